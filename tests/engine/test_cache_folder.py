"""Digests are remembered by size and time, and remembering never gets in the way."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest

from pipeline.engine.cache_folder import cache_dir, file_digest


@pytest.fixture
def file(tmp_path: Path, cache: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(b"one")
    return path


def test_a_digest_is_read_once(file: Path) -> None:
    status = file.stat()
    first = file_digest(file)
    assert first == hashlib.sha256(b"one").hexdigest()
    file.write_bytes(b"two")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert file_digest(file) == first  # same size, same time: remembered
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert file_digest(file) == hashlib.sha256(b"two").hexdigest()


@pytest.mark.parametrize("content", ["", "[]", '{"x": 1}', "{", '"text"'])
def test_a_damaged_memory_is_made_anew(file: Path, content: str) -> None:
    cache_dir().mkdir()
    (cache_dir() / "fingerprints.json").write_text(content)
    assert file_digest(file) == hashlib.sha256(b"one").hexdigest()
    assert str(file) in json.loads((cache_dir() / "fingerprints.json").read_text())


def test_a_cache_folder_that_cannot_be_written_to_is_done_without(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NIGHTDESK_CACHE", str(file / "below-a-file"))
    assert file_digest(file) == hashlib.sha256(b"one").hexdigest()


def test_the_cache_folder_defaults_to_the_home_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("NIGHTDESK_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "nightdesk"

"""GGUF files become folders once, whole, and without a word."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from pipeline.engine import conversion
from pipeline.engine.checkpoint import Checkpoint, load_model, resolve
from pipeline.errors import ModelError
from tests.gguf_file import tiny_gguf
from tests.models import CHAT_TEMPLATE, EOS, PAD

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def written(tmp_path: Path, cache: Path) -> tuple[Path, PreTrainedModel]:
    return tmp_path / "tiny.gguf", tiny_gguf(tmp_path / "tiny.gguf")


def folders(cache: Path) -> list[str]:
    return sorted(p.name for p in (cache / "models").iterdir() if p.is_dir())


def test_weights_tokenizer_template_and_eos_survive(written: tuple[Path, PreTrainedModel]) -> None:
    path, original = written
    checkpoint = resolve(str(path))
    loaded = load_model(checkpoint, "float32")
    for name, tensor in original.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    tokenizer = checkpoint.tokenizer()
    text = "naïve – “quoted”\n\n  twice"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    assert tokenizer.chat_template == CHAT_TEMPLATE
    assert checkpoint.eos_ids() == (EOS,)


def test_the_token_that_ends_a_turn_ends_a_text_too(tmp_path: Path, cache: Path) -> None:
    tiny_gguf(tmp_path / "chat.gguf", end_of_turn=PAD)
    checkpoint = resolve(str(tmp_path / "chat.gguf"))
    assert checkpoint.eos_ids() == (EOS, PAD)
    whole = checkpoint.weights_folder(torch.float32)
    assert GenerationConfig.from_pretrained(whole).eos_token_id == [EOS, PAD]


def test_the_converted_folder_loads_in_transformers_too(written: tuple[Path, PreTrainedModel]) -> None:
    folder = resolve(str(written[0])).weights_folder(torch.float32)
    tokens = torch.tensor([[1, 2, 3, 4]])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert torch.equal(model(tokens).logits, written[1](tokens).logits)


def test_each_dtype_is_converted_once(written: tuple[Path, PreTrainedModel], cache: Path) -> None:
    checkpoint = resolve(str(written[0]))
    assert len(folders(cache)) == 1
    whole = checkpoint.weights_folder(torch.bfloat16)
    before = (whole / "model.safetensors").stat().st_mtime_ns
    assert resolve(str(written[0])).weights_folder(torch.bfloat16) == whole
    assert (whole / "model.safetensors").stat().st_mtime_ns == before
    assert {t.dtype for t in load_file(whole / "model.safetensors").values()} == {torch.bfloat16}
    assert len(folders(cache)) == 2


def test_the_fingerprint_is_that_of_the_file_whatever_the_dtype(
    written: tuple[Path, PreTrainedModel], tmp_path: Path
) -> None:
    first = resolve(str(written[0])).fingerprint()
    resolve(str(written[0])).weights_folder(torch.bfloat16)
    other = tmp_path / "renamed.gguf"
    other.write_bytes(written[0].read_bytes())
    assert resolve(str(other)).fingerprint() == first
    tiny_gguf(other, seed=1)
    assert resolve(str(other)).fingerprint() != first


def test_converting_prints_nothing(
    written: tuple[Path, PreTrainedModel], capfd: pytest.CaptureFixture[str]
) -> None:
    load_model(resolve(str(written[0])), "float32")
    assert capfd.readouterr() == ("", "")


def test_a_conversion_that_dies_leaves_nothing_that_looks_finished(
    written: tuple[Path, PreTrainedModel], cache: Path
) -> None:
    """The process is killed between writing the files and renaming the folder."""
    code = (
        "import os, signal, sys; from pipeline.engine import conversion; from pathlib import Path\n"
        "conversion.os.rename = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "conversion.convert_description(Path(sys.argv[1]))"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(written[0])], cwd=ROOT, check=False)
    assert killed.returncode == -9
    assert [name.startswith(".") for name in folders(cache)] == [True]
    load_model(resolve(str(written[0])), "float32")
    assert not any(name.startswith(".") for name in folders(cache))


def test_several_processes_convert_at_once(written: tuple[Path, PreTrainedModel], cache: Path) -> None:
    code = (
        "import sys, torch; from pipeline.engine.checkpoint import resolve\n"
        "print(resolve(sys.argv[1]).weights_folder(torch.float32))"
    )
    command = [sys.executable, "-c", code, str(written[0])]
    running = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    answers = {process.communicate()[0] for process in running}
    assert [process.returncode for process in running] == [0, 0]
    assert len(answers) == 1
    assert len(folders(cache)) == 2


def test_a_failed_conversion_is_tried_again(
    written: tuple[Path, PreTrainedModel], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(conversion.os, "rename", full)
        with pytest.raises(OSError, match="No space left"):
            resolve(str(written[0]))
    assert folders(cache) == []
    assert isinstance(resolve(str(written[0])), Checkpoint)


@pytest.mark.parametrize("keep", [0, 100, 20_000])
def test_a_damaged_file_is_one_line(written: tuple[Path, PreTrainedModel], keep: int) -> None:
    path = written[0]
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"tiny\.gguf: cannot be read as a GGUF model") as caught:
        load_model(resolve(str(path)), "float32")
    assert "\n" not in str(caught.value)


def test_a_cache_folder_that_cannot_be_written_to_is_named(
    written: tuple[Path, PreTrainedModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "occupied").write_text("a file, not a folder")
    monkeypatch.setenv("NIGHTDESK_CACHE", str(tmp_path / "occupied"))
    with pytest.raises(ModelError, match="set NIGHTDESK_CACHE"):
        resolve(str(written[0]))

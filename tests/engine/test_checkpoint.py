"""Finding, describing and loading models from folders and the hub's cache."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from pipeline.engine.checkpoint import load_model, resolve, resolve_dtype
from pipeline.errors import ModelError
from tests.engine.conftest import FolderOf
from tests.models import ARCHITECTURES, EOS, TOKENS


@pytest.fixture
def folder(folder_of: FolderOf, tmp_path: Path, cache: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(folder_of("llama"), tmp_path / "model"))


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_a_loaded_model_computes_what_transformers_computes(model_type: str, folder_of: FolderOf) -> None:
    folder = folder_of(model_type)
    tokens = torch.tensor([[5, 80, 11, 200, 64, 3, 9, 9, 31, 77]])
    expected = AutoModelForCausalLM.from_pretrained(folder)(tokens).logits
    assert torch.equal(load_model(resolve(str(folder)), "float32")(tokens).logits, expected)


def test_a_loaded_model_is_for_inference_and_in_the_wanted_dtype(folder: Path) -> None:
    model = load_model(resolve(str(folder)), "bfloat16")
    assert not model.training
    assert {(p.dtype, p.requires_grad) for p in model.parameters()} == {(torch.bfloat16, False)}


def test_two_models_of_one_checkpoint_keep_their_own_attention(folder: Path) -> None:
    checkpoint = resolve(str(folder))
    eager = load_model(checkpoint, "float32", attn_implementation="eager")
    sdpa = load_model(checkpoint, "float32", attn_implementation="sdpa")
    assert (eager.config._attn_implementation, sdpa.config._attn_implementation) == ("eager", "sdpa")
    assert eager.model.layers[0].self_attn.config is not sdpa.model.layers[0].self_attn.config


def test_loading_prints_nothing(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    checkpoint = resolve(str(folder))
    load_model(checkpoint, "float32")
    checkpoint.tokenizer()
    assert capfd.readouterr() == ("", "")


def test_missing_weights_are_refused_and_never_filled_with_random_numbers(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lack model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(resolve(str(folder)), "float32")


@pytest.mark.parametrize("content", [b"", b"version https://git-lfs.github.com/spec/v1\n"])
def test_damaged_weights_are_one_line(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match="weights cannot be loaded") as caught:
        load_model(resolve(str(folder)), "float32")
    assert "\n" not in str(caught.value)


def test_a_part_missing_from_the_index_is_named(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"model-2\.safetensors is missing"):
        load_model(resolve(str(folder)), "float32")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("./no/such/folder", "does not exist"),
        ("no/such/model.gguf", "does not exist"),
        (".cache/models/smollm2-135m-instruct-absent.gguf", "make model"),
        ("nobody/nothing", "hf download nobody/nothing"),
    ],
)
def test_a_missing_model_is_one_line_with_a_remedy(
    name: str, says: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=says) as caught:
        resolve(name)
    assert str(caught.value).startswith(name)
    assert "\n" not in str(caught.value)


def test_a_folder_without_configuration_is_not_a_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        resolve(str(tmp_path))


def test_a_file_that_is_no_gguf_is_refused(folder: Path) -> None:
    with pytest.raises(ModelError, match="is a file"):
        resolve(str(folder / "model.safetensors"))


@pytest.mark.parametrize(
    ("generation", "configured", "expected"),
    [([7, 9, 7], 3, (7, 9)), (8, 3, (8,)), (None, [3, 4], (3, 4)), (None, None, (EOS,)), (0, 3, (0,))],
)
def test_eos_ids_come_from_generation_config_then_config_then_tokenizer(
    folder: Path, generation: object, configured: object, expected: tuple[int, ...]
) -> None:
    edit(folder / "generation_config.json", eos_token_id=generation)
    edit(folder / "config.json", eos_token_id=configured)
    assert resolve(str(folder)).eos_ids() == expected


def test_a_checkpoint_describes_itself_without_its_weights(folder: Path) -> None:
    parameters = load_model(resolve(str(folder)), "float32").num_parameters()
    (folder / "model.safetensors").unlink()
    checkpoint = resolve(str(folder))
    assert checkpoint.context_limit() == 512
    assert len(checkpoint.tokenizer()) == TOKENS
    assert checkpoint.parameters_bytes("float32") == 4 * parameters
    assert checkpoint.parameters_bytes("bfloat16") == 2 * parameters


def test_tied_weights_count_once(folder_of: FolderOf) -> None:
    checkpoint = resolve(str(folder_of("qwen2")))
    tensors = load_file(checkpoint.folder / "model.safetensors")
    assert checkpoint.parameters_bytes("float32") == sum(4 * t.numel() for t in tensors.values())


def test_the_fingerprint_does_not_depend_on_place_or_provenance(folder: Path, tmp_path: Path) -> None:
    first = resolve(str(folder)).fingerprint()
    moved = Path(shutil.copytree(folder, tmp_path / "elsewhere"))
    edit(moved / "config.json", transformers_version="0.0", _name_or_path="there", dtype="bfloat16")
    assert resolve(str(moved)).fingerprint() == first


@pytest.mark.parametrize("change", ["weights", "config", "eos", "tokenizer", "template"])
def test_the_fingerprint_follows_what_decides_the_answers(folder: Path, change: str) -> None:
    first = resolve(str(folder)).fingerprint()
    if change == "weights":
        tensors = load_file(folder / "model.safetensors")
        tensors["model.norm.weight"][0] += 1
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    elif change == "config":
        edit(folder / "config.json", rms_norm_eps=1e-3)
    elif change == "eos":
        edit(folder / "generation_config.json", eos_token_id=[EOS, 1])
    elif change == "tokenizer":
        text = (folder / "tokenizer.json").read_text()
        (folder / "tokenizer.json").write_text(text.replace('"!": 0', '"!": 1').replace('"\\"": 1', '"\\"": 0'))
    else:
        (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    assert resolve(str(folder)).fingerprint() != first


def test_weights_that_change_within_their_size_are_noticed(folder: Path) -> None:
    first = resolve(str(folder)).fingerprint()
    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    os.utime(weights, ns=(1, 2))
    assert resolve(str(folder)).fingerprint() != first


def test_auto_is_float32_where_the_processor_has_no_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    assert resolve_dtype("auto", "cpu") is torch.float32
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    assert resolve_dtype("auto", "cpu") is torch.bfloat16
    assert resolve_dtype("auto", "cuda") is torch.bfloat16
    assert resolve_dtype("float16", "cpu") is torch.float16


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ModelError, match="one of auto, float32"):
        resolve_dtype("int4", "cpu")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_unreadable_json_is_one_line(folder: Path, name: str) -> None:
    (folder / name).write_text("{")
    with pytest.raises(ModelError, match=f"{name}: cannot be read as JSON"):
        resolve(str(folder)).fingerprint()


def test_an_architecture_that_transformers_does_not_know_is_refused_by_name(folder: Path) -> None:
    edit(folder / "config.json", model_type="hyperattention", architectures=["HyperForCausalLM"])
    with pytest.raises(ModelError, match=r"hyperattention is not supported.*llama, qwen2"):
        resolve(str(folder)).config()


def test_a_model_in_the_hubs_cache_is_found_offline(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "hub" / "models--someone--tiny" / "snapshots" / "abc"
    shutil.copytree(folder, snapshot)
    refs = tmp_path / "hub" / "models--someone--tiny" / "refs"
    refs.mkdir()
    (refs / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    checkpoint = resolve("someone/tiny")
    assert (checkpoint.folder, checkpoint.name) == (snapshot, "someone/tiny")
    (snapshot / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="hf download someone/tiny"):
        resolve("someone/tiny")

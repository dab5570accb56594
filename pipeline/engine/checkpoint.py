"""A model on disk: where it is, what it is, and how to load it.

A model is named by a folder, a `.gguf` file or a Hugging Face hub id. Knows nothing of requests, caches or
attention; `load_model` gives transformers' own module.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedTokenizerFast,
)
from transformers.distributed import DistributedConfig

from pipeline.engine.architecture import SUPPORTED, check_supported
from pipeline.engine.cache_folder import cache_dir, file_digest
from pipeline.engine.conversion import convert_description, convert_weights, quiet
from pipeline.errors import ModelError

__all__ = ["Checkpoint", "cache_dir", "check_supported", "load_model", "resolve", "resolve_dtype"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
NAMES = "a model is named by its folder, a .gguf file or a hub id such as Qwen/Qwen2.5-0.5B-Instruct"
HUB_ID = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?")
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
SINGLE_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
# Keys that say where a model came from or how it was stored, not what it computes.
VOLATILE = {
    "transformers_version", "_name_or_path", "_model_name_or_path", "name_or_path", "is_local",
    "local_files_only", "dtype", "torch_dtype", "backend", "tokenizer_class", "processor_class",
    "chat_template", "use_cache",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """`folder` holds configuration and tokenizer, and, unless `gguf` is set, the weights too."""

    folder: Path
    name: str
    gguf: Path | None = None

    def config(self) -> PretrainedConfig:
        """A fresh configuration; ModelError if the engine does not support it."""
        raw = _read_json(self.folder / "config.json")
        try:
            with quiet():
                config = AutoConfig.from_pretrained(str(self.folder), local_files_only=True)
        except (ValueError, KeyError, TypeError, OSError) as error:
            _refuse_unknown(raw)
            raise ModelError(f"{self.name}: config.json cannot be used: {_first_line(error)}") from error
        check_supported(config)
        return config

    def tokenizer(self) -> PreTrainedTokenizerFast:
        try:
            with quiet():
                tokenizer = AutoTokenizer.from_pretrained(str(self.folder), local_files_only=True)
        except (ValueError, KeyError, TypeError, OSError, ImportError) as error:
            raise ModelError(f"{self.name}: its tokenizer cannot be loaded: {_first_line(error)}") from error
        if not tokenizer.is_fast:
            raise ModelError(f"{self.name}: there is no tokenizer.json; save the tokenizer with transformers once")
        return cast(PreTrainedTokenizerFast, tokenizer)

    def eos_ids(self) -> tuple[int, ...]:
        """The ids that end a text: of generation_config.json, else config.json, else the tokenizer."""
        for found in (
            _read_json(self.folder / "generation_config.json").get("eos_token_id"),
            _read_json(self.folder / "config.json").get("eos_token_id"),
        ):
            if found is not None:
                return tuple(dict.fromkeys(found if isinstance(found, list) else [found]))
        last = self.tokenizer().eos_token_id
        return () if last is None else (last,)

    def context_limit(self) -> int:
        """The most tokens, prompt and answer together, that the model was made for."""
        return int(self.config().max_position_embeddings)

    def parameters_bytes(self, dtype: str) -> int:
        """What the weights take in memory in `dtype`; shared ones count once. Reads no weights."""
        with torch.device("meta"), quiet():
            model = AutoModelForCausalLM.from_config(self.config(), dtype=DTYPES[dtype])
        return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())

    def weights_folder(self, dtype: torch.dtype) -> Path:
        """A complete folder; for a GGUF file its conversion to `dtype`, made now if need be."""
        return self.folder if self.gguf is None else convert_weights(self.gguf, dtype)

    def fingerprint(self) -> str:
        """Hash of what decides the model's answers: not its path, nor the dtype it is loaded in."""
        if self.gguf is not None:
            return file_digest(self.gguf)
        parts: dict[str, Any] = {
            "config": _stable(_read_json(self.folder / "config.json")),
            "eos": sorted(self.eos_ids()),
            "tokenizer": _stable(_read_json(self.folder / "tokenizer_config.json")),
            "chat_template": _chat_template(self.folder),
            "files": [file_digest(path) for path in (*_tokenizer_files(self.folder), *_weight_files(self))],
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def resolve(model: str) -> Checkpoint:
    """Finds the model that a job file names; ModelError says what to do if it is not there."""
    path = Path(model).expanduser()
    if path.suffix == ".gguf":
        return _resolve_gguf(model, path.absolute())
    if path.is_dir():
        return _resolve_folder(model, path.absolute())
    if path.exists():
        raise ModelError(f"{model}: is a file; {NAMES}")
    if HUB_ID.fullmatch(model):
        return Checkpoint(_hub_folder(model), model)
    raise ModelError(f"{model}: this folder does not exist; {NAMES}")


def resolve_dtype(name: str, device: torch.device | str) -> torch.dtype:
    """`auto` is bfloat16 where the device computes in it natively, else float32."""
    if name != "auto":
        if name not in DTYPES:
            raise ModelError(f"dtype {name}: unknown; one of auto, {', '.join(DTYPES)}")
        return DTYPES[name]
    if torch.device(device).type == "cuda":
        return torch.bfloat16
    native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if native else torch.float32


def load_model(
    checkpoint: Checkpoint,
    dtype: str | torch.dtype,
    device: torch.device | str = "cpu",
    attn_implementation: str | None = None,
    ranks: int = 1,
) -> nn.Module:
    """transformers' module with the weights of `checkpoint`, for inference only.

    It has a configuration object of its own: modules that share one share its attention function too. In one of
    several `ranks` (`parallel.join` comes first) it holds that rank's shard alone.
    """
    wanted = resolve_dtype(dtype, device) if isinstance(dtype, str) else dtype
    config = checkpoint.config()
    folder = checkpoint.weights_folder(wanted)
    _weight_files(Checkpoint(folder, checkpoint.name))
    options = {"config": config, "dtype": wanted, "local_files_only": True, "output_loading_info": True}
    if attn_implementation is not None:
        options["attn_implementation"] = attn_implementation
    if ranks > 1:
        options["distributed_config"] = DistributedConfig(tp_size=ranks)
    try:
        with quiet():
            model, report = cast(Any, AutoModelForCausalLM.from_pretrained(str(folder), **options))
    except (OSError, RuntimeError, ValueError, KeyError, SafetensorError) as error:
        raise ModelError(f"{checkpoint.name}: its weights cannot be loaded: {_first_line(error)}") from error
    # transformers fills what is missing with random numbers and only warns.
    if missing := sorted(report["missing_keys"]):
        raise ModelError(f"{checkpoint.name}: its weights lack {', '.join(missing[:3])}; copy it again")
    return cast(nn.Module, model.to(device).eval().requires_grad_(False))


def _resolve_gguf(model: str, path: Path) -> Checkpoint:
    if not path.is_file():
        hint = "; `make model` fetches the demo's model" if "smollm2" in path.name else ""
        raise ModelError(f"{model}: this file does not exist{hint}")
    return Checkpoint(convert_description(path), model, path)


def _resolve_folder(model: str, folder: Path) -> Checkpoint:
    if not (folder / "config.json").is_file():
        raise ModelError(f"{model}: there is no config.json in this folder; {NAMES}")
    return Checkpoint(folder, model)


def _hub_folder(model: str) -> Path:
    """The snapshot in the local Hugging Face cache; where it is missing it is downloaded first."""
    try:
        folder = Path(snapshot_download(model, allow_patterns=HUB_FILES, local_files_only=True))
        _weight_files(Checkpoint(folder, model))
        return folder
    except (OSError, ValueError, ModelError):
        return _download(model)


def _download(model: str) -> Path:
    remedy = f"download it where there is a network (`hf download {model}`) or point `model` at a folder"
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in {"1", "true", "yes", "on"}:
        raise ModelError(
            f"{model}: no such folder, not in the Hugging Face cache here, and HF_HUB_OFFLINE is set; {remedy}"
        )
    try:
        return Path(snapshot_download(model, allow_patterns=HUB_FILES))
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{model}: no such folder, and not to be had from the hub ({_first_line(error)}); {remedy}"
        ) from error


def _weight_files(checkpoint: Checkpoint) -> list[Path]:
    """The files that transformers would load, in its order of preference; ModelError if one is missing."""
    for name in SINGLE_WEIGHTS:
        single, index = checkpoint.folder / name, checkpoint.folder / f"{name}.index.json"
        if single.is_file():
            return [single]
        if index.is_file():
            parts = sorted(set(_read_json(index).get("weight_map", {}).values()))
            files = [checkpoint.folder / part for part in parts]
            if missing := [file.name for file in files if not file.is_file()]:
                raise ModelError(f"{checkpoint.name}: {missing[0]} is missing, download it again")
            return files
    raise ModelError(f"{checkpoint.name}: there is no model.safetensors in {checkpoint.folder}; download it")


def _tokenizer_files(folder: Path) -> list[Path]:
    return [path for name in ("tokenizer.json", "tokenizer.model") if (path := folder / name).is_file()]


def _chat_template(folder: Path) -> Any:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text()
    return _read_json(folder / "tokenizer_config.json").get("chat_template")


def _stable(mapping: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in mapping.items() if key not in VOLATILE}


def _read_json(path: Path) -> dict[str, Any]:
    """Empty if there is no such file."""
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read as JSON: {_first_line(error)}") from error
    if not isinstance(found, dict):
        raise ModelError(f"{path}: a JSON object is expected")
    return found


def _refuse_unknown(raw: Mapping[str, Any]) -> None:
    """For an architecture that even transformers does not know: its raw keys, judged like the others."""
    model_type = str(raw.get("model_type", "without model_type"))
    if model_type not in SUPPORTED:
        keys = {key: value for key, value in raw.items() if key != "model_type"}
        check_supported(type("Unknown", (PretrainedConfig,), {"model_type": model_type})(**keys))


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]

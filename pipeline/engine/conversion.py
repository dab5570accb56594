"""GGUF files as ordinary Hugging Face folders, converted once and kept in the cache folder.

Two kinds of folder per file: a light one (configuration and tokenizer), and for each dtype a whole one with
dequantised weights, which transformers and other programs can load too. Several processes may ask at once:
one converts, the others wait.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path

import gguf as gguf_package
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    GgufConfig,
    modeling_gguf_pytorch_utils,
)
from transformers.utils import logging

from pipeline.engine.architecture import check_supported
from pipeline.engine.cache_folder import cache_dir, file_digest, locked
from pipeline.engine.gguf_header import read_header
from pipeline.errors import ModelError

# A chat model may end a text with one token and a turn with another; transformers reads only the first.
END_KEYS = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))


def convert_description(gguf: Path) -> Path:
    """A folder with config.json, generation_config.json, tokenizer and chat template of the file."""
    return _built_once(_folder(gguf, None), partial(_save_description, gguf))


def convert_weights(gguf: Path, dtype: torch.dtype) -> Path:
    """A folder that holds the whole model in `dtype`."""
    return _built_once(_folder(gguf, dtype), partial(_save_weights, gguf, convert_description(gguf), dtype))


@contextmanager
def quiet() -> Iterator[None]:
    """Keeps transformers from printing progress bars and warnings while it loads or saves."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _folder(gguf: Path, dtype: torch.dtype | None) -> Path:
    suffix = "" if dtype is None else f"-{str(dtype).removeprefix('torch.')}"
    return cache_dir() / "models" / f"{gguf.stem}-{file_digest(gguf)[:16]}{suffix}"


def _built_once(folder: Path, build: Callable[[Path], None]) -> Path:
    """`folder`, made by `build` unless it is there. It appears whole or not at all."""
    if folder.is_dir():
        return folder
    prefix = f".{folder.name}.part-"
    with locked(folder.parent / f".{folder.name}.lock"):
        if folder.is_dir():
            return folder
        for left in folder.parent.glob(f"{prefix}*"):  # by a process that died: we hold the lock
            shutil.rmtree(left, ignore_errors=True)
        work = Path(tempfile.mkdtemp(dir=folder.parent, prefix=prefix))
        try:
            build(work)
            work.chmod(0o755)
            os.rename(work, folder)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return folder


def _save_description(gguf: Path, folder: Path) -> None:
    with quiet(), _readable(gguf):
        source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
        config = AutoConfig.from_pretrained(**source)
        check_supported(config)
        config.save_pretrained(folder)
        AutoTokenizer.from_pretrained(**source).save_pretrained(folder)
        header = read_header(gguf)
        ends = list(dict.fromkeys(header[key] for key in END_KEYS if key in header)) or None
        GenerationConfig(bos_token_id=config.bos_token_id, eos_token_id=ends).save_pretrained(folder)


def _save_weights(gguf: Path, description: Path, dtype: torch.dtype, folder: Path) -> None:
    with quiet(), _swift_and_silent(), _readable(gguf):
        model = AutoModelForCausalLM.from_pretrained(
            str(gguf.parent),
            gguf_file=gguf.name,
            config=AutoConfig.from_pretrained(str(description)),
            dtype=dtype,
            quantization_config=GgufConfig(dequantize=True),
        )
        model.save_pretrained(folder)
    for file in description.iterdir():
        if file.name != "config.json":  # the saved one, which knows the dtype, stays
            shutil.copyfile(file, folder / file.name)


@contextmanager
def _swift_and_silent() -> Iterator[None]:
    """Two things about transformers' reader of GGUF that no option reaches, for as long as a conversion runs.

    It shows a progress bar, and it builds the same table of tensor names anew for every module of the model.
    """
    reader = modeling_gguf_pytorch_utils
    bar, table = reader.tqdm, gguf_package.get_tensor_name_map
    reader.tqdm, gguf_package.get_tensor_name_map = partial(bar, disable=True), cache(table)
    try:
        yield
    finally:
        reader.tqdm, gguf_package.get_tensor_name_map = bar, table


@contextmanager
def _readable(gguf: Path) -> Iterator[None]:
    """Turns what the readers raise over a damaged or unknown file into one line about that file."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:  # the tokenizer's builder raises this very class
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(f"{gguf}: cannot be read as a GGUF model: {reason}") from error

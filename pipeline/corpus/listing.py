"""Which files make up the corpus, in an order that depends on nothing but their paths.

Knows names and sizes, never content: a file that turns out to be unreadable is the readers' affair.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Protocol

import fsspec
from fsspec.implementations.local import LocalFileSystem
from fsspec.utils import glob_translate

from pipeline.errors import CorpusError, OutputError

_LOG = logging.getLogger(__name__)
_FORMATS = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".txt": "text",
    ".text": "text",
}
_ALIKE = {"jsonl": {"jsonl", "json"}, "json": {"jsonl", "json"}}
_COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2"}
_APART = "give a folder beside the input, or one whose name begins with _"


class ListedInput(Protocol):
    """What of `config.InputConfig` decides the listing."""

    @property
    def paths(self) -> tuple[str, ...]: ...
    @property
    def format(self) -> str: ...


@dataclass(frozen=True, slots=True)
class InputFile:
    """One file of the corpus. `relative` is its path below the input root, with `/`; `size` is in bytes.

    `etag` changes when the content does: the modification time in nanoseconds, in hex, of a local file; the
    store's own tag elsewhere.
    """

    path: str
    relative: str
    size: int
    etag: str
    format: str


@dataclass(frozen=True, slots=True)
class _Found:
    filesystem: Any
    path: str
    info: Mapping[str, Any]
    root: str
    by: str  # how the job file names it: file | glob | folder


def list_files(input: ListedInput) -> list[InputFile]:
    """All files of the corpus, sorted by path, each once.

    The input root is the folder given, the part of a glob before its first wildcard, or the folder of a file; with
    several paths, the deepest folder that holds all of these. Raises `CorpusError` for a path that does not exist
    and for a named file of unknown format.
    """
    found = [entry for path in input.paths for entry in _find(path)]
    root = _common_root({entry.root for entry in found})
    files = {entry.path: _describe(entry, root, input.format) for entry in found}
    listed = sorted((file for file in files.values() if file), key=lambda file: file.path)
    if not listed:
        _LOG.warning("%s: no input files", ", ".join(input.paths), extra={"event": "input_skipped"})
    return listed


def refuse_overlap(input: ListedInput, output: str) -> None:
    """OutputError where the parts of an output there would be input, or the input would be read with the parts.

    Looks at local paths alone, so that the first run is refused and not the second.
    """
    folder = os.path.realpath(output)
    part = f"{folder}/part.parquet"
    for path in input.paths:
        plain = path if os.path.exists(path) or not _wildcard(path) else _fixed_part(path)
        root, rest = os.path.realpath(plain), path[len(plain) :]
        if _is_below(part, root) and (
            re.fullmatch(glob_translate(root + rest), part) if rest else input.format in ("auto", "parquet")
        ):
            raise OutputError(f"output.path: a run would read its own parts in {folder} as input ({path}); {_APART}")
        if root == folder or _is_below(root, folder):
            raise OutputError(f"output.path: {folder} holds the input ({path}), which would be read as parts; {_APART}")


def compression(path: str) -> str | None:
    """How the file is compressed, by its name."""
    return _COMPRESSIONS.get(PurePosixPath(path).suffix.lower())


def format_of(path: str) -> str | None:
    """The format that a file's name says, or None."""
    name = PurePosixPath(path)
    packed = name.suffix.lower() in _COMPRESSIONS
    suffixes = (PurePosixPath(name.stem) if packed else name).suffix.lower()
    format = _FORMATS.get(suffixes)
    return None if packed and format == "parquet" else format


def _find(path: str) -> Iterator[_Found]:
    filesystem, plain = fsspec.core.url_to_fs(path)
    filesystem.invalidate_cache()
    if filesystem.isdir(plain):
        found, root, by = filesystem.find(plain, detail=True), plain.rstrip("/"), "folder"
    elif filesystem.exists(plain):
        yield _Found(filesystem, plain, filesystem.info(plain), plain.rpartition("/")[0], by="file")
        return
    elif _wildcard(plain):
        found, root, by = *_match(filesystem, plain, path), "glob"
    else:
        raise CorpusError(f"input.path: {path} does not exist")
    for name, info in found.items():
        if info["type"] == "file" and not _hidden(name[len(root) :]):
            yield _Found(filesystem, name, info, root, by)


def _match(filesystem: Any, pattern: str, path: str) -> tuple[dict[str, Mapping[str, Any]], str]:
    root = _fixed_part(pattern)
    if not filesystem.isdir(root):
        raise CorpusError(f"input.path: {path} does not exist (there is no folder {root})")
    return filesystem.glob(pattern, detail=True), root


def _wildcard(path: str) -> bool:
    return any(mark in path for mark in "*?[")


def _fixed_part(pattern: str) -> str:
    """The folder before the first wildcard."""
    first = min(pattern.find(mark) for mark in "*?[" if mark in pattern)
    return pattern[:first].rpartition("/")[0]


def _is_below(path: str, folder: str) -> bool:
    """Whether a reader of the folder meets this path: below it, and not hidden there."""
    above = folder.rstrip("/") + "/"
    return path.startswith(above) and not _hidden(path[len(above) :])


def _common_root(roots: set[str]) -> str:
    try:
        return os.path.commonpath(roots)
    except ValueError:  # none, or local paths beside those of a store
        return ""


def _hidden(below_root: str) -> bool:
    return any(part.startswith(("_", ".")) for part in below_root.split("/"))


def _describe(entry: _Found, root: str, format: str) -> InputFile | None:
    chosen = _choose(entry, format)
    if chosen is None:
        return None
    size, etag = _identity(entry)
    if size == 0:
        _LOG.warning("%s is empty", entry.path, extra={"event": "input_skipped"})
    local = isinstance(entry.filesystem, LocalFileSystem)
    path = entry.path if local else entry.filesystem.unstrip_protocol(entry.path)
    return InputFile(path, entry.path[len(root) :].lstrip("/"), size, etag, chosen)


def _choose(entry: _Found, format: str) -> str | None:
    """A file or glob is read as the job file says; in a folder only the files whose names agree with it are."""
    by_name = format_of(entry.path)
    if format != "auto" and (entry.by != "folder" or by_name in _ALIKE.get(format, {format})):
        return format
    if format == "auto" and by_name is not None:
        return by_name
    if entry.by == "file":
        raise CorpusError(
            f"input.path: {entry.path} has no extension that is known ({', '.join(_FORMATS)}, "
            f"also with {' or '.join(_COMPRESSIONS)}); set input.format"
        )
    reason = "its extension is not known" if format == "auto" else f"not {format} by its name; use a glob to read it"
    _LOG.warning("%s skipped: %s", entry.path, reason, extra={"event": "input_skipped"})
    return None


def _identity(entry: _Found) -> tuple[int, str]:
    if isinstance(entry.filesystem, LocalFileSystem):
        status = os.stat(entry.path)
        return status.st_size, f"{status.st_mtime_ns:x}"
    return int(entry.info["size"] or 0), str(entry.info.get("ETag") or entry.filesystem.ukey(entry.path)).strip('"')

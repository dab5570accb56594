"""Which files make up the corpus, in an order that depends on nothing but their paths.

Knows names and sizes, never content: a file that turns out to be unreadable is the readers' affair.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import PurePosixPath
from typing import Protocol

from fsspec.implementations.local import LocalFileSystem
from fsspec.utils import glob_translate

from pipeline.errors import CorpusError, OutputError
from pipeline.remote.failures import Kind, RemoteFailure
from pipeline.remote.files import Files, Listed, split
from pipeline.remote.urls import canonical, is_remote

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
    path: str
    size: int
    etag: str
    root: str
    by: str  # how the job file names it: file | glob | folder


def list_files(input: ListedInput) -> list[InputFile]:
    """All files of the corpus, sorted by path, each once.

    The input root is the folder given, the part of a glob before its first wildcard, or the folder of a file; with
    several paths, the deepest folder that holds all of these. Raises `CorpusError` for a path that does not exist
    and for a named file of unknown format, `StoreError` where storage fails.
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

    Looks at paths alone, so that the first run is refused and not the second.
    """
    folder = _place(output)
    part = f"{folder}/part.parquet"
    for path in input.paths:
        plain = path if _is_no_pattern(path) else _fixed_part(path)
        root, rest = _place(plain), path[len(plain) :]
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
    found = _find_remote(path) if is_remote(path) else _find_local(path.removeprefix("file://"))
    return (entry for entry in found if not _hidden(entry.path[len(entry.root) :]))


def _find_local(path: str) -> Iterator[_Found]:
    filesystem = LocalFileSystem()
    plain = os.path.abspath(path)
    if os.path.isdir(plain):
        names, root, by = filesystem.find(plain), plain.rstrip("/"), "folder"
    elif os.path.exists(plain):
        names, root, by = [plain], os.path.dirname(plain), "file"
    elif _wildcard(plain):
        root, by = _fixed_part(plain), "glob"
        if not os.path.isdir(root):
            raise CorpusError(f"input.path: {path} does not exist (there is no folder {root})")
        names = [name for name in filesystem.glob(plain) if os.path.isfile(name)]
    else:
        raise CorpusError(f"input.path: {path} does not exist")
    for name in names:
        status = os.stat(name)
        yield _Found(name, status.st_size, f"{status.st_mtime_ns:x}", root, by)


def _find_remote(url: str) -> list[_Found]:
    files, path = split(url)
    try:
        named = files.stat(path) if "/" in path and not path.endswith("/") else None
        if named is not None:
            return [_found(files, named, path.rpartition("/")[0], "file")]
        path = path.rstrip("/")
        root = _fixed_part(path) if _wildcard(path) else path
        if not root:
            raise CorpusError(f"input.path: {url}: name one bucket, without wildcards")
        beginning = path[len(root) + 1 :]
        listed = files.below(root, _hidden_name, re.split(r"[*?[]", beginning, maxsplit=1)[0])
        if not listed and files.children(root) == ([], []):
            missing = f" (there is nothing below {files.url(root)}/)" if beginning else ""
            raise CorpusError(f"input.path: {url} does not exist{missing}")
    except RemoteFailure as failure:
        if failure.kind in (Kind.NO_BUCKET, Kind.DENIED):
            raise CorpusError(f"input.path: {failure}") from failure
        raise
    if beginning:
        matches = re.compile(glob_translate(path)).fullmatch
        return [_found(files, file, root, "glob") for file in listed if matches(file.path)]
    # A name that ends so is no file, but what browsers of buckets put there for an empty folder.
    return [_found(files, file, root, "folder") for file in listed if not file.path.endswith("/")]


def _found(files: Files, file: Listed, root: str, by: str) -> _Found:
    return _Found(files.url(file.path), file.size, file.version, files.url(root), by)


def _place(path: str) -> str:
    """A folder or file in a spelling that can be compared."""
    return canonical(path).rstrip("/") if is_remote(path) else os.path.realpath(path.removeprefix("file://"))


def _is_no_pattern(path: str) -> bool:
    return not _wildcard(path) or (not is_remote(path) and os.path.exists(path))


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
    """The deepest folder above all; "" where there is none, or local paths beside those of a store."""
    levels = zip(*(root.split("/") for root in roots), strict=False)
    return "/".join(names[0] for names in itertools.takewhile(lambda names: len(set(names)) == 1, levels))


def _hidden(below_root: str) -> bool:
    return any(map(_hidden_name, below_root.split("/")))


def _hidden_name(name: str) -> bool:
    return name.startswith(("_", "."))


def _describe(entry: _Found, root: str, format: str) -> InputFile | None:
    chosen = _choose(entry, format)
    if chosen is None:
        return None
    if entry.size == 0 and chosen != "text":  # an empty text is a document, and has an error row
        _skipped(f"{entry.path} is empty: skipped")
    return InputFile(entry.path, entry.path[len(root) :].lstrip("/"), entry.size, entry.etag, chosen)


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
    _skipped(f"{entry.path} skipped: {reason}")
    return None


@cache
def _skipped(message: str) -> None:
    """Once in a command, however often it lists its input."""
    _LOG.warning("%s", message, extra={"event": "input_skipped"})

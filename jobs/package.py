"""The working folder as it is sent to a cluster: a zip of the files that count, the same bytes for the same files.

What counts is decided here, by names, and by nothing else: no .gitignore is read, neither the folder's nor a parent's,
so that what runs is what is in the folder. Knows nothing of Ray.
"""

from __future__ import annotations

import os
import stat
import zipfile
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from pipeline.errors import ConfigError

LIMIT_BYTES = 512 * 2**20  # of what is unpacked: Ray's limit for a package
SENT_BYTES = 100 * 2**20  # of the zip: the dashboard takes no larger request
NAMED_ENTRIES = 5  # of a folder that is too large
NOT_SENT = frozenset({"__pycache__", "node_modules", "venv", "site-packages"})
NOT_SENT_AT_ROOT = frozenset({"out"})  # where job files put their output
ENVIRONMENT_MARKS = ("pyvenv.cfg", "conda-meta")  # of a Python environment, whatever its name
DATA_SUFFIXES = frozenset({".parquet", ".arrow", ".safetensors", ".gguf", ".pyc"})  # data and weights, never code
WRITTEN = (1980, 1, 1, 0, 0, 0)  # the time of every entry: a file that was only touched is the same package


def collect(root: Path, without: Collection[Path] = ()) -> dict[str, Path]:
    """Name in the package → file. Left out are hidden files, environments, caches, data, and what is in `without`.

    A link to a file is followed; one to a folder is not, for what it leads to may be anything.
    """
    return dict(sorted(_walk(root, "", frozenset(without))))


def _walk(folder: Path, above: str, without: frozenset[Path]) -> Iterator[tuple[str, Path]]:
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda each: each.name):
            path = folder / entry.name
            if _is_left_out(entry.name, above) or path in without:
                continue
            if entry.is_dir(follow_symlinks=False):
                if not any((path / mark).exists() for mark in ENVIRONMENT_MARKS):
                    yield from _walk(path, f"{above}{entry.name}/", without)
            elif entry.is_file():
                yield above + entry.name, path


def _is_left_out(name: str, above: str) -> bool:
    if name.startswith(".") or name in NOT_SENT or name.endswith(".egg-info"):
        return True
    return Path(name).suffix.lower() in DATA_SUFFIXES or (not above and name in NOT_SENT_AT_ROOT)


def refuse_oversize(root: Path, files: Mapping[str, Path], limit: int = LIMIT_BYTES) -> None:
    """ConfigError with the largest entries of the folder, if there is more than the limit."""
    sizes = {name: path.stat().st_size for name, path in files.items()}
    if sum(sizes.values()) > limit:
        raise too_large(root, sizes, limit)


def too_large(root: Path, sizes: Mapping[str, int], limit: int) -> ConfigError:
    """Names a file of the folder, or a folder in it, by all that it holds."""
    entries: Counter[str] = Counter()
    for name, size in sizes.items():
        first, slash, _ = name.partition("/")
        entries[first + slash] += size
    largest = ", ".join(f"{name} ({_mebibytes(size)})" for name, size in entries.most_common(NAMED_ENTRIES))
    return ConfigError(
        f"{root} is too large to be sent: {_mebibytes(sum(sizes.values()))}, and the limit is {_mebibytes(limit)}; "
        f"move the largest elsewhere, or give them a name that begins with a dot: {largest}"
    )


def pack(files: Mapping[str, Path], more: Mapping[str, bytes], to: Path) -> None:
    """Write the zip; `more` is what is no file of the folder."""
    with zipfile.ZipFile(to, "w", zipfile.ZIP_DEFLATED) as package:
        for name, path in files.items():
            package.writestr(_entry(name, path.stat().st_mode), path.read_bytes())
        for name, data in sorted(more.items()):
            package.writestr(_entry(name, stat.S_IFREG | 0o644), data)


def _entry(name: str, mode: int) -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo(name, WRITTEN)
    entry.compress_type = zipfile.ZIP_DEFLATED
    executable = mode & stat.S_IXUSR
    entry.external_attr = (stat.S_IFREG | (0o755 if executable else 0o644)) << 16
    return entry


def _mebibytes(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"

"""The folder where converted models and digests of large files are kept between runs.

Everything in it can be deleted at any time: it is made again. Knows nothing of models.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pipeline.errors import ModelError


def cache_dir() -> Path:
    """`$NIGHTDESK_CACHE`, or ~/.cache/nightdesk. Not created here."""
    return Path(os.environ.get("NIGHTDESK_CACHE") or Path.home() / ".cache" / "nightdesk").absolute()


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds an exclusive lock on the file `path`; other processes wait. It ends with the process."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise ModelError(
            f"cannot write to the cache folder {path.parent}: {error.strerror}; "
            "set NIGHTDESK_CACHE to a writable folder"
        ) from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def file_digest(path: Path) -> str:
    """sha256 of a file's content, remembered by (path, size, modification time)."""
    real = path.resolve()
    status = real.stat()
    stamp = [status.st_size, status.st_mtime_ns]
    known = _read_digests().get(str(real))
    if known is not None and known[:2] == stamp:
        return str(known[2])
    with open(real, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    # Remembering only saves time: a cache folder that cannot be written to is no reason to fail.
    with suppress(OSError):
        _remember(str(real), [*stamp, digest])
    return digest


def _digests_path() -> Path:
    return cache_dir() / "fingerprints.json"


def _read_digests() -> dict[str, list[int | str]]:
    try:
        found = json.loads(_digests_path().read_bytes())
    except (OSError, ValueError):
        return {}
    entries = found.items() if isinstance(found, dict) else ()
    return {path: entry for path, entry in entries if isinstance(entry, list) and len(entry) == 3}


def _remember(path: str, entry: list[int | str]) -> None:
    """Replaced whole; of two processes writing at once one entry may be lost and is computed again."""
    target = _digests_path()
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=".fingerprints-")
    with os.fdopen(handle, "w") as file:
        json.dump({**_read_digests(), path: entry}, file)
    os.replace(name, target)

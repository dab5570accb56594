"""Where an output lives: named files that are created once, replaced whole, listed and removed.

Names are relative to the output, with `/` between folders. Knows nothing of plans, shards or Parquet, and nothing of
how a kind of storage does it (`local_store`, `object_store`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

TMP = "_nightdesk/tmp"
ABANDONED_SECONDS = 3600.0  # a temporary file is written and published in seconds


@dataclass(frozen=True, slots=True)
class Entry:
    """A file: its size in bytes, and a mark that changes whenever it is replaced."""

    size: int
    version: str


class Store(Protocol):
    """One output. Listings are never cached; every failure of storage is a `StoreError`."""

    location: str  # what a user passes to pandas

    def probe(self) -> None:
        """At the start of a run, by its driver: OutputError where two writers could both get one name.

        Not if the job promises that there is one writer only.
        """
        ...

    def names(self, folder: str = "") -> list[str]:
        """Sorted names of the entries directly in `folder`; empty where there is no such folder."""
        ...

    def visible(self) -> dict[str, Entry]:
        """Every file that a reader of the whole output meets, at any depth, sorted by name.

        Left out is what readers skip: files and folders whose names begin with `_` or `.`.
        """
        ...

    def exists(self, name: str) -> bool:
        """Is there such a file?"""
        ...

    def version(self, name: str) -> str | None:
        """What `visible` would say of this file now; None if there is none."""
        ...

    def read(self, name: str) -> bytes:
        """The whole file. FileNotFoundError if there is none."""
        ...

    def read_many(self, names: Iterable[str]) -> dict[str, bytes]:
        """Whole files by name, those that are there: as fast as the storage gives many small ones."""
        ...

    def open(self, name: str) -> BinaryIO:
        """The file for reading with seeks. FileNotFoundError if there is none."""
        ...

    def create(self, name: str, data: bytes) -> bool:
        """Publish a whole file, only if the name is free: the first writer wins, whoever is killed when.

        False if the name was taken, and nothing has changed. When this returns, the file is durable.
        """
        ...

    def replace(self, name: str, data: bytes) -> None:
        """Publish a whole file under a name that may be taken; readers see the old or the new one."""
        ...

    def replace_if(self, name: str, data: bytes, version: str) -> bool:
        """Publish a whole file in place of the one that is there, if that one is still `version`.

        False if it is not (or gone), and nothing has changed. Of several at once with one `version`, one succeeds.
        """
        ...

    def remove(self, name: str) -> None:
        """Remove a file if it is there."""
        ...

    def sweep(self) -> None:
        """Remove what killed writers left behind."""
        ...


def open_store(path: str, single_writer: bool = False) -> Store:
    """The store for `output.path`. With `single_writer` nobody else writes there, so that less is asked of it."""
    from pipeline.remote.urls import is_remote

    if is_remote(path):
        from pipeline.output.object_store import ObjectStore

        return ObjectStore(path, single_writer)
    from pipeline.output.local_store import LocalStore

    return LocalStore(Path(path.removeprefix("file://")), single_writer)


def hidden(name: str) -> bool:
    """Do readers skip this file or folder?"""
    return name.startswith(("_", "."))

"""Where an output lives: named files that are created once, replaced whole, listed and removed.

Names are relative to the output, with `/` between folders. Knows nothing of plans, shards or Parquet.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Protocol

from pipeline.errors import OutputError, StoreError

TMP = "_nightdesk/tmp"
ABANDONED_SECONDS = 3600.0  # a temporary file is written and published in seconds
ATTEMPTS = 3
NO_HARD_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS}


class Store(Protocol):
    """One output. Listings are never cached; every failure of storage is a `StoreError`."""

    location: str  # what a user passes to pandas

    def names(self, folder: str = "") -> list[str]:
        """Sorted names of the entries directly in `folder`; empty where there is no such folder."""
        ...

    def exists(self, name: str) -> bool:
        """Is there such a file?"""
        ...

    def read(self, name: str) -> bytes:
        """The whole file. FileNotFoundError if there is none."""
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

    def remove(self, name: str) -> None:
        """Remove a file if it is there."""
        ...

    def sweep(self) -> None:
        """Remove what killed writers left behind."""
        ...


def open_store(path: str) -> Store:
    """The store for `output.path`."""
    return LocalStore(Path(path.removeprefix("file://")))


class LocalStore:
    """A folder of a POSIX file system with hard links."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self.location = str(self.root)
        if self.root.exists() and not self.root.is_dir():
            raise OutputError(f"output.path: {self.root} is a file; give a folder")

    def names(self, folder: str = "") -> list[str]:
        with self._failures(f"listing {folder or '.'}"), contextlib.suppress(FileNotFoundError):
            return sorted(os.listdir(self.root / folder))
        return []

    def exists(self, name: str) -> bool:
        return (self.root / name).exists()

    def read(self, name: str) -> bytes:
        with self.open(name) as file:
            return file.read()

    def open(self, name: str) -> BinaryIO:
        try:
            return (self.root / name).open("rb")
        except FileNotFoundError:
            raise
        except OSError as error:
            raise self._failure(f"reading {name}", error) from error

    def create(self, name: str, data: bytes) -> bool:
        with self._failures(f"writing {name}"):
            for _ in range(ATTEMPTS):
                with self._temporary(name, data) as written:
                    try:
                        os.link(written, self.root / name)
                    except FileExistsError:
                        self._sync_folder((self.root / name).parent)  # the winner may not have got so far
                        return False
                    except FileNotFoundError:  # another run's sweep took the file of a writer that slept
                        continue
                    except OSError as error:
                        if error.errno in NO_HARD_LINKS:
                            raise OutputError(
                                f"output.path: the file system of {self.root} has no hard links "
                                f"({error.strerror}), so a part cannot be published there; choose another"
                            ) from error
                        raise
                    self._sync_folder((self.root / name).parent)
                    return True
        raise StoreError(f"{self.root}: writing {name} failed, its temporary file is removed again and again")

    def replace(self, name: str, data: bytes) -> None:
        with self._failures(f"writing {name}"):
            for _ in range(ATTEMPTS):
                with self._temporary(name, data) as written:
                    try:
                        os.replace(written, self.root / name)
                    except FileNotFoundError:
                        continue
                    self._sync_folder((self.root / name).parent)
                    return
        raise StoreError(f"{self.root}: writing {name} failed, its temporary file is removed again and again")

    def remove(self, name: str) -> None:
        with self._failures(f"removing {name}"):
            try:
                os.unlink(self.root / name)
            except FileNotFoundError:
                return
            self._sync_folder((self.root / name).parent)

    def sweep(self) -> None:
        oldest = time.time() - ABANDONED_SECONDS
        with self._failures(f"sweeping {TMP}"):
            for name in self.names(TMP):
                path = self.root / TMP / name
                with contextlib.suppress(FileNotFoundError):
                    if path.stat().st_mtime < oldest:
                        path.unlink()

    @contextlib.contextmanager
    def _temporary(self, name: str, data: bytes) -> Iterator[Path]:
        """A durable copy of `data` on the same file system, ready to get the folder's final name."""
        self._make_folder((self.root / name).parent)
        self._make_folder(self.root / TMP)
        path = self.root / TMP / uuid.uuid4().hex
        try:
            with path.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            yield path
        finally:
            path.unlink(missing_ok=True)

    def _make_folder(self, folder: Path) -> None:
        if folder.is_dir():
            return
        self._make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        self._sync_folder(folder.parent)

    @staticmethod
    def _sync_folder(folder: Path) -> None:
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    @contextlib.contextmanager
    def _failures(self, doing: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise self._failure(doing, error) from error

    def _failure(self, doing: str, error: OSError) -> StoreError:
        return StoreError(
            f"{self.root}: {doing} failed ({error.strerror or error}); "
            "what is published stays, mend the storage and run the same command again"
        )

"""An output in a folder of a POSIX file system: names are hard links, and replacing is done under a lock."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from pipeline.errors import OutputError, StoreError
from pipeline.output.store import ABANDONED_SECONDS, TMP, Entry, hidden

LOCK = "_nightdesk/lock"  # never removed: whoever waits for it holds the file, not the name
ATTEMPTS = 3
REMEDY = "choose another file system, or set output.single_writer: true and never start two runs there"
NO_HARD_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS}
NO_LOCKS = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}


class LocalStore:
    """A folder. Several writers need hard links and flock there; a single one does without, but uses them too."""

    def __init__(self, root: Path, single_writer: bool = False) -> None:
        self.root = root.absolute()
        self.location = str(self.root)
        self.single_writer = single_writer
        if self.root.exists() and not self.root.is_dir():
            raise OutputError(f"output.path: {self.root} is a file; give a folder")
        if self.root.is_symlink() and not self.root.exists():
            raise OutputError(f"output.path: {self.root} is a link to nothing ({os.readlink(self.root)}); mend it")

    def probe(self) -> None:
        name = f"{TMP}/{uuid.uuid4().hex}"
        try:
            first, second = self.create(name, b"first"), self.create(name, b"second")
            if (first, second, self.read(name)) != (True, False, b"first"):
                raise OutputError(f"output.path: in {self.root} two writers can both get one name; {REMEDY}")
            with self._failures("locking"), self._locked():
                pass
        finally:
            self.remove(name)

    def names(self, folder: str = "") -> list[str]:
        with self._failures(f"listing {folder or '.'}"), contextlib.suppress(FileNotFoundError):
            return sorted(os.listdir(self.root / folder))
        return []

    def visible(self) -> dict[str, Entry]:
        with self._failures("listing"):
            return dict(sorted(self._below(self.root, "")))

    def exists(self, name: str) -> bool:
        with self._failures(f"looking at {name}"):
            return (self.root / name).exists()

    def version(self, name: str) -> str | None:
        with self._failures(f"looking at {name}"), contextlib.suppress(FileNotFoundError):
            return _version(os.stat(self.root / name))
        return None

    def read(self, name: str) -> bytes:
        with self.open(name) as file:
            return file.read()

    def read_many(self, names: Iterable[str]) -> dict[str, bytes]:
        found = {}
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                found[name] = self.read(name)
        return found

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
                        self._take_name(written, name)
                    except FileExistsError:
                        self._sync_folder((self.root / name).parent)  # the winner may not have got so far
                        return False
                    except FileNotFoundError:  # another run's sweep took the file of a writer that slept
                        continue
                    self._sync_folder((self.root / name).parent)
                    return True
        raise self._swept(name)

    def replace(self, name: str, data: bytes) -> None:
        with self._failures(f"writing {name}"):
            for _ in range(ATTEMPTS):
                with self._temporary(name, data) as written:
                    try:
                        with self._locked(required=False):
                            os.replace(written, self.root / name)
                    except FileNotFoundError:
                        continue
                    self._sync_folder((self.root / name).parent)
                    return
        raise self._swept(name)

    def replace_if(self, name: str, data: bytes, version: str) -> bool:
        with self._failures(f"writing {name}"):
            for _ in range(ATTEMPTS):
                if self.version(name) != version:  # spares writing; what counts is the look under the lock
                    return False
                with self._temporary(name, data) as written:
                    try:
                        with self._locked():
                            if self.version(name) != version:
                                return False
                            os.replace(written, self.root / name)
                    except FileNotFoundError:
                        continue
                    self._sync_folder((self.root / name).parent)
                    return True
        raise self._swept(name)

    def remove(self, name: str) -> None:
        if not self.exists(name):
            return
        with self._failures(f"removing {name}"):
            try:
                with self._locked(required=False):  # not between the look and the rename of `replace_if`
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

    def _below(self, folder: Path, prefix: str) -> Iterator[tuple[str, Entry]]:
        with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
            for entry in entries:
                if hidden(entry.name):
                    continue
                if entry.is_dir():
                    yield from self._below(folder / entry.name, f"{prefix}{entry.name}/")
                    continue
                with contextlib.suppress(FileNotFoundError):  # removed since
                    status = entry.stat()
                    yield prefix + entry.name, Entry(status.st_size, _version(status))

    def _take_name(self, written: Path, name: str) -> None:
        """Give the file its final name; FileExistsError if that is taken."""
        try:
            os.link(written, self.root / name)
        except OSError as error:
            if error.errno not in NO_HARD_LINKS:
                raise
            if not self.single_writer:
                raise OutputError(
                    f"output.path: the file system of {self.root} has no hard links ({error.strerror}), so of several "
                    f"writers more than one can get the same name; {REMEDY}"
                ) from error
            if self.exists(name):
                raise FileExistsError from error
            os.replace(written, self.root / name)

    @contextlib.contextmanager
    def _locked(self, required: bool = True) -> Iterator[None]:
        """Nobody else replaces or removes a file of this output meanwhile.

        OutputError where the file system has no locks, unless these are not `required`.
        """
        self._make_folder((self.root / LOCK).parent)
        handle = os.open(self.root / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX)
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise
                if required and not self.single_writer:
                    raise OutputError(
                        f"output.path: the file system of {self.root} has no file locks ({error.strerror}), so of "
                        f"several writers one can undo what another has replaced; {REMEDY}"
                    ) from error
            yield
        finally:
            os.close(handle)  # which gives the lock back

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

    def _swept(self, name: str) -> StoreError:
        return StoreError(f"{self.root}: writing {name} failed, its temporary file is removed again and again")


def _version(status: os.stat_result) -> str:
    return f"{status.st_mtime_ns:x}-{status.st_size:x}-{status.st_ino:x}"

"""An output behind a URL: names are created and replaced by conditional writes of whole objects.

What the storage makes of the conditions is found out by trying (`probe`): real servers ignore them, or let several
writers win. How a call is repeated, and what S3 calls it, is in `pipeline.remote`.
"""

from __future__ import annotations

import contextlib
import io
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import BinaryIO, TypeVar, cast

from pipeline.errors import OutputError
from pipeline.output.store import ABANDONED_SECONDS, TMP, Entry, hidden
from pipeline.remote.failures import Kind, RemoteFailure
from pipeline.remote.files import Listed, split
from pipeline.remote.stream import RemoteStream

T = TypeVar("T")

AT_ONCE = 16  # small files read at the same time
BLOCK_BYTES = 256 << 10  # read at once of a part: its footer, or the short columns
LARGEST_BYTES = 5 << 30  # of one PUT
WRITERS, ROUNDS = 8, 3  # of the probe: how many try to get one name at once, and how often
ALONE = "set output.single_writer: true and never start two runs there"


class ObjectStore:
    """A folder of a bucket. Can be pickled; connections are each process's own.

    With `single_writer` nothing is asked of the storage, but what it knows of conditions is used.
    """

    def __init__(self, url: str, single_writer: bool = False) -> None:
        self.location = url.rstrip("/")
        self.single_writer = single_writer
        self.can_replace_if: bool | None = None  # None before the probe
        self._wrote = False  # so a refusal is no mistake of the job file any more
        self._files, self._root = split(self.location)

    # --- what there is

    def names(self, folder: str = "") -> list[str]:
        with self._failures():
            files, folders = self._files.children(self._path(folder))
        return sorted({*folders, *(file.path.rpartition("/")[2] for file in files)})

    def visible(self) -> dict[str, Entry]:
        with self._failures():
            files = self._files.below(self._root, hidden)
        found = ((self._name(file), Entry(file.size, file.version)) for file in files)
        return dict(sorted((name, entry) for name, entry in found if not hidden(name.rpartition("/")[2])))

    def exists(self, name: str) -> bool:
        return self._stat(name) is not None

    def version(self, name: str) -> str | None:
        file = self._stat(name)
        return None if file is None else file.version

    def read(self, name: str) -> bytes:
        with self._failures():
            return self._files.get(self._path(name))

    def read_many(self, names: Iterable[str]) -> dict[str, bytes]:
        def read(name: str) -> tuple[str, bytes | None]:
            with contextlib.suppress(FileNotFoundError):
                return name, self.read(name)
            return name, None

        return {name: data for name, data in _at_once(AT_ONCE, read, names) if data is not None}

    def open(self, name: str) -> BinaryIO:
        file = self._stat(name)
        if file is None:
            raise FileNotFoundError(f"{self.location}/{name}")
        return cast(BinaryIO, io.BufferedReader(RemoteStream(self._files, file, BLOCK_BYTES)))

    # --- what changes it

    def create(self, name: str, data: bytes) -> bool:
        if self.single_writer and self.exists(name):
            return False
        return self._put(name, data, absent=True)

    def replace(self, name: str, data: bytes) -> None:
        self._put(name, data)

    def replace_if(self, name: str, data: bytes, version: str) -> bool:
        if self.can_replace_if is None:
            self._probe_replacing()
        if self.single_writer and self.version(name) != version:
            return False
        if self.can_replace_if:
            return self._put(name, data, version=version)
        if not self.single_writer:
            raise OutputError(
                f"output.path: {self.location} cannot replace a part only if it is the one that was read (If-Match), "
                f"so of several writers one can undo what another has replaced; {ALONE}"
            )
        self._put(name, data)
        return True

    def remove(self, name: str) -> None:
        with self._failures():
            self._files.remove(self._path(name))

    def sweep(self) -> None:
        oldest = time.time() - ABANDONED_SECONDS
        with self._failures():
            for file in self._files.below(self._path(TMP), hidden):
                if file.modified < oldest:
                    self._files.remove(file.path)

    def _put(self, name: str, data: bytes, absent: bool = False, version: str | None = None) -> bool:
        if len(data) > LARGEST_BYTES:
            raise OutputError(
                f"output.rows_per_shard: {name} has {len(data) >> 20} MiB, more than one write to "
                f"{self.location} can hold; give a smaller number"
            )
        with self._failures():
            try:
                done = self._files.put(self._path(name), data, absent, version)
            except RemoteFailure as failure:
                if failure.kind is not Kind.UNSUPPORTED or not self.single_writer:
                    raise
                done = self._files.put(self._path(name), data)
        self._wrote = True
        return done

    # --- what the storage makes of conditions

    def probe(self) -> None:
        if not self.single_writer:
            self._probe_creating()
        self._probe_replacing()

    def _probe_creating(self) -> None:
        with self._key() as key:
            try:
                first, second = self._put(key, b"first", absent=True), self._put(key, b"second", absent=True)
                alone = (first, second, self.read(key)) == (True, False, b"first")
            except RemoteFailure as failure:
                if failure.kind not in (Kind.UNSUPPORTED, Kind.OTHER):
                    raise
                self._put(key, b"first")  # which fails as well unless it was the condition
                alone = False
        if not alone or not all(self._one_creates() for _ in range(ROUNDS)):
            raise OutputError(
                f"output.path: {self.location} lets two writers both create one name (it does not heed "
                f"If-None-Match), so a part could be lost; choose other storage, or {ALONE}"
            )

    def _one_creates(self) -> bool:
        with self._key() as key:
            won = self._race(lambda data: self._put(key, data, absent=True))
            return len(won) == 1 and self.read(key) == won[0]

    def _probe_replacing(self) -> None:
        """Find out whether a version can be replaced by one of several who try."""
        if not self._files.has_versions:
            self.can_replace_if = False
            return
        with self._key() as key:
            self._put(key, b"old")
            version = self.version(key)
            assert version is not None, f"{self.location}/{key} was just written"
            try:
                refused = not self._put(key, b"other", version="0" * len(version)) and self.read(key) == b"old"
                won = self._race(lambda data: self._put(key, data, version=version)) if refused else []
                self.can_replace_if = len(won) == 1 and self.read(key) == won[0]
            except RemoteFailure as failure:
                if failure.kind not in (Kind.UNSUPPORTED, Kind.OTHER):
                    raise
                self.can_replace_if = False

    def _race(self, write: Callable[[bytes], bool]) -> list[bytes]:
        """What those wrote who were told that they had, of several at the same time."""
        ready = threading.Barrier(WRITERS)

        def one(writer: int) -> bytes | None:
            data = b"%d" % writer
            ready.wait()
            return data if write(data) else None

        return [data for data in _at_once(WRITERS, one, range(WRITERS)) if data is not None]

    @contextlib.contextmanager
    def _key(self) -> Iterator[str]:
        """A name for trying out."""
        key = f"{TMP}/{uuid.uuid4().hex}"
        try:
            yield key
        finally:
            self.remove(key)

    # --- inside

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}".rstrip("/")

    def _name(self, file: Listed) -> str:
        return file.path[len(self._root) + 1 :]

    def _stat(self, name: str) -> Listed | None:
        with self._failures():
            return self._files.stat(self._path(name))

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        """What is a mistake in the job file is told as one; the rest is storage that failed."""
        try:
            yield
        except RemoteFailure as failure:
            if failure.kind is Kind.NO_BUCKET or (failure.kind is Kind.DENIED and not self._wrote):
                raise OutputError(f"output.path: {failure}") from failure
            raise


A = TypeVar("A")


def _at_once(threads: int, work: Callable[[A], T], on: Iterable[A]) -> list[T]:
    """`work` on each, several at a time; who is interrupted does not wait for what has not begun."""
    pool = ThreadPoolExecutor(threads, thread_name_prefix="store")
    try:
        return list(pool.map(work, on))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)

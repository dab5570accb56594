"""Files behind a URL, as this process reaches them: every call is repeated while the storage is unwell.

Paths are what follows `://`, with the bucket first. Knows nothing of inputs and outputs. What S3 can do beyond other
storage is in `s3`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import fsspec

from pipeline.remote.failures import Kind, RemoteFailure
from pipeline.remote.secrets import scrub

LOG = logging.getLogger(__name__)
T = TypeVar("T")

PATIENCE_SECONDS = 60.0  # from a call's first failure to the end of its repetitions
FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 8.0
TOLD_AFTER_SECONDS = 5.0  # of trying in vain: then the log says so, once per call

REMEDIES = {
    Kind.PASSING: "what is published stays, run the same command again when the storage is well",
    Kind.EXPIRED: "the credentials are no longer accepted, nor those that their provider gives now: renew them and run "
    "the same command again",
    Kind.DENIED: "give credentials that may do this, in the environment or a profile",
    Kind.NO_BUCKET: "create the bucket, or correct the path",
}


@dataclass(frozen=True, slots=True)
class Listed:
    """A file as storage describes it: `size` in bytes, `version` changes with the content, `modified` in seconds
    since 1970 (0 where that is not known)."""

    path: str
    size: int
    version: str
    modified: float


class Connection:
    """An fsspec file system that nobody else uses: without caches of listings, and with credentials of its own age."""

    def __init__(self, make: Callable[[], Any], renew: Callable[[Any], None]) -> None:
        self.filesystem = make()
        self._renew = renew
        self._lock = threading.Lock()
        self.age = 0  # how often credentials were made anew

    def renew(self, age: int) -> None:
        """Make the credentials anew, unless somebody has done so since they had this age."""
        with self._lock:
            if self.age == age:
                self._renew(self.filesystem)
                self.age += 1


_CONNECTIONS: dict[tuple[int, str], Connection] = {}  # by process and protocol: a connection must not be forked


class Files:
    """The files of one protocol, through any fsspec file system. Conditions on versions are not known to fsspec."""

    has_versions: ClassVar[bool] = False  # can `put` be made conditional on a version?
    failures: ClassVar[tuple[type[BaseException], ...]] = (OSError, NotImplementedError)

    def __init__(self, protocol: str) -> None:
        self.protocol = protocol

    def url(self, path: str) -> str:
        return f"{self.protocol}://{path}"

    # --- what can be done with files

    def stat(self, path: str) -> Listed | None:
        """The file; None if there is none."""
        try:
            info = self.call("looking at", path, lambda fs: fs.info(path))
        except FileNotFoundError:
            return None
        return self._listed(info) if info["type"] == "file" else None

    def children(self, folder: str) -> tuple[list[Listed], list[str]]:
        """Files directly in the folder, and names of the folders there."""
        try:
            infos = self.call("listing", folder, lambda fs: fs.ls(folder, detail=True))
        except FileNotFoundError:
            return [], []
        files = [self._listed(info) for info in infos if info["type"] == "file" and _plain(info["name"]) != folder]
        return files, [_plain(info["name"]).rpartition("/")[2] for info in infos if info["type"] != "file"]

    def below(self, folder: str, skip: Callable[[str], bool], beginning: str = "") -> list[Listed]:
        """Files at any depth below the folder whose paths there start with `beginning`, in no certain order.

        Without those in folders whose names `skip`: it must tell by how a name begins.
        """
        root = f"{folder.rstrip('/')}/"
        try:
            infos = self.call("listing", folder, lambda fs: fs.find(root, detail=True))
        except FileNotFoundError:
            return []
        found = [self._listed(info) for info in infos.values() if info["type"] == "file"]
        ours = [file for file in found if file.path.startswith(root + beginning)]
        return [file for file in ours if not any(map(skip, file.path[len(root) :].split("/")[:-1]))]

    def get(self, path: str, start: int | None = None, stop: int | None = None, version: str | None = None) -> bytes:
        """The bytes of a file. FileNotFoundError if there is none; where `version` counts, it must be that one."""
        data: bytes = self.call("reading", path, lambda fs: fs.cat_file(path, start=start, end=stop))
        return data

    def put(self, path: str, data: bytes, absent: bool = False, version: str | None = None) -> bool:
        """Write a whole file: always, only if there is none, or only in place of the one with that version.

        False if the condition does not hold; nothing has changed then.
        """
        assert version is None, f"{self.protocol} knows no conditions on versions"

        def write(fs: Any) -> None:
            with contextlib.suppress(FileExistsError):
                fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            fs.pipe_file(path, data, mode="create" if absent else "overwrite")

        try:
            self.call("writing", path, write)
        except RemoteFailure as failure:
            if failure.kind is Kind.CONDITION:
                return False
            raise
        return True

    def remove(self, path: str) -> None:
        """Remove the file if it is there."""
        with contextlib.suppress(FileNotFoundError):
            self.call("removing", path, lambda fs: fs.rm_file(path))

    # --- how a call is made

    def call(self, doing: str, path: str, act: Callable[[Any], T]) -> T:
        """`act` with the file system, again and again while the failure may pass.

        FileNotFoundError where there is no such file; every other failure is a `RemoteFailure`.
        """
        deadline: float | None = None
        pause, renewed, told = FIRST_PAUSE_SECONDS, False, False
        refused: int | None = None  # the age of credentials that were
        while True:
            connection = self._connection()
            age = connection.age
            try:
                if refused is not None:
                    renewed = True
                    connection.renew(refused)
                    age = connection.age
                return act(connection.filesystem)
            except self.failures as error:
                kind, reason = self.kind_of(error), self.reason(error)
                if kind is Kind.MISSING:
                    raise FileNotFoundError(self.url(path)) from error
                now = time.monotonic()
                deadline = deadline if deadline is not None else now + PATIENCE_SECONDS
                renewable = kind is Kind.EXPIRED or (kind is Kind.DENIED and not renewed)
                refused = age if renewable else None
                if now + pause > deadline or not (renewable or kind is Kind.PASSING):
                    raise self.failure(kind, doing, path, reason) from error
            if not told and time.monotonic() > deadline - PATIENCE_SECONDS + TOLD_AFTER_SECONDS:
                url = scrub(self.url(path))
                LOG.warning("%s: %s fails (%s); trying again", url, doing, reason, extra={"event": "storage_retried"})
                told = True
            if kind is not Kind.DENIED:
                time.sleep(random.uniform(pause / 2, pause))
                pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    def failure(self, kind: Kind, doing: str, path: str, reason: str) -> RemoteFailure:
        remedy = REMEDIES.get(kind, "what is published stays, mend the storage and run the same command again")
        return RemoteFailure(scrub(f"{self.url(path)}: {doing} failed ({reason}); {remedy}"), kind)

    def kind_of(self, error: BaseException) -> Kind:
        """What kind of failure a file system means by this exception."""
        for classes, kind in (
            (FileNotFoundError, Kind.MISSING),
            (FileExistsError, Kind.CONDITION),
            (PermissionError, Kind.DENIED),
            (NotImplementedError, Kind.UNSUPPORTED),
            ((TimeoutError, ConnectionError), Kind.PASSING),
        ):
            if isinstance(error, classes):
                return kind
        return Kind.OTHER

    def reason(self, error: BaseException) -> str:
        """The exception in a few words without secrets."""
        return scrub(" ".join(str(error).split()) or type(error).__name__)

    # --- what a protocol can do otherwise

    def make(self) -> Any:
        return fsspec.filesystem(self.protocol, skip_instance_cache=True, use_listings_cache=False)

    def renew(self, filesystem: Any) -> None:
        """Make the credentials anew; file systems of which that is not known keep theirs."""

    def _connection(self) -> Connection:
        key = os.getpid(), self.protocol
        found = _CONNECTIONS.get(key)
        if found is None:  # two threads may make one each; one of them is kept
            found = _CONNECTIONS.setdefault(key, Connection(self.make, self.renew))
        return found

    def _listed(self, info: dict[str, Any]) -> Listed:
        version = info.get("etag") or info.get("ETag") or info.get("mtime") or info.get("created") or ""
        modified = info.get("mtime") or info.get("LastModified") or info.get("created") or 0
        seconds = modified.timestamp() if hasattr(modified, "timestamp") else float(modified)
        return Listed(_plain(info["name"]), int(info["size"] or 0), str(version).strip('"'), seconds)


def _plain(path: str) -> str:
    return path.lstrip("/")


def files_of(protocol: str) -> Files:
    """The files of a protocol, such as s3."""
    if protocol in ("s3", "s3a"):
        from pipeline.remote.s3 import S3Files

        return S3Files("s3")
    return Files(protocol)


def split(url: str) -> tuple[Files, str]:
    """The files of a URL's protocol, and the path in it."""
    protocol, _, path = url.partition("://")
    return files_of(protocol), path

"""Files on S3: s3fs's client and credentials, S3's own calls.

Why not s3fs's file operations: they go multipart above a size, where servers ignore conditions; take a refused
permission for an absent file; and know neither `If-Match` nor what listing may leave out. Each call here is one
request, and is repeated in one place only (`files`).
"""

from __future__ import annotations

import itertools
import os
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar

import aiohttp
import fsspec
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    CredentialRetrievalError,
    HTTPClientError,
    IncompleteReadError,
    MetadataRetrievalError,
    NoCredentialsError,
    ParamValidationError,
    PartialCredentialsError,
)
from botocore.exceptions import ConnectionError as ConnectingError
from botocore.parsers import ResponseParserError
from fsspec.asyn import sync
from fsspec.exceptions import FSTimeoutError

from pipeline.remote.failures import Kind, RemoteFailure
from pipeline.remote.files import Files, Listed
from pipeline.remote.secrets import scrub

CONNECT_SECONDS, READ_SECONDS = 10, 30  # of silence, after which a request is given up and repeated
UPLOAD_SECONDS, UPLOAD_BYTES_PER_SECOND = 60.0, 256 << 10  # a write that takes longer hangs, and is repeated as well
PAGE_KEYS = 1000  # of a listing, at once: the most that servers give
POOL = 32  # connections at once
WRITER = "nightdesk-writer"  # metadata of a file: which call wrote it

EXPIRED = {"ExpiredToken", "ExpiredTokenException", "RequestExpired", "InvalidToken", "TokenRefreshRequired"}
DENIED = {"AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "AllAccessDisabled", "AccountProblem"}
NO_BUCKET = {"NoSuchBucket", "InvalidBucketName"}
CUT_SHORT = {"IncompleteBody", "BadDigest", "RequestTimeout", "XAmzContentSHA256Mismatch"}  # 4xx, and yet an accident
BUSY = {"SlowDown", "Throttling", "ThrottlingException", "RequestLimitExceeded", "OperationAborted"}


class S3Files(Files):
    """Buckets and their objects."""

    has_versions: ClassVar[bool] = True
    failures: ClassVar[tuple[type[BaseException], ...]] = (
        OSError,
        NotImplementedError,
        BotoCoreError,
        ClientError,
        ResponseParserError,
        aiohttp.ClientError,
        FSTimeoutError,
    )

    def __init__(self, protocol: str) -> None:
        super().__init__(protocol)
        self._bare_tags = False  # in conditions on writing

    def stat(self, path: str) -> Listed | None:
        head = self._head(path)
        if head is None:
            return None
        return Listed(path, int(head["ContentLength"]), _tag(head["ETag"]), head["LastModified"].timestamp())

    def children(self, folder: str) -> tuple[list[Listed], list[str]]:
        prefix = f"{folder.rstrip('/')}/"
        files: list[Listed] = []
        folders: list[str] = []
        for page in self._pages(prefix, {"Delimiter": "/"}):
            files += [file for file in _listed(page, prefix) if file.path != prefix]
            folders += [entry["Prefix"].rstrip("/").rpartition("/")[2] for entry in page.get("CommonPrefixes", ())]
        return files, folders

    def below(self, folder: str, skip: Callable[[str], bool], beginning: str = "") -> list[Listed]:
        """See `Files`. A folder that is skipped costs at most one page, however much is in it."""
        root = f"{folder.rstrip('/')}/"
        found: list[Listed] = []
        beyond: str | None = ""
        while beyond is not None:
            for page in self._pages(root + beginning, {"StartAfter": beyond} if beyond else {}):
                files = _listed(page, root)
                found += [file for file in files if _skipped(file.path, root, skip) is None]
                beyond = _skipped(files[-1].path, root, skip) if files and _sorted(files) else None
                if beyond is not None and page.get("IsTruncated"):
                    # The folder's name and the character after "/": behind every key of the folder. What other key
                    # could begin so has a name that is skipped as well.
                    beyond = f"{_key(beyond)}0"
                    break
                beyond = None
        return found

    def get(self, path: str, start: int | None = None, stop: int | None = None, version: str | None = None) -> bytes:
        arguments = _place(path)
        if start is not None or stop is not None:
            arguments["Range"] = f"bytes={start or 0}-{'' if stop is None else stop - 1}"
        if version is not None:
            arguments["IfMatch"] = f'"{version}"'
        data: bytes = self.call("reading", path, lambda fs: sync(fs.loop, _body, fs, arguments))
        return data

    def put(self, path: str, data: bytes, absent: bool = False, version: str | None = None) -> bool:
        writer, bare = uuid.uuid4().hex, self._bare_tags
        arguments = _place(path) | {"Body": data, "Metadata": {WRITER: writer}}
        if absent:
            arguments["IfNoneMatch"] = "*"
        if version is not None:
            arguments["IfMatch"] = version if bare else f'"{version}"'
        try:
            seconds = UPLOAD_SECONDS + len(data) / UPLOAD_BYTES_PER_SECOND
            self.call("writing", path, partial(_called, "put_object", arguments, seconds=seconds))
            return True
        except FileNotFoundError:  # there is none with that version
            return False
        except RemoteFailure as failure:
            if failure.kind is not Kind.CONDITION:
                raise
        head = self._head(path)
        if head is None:
            return False
        if version == _tag(head["ETag"]) and not bare:  # so it was not understood: Ceph takes quotes for part of it
            self._bare_tags = True
            return self.put(path, data, absent, version)
        return self._is_from(writer, head, path, data)

    def remove(self, path: str) -> None:
        self.call("removing", path, partial(_called, "delete_object", _place(path)))

    def _is_from(self, writer: str, head: dict[str, Any], path: str, data: bytes) -> bool:
        """Is the file that is in the way our own? So it is where the answer to an earlier attempt was lost."""
        name = head["Metadata"].get(WRITER)
        if name is not None:
            return bool(name == writer)
        return int(head["ContentLength"]) == len(data) and self.get(path) == data  # storage that forgets metadata

    def _head(self, path: str) -> dict[str, Any] | None:
        try:
            head: dict[str, Any] = self.call("looking at", path, partial(_called, "head_object", _place(path)))
        except FileNotFoundError:
            return None
        return head

    def _pages(self, prefix: str, arguments: dict[str, Any]) -> Iterator[dict[str, Any]]:
        bucket = prefix.partition("/")[0]
        arguments = {"Bucket": bucket, "Prefix": _key(prefix), "MaxKeys": PAGE_KEYS, **arguments}
        while True:
            page: dict[str, Any] = self.call("listing", prefix, partial(_called, "list_objects_v2", arguments))
            yield page
            if not page.get("IsTruncated"):
                return
            arguments = {**arguments, "ContinuationToken": page["NextContinuationToken"]}

    # --- how a call is made

    def make(self) -> Any:
        config: dict[str, Any] = {
            "connect_timeout": CONNECT_SECONDS,
            "read_timeout": READ_SECONDS,
            "max_pool_connections": POOL,
            "retries": {"total_max_attempts": 1},
        }
        if "AWS_REQUEST_CHECKSUM_CALCULATION" not in os.environ:
            # The signature covers the content anyway, and older servers refuse the newer checksums.
            config["request_checksum_calculation"] = "when_required"
        filesystem = fsspec.filesystem(
            self.protocol, skip_instance_cache=True, use_listings_cache=False, config_kwargs=config
        )
        filesystem.retries = 1  # repeated in one place, which knows what may be repeated
        return filesystem

    def renew(self, filesystem: Any) -> None:
        filesystem.connect(refresh=True)  # goes through the whole chain of providers again

    def kind_of(self, error: BaseException) -> Kind:
        response = _response(error)
        if response is not None:
            return _kind_of_response(response, _operation(error))
        if isinstance(error, CredentialRetrievalError | MetadataRetrievalError):
            return Kind.EXPIRED
        if isinstance(error, NoCredentialsError | PartialCredentialsError):
            return Kind.DENIED
        if isinstance(error, ParamValidationError) and "bucket" in str(error).lower():
            return Kind.NO_BUCKET
        passing = ConnectingError | HTTPClientError | IncompleteReadError | ResponseParserError
        if isinstance(error, passing | aiohttp.ClientError | FSTimeoutError):
            return Kind.PASSING
        return super().kind_of(error)

    def reason(self, error: BaseException) -> str:
        response = _response(error)
        if response is None:
            return super().reason(error)
        problem = response.get("Error", {})
        said = [str(problem[name]) for name in ("Code", "Message") if problem.get(name)]
        return scrub(" ".join(f"{_operation(error)}: {': '.join(said)}".split()))


def _place(path: str) -> dict[str, Any]:
    bucket, _, key = path.partition("/")
    return {"Bucket": bucket, "Key": key}


def _called(operation: str, arguments: dict[str, Any], filesystem: Any, seconds: float | None = None) -> Any:
    return sync(filesystem.loop, filesystem._call_s3, operation, timeout=seconds, **arguments)


async def _body(filesystem: Any, arguments: dict[str, Any]) -> bytes:
    response = await filesystem._call_s3("get_object", **arguments)
    async with response["Body"] as body:
        data: bytes = await body.read()
    return data


def _kind_of_response(response: dict[str, Any], operation: str) -> Kind:
    code = str(response.get("Error", {}).get("Code", ""))
    status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    if code in EXPIRED:
        return Kind.EXPIRED
    if code in NO_BUCKET:
        return Kind.NO_BUCKET
    if status == 412:
        return Kind.CONDITION
    if status == 501:
        return Kind.UNSUPPORTED
    if status in (409, 429) or status >= 500 or code in CUT_SHORT | BUSY:
        return Kind.PASSING
    if status == 404:
        return Kind.MISSING
    # A HEAD has no body that could say what is wrong: 400 is what an expired token gets.
    if status in (401, 403) or code in DENIED or (status == 400 and operation == "HeadObject"):
        return Kind.DENIED
    return Kind.OTHER


def _response(error: BaseException) -> dict[str, Any] | None:
    """What the server said: s3fs translates botocore's exceptions, and keeps them as causes."""
    for candidate in (error, error.__cause__):
        if isinstance(candidate, ClientError):
            return dict(candidate.response)
    return None


def _operation(error: BaseException) -> str:
    for candidate in (error, error.__cause__):
        if isinstance(candidate, ClientError):
            return str(candidate.operation_name)
    return ""


def _listed(page: dict[str, Any], prefix: str) -> list[Listed]:
    bucket = prefix.partition("/")[0]
    return [
        Listed(f"{bucket}/{entry['Key']}", int(entry["Size"]), _tag(entry["ETag"]), entry["LastModified"].timestamp())
        for entry in page.get("Contents", ())
    ]


def _skipped(path: str, prefix: str, skip: Callable[[str], bool]) -> str | None:
    """The path of the first folder on the way to the file that is skipped."""
    way = prefix
    for name in path[len(prefix) :].split("/")[:-1]:
        way += name
        if skip(name):
            return way
        way += "/"
    return None


def _sorted(files: list[Listed]) -> bool:
    """All servers sort by the bytes of the key but those for "directory buckets"."""
    return all(a.path.encode() < b.path.encode() for a, b in itertools.pairwise(files))


def _key(path: str) -> str:
    return path.partition("/")[2]


def _tag(etag: str) -> str:
    return etag.strip('"')

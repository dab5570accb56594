"""How storage behind a URL fails: what kind of failure it is decides who does what about it."""

from __future__ import annotations

from enum import StrEnum

from pipeline.errors import StoreError


class Kind(StrEnum):
    """`PASSING` is tried again for a while, `EXPIRED` with credentials made anew, `DENIED` so once."""

    PASSING = "passing"
    EXPIRED = "expired"
    DENIED = "denied"
    MISSING = "missing"  # there is no such file
    NO_BUCKET = "no bucket"
    CONDITION = "condition"  # what the call was made conditional on is not so
    UNSUPPORTED = "unsupported"  # the storage knows no such call
    OTHER = "other"


class RemoteFailure(StoreError):
    """A call that has failed for good. The message is one line without secrets."""

    def __init__(self, message: str, kind: Kind = Kind.OTHER) -> None:
        super().__init__(message)
        self.kind = kind

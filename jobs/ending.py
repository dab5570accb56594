"""How a command ends: the exit code and the one line for a failure (DESIGN section 9, contract).

Exit codes: 0 all committed, 1 a bug, 2 configuration or command line, 3 too many error rows, 4 stopped and resumable,
5 a failed audit.
"""

from __future__ import annotations

import os
import tempfile
import time
import traceback
from dataclasses import dataclass

from pipeline.errors import NightdeskError
from pipeline.remote.secrets import scrub

COMMITTED, INTERNAL_ERROR, USAGE_ERROR, TOO_MANY_ERRORS, STOPPED, AUDIT_FAILED = range(6)


@dataclass(frozen=True)
class Failure:
    """What a command that raised something ends with."""

    code: int
    message: str  # one line
    is_bug: bool = False  # nobody has named it, and its traceback is wanted


def failure_of(error: BaseException) -> Failure:
    """A named failure has its own code and words, an interruption too; anything else is a bug."""
    if isinstance(error, KeyboardInterrupt):
        return Failure(STOPPED, "stopped; the same command continues where this one ended")
    known = _named(error)
    if known is not None:
        return Failure(known.exit_code, " ".join(str(known).split()))
    first = scrub((str(error).strip().splitlines() or [""])[0])
    return Failure(INTERNAL_ERROR, f"internal error: {type(error).__name__}: {first}", is_bug=True)


def write_log(error: BaseException) -> str:
    """The traceback in a file of its own; returns its path."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    with tempfile.NamedTemporaryFile(
        "w", prefix=f"nightdesk-{stamp}-", suffix=".log", delete=False, encoding="utf-8"
    ) as log:
        log.write(trace(error))
    return log.name


def trace(error: BaseException) -> str:
    """The traceback, without what exceptions of other packages may quote of credentials."""
    return scrub("".join(traceback.format_exception(error)))


def debugging() -> bool:
    """Are tracebacks shown?"""
    return os.environ.get("NIGHTDESK_DEBUG", "0") not in ("", "0")


def _named(error: BaseException) -> NightdeskError | None:
    """The named failure that this is, itself or as the cause that Ray wraps with a trace of its own."""
    cause = getattr(error, "cause", None)
    for candidate in (cause, error):
        if isinstance(candidate, NightdeskError):
            return candidate
    return None

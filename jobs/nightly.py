"""`nightly CONFIG`: a run for a schedule, which ends with one line for a pager and tells the job's hooks.

Knows how a run ended and what it did; how it is done, alone and until when, is `run`'s affair.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, fields

from jobs.account import Account
from jobs.ending import (
    AUDIT_FAILED,
    COMMITTED,
    INTERNAL_ERROR,
    STOPPED,
    TOO_MANY_ERRORS,
    USAGE_ERROR,
    Failure,
    failure_of,
)
from jobs.hooks import tell
from jobs.progress import duration
from pipeline.config import HooksConfig, JobConfig
from pipeline.counting import counted
from pipeline.errors import Busy
from pipeline.remote.secrets import scrub

REASON_CHARACTERS = 300  # of what is told on a pager about a failure
OUTCOMES = {
    COMMITTED: "complete",
    INTERNAL_ERROR: "internal error",
    USAGE_ERROR: "refused",
    TOO_MANY_ERRORS: "too many errors",
    STOPPED: "stopped",
    AUDIT_FAILED: "audit failed",
}
BUSY = "busy"
NEXT_AFTER_BUSY = "nothing: the other run does the work"
NEXT = {
    COMMITTED: "nothing until there are new documents",
    INTERNAL_ERROR: "look at the last line of standard error, then the same command continues",
    USAGE_ERROR: "put right what it says, then the same command",
    TOO_MANY_ERRORS: "look at the columns error and *_error; --retry-failed asks again",
    STOPPED: "the same command continues",
    AUDIT_FAILED: "nightdesk audit with the same job file says more",
}


@dataclass(frozen=True)
class Night:
    """How it went; the names are those that hooks get."""

    job: str
    run: str | None
    outcome: str
    exit_code: int
    new: int
    replaced: int
    removed: int
    failed: int
    left: int | None
    seconds: float
    output: str | None
    error: str | None
    next: str

    @staticmethod
    def of(job: str, output: str | None, account: Account, seconds: float, code: int, failure: str | None,
           busy: bool) -> Night:  # fmt: skip
        return Night(
            job=job,
            run=account.run,
            outcome=BUSY if busy else OUTCOMES[code],
            exit_code=code,
            new=account.new,
            replaced=account.replaced,
            removed=account.removed,
            failed=account.failed,
            left=account.left,
            seconds=round(seconds, 1),
            output=output,
            error=failure,
            next=NEXT_AFTER_BUSY if busy else NEXT[code],
        )

    def line(self) -> str:
        """For a pager: job, run, outcome, rows, duration, what is left, next step."""
        left = "rows left: unknown" if self.left is None else f"{counted(self.left, 'row')} left"
        told = [
            f"nightdesk {self.job}: {f'run {self.run} ' if self.run else ''}{self.outcome}",
            f"{counted(self.new, 'row')} new, {self.replaced:,} replaced, {self.removed:,} removed, "
            f"{self.failed:,} failed",
            duration(self.seconds),
            left,
            *([] if self.error is None else [shortened(self.error.removesuffix(f", and {self.next}"))]),
            f"next: {self.next}",
        ]
        return "; ".join(" ".join(part.split()) for part in told)

    def as_json(self) -> dict[str, str | int | float | None]:
        """`text` is the line, under the name that chat services expect."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {**values, "text": self.line()}


def run_night(name: str, load: Callable[[], JobConfig], execute: Callable[[JobConfig, Account], int]) -> int:
    """Returns the run's exit code, or raises what it raised, when line and hooks are out.

    `name` stands for the job where its file cannot be read.
    """
    started, account = time.monotonic(), Account()
    output: str | None = None
    hooks = HooksConfig()
    raised: BaseException | None = None
    failure: Failure | None = None
    code = COMMITTED
    try:
        job = load()
        name, output, hooks = job.name, job.output.path, job.hooks
        code = execute(job, account)
    except (KeyboardInterrupt, Exception) as error:  # noqa: BLE001 - told of here, and raised again
        raised, failure = error, failure_of(error)
        code = failure.code
    night = Night.of(
        scrub(name), None if output is None else scrub(output), account, time.monotonic() - started, code,
        None if failure is None else scrub(failure.message), isinstance(raised, Busy),
    )  # fmt: skip
    print(night.line(), flush=True)
    sys.stderr.flush()
    tell(hooks, night.as_json(), succeeded=code == COMMITTED)
    if raised is not None:
        raise raised
    return code


def shortened(text: str) -> str:
    """One line of at most so many characters as a pager shows."""
    whole = " ".join(text.split())
    return whole if len(whole) <= REASON_CHARACTERS else f"{whole[: REASON_CHARACTERS - 1]}…"

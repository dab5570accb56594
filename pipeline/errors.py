"""Every failure that nightdesk names, in one hierarchy.

A message is one line that says what is wrong, where, and what to do about it. The command line turns a
class into an exit code (DESIGN section 9); nothing else here knows about processes.
"""

from __future__ import annotations

from collections.abc import Iterable


class NightdeskError(Exception):
    """Base of all named failures. `exit_code` is what the command line ends with."""

    exit_code = 1


class ConfigError(NightdeskError):
    """The job file or the command line is wrong: what, where, nearest valid key."""

    exit_code = 2


class CorpusError(NightdeskError):
    """The input as a whole cannot be read (a path that does not exist). A bad row is an error row instead."""

    exit_code = 2


class ModelError(NightdeskError):
    """A model is missing, unreadable or of an architecture that is not supported."""

    exit_code = 2


class OutputError(NightdeskError):
    """The output folder holds something that this job must not touch (another fingerprint, say)."""

    exit_code = 2


class StoreError(NightdeskError):
    """Storage failed while the job ran; what is published stays, and the same command continues."""

    exit_code = 4


class WorkerLost(NightdeskError):
    """A worker process is gone or does not answer. Raised only when it could not be replaced."""

    exit_code = 4


class StepFailed(NightdeskError):
    """A step of the target came to no verdict, and its worker can be asked again: what was asked may be the cause."""

    exit_code = 4


class OutOfMemory(NightdeskError):
    """A model ran out of memory in a pass, and its worker has let go of its cache: a smaller batch may do."""

    exit_code = 4


class Stopped(NightdeskError):
    """The run was asked to stop before its end; the same command continues it."""

    exit_code = 4


class OutOfTime(Stopped):
    """The deadline has come, or comes before what is left could be done."""


class Busy(Stopped):
    """Another run is at work on the same output, and this one was to have it for itself. It did nothing."""


class PromptError(NightdeskError):
    """No prompt can be made of this document for this task: the row becomes an error row."""


class CacheMiss(NightdeskError):
    """A worker does not hold the prefix of these sequences: resend each from its first token.

    `sequences` are the handles in question (`messages.Feed.sequences`).
    """

    def __init__(self, sequences: Iterable[int]) -> None:
        self.sequences = tuple(int(s) for s in sequences)
        super().__init__(f"CacheMiss(sequences={list(self.sequences)}): resend the full prefix")

    def __reduce__(self) -> tuple[type[CacheMiss], tuple[tuple[int, ...]]]:
        return CacheMiss, (self.sequences,)

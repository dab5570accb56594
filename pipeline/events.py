"""Events: what a process has to say, a line each on standard error: JSON for machines, plain text on a terminal.

A line of JSON has `time`, `level`, `event` and `message`, and whatever else is known: `run`, `shard`, `replica` and the
event's own numbers. Without `written` or `write_here` there is plain text. Knows nothing of who has something to say.
"""

from __future__ import annotations

import io
import logging
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, Self, TextIO

import orjson

from pipeline.remote.secrets import scrub

OURS = ("pipeline", "actors", "jobs", "nightdesk")
LOG = logging.getLogger("nightdesk")
MODE = "NIGHTDESK_LOG"  # json or text; by default text on a terminal, else json
OTHER = "message"  # the event of a line that has no name of its own


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of event. `shown`: as text too; what is not is seen otherwise there, or of no interest to people."""

    name: str
    meaning: str
    shown: bool = True


KINDS = (
    Kind("run_planned", "A new plan was made: how many rows are new, to be replaced and to be removed."),
    Kind("run_continued", "An open plan is continued: how many of its rows are there already."),
    Kind("run_restarted", "--fresh: the rows that are there will be removed."),
    Kind("progress", "How far the run is; every few seconds while something changes.", shown=False),
    Kind("shard_published", "A shard is published: its rows, its error rows, and how long publishing took.", False),
    Kind("shards_dropped", "Shards were given up because their input or their parts changed; they are planned anew."),
    Kind("run_closed", "All that was planned is done: rows, error rows, tokens, and how long it took.", shown=False),
    Kind("failed", "The last line of a command that failed: why, and the exit code."),
    Kind("errors_exceeded", "More error rows than max_error_rate allows."),
    Kind("audit_started", "All rows are published; the audit begins."),
    Kind("audit_step", "What the audit is at."),
    Kind("audit_failed", "The audit found that answers do not follow the target's law."),
    Kind("replica_lost", "A replica is dead, late or failing; its shards go to others."),
    Kind("replica_careful", "A replica was hired for shards that others were lost with."),
    Kind("replica_notice", "A replica tells of something: a target that is replaced, a batch that is halved."),
    Kind("replica_failed", "A replica's own account of what ended it, with the traceback; in the worker's log.", False),
    Kind("replica_began", "A replica has loaded its models, and answers; in the worker's log.", shown=False),
    Kind("draft_worker_lost", "A draft worker is dead, late or failing; it is replaced."),
    Kind("node_draining", "A machine is about to be taken away, and a replica there ends what it has begun."),
    Kind("placement", "Seats are waited for, given up, or not used any more."),
    Kind("input_skipped", "A file of the input is empty, unreadable, or of no kind that is read."),
    Kind("storage_retried", "A call to remote storage failed and is made again."),
    Kind("metrics_failed", "Metrics can't be reported; the run goes on without them."),
    Kind(OTHER, "Whatever else is said, by nightdesk or by a library."),
)
BY_NAME = {kind.name: kind for kind in KINDS}

_AROUND: ContextVar[Mapping[str, Any]] = ContextVar("events", default=MappingProxyType({}))
_process: dict[str, Any] = {}  # known of everything that this process says
_handler: Lines | None = None


def tell(event: str, message: str, level: int = logging.INFO, **fields: Any) -> None:
    """Say something."""
    assert event in BY_NAME, f"{event}: not among pipeline.events.KINDS"
    if _handler is None:
        if BY_NAME[event].shown:
            print(message, file=sys.stderr)
        return
    LOG.log(level, "%s", message, extra={"event": event, "fields": fields})


@contextmanager
def about(event: str | None = None, **fields: Any) -> Iterator[None]:
    """Whatever this thread says inside is about this: a run, a shard, a replica. `event` names what has no name yet."""
    assert event is None or event in BY_NAME, f"{event}: not among pipeline.events.KINDS"
    named = {} if event is None else {"event": event}
    token = _AROUND.set({**_AROUND.get(), **fields, **named})
    try:
        yield
    finally:
        _AROUND.reset(token)


def are_json() -> bool:
    """Are lines written as JSON?"""
    return _handler is not None and _handler.as_json


@contextmanager
def written() -> Iterator[None]:
    """Events are written to standard error inside; so is, as events, what libraries write there."""
    stream = sys.stderr
    as_json = _wants_json(stream)
    handler = _install(Lines(stream, as_json))
    foreign = Foreign() if as_json else None
    if foreign is not None:
        sys.stderr = foreign
    try:
        yield
    finally:
        if foreign is not None:
            foreign.close()
            sys.stderr = stream
        _remove(handler)


def write_here(**fields: Any) -> None:
    """Events are written to standard error from now on, in a process that is nothing but a worker."""
    _process.update(fields)
    if _handler is None:
        _install(Lines(None, _wants_json(sys.stderr)))


class Lines(logging.Handler):
    """Writes each record as a line."""

    def __init__(self, stream: TextIO | None, as_json: bool) -> None:
        """`stream` None: whatever is standard error at the time."""
        super().__init__()
        self.output = stream
        self.as_json = as_json
        self.levels: dict[str, int] = {}  # of our loggers, before

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`."""
        try:
            line = as_json(record) if self.as_json else as_text(record)
            if line is not None:
                print(line, file=self.output or sys.stderr, flush=True)
        except (OSError, ValueError):  # nobody reads there any more: no reason to end a run
            return


def as_text(record: logging.LogRecord) -> str | None:
    """The line for people; None where they see it otherwise."""
    kind = BY_NAME.get(getattr(record, "event", OTHER))
    return scrub(record.getMessage()) if kind is None or kind.shown else None


def as_json(record: logging.LogRecord) -> str:
    """The line for machines."""
    around = dict(_AROUND.get())
    name = around.pop("event", OTHER)
    line: dict[str, Any] = {
        "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
        "level": record.levelname.lower(),
        "event": getattr(record, "event", name),
        "message": record.getMessage(),
    }
    if not record.name.startswith(OURS):
        line["logger"] = record.name
    line |= _process | around | getattr(record, "fields", {})
    if record.exc_info:
        line["traceback"] = logging.Formatter().formatException(record.exc_info)
    return orjson.dumps(_scrubbed(line), default=str, option=orjson.OPT_NON_STR_KEYS).decode()


def _scrubbed(value: Any) -> Any:
    if isinstance(value, str):
        return scrub(value).encode("utf-8", "replace").decode()  # no lone surrogates: JSON has none
    if isinstance(value, Mapping):
        return {key: _scrubbed(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_scrubbed(each) for each in value]
    return value


class Foreign(io.TextIOBase):
    """Standard error for everybody else: each line that is written there is an event of its own."""

    def __init__(self) -> None:
        self._begun = threading.local()  # lines that are not at their end, by thread

    def write(self, text: str) -> int:
        """See `io.TextIOBase`."""
        *lines, rest = (getattr(self._begun, "text", "") + text).replace("\r", "\n").split("\n")
        self._begun.text = rest
        for line in lines:
            self._say(line)
        return len(text)

    def writable(self) -> bool:
        """See `io.TextIOBase`."""
        return True

    def isatty(self) -> bool:
        """See `io.TextIOBase`."""
        return False

    def close(self) -> None:
        """Say what has no end yet."""
        self._say(getattr(self._begun, "text", ""))
        self._begun.text = ""

    def __enter__(self) -> Self:
        return self

    def _say(self, line: str) -> None:
        if line.strip():
            LOG.warning("%s", line.rstrip(), extra={"event": OTHER, "fields": {}})


def _wants_json(stream: TextIO) -> bool:
    chosen = os.environ.get(MODE, "").strip().lower()
    return chosen == "json" if chosen in ("json", "text") else not stream.isatty()


def _install(handler: Lines) -> Lines:
    global _handler
    root = logging.getLogger()
    for name in OURS:
        logger = logging.getLogger(name)
        handler.levels[name] = logger.level
        if handler.as_json or name == LOG.name:
            logger.setLevel(logging.INFO)
    root.addHandler(handler)
    _handler = handler
    return handler


def _remove(handler: Lines) -> None:
    global _handler
    logging.getLogger().removeHandler(handler)
    for name, level in handler.levels.items():
        logging.getLogger(name).setLevel(level)
    _handler = None

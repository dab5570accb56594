"""How far a run is, on standard error: one live line on a terminal, else a plain line or event every few seconds.

Adds up the increments that workers report (`pipeline/stats.py`); knows nothing of who they are.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from pipeline import events
from pipeline.counting import counted
from pipeline.stats import Progress

FEWEST_ROWS = 4  # finished in the window, before a rate of rows means anything
WINDOW = 60.0  # seconds that a rate looks back: long enough to be calm, short enough to follow a change


class ProgressLine:
    """`with ProgressLine() as line: execute(…, report=line.report)`.

    `total` is the sum so far, `elapsed` the seconds since the line was opened. `interval` is the number of
    seconds between plain lines; the clock is a parameter for tests.
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        interval: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total = Progress()
        self._stream = sys.stderr if stream is None else stream
        self._interval = interval
        self._clock = clock
        self._console = Console(file=self._stream, highlight=False)
        self._live: Live | None = None
        self._start = clock()
        self._printed_at = self._start
        self._printed = Progress()
        self._samples: deque[tuple[float, int, int]] = deque([(self._start, 0, 0)])

    def __enter__(self) -> Self:
        self._start = self._printed_at = self._clock()
        self._samples = deque([(self._start, 0, 0)])
        if self._console.is_terminal:
            self._live = Live(Text(), console=self._console, refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
        elif self._printed != self.total:
            self._print()

    @property
    def elapsed(self) -> float:
        return self._clock() - self._start

    def report(self, progress: Progress) -> None:
        """Count an increment, and show the total if it is time to."""
        self.total += progress
        now = self._clock()
        if not self.total.new_tokens:
            self._samples.clear()  # rows that an earlier run finished say nothing about how fast this one is
        self._sample(now)
        if self._live is not None:
            self._live.update(Text(self.line(), overflow="ellipsis", no_wrap=True))
        elif now - self._printed_at >= self._interval:
            self._print()

    def line(self) -> str:
        """The line as it stands: rows, tokens per second, accepted per step, errors, time left."""
        total = self.total
        rows = f"{total.rows_done:,}/{counted(total.rows_total, 'row')}"
        if not total.new_tokens and total.rows_done < total.rows_total:
            return f"{rows}  starting Ray, loading models, reading prompts"
        tokens, left = self._rate_and_left()
        accepted = f"{total.accepted_per_step:.2f} accepted/step" if total.drafted else "no drafts"
        return "  ".join(
            (
                rows,
                f"{tokens:,.1f} tokens/s",
                accepted,
                counted(total.error_rows, "error"),
                f"{duration(left)} left" if left is not None else "time left unknown",
            )
        )

    def _print(self) -> None:
        if events.are_json() and self._stream is sys.stderr:
            events.tell("progress", self.line(), **self._numbers())
        else:
            print(self.line(), file=self._stream, flush=True)
        self._printed, self._printed_at = self.total, self._clock()

    def _numbers(self) -> dict[str, Any]:
        tokens, left = self._rate_and_left()
        return {
            "rows_done": self.total.rows_done,
            "rows_total": self.total.rows_total,
            "error_rows": self.total.error_rows,
            "new_tokens": self.total.new_tokens,
            "tokens_per_second": round(tokens, 3),
            "accepted_per_step": round(self.total.accepted_per_step, 3),
            "seconds_left": None if left is None else round(left, 1),
        }

    def _sample(self, now: float) -> None:
        self._samples.append((now, self.total.rows_done, self.total.new_tokens))
        while len(self._samples) > 2 and now - self._samples[1][0] > WINDOW:
            self._samples.popleft()

    def _rate_and_left(self) -> tuple[float, float | None]:
        """(tokens per second, seconds left or None while unknown), over the window."""
        (start, rows, tokens), last = self._samples[0], self._samples[-1]
        seconds = last[0] - start
        if seconds <= 0:
            return 0.0, None
        rows_seen = last[1] - rows
        row_rate = rows_seen / seconds if rows_seen >= FEWEST_ROWS else 0.0
        remaining = max(self.total.rows_total - self.total.rows_done, 0)
        return (last[2] - tokens) / seconds, remaining / row_rate if row_rate > 0 else None


def duration(seconds: float) -> str:
    """Seconds as people say them: 42 s, 3 min 05 s, 2 h 10 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"

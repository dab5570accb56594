"""The progress line: sums of increments, rates over a window, a live line or plain ones."""

from __future__ import annotations

import io

import pytest

from jobs.progress import ProgressLine, duration
from pipeline.stats import Progress


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_increments_are_added_up(clock: Clock) -> None:
    line = ProgressLine(io.StringIO(), clock=clock)
    with line:
        line.report(Progress(rows_total=300))
        clock.now += 10
        line.report(Progress(rows_done=20, error_rows=1, new_tokens=500, steps=100, drafted=300, accepted=150))
        clock.now += 10
        line.report(Progress(rows_done=10, new_tokens=500, steps=100, drafted=300, accepted=50))
    assert line.total.rows_done == 30
    assert line.line() == "30/300 rows  50.0 tokens/s  1.00 accepted/step  1 error  3 min 00 s left"


def test_rows_of_an_earlier_run_do_not_make_this_one_look_fast(clock: Clock) -> None:
    with ProgressLine(io.StringIO(), clock=clock) as line:
        line.report(Progress(rows_total=1000, rows_done=900))
        clock.now += 10
        line.report(Progress(rows_done=10, new_tokens=100, steps=100))
    assert "910/1,000 rows" in line.line()
    assert line.line().endswith("1 min 30 s left")


def test_it_says_that_it_starts_before_anything_was_answered(clock: Clock) -> None:
    with ProgressLine(io.StringIO(), clock=clock) as line:
        line.report(Progress(rows_total=5))
        clock.now += 30
        assert line.line() == "0/5 rows  starting Ray, loading models, reading prompts"
        line.report(Progress(rows_done=1, new_tokens=30))
        assert line.line().endswith("time left unknown")  # one row says little about the others


def test_the_rate_follows_the_last_minute(clock: Clock) -> None:
    with ProgressLine(io.StringIO(), clock=clock) as line:
        for tokens in [1000] * 60 + [10] * 70:
            clock.now += 1
            line.report(Progress(new_tokens=tokens, rows_done=1, rows_total=2))
        assert "10.0 tokens/s" in line.line()


def test_work_that_was_lost_is_taken_back(clock: Clock) -> None:
    with ProgressLine(io.StringIO(), clock=clock) as line:
        line.report(Progress(rows_total=10, rows_done=4, new_tokens=40))
        line.report(Progress() - Progress(rows_done=4, new_tokens=40))
    assert "0/10 rows" in line.line()


def test_without_a_terminal_a_plain_line_comes_every_few_seconds(clock: Clock) -> None:
    stream = io.StringIO()
    with ProgressLine(stream, interval=5, clock=clock) as line:
        for _ in range(24):
            clock.now += 0.5
            line.report(Progress(rows_done=1, rows_total=1, new_tokens=5))
        printed = stream.getvalue().splitlines()
        assert [text.split()[0] for text in printed] == ["10/10", "20/20"]
    assert stream.getvalue().splitlines()[-1].startswith("24/24 rows")
    assert "\x1b" not in stream.getvalue()


def test_nothing_reported_prints_nothing(clock: Clock) -> None:
    stream = io.StringIO()
    with ProgressLine(stream, clock=clock):
        pass
    assert stream.getvalue() == ""


def test_the_last_state_is_printed_when_a_run_fails(clock: Clock) -> None:
    stream = io.StringIO()
    line = ProgressLine(stream, clock=clock)
    line.__enter__()
    line.report(Progress(rows_done=3, rows_total=9))
    line.__exit__(RuntimeError, RuntimeError(), None)
    assert stream.getvalue().startswith("3/9 rows")


def test_on_a_terminal_one_line_is_redrawn(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    with ProgressLine(stream, clock=clock) as line:
        for _ in range(3):
            clock.now += 10
            line.report(Progress(rows_done=1, rows_total=1, new_tokens=1))
    text = stream.getvalue()
    assert "\x1b" in text
    assert text.count("\n") <= 2
    assert "3/3 rows" in text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min 00 s"),
        (185, "3 min 05 s"),
        (3599.7, "1 h 00 min"),
        (7800, "2 h 10 min"),
    ],
)
def test_durations_read_like_speech(seconds: float, text: str) -> None:
    assert duration(seconds) == text

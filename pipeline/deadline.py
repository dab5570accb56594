"""When a run is to be over: a moment, and how people write it.

Knows nothing of what is to be done until then, nor how long that takes.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta, tzinfo
from zoneinfo import ZoneInfo

from pipeline.errors import ConfigError

_CLOCK = re.compile(r"([01]?\d|2[0-3]):([0-5]\d)(?:\s*([A-Za-z][\w+/-]*))?")


@dataclass(frozen=True)
class Deadline:
    """`at` is seconds since 1970, on the clock of whoever asks: give it to no other machine."""

    at: float
    clock: Callable[[], float] = field(default=time.time, compare=False, repr=False)

    @property
    def left(self) -> float:
        """Seconds until then; negative afterwards."""
        return self.at - self.clock()

    @property
    def passed(self) -> bool:
        return self.left <= 0

    def __str__(self) -> str:
        """Local date and time, with the difference to UTC."""
        return datetime.fromtimestamp(self.at).astimezone().isoformat(timespec="minutes")


def parse_deadline(text: str, now: float | None = None) -> Deadline:
    """The next time it is `HH:MM` here or, as in `06:00Europe/Berlin`, there; or a moment as ISO 8601 writes it.

    A moment without a zone is local. ConfigError for anything else. `now` is seconds since 1970.
    """
    now = time.time() if now is None else now
    clock = _CLOCK.fullmatch(text.strip())
    if clock is not None:
        hour, minute = int(clock[1]), int(clock[2])
        return Deadline(_next(hour, minute, _zone(clock[3], text), now))
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError:
        moment = None
    if moment is None or len(text.strip()) <= len("2024-05-17"):  # a date alone is midnight at its beginning
        raise _unreadable(text)
    return Deadline(moment.timestamp())


def _next(hour: int, minute: int, zone: tzinfo | None, now: float) -> float:
    """On the clock of the zone, whose days are not all of one length; None is the zone of this machine."""
    today = datetime.fromtimestamp(now, zone).replace(hour=hour, minute=minute, second=0, microsecond=0, fold=0)
    return next(at for day in range(3) if (at := (today + timedelta(days=day)).timestamp()) > now)


def _zone(name: str | None, text: str) -> tzinfo | None:
    if name is None:
        return None
    try:
        return ZoneInfo(name)
    except (LookupError, ValueError, OSError):
        raise _unreadable(text) from None


def _unreadable(text: str) -> ConfigError:
    return ConfigError(f"--until: {text!r} is no time: write 06:00, 06:00Europe/Berlin or 2024-05-17T06:00+02:00")

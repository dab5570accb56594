"""Who works on an output: a sign with a heartbeat.

It saves work and guards --fresh; nothing lost or doubled rests on it. The sign is one file, so of several
runs at once only the first shows; another puts up its own when that one is gone.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import uuid
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Self

from pipeline.errors import OutputError, StoreError
from pipeline.output.store import Store

CLAIM = "_nightdesk/claim.json"
HEARTBEAT_SECONDS = 5.0
WATCH_SECONDS = 0.5  # between two looks at another's sign
SILENT_SECONDS = 60.0  # a claim that has not been renewed for so long is nobody's


@dataclass(frozen=True)
class Holder:
    """What the sign says; `heartbeat` is seconds since 1970."""

    id: str
    host: str
    pid: int
    heartbeat: float

    def is_alive(self) -> bool:
        """A silent holder is dead, one from the future too, and one whose process on this machine is gone."""
        if abs(time.time() - self.heartbeat) > SILENT_SECONDS:
            return False
        return self.host != socket.gethostname() or _runs(self.pid)


class Claim:
    """A context: the sign is up (unless another's is) while it is open."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.id = uuid.uuid4().hex
        self.other: Holder | None = None  # who was at work here when this claim began
        self._closed = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="claim", daemon=True)

    def __enter__(self) -> Self:
        self._renew()
        self._heart.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed.set()
        self._heart.join()
        holder = holder_of(self.store)
        if holder is not None and holder.id == self.id:
            self.store.remove(CLAIM)

    def rival(self, patience: float = SILENT_SECONDS) -> Holder | None:
        """Who else is at work here, having shown it by a heartbeat; None once the sign is this claim's.

        A process that was killed elsewhere leaves a sign that looks alive for a while: that is waited for.
        """
        first, until = self.other, time.monotonic() + patience + HEARTBEAT_SECONDS
        while self.other is not None and first is not None:
            holder = holder_of(self.store)
            if holder is not None and holder.id != self.id and holder != first and holder.is_alive():
                return holder
            if holder is None or holder.id == self.id or not holder.is_alive():
                self.other = None
                self._renew()
            elif time.monotonic() > until:
                return holder
            else:
                self._closed.wait(WATCH_SECONDS)
        holder = holder_of(self.store)  # two may have taken over a dead one's sign: the later of them has it
        return holder if holder is not None and holder.id != self.id and holder.is_alive() else self.other

    def _renew(self) -> None:
        holder = holder_of(self.store)
        if holder is not None and holder.id != self.id and holder.is_alive():
            self.other = holder
            return
        mine = Holder(self.id, socket.gethostname(), os.getpid(), time.time())
        data = json.dumps(asdict(mine)).encode()
        if holder is not None:
            self.store.replace(CLAIM, data)
        elif not self.store.create(CLAIM, data):
            self.other = holder_of(self.store)
            if self.other is None:  # nobody can read what is there
                self.store.replace(CLAIM, data)

    def _beat(self) -> None:
        while not self._closed.wait(HEARTBEAT_SECONDS):
            try:
                self._renew()
            except (StoreError, OutputError):
                continue  # advisory: the run's own writes will say what is wrong with the store


def holder_of(store: Store) -> Holder | None:
    """Whose sign is up; None if there is none, or none that can be read."""
    try:
        return Holder(**json.loads(store.read(CLAIM)))
    except (FileNotFoundError, ValueError, TypeError):
        return None


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True

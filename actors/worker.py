"""An actor as its owner sees it: asked with a deadline, ended when it is late or dead.

What the actor's code raised arrives as itself; whatever befell the process is `WorkerLost`, in one line.
"""

from __future__ import annotations

import re
import time
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from pipeline.errors import WorkerLost

PING_SECONDS = 3.0  # between two signs of life
LOADING_SECONDS = 1800.0  # a worker may take this long to load a model: a large one, from slow storage


class Worker:
    """One actor that answers `ready` when it has loaded what it needs; loading begins at once."""

    def __init__(self, handle: Any, name: str, *arguments: Any) -> None:
        """`name` is how messages call it: "the target worker". `arguments` are for its `ready`."""
        self.handle = handle
        self.name = name
        self._loaded = handle.ready.remote(*arguments)
        self._ping: Any = None
        self._pinged_at = -PING_SECONDS

    def is_ready(self) -> bool:
        """Has it loaded? Raises what loading raised."""
        done, _ = ray.wait([self._loaded], timeout=0)
        return bool(done) and self.wait_ready() is not None

    def wait_ready(self) -> Any:
        """What `ready` returned."""
        return answer(self._loaded, LOADING_SECONDS, self.name)

    def ask(self, method: str, argument: Any, seconds: float) -> Any:
        """Call one of its methods."""
        return answer(getattr(self.handle, method).remote(argument), seconds, self.name)

    def shows_life(self, seconds: float) -> bool:
        """Has it answered a `ping` since this was asked last? Never waits: it is pinged now and then.

        WorkerLost when it is dead, or has not answered for `seconds`.
        """
        now = time.monotonic()
        if self._ping is None:
            if now - self._pinged_at >= PING_SECONDS:
                self._ping, self._pinged_at = self.handle.ping.remote(), now
            return False
        if ray.wait([self._ping], timeout=0)[0]:
            answer(self._ping, seconds, self.name)
            self._ping = None
            return True
        if now - self._pinged_at > seconds:
            raise WorkerLost(f"{self.name} has not answered for {seconds:g} s")
        return False

    def end(self) -> None:
        """End its process, whether it answers or not."""
        ray.kill(self.handle)


def answer(call: Any, seconds: float, name: str) -> Any:
    """The result of a remote call within `seconds`; its own exception, or WorkerLost."""
    try:
        return ray.get(call, timeout=seconds)
    except GetTimeoutError:
        raise WorkerLost(f"{name} has not answered for {seconds:g} s") from None
    except RayTaskError as error:
        raise error.cause from None
    except RayError as error:
        raise WorkerLost(f"{name} is gone: {reason(error)}") from None


def reason(error: RayError) -> str:
    """Why an actor died, in one line: Ray's own words without its advice."""
    text = " ".join(str(error).split())
    detail = re.search(r"Worker exit detail: (.*?)(?: Some common causes|$)", text)
    if detail is None:
        cause = re.search(r"(The actor is dead because .*?)(?:\. |$)", text)
        return cause[1] if cause else text
    ended = detail[1].rstrip(". ")
    if "End of file" in ended:
        return "its process was killed (for lack of memory, perhaps)"
    return ended

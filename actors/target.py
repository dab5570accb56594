"""The target's worker, one per rank, and the verifier that stands for them in a replica."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from actors.meeting import Meeting
from pipeline.config import JobConfig
from pipeline.engine.assembly import Setup, load_verifier, set_threads
from pipeline.engine.verifier import TargetVerifier
from pipeline.errors import NightdeskError, OutOfMemory, StepFailed, WorkerLost
from pipeline.messages import VerifyReply, VerifyRequest

ATTEMPTS = 3  # workers that may be lost one after another while loading


class Target:
    """The actor: hosts the target's verifier, or one rank of it."""

    def __init__(self, config: JobConfig, setup: Setup, threads: int, rank: int = 0) -> None:
        set_threads(threads)
        self.config = config
        self.setup = setup
        self.meeting = Meeting(rank, config.decoding.step_timeout)
        self.verifier: TargetVerifier | None = None

    def listen(self) -> tuple[str, int]:
        """See `Meeting.listen`."""
        return self.meeting.listen()

    def ready(self, place: tuple[str, int] | None = None) -> bool:
        """Meet the other ranks, if there are any, and load, if that has not been done."""
        if self.verifier is None:
            ranks, device = self.config.target.gpus, self.setup.device
            group = None if place is None else self.meeting.join(place, ranks, device)
            self.verifier = load_verifier(self.config, self.setup, group)
        return True

    def verify(self, request: VerifyRequest) -> VerifyReply:
        """See `decode.Verifier`."""
        assert self.verifier is not None, "ready() comes first"
        return self.verifier.verify(request)


class VerifyingWorker(Protocol):
    """What a `RemoteVerifier` needs of a worker; `actors.target_group` has it."""

    several: bool  # ranks, which one that runs out of memory leaves out of step

    def wait_ready(self) -> Any:
        """Return when it has loaded; raise what loading raised, or WorkerLost."""
        ...

    def ask(self, method: str, argument: Any, seconds: float) -> Any:
        """The answer within `seconds`; what the method raised, or WorkerLost."""
        ...

    def end(self) -> None:
        """End it, whether it answers or not."""
        ...


class RemoteVerifier:
    """A `decode.Verifier` whose work a worker does, for several threads at once.

    A worker that is lost is replaced, and the step that it was lost on has failed. The new one knows no sequence and
    says so (`CacheMiss`), whereupon the decoder feeds them all again.
    """

    def __init__(
        self, create: Callable[[], VerifyingWorker], step_timeout: float, notice: Callable[[str], None]
    ) -> None:
        """`create` makes a worker, which begins to load; `notice` is told of every loss."""
        self.create = create
        self.step_timeout = step_timeout
        self.notice = notice
        self.worker = create()
        self._replacing = threading.Lock()
        self._counting = threading.Lock()
        self._asking = 0  # calls under way

    def wait_ready(self) -> None:
        """Return when a worker has loaded; raise what loading raised, or WorkerLost."""
        for _ in range(ATTEMPTS - 1):
            try:
                self.worker.wait_ready()
                return
            except WorkerLost as loss:
                self._replace(f"{loss}; replacing it")
        try:
            self.worker.wait_ready()
        except WorkerLost as loss:
            raise WorkerLost(f"{loss}; lost {ATTEMPTS} times in a row while loading") from None

    def verify(self, request: VerifyRequest) -> VerifyReply:
        """Ask the worker. StepFailed when it is lost, and another has taken its place; WorkerLost when none could.

        OutOfMemory: nothing is cached any more, and the same would happen again.
        """
        with self._replacing:  # one that has not loaded yet is not asked
            worker = self.worker
        try:
            with self._asked() as asked:
                reply: VerifyReply = worker.ask("verify", request, asked * self.step_timeout)
        except WorkerLost as loss:
            self._replaced(worker, f"{loss}; replacing it")
            raise StepFailed(str(loss)) from None
        except OutOfMemory as exhausted:
            if worker.several:
                self._replaced(worker, f"{exhausted}; its ranks are replaced")
            raise
        except (NightdeskError, AssertionError):
            raise
        except Exception as error:
            cause = f"the target failed: {type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
            self._replaced(worker, f"{cause}; replacing its worker")
            raise StepFailed(cause) from error
        return reply

    @contextmanager
    def _asked(self) -> Iterator[int]:
        """How many steps the worker has to take until this one is done."""
        with self._counting:
            self._asking += 1
            asked = self._asking
        try:
            yield asked
        finally:
            with self._counting:
                self._asking -= 1

    def _replaced(self, worker: VerifyingWorker, why: str) -> None:
        """Return when another worker has loaded in its place, by whomever it was replaced."""
        with self._replacing:
            if self.worker is worker:
                self._replace(why)
                self.wait_ready()

    def _replace(self, why: str) -> None:
        self.worker.end()
        self.notice(why)
        self.worker = self.create()

"""The target's worker, one per rank, and the verifier that stands for them in a replica."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from actors.losses import Losses
from actors.meeting import Meeting
from pipeline.config import JobConfig
from pipeline.engine.assembly import Setup, load_verifier, set_threads
from pipeline.engine.verifier import TargetVerifier
from pipeline.errors import OutOfMemory, WorkerLost
from pipeline.messages import VerifyReply, VerifyRequest


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
    """A `decode.Verifier` whose work a worker does. A worker that is lost is replaced, and asked again.

    The new one knows no sequence and says so (`CacheMiss`), whereupon the decoder feeds them all again.
    """

    def __init__(
        self, create: Callable[[], VerifyingWorker], step_timeout: float, notice: Callable[[str], None]
    ) -> None:
        """`notice` is told of every loss."""
        self.create = create
        self.step_timeout = step_timeout
        self.notice = notice
        self.worker = create()
        self.losses = Losses()

    def wait_ready(self) -> None:
        """Return when a worker has loaded; raise what loading raised, or WorkerLost."""
        while True:
            try:
                self.worker.wait_ready()
                return
            except WorkerLost as loss:
                self._replace(loss)

    def verify(self, request: VerifyRequest) -> VerifyReply:
        """Ask the worker, or its replacement; WorkerLost when that does not help.

        OutOfMemory: nothing is cached any more, and the same would happen again.
        """
        while True:
            try:
                reply: VerifyReply = self.worker.ask("verify", request, self.step_timeout)
            except WorkerLost as loss:
                self._replace(loss)
                self.wait_ready()
                continue
            except OutOfMemory as exhausted:
                if self.worker.several:
                    self.worker.end()
                    self.notice(f"{exhausted}; its ranks are replaced")
                    self.worker = self.create()
                    self.wait_ready()
                raise
            self.losses.answered()
            return reply

    def _replace(self, loss: WorkerLost) -> None:
        self.worker.end()
        self.losses.lost()
        if self.losses.too_many:
            raise WorkerLost(f"{loss}; lost {self.losses.in_a_row} times in a row") from None
        self.notice(f"{loss}; replacing it")
        self.worker = self.create()

"""The target's worker, and the verifier that stands for it in a replica."""

from __future__ import annotations

from collections.abc import Callable

from actors.losses import Losses
from actors.worker import Worker
from pipeline.config import JobConfig
from pipeline.engine.assembly import Setup, load_verifier, set_threads
from pipeline.engine.verifier import TargetVerifier
from pipeline.errors import WorkerLost
from pipeline.messages import VerifyReply, VerifyRequest


class Target:
    """The actor: hosts the target's verifier."""

    def __init__(self, config: JobConfig, setup: Setup, threads: int) -> None:
        set_threads(threads)
        self.config = config
        self.setup = setup
        self.verifier: TargetVerifier | None = None

    def ready(self) -> bool:
        """Load, if that has not been done."""
        if self.verifier is None:
            self.verifier = load_verifier(self.config, self.setup)
        return True

    def verify(self, request: VerifyRequest) -> VerifyReply:
        """See `decode.Verifier`."""
        assert self.verifier is not None, "ready() comes first"
        return self.verifier.verify(request)


class RemoteVerifier:
    """A `decode.Verifier` whose work a worker does. A worker that is lost is replaced, and asked again.

    The new one knows no sequence and says so (`CacheMiss`), whereupon the decoder feeds them all again.
    """

    def __init__(self, create: Callable[[], Worker], step_timeout: float, notice: Callable[[str], None]) -> None:
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
        """Ask the worker, or its replacement; WorkerLost when that does not help."""
        while True:
            try:
                reply: VerifyReply = self.worker.ask("verify", request, self.step_timeout)
            except WorkerLost as loss:
                self._replace(loss)
                self.wait_ready()
                continue
            self.losses.answered()
            return reply

    def _replace(self, loss: WorkerLost) -> None:
        self.worker.end()
        self.losses.lost()
        if self.losses.too_many:
            raise WorkerLost(f"{loss}; lost {self.losses.in_a_row} times in a row") from None
        self.notice(f"{loss}; replacing it")
        self.worker = self.create()

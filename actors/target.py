"""The target's worker, one per rank, and the verifier that stands for them in a replica."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

import ray
from torch.distributed import TCPStore

from pipeline.config import JobConfig
from pipeline.engine.assembly import Setup, load_verifier, set_threads
from pipeline.engine.parallel import Group, host, join, visit
from pipeline.engine.verifier import TargetVerifier
from pipeline.errors import StepFailed, WorkerLost
from pipeline.messages import VerifyReply, VerifyRequest

ATTEMPTS = 3  # workers that may be lost one after another while loading
SHORTEST_COLLECTIVE = 60.0  # seconds: the owner ends a late group long before, and this is for when it cannot


class Target:
    """The actor: hosts the target's verifier, or one rank of it."""

    def __init__(self, config: JobConfig, setup: Setup, threads: int, rank: int = 0) -> None:
        set_threads(threads)
        self.config = config
        self.setup = setup
        self.rank = rank
        self.store: TCPStore | None = None
        self.verifier: TargetVerifier | None = None

    def listen(self) -> tuple[str, int]:
        """Where the ranks are to meet: asked of rank 0, whose process holds the port from now on."""
        address = ray.util.get_node_ip_address()
        self.store = host(address)
        return address, self.store.port

    def ready(self, meeting: tuple[str, int] | None = None) -> bool:
        """Meet the other ranks, if there are any, and load, if that has not been done."""
        if self.verifier is None:
            self.verifier = load_verifier(self.config, self.setup, None if meeting is None else self._join(*meeting))
        return True

    def _join(self, address: str, port: int) -> Group:
        timeout = max(self.config.decoding.step_timeout, SHORTEST_COLLECTIVE)
        self.store = self.store or visit(address, port)
        return join(self.store, self.rank, self.config.target.gpus, self.setup.device, timeout)

    def verify(self, request: VerifyRequest) -> VerifyReply:
        """See `decode.Verifier`."""
        assert self.verifier is not None, "ready() comes first"
        return self.verifier.verify(request)


class VerifyingWorker(Protocol):
    """What a `RemoteVerifier` needs of a worker; `actors.target_group` has it."""

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

    def wait_ready(self) -> None:
        """Return when a worker has loaded; raise what loading raised, or WorkerLost."""
        for _ in range(ATTEMPTS - 1):
            try:
                self.worker.wait_ready()
                return
            except WorkerLost as loss:
                self._replace(loss)
        try:
            self.worker.wait_ready()
        except WorkerLost as loss:
            raise WorkerLost(f"{loss}; lost {ATTEMPTS} times in a row while loading") from None

    def verify(self, request: VerifyRequest) -> VerifyReply:
        """Ask the worker. StepFailed when it is lost, and another has taken its place; WorkerLost when none could."""
        worker = self.worker
        try:
            reply: VerifyReply = worker.ask("verify", request, self.step_timeout)
        except WorkerLost as loss:
            with self._replacing:
                if self.worker is worker:
                    self._replace(loss)
                    self.wait_ready()
            raise StepFailed(str(loss)) from None
        return reply

    def _replace(self, loss: WorkerLost) -> None:
        self.worker.end()
        self.notice(f"{loss}; replacing it")
        self.worker = self.create()

"""A draft worker, and the drafter that stands for the pool of them in a replica."""

from __future__ import annotations

from dataclasses import dataclass

from actors.draft_pool import DraftPool
from pipeline.config import JobConfig
from pipeline.decode import Drafter
from pipeline.engine.assembly import Setup, load_drafter, set_threads
from pipeline.errors import WorkerLost
from pipeline.messages import DraftRequest, Proposal


@dataclass(frozen=True, slots=True)
class Traits:
    """What a scheduler must know of a drafter (`decode.Drafter`)."""

    keeps_proposals: bool
    chunk: int | None


class Draft:
    """The actor: hosts a drafter."""

    def __init__(self, config: JobConfig, setup: Setup, threads: int) -> None:
        set_threads(threads)
        self.config = config
        self.setup = setup
        self.drafter: Drafter | None = None

    def ready(self) -> Traits:
        """Load, if that has not been done."""
        if self.drafter is None:
            self.drafter = load_drafter(self.config, self.setup)
        assert self.drafter is not None, "the job has no drafter"
        return Traits(self.drafter.keeps_proposals, self.drafter.chunk)

    def propose(self, request: DraftRequest) -> Proposal:
        """See `decode.Drafter`."""
        assert self.drafter is not None, "ready() comes first"
        return self.drafter.propose(request)


class RemoteDrafter:
    """A `decode.Drafter` whose work a pool's workers do. With none of them up it is not ready, and nobody waits."""

    def __init__(self, pool: DraftPool, traits: Traits, step_timeout: float) -> None:
        self.pool = pool
        self.keeps_proposals = traits.keeps_proposals
        self.chunk = traits.chunk
        self.step_timeout = step_timeout

    def ready(self) -> bool:
        """Is a worker up?"""
        return self.pool.worker() is not None

    def propose(self, request: DraftRequest) -> Proposal:
        """Ask the worker; WorkerLost when it is lost, and the pool replaces it meanwhile."""
        worker = self.pool.worker()
        if worker is None:
            raise WorkerLost("no draft worker is up")
        try:
            proposal: Proposal = worker.ask("propose", request, self.step_timeout)
        except WorkerLost as loss:
            self.pool.lose(worker, loss)
            raise
        self.pool.praise(worker)
        return proposal

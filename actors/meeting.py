"""Where the ranks of a model on several actors meet before they load. Knows nothing of models."""

from __future__ import annotations

import ray
from torch.distributed import TCPStore

from pipeline.engine.parallel import Group, host, join, visit

SHORTEST_COLLECTIVE = 60.0  # seconds: the owner ends a late group long before, and this is for when it cannot


class Meeting:
    """One rank's way to the others."""

    def __init__(self, rank: int, step_timeout: float) -> None:
        self.rank = rank
        self.step_timeout = step_timeout
        self.store: TCPStore | None = None

    def listen(self) -> tuple[str, int]:
        """Where the ranks are to meet: asked of rank 0, whose process holds the port from now on."""
        address = ray.util.get_node_ip_address()
        self.store = host(address)
        return address, self.store.port

    def join(self, place: tuple[str, int], ranks: int, device: str) -> Group:
        """Meet the others where rank 0 listens: once in the life of a process."""
        self.store = self.store or visit(*place)
        return join(self.store, self.rank, ranks, device, max(self.step_timeout, SHORTEST_COLLECTIVE))

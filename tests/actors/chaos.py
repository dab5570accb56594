"""Kills workers and nodes of a running job at random moments, and gives nodes back a while later."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any
from unittest.mock import patch

from tests.actors.gpu_nodes import DRAFTS, TARGETS, seated
from tests.actors.growing import nodes_added

ABSENCE = 2.0  # seconds for which a killed node is away
STARTERS = ThreadPoolExecutor(1, "nodes")  # nodes die with the thread that started them: this one lives on


class Chaos:
    """`victims` names what may be hit: classes of actors, "target node", "draft node"; `struck` says what was."""

    def __init__(
        self, cluster: Any, nodes: list[Any], victims: Sequence[str], moments: Sequence[float], seed: int
    ) -> None:
        """`nodes` are the target nodes and then the draft nodes; `moments` are seconds from the first rank on."""
        self.cluster, self.nodes, self.victims, self.moments = cluster, nodes, victims, sorted(moments)
        self.rng = random.Random(seed)
        self.struck: list[str] = []
        self._over = threading.Event()
        self._away: list[tuple[float, dict[str, Any]]] = []  # when a node comes back, and its settings

    @contextmanager
    def raging(self) -> Iterator[None]:
        """While the block runs; afterwards all nodes are back."""
        thread = threading.Thread(target=self._rage, name="chaos")
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()
            for _, settings in self._away:
                STARTERS.submit(self._bring_back, settings).result()
            self._away.clear()

    def _rage(self) -> None:
        while not any(name == "Target" for name, _, _ in seated()) and not self._over.wait(0.1):
            pass
        began = time.monotonic()
        for moment in self.moments:
            while (left := began + moment - time.monotonic()) > 0:
                if self._over.wait(min(left, 0.2)):
                    return
                self._return_nodes()
            victim = self.rng.choice(self.victims)
            while not self._strike(victim) and not self._over.wait(0.2):  # it may be on its way back
                self._return_nodes()
        while not self._over.wait(0.2):
            self._return_nodes()

    def _strike(self, victim: str) -> bool:
        """False where nothing of the kind is there to be hit."""
        if victim.endswith("node"):
            return self._kill_node(victim)
        there = [pid for name, _, pid in seated() if name == victim]
        with suppress(ProcessLookupError, IndexError):
            os.kill(self.rng.choice(there), signal.SIGKILL)
            self.struck.append(victim)
            return True
        return False

    def _kill_node(self, victim: str) -> bool:
        settings, kind = (TARGETS[0], "H100") if victim == "target node" else (DRAFTS[0], "L4")
        there = [node for node in self.nodes if f"accelerator_type:{kind}" in str(node._ray_params.resources)]
        if len(there) < 2:  # somebody must go on
            return False
        node = self.rng.choice(there)
        self.nodes.remove(node)
        self.cluster.remove_node(node, allow_graceful=False)
        self._away.append((time.monotonic() + ABSENCE, settings))
        self.struck.append(victim)
        return True

    def _return_nodes(self) -> None:
        due = [away for away in self._away if away[0] <= time.monotonic()]
        for away in due:
            self._away.remove(away)
            STARTERS.submit(self._bring_back, away[1]).result()

    def _bring_back(self, settings: dict[str, Any]) -> None:
        with patch("ray._private.utils.set_sigterm_handler"):  # which only the main thread may set
            node = self.cluster.add_node(wait=False, object_store_memory=80 * 2**20, **settings)
        self.nodes.append(node)


@contextmanager
def stormy_nodes(cluster: Any, targets: int, drafts: int) -> Iterator[list[Any]]:
    """Nodes that chaos may take and give: whatever is there at the end is removed."""
    from tests.actors.gpu_nodes import gpu_nodes

    with nodes_added(cluster, []), gpu_nodes(cluster, targets, drafts) as added:
        nodes = list(added)
        yield nodes
        for node in nodes:
            if node not in added and node in cluster.worker_nodes:
                cluster.remove_node(node)

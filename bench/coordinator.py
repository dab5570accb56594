"""How many replicas one coordinator can look after: calls per second that it sustains, and its memory.

    python bench/coordinator.py [--replicas 10,100,1000] [--shards-each 50] [--json FILE]

The replicas are simulated: no actors, no Ray, nothing but what they would say. Each is polled in turn, takes as many
shards as it is given, and publishes one at every fourth poll on the average; some are lost. A driver polls every
replica every 0.1 s or every 2 ms × replicas, whichever is longer, so `share_of_a_core` is what the coordinator takes
of it. Ray's own calls come on top: `bench/separate.py` shows what one costs.
"""

from __future__ import annotations

import argparse
import json
import random
import time
import tracemalloc
from dataclasses import dataclass, field
from pathlib import Path

from actors.coordinator import Coordinator
from actors.report import Activity, Order, Publication, ReplicaReport
from pipeline.corpus.rows import RowRange
from pipeline.output.plan import Shard
from pipeline.stats import Progress

ROWS = 2000  # per shard
LOST = 1e-4  # of the polls


@dataclass
class Simulated:
    """What a replica would say."""

    waiting: list[Shard] = field(default_factory=list)
    published: list[Publication] = field(default_factory=list)
    total: Progress = field(default_factory=Progress)
    closed: bool = False

    def poll(self, order: Order, rng: random.Random) -> ReplicaReport:
        self.waiting += order.give
        self.closed |= order.close
        if self.waiting and rng.random() < 0.25:
            counts = Progress(rows_done=ROWS, shards_done=1, requests=ROWS, new_tokens=100 * ROWS, steps=40 * ROWS)
            self.total += counts
            self.published.append(Publication(self.waiting.pop(0).index, counts))
        return ReplicaReport(
            published=tuple(self.published[order.seen :]),
            total=self.total,
            wants=0 if self.closed else 2 - len(self.waiting),
            activity=Activity("the target's step", 0.1, 120.0),
            ended=self.closed and not self.waiting,
        )


def run(replicas: int, shards: int, traced: bool) -> dict[str, float]:
    """Answer all shards; what it took. Memory is counted where `traced`, which costs time."""
    rng = random.Random(0)
    total = Progress()

    def report(increment: Progress) -> None:
        nonlocal total
        total += increment

    if traced:
        tracemalloc.start()
    ranges = [RowRange(0, i * ROWS, (i + 1) * ROWS) for i in range(shards)]
    coordinator = Coordinator([Shard(i, (r,)) for i, r in enumerate(ranges)], report, lambda line: None)
    crew: dict[str, Simulated] = {}
    hired = polls = 0
    seconds = slowest = 0.0
    while not coordinator.finished:
        while len(crew) < replicas and coordinator.hands_wanted:
            crew[f"replica {hired}"] = Simulated()
            coordinator.enlist(f"replica {hired}")
            hired += 1
        began = time.perf_counter()
        for name, replica in list(crew.items()):
            coordinator.heard(name, said := replica.poll(coordinator.order(name), rng))
            polls += 1
            if said.ended:
                coordinator.left(name)
                del crew[name]
            elif rng.random() < LOST:
                coordinator.lost(name, f"{name} is gone")
                del crew[name]
        taken = time.perf_counter() - began
        seconds, slowest = seconds + taken, max(slowest, taken)
    peak = tracemalloc.get_traced_memory()[1] if traced else 0
    tracemalloc.stop()
    assert total.rows_done == shards * ROWS, "every row is counted once"
    assert total.shards_done == shards
    period = max(0.1, replicas * 0.002)
    return {
        "replicas": replicas,
        "shards": shards,
        "polls_per_s": round(polls / seconds),
        "share_of_a_core": round(replicas / period * seconds / polls, 4),
        "slowest_round_ms": round(1e3 * slowest, 1),
        "replicas_lost": hired - replicas,
    } | ({"peak_mb": round(peak / 2**20, 1)} if traced else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replicas", default="10,100,1000")
    parser.add_argument("--shards-each", type=int, default=50)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = []
    for replicas in map(int, args.replicas.split(",")):
        shards = replicas * args.shards_each
        found.append({"peak_mb": run(replicas, shards, traced=True)["peak_mb"]} | run(replicas, shards, traced=False))
        print(json.dumps(found[-1]), flush=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()

"""`nightdesk compact OUT`: many small parts become few. Knows nothing of models and jobs."""

from __future__ import annotations

from pipeline.config import absolute_path
from pipeline.errors import OutputError
from pipeline.output.claim import Claim
from pipeline.output.compaction import merge, plan_merges
from pipeline.output.folder import Output
from pipeline.output.names import run_name
from pipeline.output.store import open_store

MIB = 1 << 20


def compact_output(path: str, target: int, single_writer: bool = False) -> int:
    """Join the parts of the output at `path` to about `target` MiB each; the exit code."""
    output = Output(open_store(absolute_path(path), single_writer))
    live = output.live_plans()
    if not live:
        raise OutputError(f"{path}: there is no output of nightdesk; give the output.path of a job that has run")
    output.store.probe()
    with Claim(output.store) as claim:
        if claim.other is not None:
            raise OutputError(f"{path}: process {claim.other.pid} on {claim.other.host} is at work there; wait for it")
        last = live[-1]
        is_open = output.summary(last.run) is None
        if is_open and not last.merges:
            raise OutputError(f"{path}: run {run_name(last.run)} is open; finish it with the same run command first")
        plan = last if is_open else plan_merges(output, target * MIB)
        if plan is None:
            print("nothing to do: no two parts of a folder are small enough to be joined")
            return 0
        created = plan if is_open else output.create_plan(plan)
        if not created.merges:
            raise OutputError(f"{path}: a run began at this moment; compact when it has ended")
        dropped = merge(output, created)
        done = [merge for number, merge in enumerate(created.merges) if number not in dropped]
        print(f"{sum(len(merge.sources) for merge in done)} parts became {len(done)}")
        if dropped:
            print(f"{len(dropped)} merges were given up: parts were changed or removed since they were planned")
        return 0

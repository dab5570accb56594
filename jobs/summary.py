"""What `summary.json` says of a run: its counts, what was given up, and what it was done with."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

from jobs.models import Models
from pipeline.audit import Audit
from pipeline.config import JobConfig
from pipeline.output.names import run_name
from pipeline.output.plan import Plan, Shard
from pipeline.stats import Progress
from pipeline.work import Executor

VERSIONS = ("nightdesk", "torch", "transformers", "ray", "pyarrow", "pandas", "numpy")


@dataclass
class Session:
    """What this process has done for one plan; `started` is when its command did, in seconds since the epoch."""

    plan: Plan
    continued: bool
    dropped: list[Shard]
    changed_files: list[str]
    started: float
    total: Progress = field(default_factory=Progress)
    answering_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        return round(time.time() - self.started, 3)


@dataclass(frozen=True)
class End:
    """Shards (by index) and cuts (by part) that a run gave up: the same for every driver of it."""

    dropped: list[int]
    dropped_cuts: list[str]

    @property
    def whole(self) -> bool:
        """Was all done that was planned?"""
        return not self.dropped and not self.dropped_cuts


def summarised(session: Session, end: End, counts: Progress, parts: int, audit: Audit | None) -> dict[str, Any]:
    """Of the run's rows, which are `counts` in so many `parts`."""
    plan = session.plan
    return {
        "run": run_name(plan.run),
        "rows": counts.rows_done,
        "error_rows": counts.error_rows,
        "error_share": counts.error_share,
        "replaced_rows": sum(shard.rows for shard in plan.shards if shard.amends and shard.index not in end.dropped),
        "removed_rows": sum(cut.count for cut in plan.cuts if cut.part not in end.dropped_cuts),
        "parts": parts,
        "dropped_shards": end.dropped,
        "dropped_cuts": end.dropped_cuts,
        "dropped_files": session.changed_files if end.dropped else [],
        "counts": _told(counts),
        "accepted_per_step": counts.accepted_per_step,
        "acceptance_by_position": [
            accepted / drafted if drafted else None
            for accepted, drafted in zip(counts.accepted_at, counts.drafted_at, strict=False)
        ],
        "fingerprint": plan.fingerprint,
        "salt": plan.salt,
        "audit": None if audit is None else audit.as_json(),
        "planned": plan.created,
        "ended": datetime.now(UTC).isoformat(timespec="seconds"),
        "last_process": {
            "seconds": session.seconds,
            "answering_seconds": round(session.answering_seconds, 3),
            "continued": session.continued,
            "counts": _told(session.total),
        },
    }


def equipment(config: JobConfig, models: Models, executor: Executor) -> dict[str, Any]:
    """Of the job, and what it was done with."""
    return {
        "job": config.name,
        "max_error_rate": config.max_error_rate,
        "models": models.names(config),
        "versions": _versions(),
        "executor": executor.describe(),
    }


def _told(counts: Progress) -> dict[str, Any]:
    """Counts of what was done; totals are the progress line's affair."""
    return {k: v for k, v in dataclasses.asdict(counts).items() if k not in ("rows_total", "shards_total")}


def _versions() -> dict[str, str]:
    found = {}
    for package in VERSIONS:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found

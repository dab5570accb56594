"""Night after night over an archive that changes: every current document once, and nothing answered in vain."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from deltalake import DeltaTable

from jobs.compact import compact_output
from jobs.run import execute
from pipeline.config import JobConfig
from pipeline.errors import Stopped
from pipeline.records import Completion, Request
from tests.archive import Archive, Row, as_seen, rows_of
from tests.stub_engine import StubEngine, job, local, stub_models

NIGHTS = 8


class Interrupted(StubEngine):
    """Somebody presses Ctrl-C after some answers."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.after = after

    def stream(self, requests: Iterable[Request | None]) -> Iterator[Completion]:
        for number, completion in enumerate(super().stream(requests)):
            if number == self.after:
                raise KeyboardInterrupt
            yield completion


LAYOUTS = ["flat", "partitioned", "delta", "partitioned delta"]


def config(folder: Path, layout: str, **changes: Any) -> JobConfig:
    changes["input__keep"] = ["title"] if "partitioned" in layout else ["title", "source"]
    if "partitioned" in layout:
        changes["output__partition_by"] = ["source"]
    return job(folder, output__format="delta" if "delta" in layout else "parquet", **changes)


def run(config: JobConfig, engine: StubEngine, **options: Any) -> int:
    return execute(config, executor=local(engine), models=stub_models(), allow_deletions=True, **options)


def seen(folder: Path, layout: str) -> Counter[Row]:
    if "delta" in layout:
        return rows_of(DeltaTable(folder / "out").to_pandas(), layout)
    return rows_of(pd.read_parquet(folder / "out"), layout)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", range(5))
def test_every_current_document_has_one_row_and_only_new_or_changed_ones_were_asked(
    tmp_path: Path, layout: str, seed: int
) -> None:
    rng = random.Random(seed)
    archive = Archive(tmp_path, rng)
    for _ in range(3):
        archive.add_file()
    before: Counter[tuple[Any, ...]] = Counter()
    for night in range(NIGHTS):
        for _ in range(rng.randint(0, 6) if night else 0):
            archive.change()
        archive.write()
        now = Counter((s.prompt, s.row) for s in archive.stories)
        if rng.random() < 0.3:
            with suppress(Stopped):  # there may be nothing to stop
                run(config(tmp_path, layout), Interrupted(rng.randint(0, 3)))
            if rng.random() < 0.5:
                archive.change()
                archive.write()
                now = Counter((s.prompt, s.row) for s in archive.stories)
            before = Counter()  # what was answered until then is not looked into
        engine = StubEngine()
        assert run(config(tmp_path, layout), engine) == 0
        assert seen(tmp_path, layout) == as_seen(archive.rows(), layout), f"night {night}"
        if before:
            asked = {prompt for prompt, _ in now - before}
            assert set(engine.prompts) == asked, f"night {night}"
        idle = StubEngine()
        assert run(config(tmp_path, layout), idle) == 0
        assert not idle.prompts
        before = now
        if rng.random() < 0.2:
            compact_output(str(tmp_path / "out"), 1)
            assert seen(tmp_path, layout) == as_seen(archive.rows(), layout), f"compacted after {night}"

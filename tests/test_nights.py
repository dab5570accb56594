"""Night after night over an archive that changes: every current document once, and nothing answered in vain."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
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


def seen(out: str, layout: str) -> Counter[Row]:
    if "delta" in layout:
        options = {"AWS_ALLOW_HTTP": "true"} if out.startswith("s3://") else None
        return rows_of(DeltaTable(out, storage_options=options).to_pandas(), layout)
    return rows_of(pd.read_parquet(out), layout)


def nights(
    folder: Path, layout: str, seed: int, count: int, write: Callable[[Archive], None], where: dict[str, str]
) -> None:
    """`write` puts the archive where `where` (keys of the job) says that the input is."""
    rng = random.Random(seed)
    archive = Archive(folder, rng)
    for _ in range(3):
        archive.add_file()
    out = where.get("output__path", str(folder / "out"))
    asked = config(folder, layout, **where)
    before: Counter[tuple[Any, ...]] = Counter()
    for night in range(count):
        for _ in range(rng.randint(0, 6) if night else 0):
            archive.change()
        write(archive)
        now = Counter((s.prompt, s.row) for s in archive.stories)
        if rng.random() < 0.3:
            with suppress(Stopped):  # there may be nothing to stop
                run(asked, Interrupted(rng.randint(0, 3)))
            if rng.random() < 0.5:
                archive.change()
                write(archive)
                now = Counter((s.prompt, s.row) for s in archive.stories)
            before = Counter()  # what was answered until then is not looked into
        engine = StubEngine()
        assert run(asked, engine) == 0
        assert seen(out, layout) == as_seen(archive.rows(), layout), f"night {night}"
        if before:
            assert set(engine.prompts) == {prompt for prompt, _ in now - before}, f"night {night}"
        idle = StubEngine()
        assert run(asked, idle) == 0
        assert not idle.prompts
        before = now
        if rng.random() < 0.2:
            compact_output(out, 1)
            assert seen(out, layout) == as_seen(archive.rows(), layout), f"compacted after {night}"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", range(5))
def test_every_current_document_has_one_row_and_only_new_or_changed_ones_were_asked(
    tmp_path: Path, layout: str, seed: int
) -> None:
    nights(tmp_path, layout, seed, NIGHTS, Archive.write, {})


@pytest.mark.parametrize(
    "layout", [pytest.param(layout, marks=[pytest.mark.slow] if layout != "partitioned" else []) for layout in LAYOUTS]
)
def test_the_same_from_s3_to_s3(tmp_path: Path, s3: Any, layout: str) -> None:
    sent: dict[str, bytes] = {}

    def write(archive: Archive) -> None:
        archive.write()
        files = {f"in/{path.name}": path.read_bytes() for path in archive.folder.iterdir()}
        for key, data in files.items():
            if sent.get(key) != data:
                s3.put(key, data)
        for key in sent.keys() - files.keys():
            s3.remove(key)
        sent.clear()
        sent.update(files)

    where = {"input__path": f"{s3.url}/in", "output__path": f"{s3.url}/out"}
    nights(tmp_path, layout, LAYOUTS.index(layout), 4, write, where)

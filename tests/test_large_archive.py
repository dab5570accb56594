"""A large archive, then a night with few changes: the right documents, and the time of the change."""

from __future__ import annotations

import dataclasses
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.run import execute
from pipeline.corpus.listing import InputFile, list_files
from pipeline.corpus.readers import Corpus, RowRange
from pipeline.output.folder import Output
from pipeline.output.names import part_name
from pipeline.output.plan import Shard
from pipeline.planning import Ask, make_plan
from pipeline.records import Request
from tests.stub_engine import StubEngine, answer_to, job, local, stub_models

STORIES_PER_FILE = {10_000: 500, 100_000: 2000}


class Remembering(StubEngine):
    """An engine that keeps all prompts."""

    def __init__(self) -> None:
        super().__init__(slots=64)
        self.asked: list[str] = []

    def stream(self, requests: Any) -> Any:
        def noted() -> Any:
            for request in requests:
                if isinstance(request, Request):
                    self.asked.append(bytes(request.prompt_token_ids).decode())
                yield request

        return super().stream(noted())


def write(folder: Path, name: str, bodies: dict[str, str]) -> None:
    (folder / "in").mkdir(exist_ok=True)
    table = {"doc_id": list(bodies), "body": list(bodies.values()), "title": ["t"] * len(bodies)}
    pq.write_table(pa.table(table), folder / "in" / name)


def a_night(folder: Path, documents: int, monkeypatch: pytest.MonkeyPatch) -> tuple[float, float]:
    """Seconds of the first run and of the second, which finds 500 new, 200 changed and 50 deleted documents."""
    per_file = STORIES_PER_FILE[documents]
    files = {
        f"{f:03d}.parquet": {f"{n:07d}": f"story {n}" for n in range(f * per_file, (f + 1) * per_file)}
        for f in range(documents // per_file)
    }
    for name, bodies in files.items():
        write(folder, name, bodies)
    config = job(folder, input__keep=["title"], output__rows_per_shard=2000)
    began = time.monotonic()
    assert execute(config, executor=local(StubEngine(slots=64)), models=stub_models()) == 0
    first = time.monotonic() - began
    for name in ("003.parquet", "017.parquet"):
        bodies = files[name]
        for identity in list(bodies)[10:35]:
            del bodies[identity]
        for identity in list(bodies)[100:200]:
            bodies[identity] += ", corrected"
        write(folder, name, bodies)
    files["new.parquet"] = {f"new{n}": f"new story {n}" for n in range(500)}
    write(folder, "new.parquet", files["new.parquet"])
    opened: set[str] = set()
    reader = Corpus._reader
    monkeypatch.setattr(Corpus, "_reader", lambda self, file: opened.add(file.relative) or reader(self, file))
    engine = Remembering()
    began = time.monotonic()
    assert execute(config, executor=local(engine), models=stub_models()) == 0
    second = time.monotonic() - began
    assert opened == {"003.parquet", "017.parquet", "new.parquet"}, "unchanged files are not read"
    expected = {f"Say: new story {n}" for n in range(500)}
    expected |= {f"Say: {b}" for bodies in files.values() for b in bodies.values() if b.endswith("corrected")}
    assert len(engine.asked) == 700
    assert set(engine.asked) == expected
    frame = pd.read_parquet(folder / "out", columns=["doc_id", "summary"])
    assert len(frame) == documents + 450
    answers = {i: answer_to(f"Say: {b}") for bodies in files.values() for i, b in bodies.items()}
    assert dict(zip(frame["doc_id"], frame["summary"], strict=True)) == answers
    return first, second


def test_a_night_over_ten_thousand_documents_asks_about_the_right_seven_hundred(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_night(tmp_path, 10_000, monkeypatch)


@pytest.mark.slow
def test_a_night_over_a_hundred_thousand_takes_the_time_of_its_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = a_night(tmp_path, 100_000, monkeypatch)
    print(f"100,000 documents: {first:.1f} s; 500 new, 200 changed and 50 deleted of them: {second:.1f} s")
    assert second < first / 5


def known_archive(folder: Path, documents: int) -> tuple[Output, list[InputFile]]:
    """An output that says it holds so many documents, of files of 10,000; only those of the first file are there."""
    write(folder, "first.parquet", {f"{n:08d}": f"story {n}" for n in range(10_000)})
    config = job(folder, input__keep=["title"], output__rows_per_shard=2000)
    assert execute(config, executor=local(StubEngine(slots=64)), models=stub_models()) == 0
    output = Output.of(config.output)
    plan = output.plan(1)
    (first,) = plan.files
    others = [
        dataclasses.replace(first, file=dataclasses.replace(first.file, path=f"/gone/{f:06d}.parquet"))
        for f in range(1, documents // 10_000)
    ]
    files = (first, *others)
    shards = tuple(
        Shard(f * 5 + s, (RowRange(f, s * 2000, (s + 1) * 2000),)) for f in range(len(files)) for s in range(5)
    )
    large = dataclasses.replace(plan, files=files, shards=shards)
    runs = folder / "out/_nightdesk/runs/000001"
    (runs / "plan.json").write_bytes(large.to_json())
    for shard in shards[5:]:
        (folder / "out" / part_name(1, shard.index)).touch()
    return Output.of(config.output), [planned.file for planned in files]


def test_memory_and_time_of_planning_hardly_grow_with_what_is_known(tmp_path: Path) -> None:
    found = {}
    for documents in (100_000, 10_000_000):
        folder = tmp_path / str(documents)
        folder.mkdir()
        output, files = known_archive(folder, documents)
        write(folder, "first.parquet", {f"{n:08d}": f"story {n}" for n in range(5, 10_100)})
        config = job(folder, input__keep=["title"], output__rows_per_shard=2000)
        files[:1] = list_files(config.input)
        ask = Ask(output.plan(1).answers, 4096, None, fresh=False)
        tracemalloc.start()
        began = time.monotonic()
        plan = make_plan(config, output, 2, output.live_plans(), files, ask)
        seconds, used = time.monotonic() - began, tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert plan is not None
        assert plan.rows == 100
        assert sum(cut.count for cut in plan.cuts) == 5
        found[documents] = used
        print(f"{documents:,} known documents: {seconds:.2f} s, {used / 2**20:.1f} MiB")
    assert found[10_000_000] < found[100_000] + 32 * 2**20, found

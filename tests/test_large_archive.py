"""A large archive, then a night with few changes: the right documents, and the time of the change."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.run import execute
from pipeline.corpus.readers import Corpus
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

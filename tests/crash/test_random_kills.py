"""Two hundred kills at random moments over pairs of runs on one output, local and on S3: nothing lost or doubled."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest

from tests.crash.test_killed_driver import KILLED, Reader
from tests.crash.test_killed_increment import BY_DAY, JOB, Docs, expected, write
from tests.crash.test_killed_on_s3 import Cloud, CloudReader
from tests.crash.zygote import Zygote
from tests.s3.bucket import Bucket
from tests.s3.proxy import Proxy

KILLS = 200
NIGHTS = 4  # on one output
KILLS_A_NIGHT = 5
SECONDS_PER_ANSWER = 0.004
PUBLISHED = (0, 3, 4)  # what a run that was not killed may end with beside others: they change parts under it

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    with Zygote() as process:
        yield process


class Patient(CloudReader):
    """Reads again where a part was replaced between two requests of one reading: S3 has no reading of a version."""

    def _look(self) -> None:
        try:
            super()._look()
        except (pa.ArrowException, OSError):
            self.broken_off += 1

    broken_off = 0


def test_two_hundred_kills_of_pairs_of_runs_lose_and_double_nothing(
    zygote: Zygote, s3: Bucket, proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint)
    chance = random.Random(KILLS)
    kills, round = {"local": 0, "s3": 0}, 0
    while sum(kills.values()) < KILLS:
        job = (JOB, BY_DAY)[round // 2 % 2]
        folder = tmp_path / f"{round}"
        folder.mkdir()
        if round % 2:
            kills["s3"] += nights_on_s3(Cloud(zygote, s3, proxy, folder), f"{round}", chance, job)
        else:
            kills["local"] += nights_on_disk(zygote, folder, chance, job)
        round += 1
    assert min(kills.values()) > KILLS // 3, kills
    print(kills)


def nights_on_disk(zygote: Zygote, folder: Path, chance: random.Random, job: dict[str, Any]) -> int:
    def start(seconds: float) -> int:
        return zygote.start(folder, seconds=seconds, job=job)

    with Reader(folder) as reader:
        kills = nights(zygote, folder, chance, start, lambda: None, str(folder / "out"))
    assert reader.failure is None, (folder, reader.failure)
    assert reader.reads > kills
    return kills


def nights_on_s3(cloud: Cloud, name: str, chance: random.Random, job: dict[str, Any]) -> int:
    cloud.environment["AWS_ENDPOINT_URL"] = cloud.bucket.endpoint

    def start(seconds: float) -> int:
        return cloud.start(name, seconds=seconds, job=job)

    with Patient(cloud, name) as reader:
        kills = nights(cloud.zygote, cloud.folder, chance, start, cloud.put_input, cloud.location(name))
    assert reader.failure is None, (name, reader.failure)
    assert reader.reads > kills > 0, (reader.reads, reader.broken_off)
    return kills


def nights(
    zygote: Zygote,
    folder: Path,
    chance: random.Random,
    start: Callable[[float], int],
    sent: Callable[[], None],
    location: str,
) -> int:
    """Some nights on one output, each with its own changes and kills; how many of the kills met a living run."""
    docs: Docs = {}
    kills = 0
    for night in range(NIGHTS):
        changed = chance.sample(sorted(docs), min(len(docs), 12))
        docs |= {identity: (f"story {identity} of night {night}", docs[identity][1]) for identity in changed}
        docs |= {f"{night}{n:03d}": (f"story {n}", chance.choice(["mon", "tue"])) for n in range(40)}
        write(folder, docs)
        sent()
        kills += kill_pairs(zygote, chance, start)
        codes = [end(zygote, start(0.0)) for _ in range(3)]
        assert codes[-1] == 0, (codes, (folder / "log").read_text()[-3000:])
        frame = pd.read_parquet(location)
        rows = sorted(zip(frame["doc_id"], frame["summary"], strict=True))
        assert rows == sorted(expected(docs).items()), (location, night)
    return kills


def kill_pairs(zygote: Zygote, chance: random.Random, start: Callable[[float], int]) -> int:
    kills = 0
    running = [start(SECONDS_PER_ANSWER), start(SECONDS_PER_ANSWER)]
    for _ in range(KILLS_A_NIGHT):
        time.sleep(chance.uniform(0, 0.6))
        victim = running.pop(chance.randrange(2))
        os.kill(victim, signal.SIGKILL)
        kills += end(zygote, victim) == KILLED
        running.append(start(SECONDS_PER_ANSWER))
    for pid in running:
        end(zygote, pid)
    return kills


def end(zygote: Zygote, pid: int) -> int:
    """How a run ended: killed, or in one of the ways that are foreseen."""
    code = zygote.wait(pid)
    assert code in (*PUBLISHED, KILLED), code
    return code

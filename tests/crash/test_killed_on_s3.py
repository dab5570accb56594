"""`kill -9` of a driver whose output is on S3, at every request that changes what is stored there.

The proxy between driver and server kills it: before the server hears of a request, in the middle of its body, or when
the request is done and its answer is not sent. Then the same command again, and every row is there once. A reader reads
all along, past the proxy.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from deltalake import DeltaTable

from tests.crash.test_killed_driver import SCHEMA_PART, Reader
from tests.crash.test_killed_increment import AFTER, BEFORE, BY_DAY, JOB, Docs, write
from tests.crash.test_killed_increment import expected as answers_to
from tests.crash.zygote import Zygote
from tests.s3.bucket import Bucket
from tests.s3.proxy import Fault, Handler, Killer, Proxy, Seen, answer, cut, lose_answer
from tests.stub_engine import expected, write_stories

KILLED = -signal.SIGKILL
MOMENTS = ("before", "middle", "after")


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    with Zygote() as process:
        yield process


class Cloud:
    """Drivers that read s3://…/in and write s3://…/NAME, by way of the proxy."""

    def __init__(self, zygote: Zygote, bucket: Bucket, proxy: Proxy, folder: Path) -> None:
        self.zygote = zygote
        self.bucket = bucket
        self.proxy = proxy
        self.folder = folder
        self.environment = {
            "AWS_ENDPOINT_URL": proxy.endpoint,
            "AWS_ACCESS_KEY_ID": bucket.access_key,
            "AWS_SECRET_ACCESS_KEY": bucket.secret_key,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
            "AWS_CONFIG_FILE": "/dev/null",
        }

    def put_input(self) -> None:
        """What is in `folder`/in."""
        self.bucket.put("in/a.parquet", (self.folder / "in/a.parquet").read_bytes())

    def location(self, name: str) -> str:
        return f"{self.bucket.url}/{name}"

    def start(self, name: str, job: dict[str, Any] | None = None, **options: Any) -> int:
        paths = {"input__path": self.location("in"), "output__path": self.location(name)}
        return self.zygote.start(self.folder, job={**(job or {}), **paths}, environment=self.environment, **options)

    def run(self, name: str, killer: Killer | None = None, **options: Any) -> int:
        self.proxy.reset()
        if killer is not None:
            self.proxy.faults.append(Fault(killer.concerns, killer.act, 1))
        pid = self.start(name, **options)
        if killer is not None:
            killer.aim(pid)
        return self.zygote.wait(pid)

    def copy(self, name: str, to: str) -> None:
        for key in self.bucket.keys(f"{name}/"):
            self.bucket.copy(key, f"{to}/{key.removeprefix(f'{name}/')}")

    def log(self) -> str:
        return (self.folder / "log").read_text()


@pytest.fixture
def cloud(zygote: Zygote, s3: Bucket, proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cloud:
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint)  # for what this process reads
    return Cloud(zygote, s3, proxy, tmp_path)


class CloudReader(Reader):
    """Reads s3://…/NAME."""

    def __init__(self, cloud: Cloud, name: str) -> None:
        super().__init__(cloud.folder)
        self.location = cloud.location(name)
        self._there = lambda: cloud.bucket.get(f"{name}/{SCHEMA_PART}") is not None

    def is_there(self) -> bool:
        return self._there()


def kill_everywhere(
    cloud: Cloud,
    moments: Callable[[int], tuple[str, ...]],
    prepared: str | None,
    check: Callable[[str, int], None],
    among: Callable[[Seen], bool] = lambda seen: True,
    **options: Any,
) -> int:
    """A driver with `options`, on copies of `prepared`, killed at each change `among` those; how many there are."""
    if prepared is not None:
        cloud.copy(prepared, "whole")
    counter = Killer(0, "never", among)
    assert cloud.run("whole", counter, **options) == 0, cloud.log()
    for point in range(1, counter.calls + 1):
        for moment in moments(point):
            name = f"{point}-{moment}"
            if prepared is not None:
                cloud.copy(prepared, name)
            assert cloud.run(name, Killer(point, moment, among), **options) == KILLED, (name, cloud.log())
            check(name, point)
    return counter.calls


def in_turn(point: int) -> tuple[str, ...]:
    return (MOMENTS[point % 3],)


def each(point: int) -> tuple[str, ...]:
    return MOMENTS


def told(location: str) -> dict[str, str]:
    frame = pd.read_parquet(location)
    assert frame["doc_id"].is_unique, sorted(frame["doc_id"][frame["doc_id"].duplicated()])
    return dict(zip(frame["doc_id"], frame["summary"], strict=True))


# --- a first run


@pytest.mark.parametrize("moments", [in_turn, pytest.param(each, marks=pytest.mark.slow)])
def test_a_run_killed_at_any_change_is_whole_after_the_same_command(
    cloud: Cloud, moments: Callable[[int], tuple[str, ...]]
) -> None:
    write_stories(cloud.folder, "a.parquet", 0, 6)
    cloud.put_input()

    def check(name: str, point: int) -> None:
        location = cloud.location(name)
        if cloud.bucket.get(f"{name}/{SCHEMA_PART}") is not None:
            assert set(told(location).items()) <= set(expected((0, 6)).items()), name
        with CloudReader(cloud, name) as reader:
            assert cloud.run(name) == 0, (name, cloud.log())
        assert reader.failure is None, (name, reader.failure)
        assert told(location) == expected((0, 6)), name
        assert cloud.bucket.get(f"{name}/_SUCCESS"), name

    assert kill_everywhere(cloud, moments, None, check) > 10


@pytest.mark.parametrize("act", [cut, lose_answer, answer(503, "SlowDown")], ids=["cut", "lost", "busy"])
def test_a_run_lives_through_a_network_that_fails_at_every_change(
    cloud: Cloud, act: Callable[[Handler], None]
) -> None:
    write_stories(cloud.folder, "a.parquet", 0, 12)
    cloud.put_input()
    failed: set[tuple[str, str]] = set()

    def first_time(seen: Seen) -> bool:
        change = seen.method, seen.key
        if seen.method not in ("PUT", "DELETE") or change in failed or (act is cut and seen.method == "DELETE"):
            return False
        failed.add(change)
        return True

    cloud.proxy.reset()
    cloud.proxy.fail(first_time, act, times=1000)
    with CloudReader(cloud, "out") as reader:
        assert cloud.zygote.wait(cloud.start("out")) == 0, cloud.log()
    assert len(failed) > 10
    assert reader.failure is None, reader.failure
    assert told(cloud.location("out")) == expected((0, 12))


def test_two_runs_at_once_on_one_output_both_end_with_every_row_once(cloud: Cloud) -> None:
    write_stories(cloud.folder, "a.parquet", 0, 60)
    cloud.put_input()
    with CloudReader(cloud, "out") as reader:
        pids = [cloud.start("out", seconds=0.01) for _ in range(2)]
        codes = [cloud.zygote.wait(pid) for pid in pids]
    assert codes == [0, 0], cloud.log()
    assert reader.failure is None, reader.failure
    assert reader.reads > 5
    assert told(cloud.location("out")) == expected((0, 60))
    assert cloud.bucket.get("out/_SUCCESS")
    plans = [key for key in cloud.bucket.keys("out/_nightdesk/runs/") if key.endswith("plan.json")]
    assert len(plans) == 1


# --- a night of changes


def rows(cloud: Cloud, name: str, job: dict[str, Any]) -> list[tuple[str, str]]:
    if job.get("output__format") == "delta":
        frame = DeltaTable(cloud.location(name), storage_options={"AWS_ALLOW_HTTP": "true"}).to_pandas()
    else:
        frame = pd.read_parquet(cloud.location(name))
    return sorted(zip(frame["doc_id"], frame["summary"], strict=True))


def prepare(cloud: Cloud, docs: Docs) -> None:
    write(cloud.folder, docs)
    cloud.put_input()


DELTA = {**BY_DAY, "output__format": "delta"}


def kill_a_night(
    cloud: Cloud,
    job: dict[str, Any],
    moments: Callable[[int], tuple[str, ...]],
    among: Callable[[Seen], bool] = lambda seen: True,
) -> int:
    prepare(cloud, BEFORE)
    options = {"job": job, "allow_deletions": True}
    assert cloud.run("prepared", **options) == 0, cloud.log()
    prepare(cloud, AFTER)
    old, new = set(answers_to(BEFORE).items()), set(answers_to(AFTER).items())

    def check(name: str, point: int) -> None:
        meanwhile = rows(cloud, name, job)
        assert set(meanwhile) <= old | new, name
        if job is not BY_DAY:
            assert len({identity for identity, _ in meanwhile}) == len(meanwhile), f"{name}: a document twice"
        assert {i for i, _ in meanwhile} >= set(BEFORE) & set(AFTER), f"{name}: a document is missing"
        assert cloud.run(name, **options) == 0, (name, cloud.log())
        assert rows(cloud, name, job) == sorted(new), name
        assert cloud.bucket.get(f"{name}/_SUCCESS"), name

    return kill_everywhere(cloud, moments, "prepared", check, among, **options)


def test_a_replacement_killed_in_the_middle_is_whole_after_the_same_command(cloud: Cloud) -> None:
    assert kill_a_night(cloud, JOB, in_turn, lambda seen: "If-Match" in seen.conditions) > 1


@pytest.mark.slow
@pytest.mark.parametrize("job", [JOB, BY_DAY, DELTA], ids=["flat", "by day", "delta"])
def test_a_night_of_changes_killed_at_any_of_them_is_whole_after_the_same_command(
    cloud: Cloud, job: dict[str, Any]
) -> None:
    assert kill_a_night(cloud, job, each) > 10


@pytest.mark.slow
def test_a_compaction_killed_at_any_change_is_finished_by_the_next_run(cloud: Cloud) -> None:
    prepare(cloud, BEFORE)
    assert cloud.run("prepared", job=JOB) == 0
    whole = sorted(answers_to(BEFORE).items())

    def check(name: str, point: int) -> None:
        meanwhile = rows(cloud, name, JOB)
        assert len(meanwhile) == len(set(meanwhile)), name
        assert set(meanwhile) <= set(whole), name
        assert cloud.run(name, job=JOB) == 0, (name, cloud.log())
        assert rows(cloud, name, JOB) == whole, name

    assert kill_everywhere(cloud, each, "prepared", check, job=JOB, compact=True) > 4


@pytest.mark.slow
def test_a_fresh_start_killed_at_any_change_never_shows_old_and_new_rows_together(cloud: Cloud) -> None:
    write_stories(cloud.folder, "a.parquet", 0, 6)
    cloud.put_input()
    assert cloud.run("prepared") == 0

    def check(name: str, point: int) -> None:
        assert set(told(cloud.location(name)).items()) <= set(expected((0, 6)).items()), name
        assert cloud.run(name) == 0, (name, cloud.log())
        assert told(cloud.location(name)) == expected((0, 6)), name
        assert cloud.bucket.get(f"{name}/_SUCCESS"), name

    assert kill_everywhere(cloud, each, "prepared", check, fresh=True) > 10

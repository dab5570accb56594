"""Draft workers as actors: shared by replicas, late, killed, and on two ranks."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import psutil
import pytest
import ray

from actors.draft import Draft, RemoteDrafter
from actors.draft_group import DraftGroup
from actors.draft_pool import DraftPool
from actors.roster import Roster, Traits
from pipeline.config import JobConfig
from pipeline.engine.assembly import Setup, agree, load_drafter
from pipeline.engine.parallel import PRETEND
from pipeline.errors import ConfigError
from tests.actors.exchange import TRAITS, Exchange, Replica, request_of
from tests.actors.fakes import Drafty
from tests.actors.growing import wait_until
from tests.actors.processes import wait_gone
from tests.actors.tiny_job import nearly, tiny_job
from tests.models import tiny_folder

pytestmark = pytest.mark.usefixtures("ray_address")


class Floor:
    """A seat that reserves nothing; `actor`, if given, sits there instead of whoever was meant to.

    `environment` is that of the actor's process, beside what it has from its node.
    """

    threads, gpus = 1, 0

    def __init__(self, actor: type | None = None, **environment: str) -> None:
        self.actor = actor
        self.environment = environment

    def create(self, actor: type, *arguments: Any) -> Any:
        options: dict[str, Any] = {"num_cpus": 0, "max_restarts": 0, "max_concurrency": Draft.CONCURRENCY}
        if self.environment:
            options["runtime_env"] = {"env_vars": self.environment}
        return ray.remote(self.actor or actor).options(**options).remote(*arguments)


class Pool:
    """A driver's pool of such workers, and its rounds."""

    def __init__(self, size: int) -> None:
        self.notices: list[str] = []
        nothing: Any = None
        make = lambda i: DraftGroup([Floor(Drafty)], nothing, nothing, f"draft worker {i}")  # noqa: E731
        self.pool = DraftPool(make, size, self.notices.append, step_timeout=20.0)

    def round(self, drafter: RemoteDrafter) -> Roster:
        """What the driver and one replica tell each other."""
        for home, cause in drafter.losses():
            self.pool.lose(home, cause)
        self.pool.tend()
        if drafter.roster_version != self.pool.roster.version:
            drafter.enroll(self.pool.roster)
        return self.pool.roster

    def full(self, drafter: RemoteDrafter) -> None:
        wait_until(lambda: len(self.round(drafter).members) == len(self.pool.places))


@pytest.fixture
def pool() -> Iterator[Pool]:
    made = Pool(2)
    yield made
    made.pool.end()


def test_a_killed_worker_costs_drafts_and_is_replaced(pool: Pool) -> None:
    drafter = RemoteDrafter(TRAITS, 20.0)
    pool.full(drafter)
    replica = Replica(drafter, 1, [3] * 4)
    for _ in range(3):
        assert replica.step() == [2] * 4
    victim = drafter._homes.standings[1].member
    process = psutil.Process(ray.get(victim.handle.pid.remote(), timeout=20))
    process.kill()
    wait_gone(process, 10)
    replica.step()
    assert {text.home for text in replica.texts if replica.drafted[text.slot]} == {2}
    wait_until(lambda: (replica.step(), pool.round(drafter), drafter.losses())[2])
    assert drafter.losses()[0][0] == 1
    assert replica.step() == [2] * 4
    assert {text.home for text in replica.texts} == {2}
    pool.full(drafter)
    assert [member.home for member in pool.pool.roster.members] == [3, 2]
    for slot in range(4):
        replica.renew(slot)
    assert set(replica.homes()) == {2, 3}
    assert replica.step() == [2] * 4
    assert len(pool.notices) == 1
    assert pool.notices[0].startswith("draft worker 0 is gone: its process was killed")


def test_a_worker_that_sleeps_is_not_waited_for(pool: Pool) -> None:
    drafter = RemoteDrafter(TRAITS, 20.0)
    pool.full(drafter)
    replica = Replica(drafter, 1, [3] * 4)
    for _ in range(10):
        replica.step()
    sleepy = drafter._homes.standings[2].member.handle
    ray.get(sleepy.take.remote(3.0), timeout=20)
    began = time.monotonic()
    lengths = [replica.step() for _ in range(10)]
    assert time.monotonic() - began < 2.5
    assert sorted(lengths[0]) == [0, 0, 2, 2]
    assert all(sum(each) >= 4 for each in lengths)
    ray.get(sleepy.take.remote(0.0), timeout=20)
    wait_until(lambda: replica.step() == [2] * 4)
    assert 2 in replica.homes()
    assert drafter.losses() == ()


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> JobConfig:
    folder = tmp_path_factory.mktemp("drafts")
    target = tiny_folder(folder / "target", "qwen2", 3)
    return tiny_job(folder, (target, nearly(target, folder / "draft")), rows=1, tokens=8)


def ranks(config: JobConfig, number: int) -> JobConfig:
    return config.model_copy(update={"draft": (config.draft[0].model_copy(update={"gpus": number}),)})


REQUESTS = [request_of(1, [(0, 0, [1, 2, 3]), (1, 0, [4])]), request_of(2, [(1, 0, [5, 6, 7, 8]), (0, 0, [9])])]


def expected(config: JobConfig, setup: Setup) -> list[Any]:
    drafter = load_drafter(config, setup)
    assert drafter is not None
    return [drafter.propose(request) for request in REQUESTS]


def drafted(group: DraftGroup) -> list[Any]:
    return ray.get([group.handle.propose.remote(request) for request in REQUESTS], timeout=60)


def test_a_draft_model_serves_two_replicas(config: JobConfig) -> None:
    setup = agree(config)
    worker = DraftGroup([Floor()], config, setup, "draft worker 0")
    assert worker.wait_ready() == Traits.of_workers(setup)
    for one, other in zip(drafted(worker), expected(config, setup), strict=True):
        assert one.proposal.tokens.tolist() == other.tokens.tolist()
    worker.end()


@pytest.mark.slow
def test_a_draft_model_on_two_ranks_drafts_as_one_does_and_ends_as_a_whole(
    config: JobConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PRETEND, "1")
    divided = ranks(config, 2)
    setup = agree(divided)
    with pytest.raises(ConfigError, match=r"draft\.gpus: 2 ranks need a worker each"):
        load_drafter(divided, setup)
    seats = [Floor(**{PRETEND: "1"}) for _ in range(2)]
    group = DraftGroup(seats, divided, setup, "draft worker 0")
    wait_until(group.is_ready, 60)
    assert group.wait_ready() == Traits.of_workers(setup)
    for one, other in zip(drafted(group), expected(config, setup), strict=True):
        assert one.proposal.tokens.tolist() == other.tokens.tolist()
        np.testing.assert_allclose(one.proposal.support_probs, other.support_probs, atol=1e-4)
    pids = [ray.get(rank.handle.__ray_call__.remote(lambda actor: os.getpid()), timeout=20) for rank in group.ranks]
    processes = [psutil.Process(pid) for pid in pids]
    drafter = RemoteDrafter(TRAITS, 20.0)
    members = Exchange().roster(1).members
    drafter.enroll(Roster(1, (replace(members[0], handle=group.handle),)))
    processes[1].kill()
    replica = Replica(drafter, 1, [3, 3])
    replica.step()
    ((home, cause),) = drafter.losses()
    assert (home, "a rank of the draft failed" in cause) == (1, True)
    group.end()
    assert all(wait_gone(process, 10) for process in processes)

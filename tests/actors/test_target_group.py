"""A target of two ranks as actors: the texts of one process, whatever befalls a rank."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from actors.target import RemoteVerifier
from actors.target_group import TargetGroup
from pipeline.config import JobConfig
from pipeline.decode import Verifier
from pipeline.engine import Engine
from pipeline.engine.assembly import agree, load_drafter, make_decoder
from pipeline.engine.checkpoint import resolve
from pipeline.engine.parallel import PRETEND
from pipeline.errors import CacheMiss, ConfigError, ModelError, OutOfMemory, WorkerLost
from pipeline.messages import VerifyReply, VerifyRequest
from pipeline.records import Request, SamplingParams
from tests.actors.fakes import Puppet
from tests.actors.processes import actor_processes, wait_gone
from tests.actors.tiny_job import nearly, texts, tiny_job
from tests.models import tiny_folder

pytestmark = pytest.mark.usefixtures("ray_address")


class Floor:
    """A seat that reserves nothing; `actor`, if given, sits there instead of whoever was meant to."""

    threads = 1

    def __init__(self, actor: type | None = None) -> None:
        self.actor = actor

    def create(self, actor: type, *arguments: Any) -> Any:
        return ray.remote(self.actor or actor).options(num_cpus=0, max_restarts=0).remote(*arguments)


class Watched:
    """A verifier that has something happen before its n-th step."""

    def __init__(self, verifier: Verifier, step: int, happens: Callable[[], object]) -> None:
        self.verifier, self.step, self.happens = verifier, step, happens
        self.steps = 0

    def verify(self, request: VerifyRequest) -> VerifyReply:
        self.steps += 1
        if self.steps == self.step:
            self.happens()
        return self.verifier.verify(request)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> JobConfig:
    folder = tmp_path_factory.mktemp("group")
    target = tiny_folder(folder / "target", "qwen2", 3)
    job = tiny_job(folder, (target, nearly(target, folder / "draft")), rows=6, tokens=16)
    return job.model_copy(update={"target": job.target.model_copy(update={"gpus": 2})})


@pytest.fixture(scope="module")
def requests(config: JobConfig) -> list[Request]:
    tokenizer = resolve(config.target.model).tokenizer()
    return [Request(text, tokenizer.encode(text, add_special_tokens=False), SamplingParams(16)) for text in texts(6)]


@pytest.fixture(scope="module")
def expected(config: JobConfig, requests: list[Request]) -> list[list[int]]:
    here = config.model_copy(update={"draft": (), "target": config.target.model_copy(update={"gpus": 0})})
    return [answer.token_ids for answer in Engine.from_config(here).generate(requests)]


@pytest.fixture(scope="module")
def notices() -> list[str]:
    return []


@pytest.fixture(scope="module")
def verifier(config: JobConfig, notices: list[str]) -> Iterator[RemoteVerifier]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(PRETEND, "1")
        setup = agree(config)
    verifier = RemoteVerifier(lambda: TargetGroup([Floor(), Floor()], config, setup), 60.0, notices.append)
    verifier.wait_ready()
    yield verifier
    verifier.worker.end()


@pytest.fixture
def generated(config: JobConfig, requests: list[Request]) -> Callable[[Verifier], list[list[int]]]:
    def generate(verifier: Verifier) -> list[list[int]]:
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv(PRETEND, "1")
            setup = agree(config)
        engine = Engine(make_decoder(config, setup, verifier, load_drafter(config, setup)))
        answers = engine.generate(requests)
        assert all(answer.error is None for answer in answers)
        return [answer.token_ids for answer in answers]

    return generate


Generated = Callable[[Verifier], list[list[int]]]


def rank_process(verifier: RemoteVerifier, rank: int) -> psutil.Process:
    group: Any = verifier.worker
    pid = ray.get(group.handles[rank].__ray_call__.remote(lambda actor: os.getpid()), timeout=30)
    return psutil.Process(pid)


def test_greedy_texts_are_those_of_one_process(
    verifier: RemoteVerifier, generated: Generated, expected: list[list[int]], notices: list[str]
) -> None:
    assert generated(verifier) == expected
    assert len({tuple(text) for text in expected}) == len(expected)
    assert notices == []


def test_a_rank_killed_in_mid_run_changes_no_text_and_takes_the_group_with_it(
    verifier: RemoteVerifier, generated: Generated, expected: list[list[int]], notices: list[str]
) -> None:
    old = [rank_process(verifier, rank) for rank in range(2)]
    assert generated(Watched(verifier, 4, old[1].kill)) == expected
    assert len(notices) == 1
    assert notices[0].startswith("target rank 1 is gone: ")
    assert all(wait_gone(process, 10) for process in old)
    assert len(actor_processes("Target")) == 2


@pytest.mark.slow
def test_a_rank_that_hangs_is_late_and_named(
    verifier: RemoteVerifier, generated: Generated, expected: list[list[int]], notices: list[str]
) -> None:
    old = [rank_process(verifier, rank) for rank in range(2)]
    before, verifier.step_timeout = len(notices), 4.0
    began = time.monotonic()

    def hang() -> None:
        old[0].send_signal(signal.SIGSTOP)

    assert generated(Watched(verifier, 4, hang)) == expected
    assert [n for n in notices[before:] if "target rank 0" in n and "no answer for 4 s" in n]
    assert time.monotonic() - began < 60
    assert all(wait_gone(process, 10) for process in old)


@pytest.fixture(scope="module")
def puppets() -> Iterator[TargetGroup]:
    nothing: Any = None
    group = TargetGroup([Floor(Puppet), Floor(Puppet)], nothing, nothing)
    assert group.wait_ready() == "here 0"
    yield group
    group.end()


def test_rank_0_answers(puppets: TargetGroup) -> None:
    assert puppets.ask("verify", ["", ""], 20.0) == "answer of 0"


@pytest.mark.parametrize(
    ("script", "error", "message"),
    [
        ([CacheMiss([3]), CacheMiss([3])], CacheMiss, r"sequences=\[3\]"),
        ([CacheMiss([3]), ""], WorkerLost, "out of step"),
        (["", CacheMiss([3])], WorkerLost, "out of step"),
        ([CacheMiss([3]), CacheMiss([4])], WorkerLost, "out of step"),
        (["", RuntimeError("it broke\nhere")], WorkerLost, "^target rank 1 failed: RuntimeError: it broke$"),
        ([ModelError("no such model"), ""], ModelError, "no such model"),
        (["", OutOfMemory("no memory")], OutOfMemory, "no memory"),
        ([0.0, 1.5], WorkerLost, r"^target rank 1: no answer for 0\.5 s$"),
    ],
)
def test_what_ranks_say_decides_what_becomes_of_the_group(
    puppets: TargetGroup, script: list[Any], error: type[Exception], message: str
) -> None:
    if 1.5 not in script:  # the others take what time they need, on a busy machine
        seconds = 20.0
    else:
        assert puppets.ask("verify", ["", ""], 20.0)
        seconds = 0.5
    with pytest.raises(error, match=message):
        puppets.ask("verify", script, seconds)


def test_a_dead_rank_is_named_though_the_others_fail_first(puppets: TargetGroup) -> None:
    """The last test of these puppets."""
    with pytest.raises(WorkerLost, match=r"^target rank 1 is gone: "):
        puppets.ask("verify", [RuntimeError("connection closed by peer"), "die"], 20.0)


def test_heads_that_do_not_divide_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PRETEND, "1")
    models = (tiny_folder(tmp_path / "target", num_key_value_heads=1), tiny_folder(tmp_path / "draft"))
    job = tiny_job(tmp_path, models, rows=1, tokens=1)
    with pytest.raises(ConfigError, match=r"target\.gpus: .* has 1 key-value heads, and 1 = 2 × 0 \+ 1 cannot"):
        agree(job.model_copy(update={"target": job.target.model_copy(update={"gpus": 2})}))

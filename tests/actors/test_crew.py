"""Several replicas on the tests' Ray: they share the work, come and go, and all is answered once whatever happens."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import ray
from ray._raylet import GcsClient
from ray.core.generated import autoscaler_pb2
from ray.util.placement_group import placement_group, remove_placement_group

from actors import crew, executor, hiring, seats
from actors.coordinator import Coordinator
from actors.executor import RayExecutor
from actors.report import ReplicaReport
from jobs.run import execute
from pipeline.config import JobConfig
from pipeline.errors import WorkerLost
from pipeline.output.plan import Shard
from pipeline.stats import Progress
from pipeline.work import JobWork
from tests.actors.growing import nodes_added, standing_groups, wait_until
from tests.actors.processes import actor_processes, wait_gone
from tests.actors.stub_replica import DawdlingStubReplica, PoisonedStubReplica, StubReplica, UnequalStubReplica
from tests.stub_engine import answers, expected, job, stub_models, write_stories

ROWS, ROWS_PER_SHARD = 40, 2
REPLICAS = (StubReplica, DawdlingStubReplica, UnequalStubReplica, PoisonedStubReplica)


@dataclass
class Scene:
    """A run that is observed, and meddled with."""

    folder: Path
    config: JobConfig
    act: Callable[[Scene], None] | None = None  # replicas that dawdle do so until it has ended
    groups: int = field(default_factory=standing_groups)  # of others
    published: dict[str, list[int]] = field(default_factory=dict)  # by replica
    total: Progress = field(default_factory=Progress)
    trouble: list[BaseException] = field(default_factory=list)
    ended: bool = False

    def run(self) -> float:
        """The seconds that it took; all is answered, and nothing stays behind."""
        running, started = threading.Thread(target=self._running), time.monotonic()
        running.start()
        try:
            if self.act is not None:  # in the main thread: only there can nodes be added
                self.act(self)
        finally:
            (self.folder / "hurry").touch()
            running.join(90)
        seconds = time.monotonic() - started
        assert not running.is_alive()
        if self.trouble:
            raise self.trouble[0]
        assert answers(self.folder) == expected((0, ROWS))
        assert (self.total.rows_done, self.total.shards_done) == (ROWS, ROWS // ROWS_PER_SHARD)
        self.assert_gone()
        return seconds

    def _running(self) -> None:
        try:
            assert execute(self.config, executor=Observed(self), models=stub_models()) == 0
        except BaseException as error:  # noqa: BLE001 - told by the test's own thread
            self.trouble.append(error)
        self.ended = True

    def assert_gone(self) -> None:
        """They end a moment after the run."""
        for replica in REPLICAS:
            for process in actor_processes(replica.__name__):
                assert wait_gone(process, 10), process
        wait_until(lambda: standing_groups() <= self.groups, 10)

    def wait_working(self, *replicas: str) -> None:
        """Until they have published something, or the run has ended."""
        wait_until(lambda: self.ended or all(name in self.published for name in replicas), 60)
        assert not self.ended, self.published


class Observed(RayExecutor):
    def __init__(self, scene: Scene) -> None:
        super().__init__(scene.config)
        self.scene = scene

    def run(self, work: JobWork, shards: list[Shard], report: Callable[[Progress], None]) -> None:
        def reported(increment: Progress) -> None:
            report(increment)
            self.scene.total += increment

        super().run(work, shards, reported)


@pytest.fixture
def staged(ray_cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Scene]]:
    """Makes a scene."""
    scenes: list[Scene] = []

    class Observing(Coordinator):
        def heard(self, replica: str, report: ReplicaReport) -> None:
            for publication in report.published:
                scenes[-1].published.setdefault(replica, []).append(publication.shard)
            super().heard(replica, report)

    def stage(
        replica: type = StubReplica, act: Callable[[Scene], None] | None = None, timeout: float = 60.0, **target: Any
    ) -> Scene:
        monkeypatch.setattr(crew, "Replica", replica)
        monkeypatch.setattr(executor, "Coordinator", Observing)
        monkeypatch.setattr("actors.cluster.LOOK_SECONDS", 0.3)
        monkeypatch.setattr(crew, "LOOK_SECONDS", 0.3)
        write_stories(tmp_path, "a.parquet", 0, ROWS)
        decoding = {"placement_timeout": timeout, "step_timeout": 8.0, "batch": 2}
        target = {"model": "stub", **target}
        config = job(tmp_path, output__rows_per_shard=ROWS_PER_SHARD, decoding=decoding, target=target)
        scenes.append(Scene(tmp_path, config, act))
        return scenes[-1]

    yield stage
    scenes[-1].assert_gone()


def test_two_replicas_share_the_work(staged: Callable[..., Scene]) -> None:
    both = ("replica 0", "replica 1")
    scene = staged(DawdlingStubReplica, lambda scene: scene.wait_working(*both), replicas=2, threads=1)
    scene.run()
    assert set(scene.published) == set(both)
    everything = sorted(shard for shards in scene.published.values() for shard in shards)
    assert everything == list(range(ROWS // ROWS_PER_SHARD))


@pytest.mark.slow
def test_when_one_is_killed_the_other_goes_on_and_a_third_takes_its_place(
    staged: Callable[..., Scene], caplog: pytest.LogCaptureFixture
) -> None:
    def kill(scene: Scene) -> None:
        scene.wait_working("replica 0", "replica 1")
        actor_processes("DawdlingStubReplica")[0].send_signal(signal.SIGKILL)
        wait_until(lambda: bool(caplog.messages))

    scene = staged(DawdlingStubReplica, kill, replicas=2, threads=1)
    scene.run()
    (message,) = caplog.messages
    assert message.startswith("replica ")
    assert message.endswith(" is gone: its process was killed (for lack of memory, perhaps); replacing it")


def test_replicas_grow_with_the_cluster_and_survive_its_shrinking(
    staged: Callable[..., Scene], ray_cluster: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def grow_and_shrink(scene: Scene) -> None:
        scene.wait_working("the replica")
        with nodes_added(ray_cluster, [{"num_cpus": 1}]):
            scene.wait_working("replica 1")

    scene = staged(DawdlingStubReplica, grow_and_shrink)
    scene.run()
    assert set(scene.published) == {"the replica", "replica 1"}
    (message,) = caplog.messages
    assert message.startswith("replica 1 is gone: ")


def test_a_node_that_is_drained_ends_what_was_begun_and_is_replaced(
    staged: Callable[..., Scene], ray_cluster: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with nodes_added(ray_cluster, [{"num_cpus": 1, "labels": {"zone": "x"}}, {"num_cpus": 1, "labels": {"zone": "x"}}]):

        def drain(scene: Scene) -> None:
            scene.wait_working("the replica")
            (node,) = {each.seats.node.id for each in crews[0].members.values()}
            end = int((time.time() + 60) * 1000)
            reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
            accepted, why = GcsClient(address=ray_cluster.address).drain_node(node, reason, "a test", end)
            assert accepted, why
            scene.wait_working("replica 1")

        crews: list[crew.Crew] = []
        scene = staged(DawdlingStubReplica, drain, label_selector={"zone": "x"}, replicas=1)

        class Noting(crew.Crew):
            def run(self) -> None:
                crews.append(self)
                super().run()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(executor, "Crew", Noting)
            scene.run()
    assert len(scene.published) == 2
    (message,) = caplog.messages
    assert "is being drained by " in message
    assert message.endswith("ends what it has begun")


def test_the_last_shard_of_a_slow_replica_is_done_by_another(staged: Callable[..., Scene]) -> None:
    scene = staged(UnequalStubReplica, replicas=2, threads=1)
    assert scene.run() < 40
    assert set(scene.published) == {"replica 1"}


def test_a_document_that_kills_its_replica_comes_to_a_careful_one(
    staged: Callable[..., Scene], caplog: pytest.LogCaptureFixture
) -> None:
    staged(PoisonedStubReplica, replicas=1).run()
    loss = "the replica is gone: its process was killed (for lack of memory, perhaps); replacing it"
    careful = "the replica is a careful one: its target is in a process of its own, and it does not draft"
    assert caplog.messages == [loss, loss, careful]


def test_a_second_replica_that_is_not_to_be_had_ends_nothing(
    staged: Callable[..., Scene], ray_cluster: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hiring, "autoscales", lambda: False)
    with nodes_added(ray_cluster, [{"num_cpus": 2}]):
        others = placement_group([{"CPU": 2}])
        assert others.wait(10)

        def look(scene: Scene) -> None:
            wait_until(lambda: bool(caplog.messages))

        scene = staged(DawdlingStubReplica, look, timeout=2.0, replicas=2, threads=2)
        scene.run()
        remove_placement_group(others)
    assert len(scene.published) == 1
    assert caplog.messages == [
        "decoding.placement_timeout: the cluster has not offered 2 cores within 2 s; "
        "the same command continues when it does"
    ]


def test_where_nobody_is_to_be_had_the_run_ends(staged: Callable[..., Scene], monkeypatch: pytest.MonkeyPatch) -> None:
    others = placement_group([{"CPU": 2}])
    assert others.wait(10)
    monkeypatch.setattr(seats, "QUIET_SECONDS", 0.5)
    scene = staged(timeout=1.0, replicas=2, threads=1)
    with pytest.raises(WorkerLost, match="has not offered 1 core within 1 s; the same command continues when it does"):
        scene.run()
    remove_placement_group(others)
    assert ray.is_initialized()

"""Parts are the truth, and a run that was overtaken publishes nothing."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.errors import OutputError, Stopped
from pipeline.output.folder import Output, refuse_unplanned_parts
from pipeline.output.local_store import LocalStore
from pipeline.output.names import SCHEMA_PART, part_name
from pipeline.output.plan import Plan, Shard
from pipeline.stats import Progress
from tests.output.test_plan import plan

DONE = {"rows": 0, "error_rows": 0, "dropped_shards": []}


@pytest.fixture
def output(tmp_path: Path) -> Output:
    return Output(LocalStore(tmp_path / "out"))


def rows(of: Plan, shard: Shard, mark: str = "x") -> pa.Table:
    numbers = [row for r in shard.ranges for row in range(r.start, r.stop)]
    values = {"id": [f"{n}" for n in numbers], "doc_hash": [mark for _ in numbers]}
    return pa.table({f.name: pa.array(values.get(f.name, [None] * len(numbers)), f.type) for f in of.schema})


def publish(output: Output, of: Plan, index: int, mark: str = "x", counts: Progress | None = None) -> bool:
    shard = of.shards[index]
    return output.publish(of, shard, rows(of, shard, mark), counts or Progress(rows_done=shard.rows), 1.0)


def read(output: Output) -> pd.DataFrame:
    return pd.read_parquet(output.store.location)


def test_the_first_of_two_planners_owns_the_run(output: Output) -> None:
    mine, theirs = plan(rows=10), plan(rows=6)
    assert output.create_plan(mine) == mine
    assert output.create_plan(theirs) == mine
    assert output.runs() == [1]


def test_the_folder_opens_from_the_first_minute(output: Output) -> None:
    output.begin(output.create_plan(plan()))
    frame = read(output)
    assert list(frame.columns) == ["id", "doc_hash", "published_at", "tags", "error"]
    assert len(frame) == 0
    assert str(frame["published_at"].dtype) == "datetime64[us, Europe/Paris]"


def test_a_second_copy_of_a_part_is_never_published(output: Output) -> None:
    one = output.create_plan(plan())
    assert publish(output, one, 0, "first")
    assert not publish(output, one, 0, "second")
    assert set(read(output)["doc_hash"]) == {"first"}
    assert [shard.index for shard in output.missing(one)] == [1]


def test_a_part_with_a_missing_row_is_not_published(output: Output) -> None:
    one = output.create_plan(plan())
    shard = one.shards[0]
    with pytest.raises(AssertionError, match="3 rows of 4"):
        output.publish(one, shard, rows(one, shard).slice(0, 3), Progress(), 1.0)
    assert output.parts() == {}


def test_an_error_first_in_the_second_part_and_a_null_column_in_the_first_are_read(output: Output) -> None:
    one = output.create_plan(plan())
    output.begin(one)
    publish(output, one, 0)
    shard = one.shards[1]
    failed = rows(one, shard).set_column(4, "error", pa.array(["bad"] * shard.rows))
    tagged = failed.set_column(3, "tags", pa.array([["a"]] * shard.rows, pa.list_(pa.string())))
    output.publish(one, shard, tagged, Progress(), 1.0)
    frame = read(output)
    assert frame["error"].notna().sum() == shard.rows
    assert [list(value) for value in frame["tags"].dropna()] == [["a"]] * shard.rows


def test_the_footer_says_whose_a_part_is(output: Output) -> None:
    one = output.create_plan(plan())
    publish(output, one, 1, counts=Progress(rows_done=4, error_rows=1))
    metadata = pq.read_metadata(Path(output.store.location) / part_name(1, 1)).metadata
    assert metadata[b"nightdesk.run"] == b"000001"
    assert metadata[b"nightdesk.shard"] == b"1"
    assert metadata[b"nightdesk.fingerprint"] == one.fingerprint.encode()
    assert b'"error_rows": 1' in metadata[b"nightdesk.counts"]


def test_counts_survive_a_kill_between_part_and_mark(output: Output) -> None:
    one = output.create_plan(plan())
    for index in (0, 1):
        publish(output, one, index, counts=Progress(rows_done=4, new_tokens=10, accepted_at=(1, 2)))
    output.store.remove("_nightdesk/runs/000001/shards/000001.json")
    assert output.counts(one) == Progress(rows_done=8, new_tokens=20, accepted_at=(2, 4))


def test_a_run_is_open_until_its_summary(output: Output) -> None:
    one = output.create_plan(plan())
    assert output.summary(1) is None
    output.finish(one, DONE, success=True)
    assert output.summary(1) == DONE
    assert output.has_success()


def test_success_disappears_when_a_run_begins(output: Output) -> None:
    one = output.create_plan(plan())
    output.finish(one, DONE, success=True)
    output.begin(output.create_plan(plan(run=2)))
    assert not output.has_success()


def test_a_fresh_start_removes_old_parts_and_takes_its_own_schema(output: Output) -> None:
    old = output.create_plan(plan())
    output.begin(old)
    publish(output, old, 0)
    (Path(output.store.location) / "notes.txt").write_text("not ours")
    schema = old.schema.remove(3)
    fresh = output.create_plan(dataclasses.replace(plan(run=2, fresh=True), schema=schema))
    output.begin(fresh)
    assert output.parts() == {}
    assert "tags" not in read_schema(output).names
    assert [p.run for p in output.live_plans()] == [2]
    assert output.highest_run() == 2
    assert (Path(output.store.location) / "notes.txt").exists()


def read_schema(output: Output) -> pa.Schema:
    return pq.read_schema(Path(output.store.location) / SCHEMA_PART)


class Watched(LocalStore):
    """A store that remembers what was published on it, if only for a moment."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.created: list[str] = []

    def create(self, name: str, data: bytes) -> bool:
        self.created.append(name)
        return super().create(name, data)


def test_a_zombie_of_an_old_run_publishes_nothing_after_a_fresh_start(tmp_path: Path) -> None:
    store = Watched(tmp_path / "out")
    output = Output(store)
    old = output.create_plan(plan())
    output.begin(output.create_plan(plan(run=2, fresh=True)))
    with pytest.raises(Stopped, match="--fresh"):
        publish(output, old, 0)
    with pytest.raises(Stopped, match="--fresh"):
        output.begin(old)
    assert part_name(1, 0) not in store.created


class Overtaken(LocalStore):
    """A store on which a later run starts over at the very moment of a publication, having listed the parts."""

    def create(self, name: str, data: bytes) -> bool:
        if name.startswith("part-000001-0"):
            Output(LocalStore(self.root)).begin(Output(LocalStore(self.root)).create_plan(plan(run=2, fresh=True)))
        return super().create(name, data)


def test_a_zombie_that_is_overtaken_while_it_publishes_takes_its_part_back(tmp_path: Path) -> None:
    output = Output(Overtaken(tmp_path / "out"))
    old = output.create_plan(plan())
    with pytest.raises(Stopped, match="--fresh"):
        publish(output, old, 0)
    assert output.parts() == {}


def test_a_shard_that_its_run_has_given_up_is_not_published_by_a_straggler(output: Output) -> None:
    one = output.create_plan(plan())
    publish(output, one, 0)
    output.finish(one, DONE | {"dropped_shards": [1]}, success=False)
    assert not publish(output, one, 1)
    assert set(output.parts()) == {part_name(1, 0)}


def test_a_straggler_in_a_finished_run_leaves_published_parts_alone(output: Output) -> None:
    one = output.create_plan(plan())
    publish(output, one, 0)
    publish(output, one, 1)
    output.finish(one, DONE, success=True)
    assert not publish(output, one, 1, "late")
    assert set(read(output)["doc_hash"]) == {"x"}


def test_parts_without_a_plan_are_refused(output: Output) -> None:
    publish(output, plan(), 0)
    with pytest.raises(OutputError, match="run 000001 but not its plan"):
        refuse_unplanned_parts(output)


def test_numbers_and_salts_go_on_where_earlier_runs_ended(output: Output) -> None:
    assert (output.highest_run(), output.highest_salt()) == (0, None)
    output.create_plan(dataclasses.replace(plan(run=3), salt=2))
    assert (output.highest_run(), output.highest_salt()) == (3, 2)
    publish(output, plan(run=7), 0)
    assert output.highest_run() == 7


def test_a_straggler_does_not_call_the_next_run_a_success(output: Output) -> None:
    one = output.create_plan(plan())
    output.finish(one, DONE, success=True)
    output.begin(output.create_plan(dataclasses.replace(plan(), run=2)))
    output.finish(one, DONE, success=True)
    assert not output.has_success()


def test_what_the_first_driver_says_at_the_end_holds_for_the_others(output: Output) -> None:
    one = output.create_plan(plan())
    assert output.given_up(1) == set()
    assert output.agree_on_end(1, [1]) == [1]
    assert output.agree_on_end(1, []) == [1]
    assert output.given_up(1) == {1}
    assert publish(output, one, 0)
    assert not publish(output, one, 1)

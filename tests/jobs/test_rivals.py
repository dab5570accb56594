"""Several drivers on one output, and ends of runs on which they must agree: no row lost, none twice."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

import jobs.run
from jobs.compact import compact_output
from jobs.run import Run, execute
from pipeline.config import JobConfig
from pipeline.errors import OutputError, Stopped
from pipeline.output import compaction
from pipeline.output.compaction import merge, plan_merges
from pipeline.output.folder import Output
from pipeline.output.local_store import LocalStore
from pipeline.output.plan import Plan
from pipeline.records import Completion, Request
from tests.jobs.test_increments import TELL, Interrupted, output, run, summary_of, told
from tests.stub_engine import StubEngine, answer_to, answers, expected, job, local, stub_models, write_stories


class Meanwhile(StubEngine):
    """Something happens elsewhere after some answers."""

    def __init__(self, what: Any, after: int = 0) -> None:
        super().__init__()
        self.what = what
        self.after = after

    def stream(self, requests: Iterable[Request | None]) -> Iterator[Completion]:
        for number, completion in enumerate(super().stream(requests)):
            if number == self.after:
                self.what()
            yield completion


def rival(config: JobConfig, **options: Any) -> int:
    return execute(config, executor=local(), models=stub_models(), **options)


# --- plans


def when_looked(monkeypatch: pytest.MonkeyPatch, what: Any) -> None:
    """`what` happens once, right after a run has looked for an open plan."""
    look = Run._open_plan

    def looked(self: Run) -> Plan | None:
        found = look(self)
        monkeypatch.setattr(Run, "_open_plan", look)
        what()
        return found

    monkeypatch.setattr(Run, "_open_plan", looked)


def begin(config: JobConfig) -> None:
    with pytest.raises(Stopped):
        run(config, Interrupted(2))


def test_a_run_that_somebody_has_planned_since_we_looked_is_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_stories(tmp_path, "a.parquet", 0, 8)
    when_looked(monkeypatch, lambda: begin(job(tmp_path)))
    assert run(job(tmp_path)) == 0
    assert output(tmp_path).runs() == [1]
    assert answers(tmp_path) == expected((0, 8))


def test_nor_is_a_later_one_planned_over_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_stories(tmp_path, "a.parquet", 0, 8)
    run(job(tmp_path))
    write_stories(tmp_path, "b.parquet", 8, 12)
    when_looked(monkeypatch, lambda: begin(job(tmp_path)))
    assert run(job(tmp_path)) == 0
    assert output(tmp_path).runs() == [1, 2]
    assert answers(tmp_path) == expected((0, 12))


def test_a_run_of_another_job_that_began_since_we_looked_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_stories(tmp_path, "a.parquet", 0, 8)
    run(job(tmp_path))
    when_looked(monkeypatch, lambda: rival(job(tmp_path, tasks=TELL), reanswer=True))
    with pytest.raises(OutputError, match="prompt"):
        run(job(tmp_path))
    assert answers(tmp_path) == told((0, 8))


def test_a_run_that_is_given_up_by_another_ends_with_a_word(tmp_path: Path) -> None:
    write_stories(tmp_path, "a.parquet", 0, 8)
    engine = Meanwhile(lambda: rival(job(tmp_path, tasks=TELL), reanswer=True))
    with pytest.raises(OutputError, match="prompt"):
        run(job(tmp_path), engine)
    assert answers(tmp_path) == told((0, 8))


def test_of_two_jobs_that_reanswer_each_other_one_stops(tmp_path: Path) -> None:
    write_stories(tmp_path, "a.parquet", 0, 8)
    run(job(tmp_path))
    sing = [{"name": "summary", "prompt": "Sing: {body}", "max_new_tokens": 64}]
    engine = Meanwhile(lambda: rival(job(tmp_path, tasks=sing), reanswer=True))
    with pytest.raises((OutputError, Stopped)):
        run(job(tmp_path, tasks=TELL), engine, reanswer=True)
    assert answers(tmp_path) == {f"{n:05d}": answer_to(f"Sing: story {n}") for n in range(8)}


# --- ends


@pytest.fixture
def killed_at_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An output whose second run has answered, replaced and cut everything, and has no summary."""
    write_stories(tmp_path, "a.parquet", 0, 24)
    run(job(tmp_path))
    write_stories(tmp_path, "a.parquet", 1, 25, n5="other")

    def killed(*args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Output, "finish", killed)
        with pytest.raises(KeyboardInterrupt):
            run(job(tmp_path))
    assert "00000" not in answers(tmp_path)
    return tmp_path


def test_a_run_that_is_given_up_after_its_cuts_remembers_them(killed_at_its_end: Path) -> None:
    folder = killed_at_its_end
    assert run(job(folder, tasks=TELL), reanswer=True) == 0
    assert answers(folder) == told((1, 25)) | {"00005": answer_to("Tell: other")}
    assert summary_of(folder, 2)["dropped_cuts"] == []


def test_drivers_agree_on_what_a_run_gives_up_before_anything_is_cut(tmp_path: Path) -> None:
    write_stories(tmp_path, "a.parquet", 0, 24)
    run(job(tmp_path))
    write_stories(tmp_path, "a.parquet", 1, 25)

    def hasty() -> None:  # a driver that sees the shard missing comes first to the end
        assert output(tmp_path).agree_on_end(2, [0]) == [0]

    assert run(job(tmp_path), Meanwhile(hasty)) == 0
    summary = summary_of(tmp_path, 2)
    assert (summary["dropped_shards"], summary["dropped_cuts"]) == ([0], ["part-000001-000000.parquet"])
    assert output(tmp_path).runs() == [1, 2, 3], "what was given up is planned anew at once"
    assert summary_of(tmp_path, 3)["removed_rows"] == 1
    assert answers(tmp_path) == expected((1, 25))


@pytest.mark.parametrize("third", ["another correction", "story 3"])
@pytest.mark.parametrize("partitions", [[], ["title"]])
def test_what_a_run_gives_up_stays_in_a_delta_table(tmp_path: Path, partitions: list[str], third: str) -> None:
    asked = job(tmp_path, input__keep=[], output__format="delta", output__partition_by=partitions)
    write_stories(tmp_path, "a.parquet", 0, 12)
    write_stories(tmp_path, "b.parquet", 12, 24)
    assert run(asked) == 0
    write_stories(tmp_path, "a.parquet", 1, 12, n3="a correction")
    write_stories(tmp_path, "b.parquet", 12, 25, n20="a correction")
    with pytest.raises(Stopped):
        run(asked, Interrupted(0), allow_deletions=True)
    write_stories(tmp_path, "a.parquet", 0, 12, n3=third)
    assert run(asked) == 0
    assert output(tmp_path).summary(2) != output(tmp_path).summary(3)
    frame = DeltaTable(str(tmp_path / "out")).to_pandas()
    assert dict(zip(frame["doc_id"], frame["summary"], strict=True)) == expected((0, 25)) | {
        "00003": answer_to(f"Say: {third}"),
        "00020": answer_to("Say: a correction"),
    }
    assert len(frame) == 25


def test_a_file_that_is_being_written_while_it_is_compared_costs_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_stories(tmp_path, "a.parquet", 0, 24)
    run(job(tmp_path))
    make = jobs.run.make_plan

    def slowly_copied(*args: Any) -> Plan | None:
        try:
            return make(*args)
        finally:
            write_stories(tmp_path, "a.parquet", 0, 26)

    write_stories(tmp_path, "a.parquet", 1, 24)
    monkeypatch.setattr(jobs.run, "make_plan", slowly_copied)
    with pytest.raises(Stopped, match=r"a\.parquet changed while it was read"):
        run(job(tmp_path))
    assert answers(tmp_path) == expected((0, 24))
    monkeypatch.undo()
    idle = StubEngine()
    assert run(job(tmp_path), idle) == 0
    assert len(idle.prompts) == 2


def test_a_fresh_start_over_an_empty_input_removes_nothing(tmp_path: Path) -> None:
    write_stories(tmp_path, "a.parquet", 0, 8)
    run(job(tmp_path))
    (tmp_path / "in/a.parquet").unlink()
    with pytest.raises(OutputError, match=r"no documents.*8 rows"):
        run(job(tmp_path), fresh=True)
    assert answers(tmp_path) == expected((0, 8))


# --- merges


@pytest.fixture
def planned_merge(tmp_path: Path) -> Path:
    write_stories(tmp_path, "a.parquet", 0, 12)
    run(job(tmp_path))
    plan = plan_merges(output(tmp_path), 1 << 20)
    assert plan is not None
    output(tmp_path).create_plan(plan)
    return tmp_path


def before_publishing(monkeypatch: pytest.MonkeyPatch, what: Any) -> None:
    """`what` happens once, when the sources of a merged part have been removed and it is not there yet."""
    remove = compaction._remove

    def removed(*args: Any) -> None:
        remove(*args)
        monkeypatch.setattr(compaction, "_remove", remove)
        what()

    monkeypatch.setattr(compaction, "_remove", removed)


def test_a_merge_may_be_carried_out_by_two_at_once(planned_merge: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = planned_merge
    before_publishing(monkeypatch, lambda: merge(output(folder), output(folder).plan(2)))
    merge(output(folder), output(folder).plan(2))
    assert answers(folder) == expected((0, 12))
    merge(output(folder), output(folder).plan(2))
    assert answers(folder) == expected((0, 12))


def test_a_straggler_cannot_bring_back_a_merged_part_that_was_merged_again(
    planned_merge: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = planned_merge

    def others() -> None:
        merge(output(folder), output(folder).plan(2))
        write_stories(folder, "b.parquet", 12, 16)
        run(job(folder))
        compact_output(str(folder / "out"), 1)

    before_publishing(monkeypatch, others)
    merge(output(folder), output(folder).plan(2))
    assert len(pd.read_parquet(folder / "out")) == 16
    assert answers(folder) == expected((0, 16))


def test_nor_one_that_a_fresh_start_has_removed(planned_merge: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = planned_merge
    before_publishing(monkeypatch, lambda: rival(job(folder, tasks=TELL), fresh=True))
    with pytest.raises(Stopped, match="--fresh"):
        merge(output(folder), output(folder).plan(2))
    assert answers(folder) == told((0, 12))


# --- what is damaged, or of an older version


def damage(folder: Path, name: str) -> None:
    path = folder / "out/_nightdesk/runs/000001" / name
    path.write_bytes(path.read_bytes()[:20])


@pytest.mark.parametrize("name", ["plan.json", "summary.json", "end.json"])
def test_a_damaged_record_is_named_with_what_to_do(tmp_path: Path, name: str) -> None:
    write_stories(tmp_path, "a.parquet", 0, 4)
    run(job(tmp_path))
    if name == "end.json":
        (tmp_path / "out/_nightdesk/runs/000001/summary.json").unlink()
    damage(tmp_path, name)
    with pytest.raises(OutputError, match=rf"{name} is damaged.*copy.*output\.path") as refusal:
        run(job(tmp_path))
    assert "\n" not in str(refusal.value)
    assert answers(tmp_path) == expected((0, 4))


@pytest.mark.parametrize("partitions", [[], ["title"]])
def test_a_damaged_mark_costs_nothing(tmp_path: Path, partitions: list[str]) -> None:
    asked = job(tmp_path, input__keep=[], output__partition_by=partitions)
    write_stories(tmp_path, "a.parquet", 0, 12)
    with pytest.raises(Stopped):
        run(asked, Interrupted(9))
    mark = min((tmp_path / "out/_nightdesk/runs/000001/shards").iterdir())
    mark.write_text('{"ro')
    engine = StubEngine()
    assert run(asked, engine) == 0
    assert answers(tmp_path) == expected((0, 12))
    assert summary_of(tmp_path, 1)["rows"] == 12


@pytest.mark.parametrize("partitions", [[], ["title"]])
def test_an_output_with_the_summary_of_an_older_version_is_continued(tmp_path: Path, partitions: list[str]) -> None:
    asked = job(tmp_path, input__keep=[], output__partition_by=partitions)
    write_stories(tmp_path, "a.parquet", 0, 12)
    run(asked)
    (tmp_path / "out/_nightdesk/runs/000001/end.json").unlink()
    path = tmp_path / "out/_nightdesk/runs/000001/summary.json"
    summary = json.loads(path.read_text())
    path.write_text(json.dumps({key: summary[key] for key in ("run", "rows", "error_rows", "dropped_shards")}))
    write_stories(tmp_path, "a.parquet", 1, 13, n3="a correction")
    assert run(asked, retry_failed=True) == 0
    assert answers(tmp_path) == expected((1, 13)) | {"00003": answer_to("Say: a correction")}


def test_a_kept_column_that_partitions_may_come_first(tmp_path: Path) -> None:
    write_stories(tmp_path, "a.parquet", 0, 4)
    assert run(job(tmp_path, input__keep=["title"], output__partition_by=["title"])) == 0


def test_an_output_folder_may_be_a_link(tmp_path: Path) -> None:
    write_stories(tmp_path, "a.parquet", 0, 4)
    (tmp_path / "real").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "real")
    run(job(tmp_path))
    assert Output(LocalStore(tmp_path / "real")).runs() == [1]
    idle = StubEngine()
    assert run(job(tmp_path), idle) == 0
    assert not idle.prompts


# --- parts that are gone or damaged


@pytest.mark.parametrize("layout", ["flat", "partitioned", "compacted"])
def test_a_part_that_somebody_removed_is_answered_again_whatever_later_runs_knew(tmp_path: Path, layout: str) -> None:
    asked = job(tmp_path, input__keep=[], output__partition_by=["title"] if layout == "partitioned" else [])
    write_stories(tmp_path, "a.parquet", 0, 24)
    run(asked)
    write_stories(tmp_path, "a.parquet", 0, 25, n1="a correction")
    run(asked)
    if layout == "compacted":
        compact_output(str(tmp_path / "out"), 1)
    (tmp_path / "in/a.parquet").rename(tmp_path / "in/b.parquet")
    write_stories(tmp_path, "c.parquet", 25, 26)
    run(asked)
    everything = expected((0, 26)) | {"00001": answer_to("Say: a correction")}
    assert answers(tmp_path) == everything
    part = min(output(tmp_path).parts())
    lost = len(pd.read_parquet(tmp_path / "out" / part))
    (tmp_path / "out" / part).unlink()
    engine = StubEngine()
    assert run(asked, engine) == 0
    assert answers(tmp_path) == everything
    assert len(engine.prompts) == lost


@pytest.mark.parametrize("partitions", [[], ["title"]])
def test_a_delta_table_forgets_a_part_that_somebody_removed(tmp_path: Path, partitions: list[str]) -> None:
    asked = job(tmp_path, input__keep=[], output__partition_by=partitions, output__format="delta")
    write_stories(tmp_path, "a.parquet", 0, 24)
    run(asked)
    write_stories(tmp_path, "a.parquet", 0, 25, n1="a correction")
    run(asked)
    everything = expected((0, 25)) | {"00001": answer_to("Say: a correction")}
    shown = [Path(uri) for uri in DeltaTable(str(tmp_path / "out")).file_uris()]
    lost = [len(pq.ParquetFile(path).read(["doc_id"])) for path in (min(shown), max(shown))]
    for path in (min(shown), max(shown)):
        path.unlink()
    engine = StubEngine()
    assert run(asked, engine) == 0
    frame = DeltaTable(str(tmp_path / "out")).to_pandas()
    assert frame["doc_id"].is_unique
    assert dict(zip(frame["doc_id"], frame["summary"], strict=True)) == everything
    assert len(engine.prompts) == sum(lost)


@pytest.mark.parametrize("partitions", [[], ["title"]])
def test_parts_without_a_mark_may_be_merged_and_their_documents_change(tmp_path: Path, partitions: list[str]) -> None:
    """As a kill between a part and its mark leaves it."""
    asked = job(tmp_path, input__keep=[], output__partition_by=partitions)
    write_stories(tmp_path, "a.parquet", 0, 12, title="one")
    run(asked)
    record = tmp_path / "out/_nightdesk/runs/000001"
    for path in (*(record / "shards").iterdir(), record / "summary.json", record / "end.json"):
        path.unlink()
    run(asked, StubEngine())
    compact_output(str(tmp_path / "out"), 1)
    write_stories(tmp_path, "a.parquet", 0, 12, n5="a correction", title="one")
    engine = StubEngine()
    assert run(asked, engine) == 0
    assert engine.prompts == ["Say: a correction"]
    assert answers(tmp_path) == expected((0, 12)) | {"00005": answer_to("Say: a correction")}


@pytest.mark.parametrize("layout", ["parquet", "delta"])
def test_a_damaged_part_is_named_with_what_to_do(tmp_path: Path, layout: str) -> None:
    write_stories(tmp_path, "a.parquet", 0, 24)
    run(job(tmp_path, output__format=layout))
    part = min(output(tmp_path).parts())
    (tmp_path / "out" / part).write_bytes(b"PAR1 torn")
    write_stories(tmp_path, "a.parquet", 0, 25)
    with pytest.raises(OutputError, match=rf"{part} is damaged.*{'remove it' if layout == 'parquet' else '--fresh'}"):
        run(job(tmp_path, output__format=layout))
    with pytest.raises(OutputError, match=f"{part} is damaged"):
        compact_output(str(tmp_path / "out"), 1)
    if layout == "parquet":
        (tmp_path / "out" / part).unlink()
        assert run(job(tmp_path)) == 0
        assert answers(tmp_path) == expected((0, 25))


@pytest.mark.parametrize("changed", ["removed", "rewritten"])
def test_a_merge_whose_sources_were_changed_is_given_up_and_bars_nothing(tmp_path: Path, changed: str) -> None:
    write_stories(tmp_path, "a.parquet", 0, 12)
    run(job(tmp_path))
    plan = plan_merges(output(tmp_path), 1 << 20)
    assert plan is not None
    output(tmp_path).create_plan(plan)
    part = tmp_path / "out" / plan.merges[0].sources[0]
    data = part.read_bytes()
    part.unlink()
    if changed == "rewritten":
        part.write_bytes(data)
    assert run(job(tmp_path)) == 0
    assert summary_of(tmp_path, 2)["dropped_merges"] == [0]
    assert answers(tmp_path) == expected((0, 12))
    assert compact_output(str(tmp_path / "out"), 1) == 0
    assert len(output(tmp_path).parts()) == 1
    assert answers(tmp_path) == expected((0, 12))
    idle = StubEngine()
    assert run(job(tmp_path), idle) == 0
    assert not idle.prompts

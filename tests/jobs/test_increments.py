"""Answers that are replaced, asked again or moved, and what other runs may do meanwhile."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.compact import compact_output
from jobs.run import execute
from pipeline.config import JobConfig
from pipeline.errors import OutputError, Stopped
from pipeline.output.folder import Output
from pipeline.output.local_store import LocalStore
from pipeline.output.plan import Plan
from pipeline.records import Completion, Request
from pipeline.stats import Progress
from tests.stub_engine import (
    FAILS,
    StubEngine,
    answer_to,
    answers,
    expected,
    job,
    local,
    stub_models,
    write_stories,
)

TELL = [{"name": "summary", "prompt": "Tell: {body}", "max_new_tokens": 64}]


def run(config: JobConfig, engine: StubEngine | None = None, target: str = "stub", **options: Any) -> int:
    return execute(config, executor=local(engine), models=stub_models(target), **options)


def told(*spans: tuple[int, int]) -> dict[str, str]:
    return {f"{n:05d}": answer_to(f"Tell: story {n}") for start, stop in spans for n in range(start, stop)}


def output(folder: Path) -> Output:
    return Output(LocalStore(folder / "out"))


def summary_of(folder: Path, run_number: int) -> dict[str, Any]:
    found = output(folder).summary(run_number)
    assert found is not None
    return found


class Recovered(StubEngine):
    """An engine that can answer everything."""

    def stream(self, requests: Iterable[Request | None]) -> Iterator[Completion]:
        for done in super().stream(requests):
            prompt = FAILS if done.error else ""
            yield done if not prompt else dataclasses.replace(done, error=None, text="at last", finish_reason="stop")


# --- asked again


def test_failed_rows_are_asked_again_only_when_that_is_wanted(tmp_path: Path) -> None:
    write_stories(tmp_path, "a.parquet", 0, 30, n2=FAILS, n17=FAILS)
    assert run(job(tmp_path, max_error_rate=0.5)) == 0
    idle = StubEngine()
    assert run(job(tmp_path, max_error_rate=0.5), idle) == 0
    assert idle.prompts == []
    engine = Recovered()
    assert run(job(tmp_path, max_error_rate=0.5), engine, retry_failed=True) == 0
    assert set(engine.prompts) == {f"Say: {FAILS}"}
    frame = pd.read_parquet(tmp_path / "out").set_index("doc_id")
    assert frame["summary_error"].isna().all()
    assert frame.loc["00002", "summary"] == frame.loc["00017", "summary"] == "at last"
    assert len(frame) == 30
    assert summary_of(tmp_path, 2)["replaced_rows"] == 2
    assert run(job(tmp_path, max_error_rate=0.5, retry_failed=True), idle) == 0
    assert idle.prompts == []


def test_a_row_that_could_not_be_read_is_not_asked_about_again(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.jsonl").write_text('{"doc_id": "a", "body": "x", "title": "t"}\nnot json\n')
    config = job(tmp_path, input__keep=["title"], max_error_rate=0.5)
    assert run(config) == 0
    assert run(config, retry_failed=True) == 0
    assert output(tmp_path).runs() == [1]


def test_a_line_that_is_mended_replaces_its_error_row(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    lines = [f'{{"doc_id": "{n}", "body": "story {n}", "title": "t"}}' for n in range(20)]
    config = job(tmp_path, input__keep=["title"], max_error_rate=0.5)
    (tmp_path / "in/a.jsonl").write_text("\n".join([*lines, '{"doc_id": "last", '] ) + "\n")
    assert run(config) == 0
    (tmp_path / "in/a.jsonl").write_text("\n".join([*lines, '{"doc_id": "last", "body": "b", "title": "t"}']) + "\n")
    assert run(config) == 0
    frame = pd.read_parquet(tmp_path / "out")
    assert sorted(frame["doc_id"]) == sorted([*(str(n) for n in range(20)), "last"])
    assert frame["error"].isna().all()


def ragged(stories: range, raggeds: int) -> str:
    """A CSV file of good rows and then of some that have too many fields."""
    lines = [f"{n:05d},story {n},t" for n in stories] + [f"r{n},story {n},t,more" for n in range(raggeds)]
    return "\n".join(["doc_id,body,title", *lines]) + "\n"


def test_mending_rows_that_could_not_be_read_is_no_deletion(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    config = job(tmp_path, input__keep=["title"], max_error_rate=0.9)
    (tmp_path / "in/a.csv").write_text(ragged(range(3), 2))
    assert run(config) == 0
    assert pd.read_parquet(tmp_path / "out")["error"].notna().sum() == 2
    (tmp_path / "in/a.csv").write_text(ragged(range(5), 0))
    assert run(config, retry_failed=True) == 0
    assert pd.read_parquet(tmp_path / "out")["error"].isna().all()
    assert answers(tmp_path) == expected((0, 5))


@pytest.mark.parametrize("name", ["a.csv", "b.csv"])
def test_rows_that_could_not_be_read_are_no_answered_documents(tmp_path: Path, name: str) -> None:
    """Whether their part is compared or not."""
    (tmp_path / "in").mkdir()
    config = job(tmp_path, input__keep=["title"], max_error_rate=0.9)
    (tmp_path / "in/a.csv").write_text(ragged(range(10), 20 if name == "a.csv" else 0))
    (tmp_path / "in/b.csv").write_text(ragged(range(10, 11), 20 if name == "b.csv" else 0))
    assert run(config) == 0
    (tmp_path / "in/a.csv").write_text(ragged(range(8), 0))
    with pytest.raises(OutputError, match=r"2 of 11 answered documents .*\(00008, 00009\)"):
        run(config)
    assert run(config, allow_deletions=True) == 0
    assert len(pd.read_parquet(tmp_path / "out")) == (9 if name == "a.csv" else 29)


def test_nothing_to_do_says_how_many_documents_have_an_error_instead(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(**options: Any) -> str:
        assert run(config, StubEngine(), **options) == 0
        return capsys.readouterr().out.splitlines()[-1]

    config = job(tmp_path, max_error_rate=0.9)
    write_stories(tmp_path, "a.parquet", 0, 9, n2=FAILS, n5=" ")
    said()
    where = f"nothing to do: every document is answered in {output(tmp_path).store.location}"
    why = f"(python -m jobs status {output(tmp_path).store.location} says why)"
    assert said() == f"{where}, except 2 that have an error instead {why}"
    assert run(config, Recovered(), retry_failed=True) == 0
    one = f"{where}, except 1 that has an error instead {why}"
    assert said(retry_failed=True) == said() == one
    write_stories(tmp_path, "a.parquet", 0, 9, n2=FAILS, n5="story 5")
    assert run(config, StubEngine()) == 0
    capsys.readouterr()
    assert said() == where


# --- answered otherwise


def test_another_prompt_is_refused_with_the_remedies_and_reanswer_replaces_every_row(tmp_path: Path) -> None:
    write_stories(tmp_path, "a.parquet", 0, 10)
    write_stories(tmp_path, "b.parquet", 10, 14)
    run(job(tmp_path))
    before = set(output(tmp_path).parts())
    other = job(tmp_path, tasks=TELL)
    with pytest.raises(OutputError, match=r"tasks\.summary\.prompt.*--reanswer.*--fresh"):
        run(other)
    assert run(other, reanswer=True) == 0
    assert answers(tmp_path) == told((0, 14))
    assert set(output(tmp_path).parts()) == before, "in their parts"
    assert output(tmp_path).plan(2).salt == 1
    engine = StubEngine()
    assert run(other, engine) == 0
    assert run(other, engine, reanswer=True) == 0
    assert engine.prompts == []
    with pytest.raises(OutputError, match="prompt"):
        run(job(tmp_path))


def test_reanswer_takes_new_changed_and_deleted_documents_along(tmp_path: Path) -> None:
    write_stories(tmp_path, "a.parquet", 0, 30)
    run(job(tmp_path))
    write_stories(tmp_path, "a.parquet", 1, 33, n5="other")
    assert run(job(tmp_path, tasks=TELL), reanswer=True) == 0
    assert answers(tmp_path) == told((1, 33)) | {"00005": answer_to("Tell: other")}


def test_a_limit_narrows_a_reanswer_and_the_next_run_takes_up_the_rest(tmp_path: Path) -> None:
    write_stories(tmp_path, "a.parquet", 0, 8)
    write_stories(tmp_path, "b.parquet", 8, 16)
    run(job(tmp_path))
    other = job(tmp_path, tasks=TELL)
    engine = StubEngine()
    assert run(other, engine, reanswer=True, limit=10) == 0
    assert len(engine.prompts) == 10
    assert answers(tmp_path) == told((0, 10)) | expected((10, 16))
    assert run(other, engine, limit=10) == 0
    (tmp_path / "in/b.parquet").rename(tmp_path / "in/c.parquet")
    assert run(other, engine, limit=12) == 0
    assert len(engine.prompts) == 12
    assert run(other, engine) == 0
    assert len(engine.prompts) == 16
    assert answers(tmp_path) == told((0, 16))


def test_a_limit_narrows_what_is_asked_again(tmp_path: Path) -> None:
    write_stories(tmp_path, "a.parquet", 0, 30, n2=FAILS, n17=f"{FAILS}!")
    config = job(tmp_path, max_error_rate=0.5)
    run(config)
    engine = Recovered()
    assert run(config, engine, retry_failed=True, limit=10) == 0
    assert engine.prompts == [f"Say: {FAILS}"]
    assert len(answers(tmp_path)) == 30


def test_a_reanswer_that_is_stopped_is_continued_by_the_plain_command(tmp_path: Path) -> None:
    write_stories(tmp_path, "a.parquet", 0, 24)
    run(job(tmp_path))
    other = job(tmp_path, tasks=TELL)
    with pytest.raises(Stopped):
        run(other, Interrupted(9), reanswer=True)
    mixed = answers(tmp_path)
    assert set(mixed) == set(expected((0, 24))), "readers see every row all the time"
    assert len(set(mixed.items()) & set(told((0, 24)).items())) in range(1, 24)
    assert run(other) == 0
    assert answers(tmp_path) == told((0, 24))


def test_rows_that_a_reanswer_had_to_leave_are_answered_by_the_next_run(tmp_path: Path) -> None:
    write_stories(tmp_path, "a.parquet", 0, 12)
    write_stories(tmp_path, "b.parquet", 12, 24)
    run(job(tmp_path))
    other = job(tmp_path, tasks=TELL)
    with pytest.raises(Stopped):
        run(other, Interrupted(3), reanswer=True)
    write_stories(tmp_path, "b.parquet", 12, 24, n20="changed")
    assert run(other) == 0
    assert answers(tmp_path) == told((0, 24)) | {"00020": answer_to("Tell: changed")}


def test_a_third_job_may_reanswer_over_an_open_run(tmp_path: Path) -> None:
    write_stories(tmp_path, "a.parquet", 0, 12)
    run(job(tmp_path))
    with pytest.raises(Stopped):
        run(job(tmp_path, tasks=TELL), Interrupted(5), reanswer=True)
    third = [{"name": "summary", "prompt": "Sing: {body}", "max_new_tokens": 64}]
    assert run(job(tmp_path, tasks=third), reanswer=True) == 0
    assert answers(tmp_path) == {f"{n:05d}": answer_to(f"Sing: story {n}") for n in range(12)}


def test_reanswer_with_other_columns_is_refused(tmp_path: Path) -> None:
    write_stories(tmp_path, "a.parquet", 0, 4)
    run(job(tmp_path))
    renamed = [{"name": "gist", "prompt": "Say: {body}", "max_new_tokens": 64}]
    with pytest.raises(OutputError, match=r"gist.*--fresh"):
        run(job(tmp_path, tasks=renamed), reanswer=True)
    with pytest.raises(OutputError, match=r"input\.keep"):
        run(job(tmp_path, input__keep=["title"], tasks=TELL), reanswer=True)
    assert answers(tmp_path) == expected((0, 4))


class Interrupted(StubEngine):
    def __init__(self, after: int) -> None:
        super().__init__()
        self.after = after

    def stream(self, requests: Iterable[Request | None]) -> Iterator[Completion]:
        for number, completion in enumerate(super().stream(requests)):
            if number == self.after:
                raise KeyboardInterrupt
            yield completion


# --- partitions


def sourced(folder: Path, name: str, *rows: tuple[str, str, Any]) -> None:
    (folder / "in").mkdir(exist_ok=True)
    kind = pa.string() if all(isinstance(r[2], str | None) for r in rows) else None
    table = pa.table(
        {
            "doc_id": [r[0] for r in rows],
            "body": [r[1] for r in rows],
            "day": pa.array([r[2] for r in rows], kind),
        }
    )
    pq.write_table(table, folder / "in" / name)


def by_day(folder: Path, **changes: Any) -> JobConfig:
    return job(folder, input__keep=[], output__partition_by=["day"], **changes)


def test_a_null_partition_value_and_strange_ones_are_read_by_pandas(tmp_path: Path) -> None:
    values = ["Mon day", None, "a/b", "k=v", "100%", "é", "..", "_x", "x" * 300]
    sourced(tmp_path, "a.parquet", *((str(n), f"story {n}", value) for n, value in enumerate(values)))
    assert run(by_day(tmp_path)) == 0
    frame = pd.read_parquet(tmp_path / "out").set_index("doc_id")
    seen = [str(frame.loc[str(n), "day"]) for n in range(len(values) - 1)]
    assert seen == ["null" if value is None else value for value in values[:-1]]
    assert str(frame.loc["8", "day"]).startswith("x" * 50)
    assert list(frame.columns[-1:]) == ["day"]
    assert frame["summary"].notna().all()
    idle = StubEngine()
    assert run(by_day(tmp_path), idle) == 0
    assert idle.prompts == []


@pytest.mark.parametrize("values", [[1, 2, None], [1.5, 2.5], [True, False]])
def test_values_that_are_no_text_name_folders_too(tmp_path: Path, values: list[Any]) -> None:
    sourced(tmp_path, "a.parquet", *((str(n), f"story {n}", value) for n, value in enumerate(values)))
    assert run(by_day(tmp_path)) == 0
    assert len(pd.read_parquet(tmp_path / "out")) == len(values)


def test_a_document_whose_partition_changes_is_in_the_new_one_only_at_the_end(tmp_path: Path) -> None:
    sourced(tmp_path, "a.parquet", *((str(n), f"story {n}", "mon") for n in range(12)))
    run(by_day(tmp_path))
    sourced(tmp_path, "a.parquet", *((str(n), f"story {n}", "tue" if n == 3 else "mon") for n in range(12)))
    assert run(by_day(tmp_path)) == 0
    frame = pd.read_parquet(tmp_path / "out").set_index("doc_id")
    assert frame.index.is_unique
    assert frame.loc["3", "day"] == "tue"
    assert (frame["day"] == "mon").sum() == 11
    assert summary_of(tmp_path, 2)["removed_rows"] == 1


def test_a_shard_killed_between_two_of_its_parts_is_completed(tmp_path: Path) -> None:
    sourced(tmp_path, "a.parquet", *((str(n), f"story {n}", "mon" if n % 2 else "tue") for n in range(4)))
    run(by_day(tmp_path))
    names = sorted(output(tmp_path).parts())
    assert len(names) == 2
    for path in (names[1], "_nightdesk/runs/000001/summary.json", "_nightdesk/runs/000001/shards/000000.json"):
        (tmp_path / "out" / path).unlink()
    assert [shard.index for shard in output(tmp_path).missing(output(tmp_path).plan(1))] == [0]
    assert run(by_day(tmp_path)) == 0
    assert sorted(output(tmp_path).parts()) == names
    assert sorted(pd.read_parquet(tmp_path / "out")["doc_id"]) == ["0", "1", "2", "3"]


def test_a_part_of_a_partition_that_somebody_removed_is_answered_again(tmp_path: Path) -> None:
    sourced(tmp_path, "a.parquet", *((str(n), f"story {n}", "mon" if n % 2 else "tue") for n in range(8)))
    run(by_day(tmp_path))
    (tmp_path / "out" / min(output(tmp_path).parts())).unlink()
    engine = StubEngine()
    assert run(by_day(tmp_path), engine) == 0
    assert len(engine.prompts) == 2
    assert sorted(pd.read_parquet(tmp_path / "out")["doc_id"]) == [str(n) for n in range(8)]


@pytest.mark.parametrize("value", [[["x"]], [{"a": 1}], [b"x"]])
def test_columns_that_name_no_folder_are_refused(tmp_path: Path, value: list[Any]) -> None:
    (tmp_path / "in").mkdir()
    pq.write_table(pa.table({"doc_id": ["a"], "body": ["b"], "day": value}), tmp_path / "in/a.parquet")
    with pytest.raises(Exception, match=r"output\.partition_by: 'day'"):
        run(by_day(tmp_path))


def test_files_of_somebody_else_in_a_partition_are_named_and_left_alone(tmp_path: Path) -> None:
    sourced(tmp_path, "a.parquet", ("1", "story", "mon"))
    run(by_day(tmp_path))
    (tmp_path / "out/day=mon/notes.csv").write_text("mine")
    with pytest.raises(OutputError, match=r"day=mon/notes\.csv"):
        run(by_day(tmp_path))
    assert (tmp_path / "out/day=mon/notes.csv").read_text() == "mine"


# --- zombies and rivals


def open_plan(folder: Path) -> tuple[JobConfig, Plan]:
    """A run with one document to replace, not begun."""
    write_stories(folder, "a.parquet", 0, 12)
    run(job(folder))
    write_stories(folder, "a.parquet", 0, 12, n3="a correction")
    with pytest.raises(Stopped):
        run(job(folder), Interrupted(0))
    return job(folder), output(folder).plan(2)


def table_of(plan: Plan, body: str) -> pa.Table:
    values = {"doc_id": "00003", "doc_hash": "0" * 32, "summary": body}
    return pa.table({f.name: pa.array([values.get(f.name)], f.type) for f in plan.schema})


def test_an_amendment_is_published_once(tmp_path: Path) -> None:
    _, plan = open_plan(tmp_path)
    (shard,) = plan.shards
    assert output(tmp_path).publish(plan, shard, table_of(plan, "first"), Progress(rows_done=1), 1.0)
    assert not output(tmp_path).publish(plan, shard, table_of(plan, "second"), Progress(rows_done=1), 1.0)
    assert answers(tmp_path) == expected((0, 12)) | {"00003": "first"}
    (tmp_path / "out/_nightdesk/runs/000002/shards/000000.json").unlink()
    assert output(tmp_path).missing(plan) == []
    assert output(tmp_path).counts(plan).rows_done == 1


def test_a_zombie_that_amends_after_the_run_has_ended_changes_nothing(tmp_path: Path) -> None:
    config, plan = open_plan(tmp_path)
    assert run(config) == 0
    before = answers(tmp_path)
    assert not output(tmp_path).publish(plan, plan.shards[0], table_of(plan, "late"), Progress(), 1.0)
    assert answers(tmp_path) == before
    write_stories(tmp_path, "a.parquet", 0, 12, n3="another correction")
    run(config)
    assert not output(tmp_path).publish(plan, plan.shards[0], table_of(plan, "late"), Progress(), 1.0)
    assert answers(tmp_path)["00003"] == answer_to("Say: another correction")


def test_a_part_that_somebody_changed_under_an_open_plan_is_planned_anew(tmp_path: Path) -> None:
    config, _ = open_plan(tmp_path)
    part = tmp_path / "out/part-000001-000000.parquet"
    data = part.read_bytes()
    part.unlink()
    part.write_bytes(data)  # a copy of the output, say: the same bytes, another file
    assert run(config) == 0
    assert summary_of(tmp_path, 2)["dropped_shards"] == [0]
    assert answers(tmp_path) == expected((0, 12)) | {"00003": answer_to("Say: a correction")}
    assert output(tmp_path).runs() == [1, 2, 3]


def test_a_part_that_was_changed_since_the_plan_keeps_the_rows_that_were_to_go_until_the_next_run(
    tmp_path: Path,
) -> None:
    write_stories(tmp_path, "a.parquet", 0, 24)
    run(job(tmp_path))
    write_stories(tmp_path, "a.parquet", 1, 25)
    with pytest.raises(Stopped):
        run(job(tmp_path), Interrupted(0))
    part = tmp_path / "out/part-000001-000000.parquet"
    table = pq.read_table(part)
    part.unlink()
    pq.write_table(table.slice(2), part)  # somebody else's doing: the plan's row numbers mean other rows now
    with pytest.raises(OutputError, match=r"part-000001-000000\.parquet has 2 rows, and not the 4"):
        run(job(tmp_path))
    assert len(pq.read_table(part)) == 2, "nothing was cut by numbers that are not true any more"
    assert summary_of(tmp_path, 2)["dropped_cuts"] == [part.name]


def test_a_document_deleted_under_an_open_plan_is_gone_in_the_end(tmp_path: Path) -> None:
    config, _ = open_plan(tmp_path)
    write_stories(tmp_path, "a.parquet", 4, 12)
    assert run(config, allow_deletions=True) == 0
    assert answers(tmp_path) == expected((4, 12))


# --- compaction


def test_small_parts_become_few_and_later_runs_know_what_they_hold(tmp_path: Path) -> None:
    write_stories(tmp_path, "a.parquet", 0, 40)
    run(job(tmp_path))
    assert len(output(tmp_path).parts()) == 10
    assert compact_output(str(tmp_path / "out"), 1) == 0
    assert len(output(tmp_path).parts()) == 1
    frame = pd.read_parquet(tmp_path / "out")
    assert list(frame["doc_id"]) == [f"{n:05d}" for n in range(40)], "in the order they had"
    assert (tmp_path / "out/_SUCCESS").exists()
    idle = StubEngine()
    assert run(job(tmp_path), idle) == 0
    assert idle.prompts == []
    write_stories(tmp_path, "a.parquet", 1, 42, n7="a correction")
    assert run(job(tmp_path)) == 0
    assert answers(tmp_path) == expected((1, 42)) | {"00007": answer_to("Say: a correction")}
    assert compact_output(str(tmp_path / "out"), 1) == 0
    assert answers(tmp_path) == expected((1, 42)) | {"00007": answer_to("Say: a correction")}
    assert compact_output(str(tmp_path / "out"), 1) == 0, "nothing to do"


def test_a_straggler_cannot_bring_a_merged_part_back(tmp_path: Path) -> None:
    write_stories(tmp_path, "a.parquet", 0, 8)
    run(job(tmp_path))
    plan = output(tmp_path).plan(1)
    rows = pq.read_table(tmp_path / "out/part-000001-000000.parquet", partitioning=None)
    compact_output(str(tmp_path / "out"), 1)
    assert not output(tmp_path).publish(plan, plan.shards[0], rows, Progress(rows_done=4), 1.0)
    assert answers(tmp_path) == expected((0, 8))


def test_large_parts_are_left_alone_and_folders_apart(tmp_path: Path) -> None:
    sourced(tmp_path, "a.parquet", *((str(n), f"story {n}", "mon" if n % 2 else "tue") for n in range(16)))
    run(by_day(tmp_path))
    compact_output(str(tmp_path / "out"), 1)
    assert sorted(name.split("/")[0] for name in output(tmp_path).parts()) == ["day=mon", "day=tue"]
    assert len(pd.read_parquet(tmp_path / "out")) == 16


def test_an_open_run_is_not_compacted(tmp_path: Path) -> None:
    config, _ = open_plan(tmp_path)
    with pytest.raises(OutputError, match="run 000002 is open"):
        compact_output(str(tmp_path / "out"), 1)
    assert run(config) == 0


@pytest.mark.parametrize("point", range(5))
def test_a_compaction_that_was_killed_is_finished_by_the_next_run(
    tmp_path: Path, point: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_stories(tmp_path, "a.parquet", 0, 12)
    run(job(tmp_path))
    calls = 0
    originals = {name: getattr(LocalStore, name) for name in ("create", "remove")}

    class Killed(BaseException):
        pass

    def dying(name: str) -> Any:
        def call(self: LocalStore, file: str, *args: Any) -> Any:
            nonlocal calls
            if "part-" in file or "merged" in file or "summary" in file:
                calls += 1
                if calls == point + 1:
                    raise Killed
            return originals[name](self, file, *args)

        return call

    with monkeypatch.context() as patch:
        for name in originals:
            patch.setattr(LocalStore, name, dying(name))
        with pytest.raises(Killed):
            compact_output(str(tmp_path / "out"), 1)
    assert set(answers(tmp_path).items()) <= set(expected((0, 12)).items())
    assert run(job(tmp_path)) == 0
    assert answers(tmp_path) == expected((0, 12))
    assert len(output(tmp_path).parts()) == 1


def test_the_plan_file_is_readable_json(tmp_path: Path) -> None:
    _, plan = open_plan(tmp_path)
    document = json.loads((tmp_path / "out/_nightdesk/runs/000002/plan.json").read_text())
    assert document["amendments"]["0"]["part"] == "part-000001-000000.parquet"
    assert document["amendments"]["0"]["rows"] == [[3, 4]]
    assert Plan.from_json(plan.to_json()) == plan

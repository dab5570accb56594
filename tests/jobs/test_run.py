"""A job from its first run to later ones: continued, extended, refused, started over."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from jobs.run import execute
from jobs.status import print_status
from pipeline.answering import Report
from pipeline.config import JobConfig
from pipeline.corpus.readers import Corpus, RowIndex
from pipeline.corpus.text import TextRows
from pipeline.errors import ConfigError, OutputError, Stopped
from pipeline.output.claim import CLAIM
from pipeline.output.plan import Shard
from pipeline.records import Completion, Request
from pipeline.work import JobWork
from tests.stub_engine import (
    FAILS,
    PROMPT,
    ByteTokenizer,
    StubEngine,
    answer_to,
    answers,
    expected,
    job,
    local,
    stub_models,
    write_stories,
)


def run(config: JobConfig, engine: StubEngine | None = None, target: str = "stub", **options: Any) -> int:
    return execute(config, executor=local(engine), models=stub_models(target), **options)


def plans(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "out/_nightdesk/runs").iterdir())


def plan_of(folder: Path, run_number: str = "000001") -> dict[str, Any]:
    document: dict[str, Any] = json.loads((folder / f"out/_nightdesk/runs/{run_number}/plan.json").read_text())
    return document


def summary_of(folder: Path, run_number: str = "000001") -> dict[str, Any]:
    document: dict[str, Any] = json.loads((folder / f"out/_nightdesk/runs/{run_number}/summary.json").read_text())
    return document


def success(folder: Path) -> str | None:
    path = folder / "out/_SUCCESS"
    return path.read_text().strip() if path.exists() else None


# --- a run


def test_a_run_ends_with_every_row_once_a_summary_and_success(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_stories(tmp_path, "a.parquet", 0, 6)
    assert run(job(tmp_path)) == 0
    assert answers(tmp_path) == expected((0, 6))
    assert success(tmp_path) == "000001"
    summary = summary_of(tmp_path)
    assert (summary["rows"], summary["error_rows"], summary["dropped_shards"]) == (6, 0, [])
    assert summary["models"] == {"target": {"model": job(tmp_path).target.model, "fingerprint": "stub"}}
    assert summary["accepted_per_step"] == 1.0
    assert summary["counts"]["requests"] == 6
    assert "pyarrow" in summary["versions"]
    printed = capsys.readouterr().out
    assert "Title [0]" in printed
    assert "re story 0" in printed
    assert "tokens/s, 1.00 accepted tokens per step" in printed
    assert printed.splitlines()[-1] == f'pandas.read_parquet("{tmp_path}/out")'


def test_the_kept_columns_are_those_of_the_input(tmp_path: Path) -> None:
    write_stories(tmp_path, "a.parquet", 0, 6)
    run(job(tmp_path))
    frame, source = pd.read_parquet(tmp_path / "out"), pd.read_parquet(tmp_path / "in")
    kept = ["doc_id", "title", "published_at"]
    pd.testing.assert_frame_equal(frame[kept], source[kept])
    assert str(frame["published_at"].dtype) == "datetime64[us, Europe/Paris]"


def test_the_plan_is_there_before_any_work(tmp_path: Path) -> None:
    write_stories(tmp_path, "a.parquet", 0, 6)

    class Looking(StubEngine):
        def stream(self, requests: Iterable[Request | None]) -> Iterator[Completion]:
            assert plan_of(tmp_path)["shards"] == [[[0, 0, 4, 0]], [[0, 4, 6, 0]]]
            assert len(pd.read_parquet(tmp_path / "out")) == 0
            assert success(tmp_path) is None
            return super().stream(requests)

    assert run(job(tmp_path), Looking()) == 0


def test_too_many_error_rows_end_with_3_and_without_success_now_and_later(tmp_path: Path) -> None:
    write_stories(tmp_path, "a.parquet", 0, 6, n2=FAILS)
    assert run(job(tmp_path, max_error_rate=0.1)) == 3
    assert summary_of(tmp_path)["error_share"] == pytest.approx(1 / 6)
    assert success(tmp_path) is None
    assert run(job(tmp_path, max_error_rate=0.1)) == 3
    assert success(tmp_path) is None
    assert run(job(tmp_path, max_error_rate=0.2)) == 0
    assert success(tmp_path) == "000001"
    assert plans(tmp_path) == ["000001"]


def test_an_empty_folder_is_zero_rows_and_no_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in").mkdir()
    assert run(job(tmp_path)) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert not (tmp_path / "out/_nightdesk/runs").exists()


def test_a_task_that_can_have_no_prompt_is_refused_before_a_plan_is_made(tmp_path: Path) -> None:
    write_stories(tmp_path, "a.parquet", 0, 2)
    with pytest.raises(ConfigError, match=r"summary.*max_new_tokens"):
        run(job(tmp_path, tasks=[{"name": "summary", "prompt": PROMPT, "max_new_tokens": 5000}]))
    assert not (tmp_path / "out").exists()


def test_an_empty_text_file_is_an_error_row_also_where_earlier_plans_skipped_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.txt").write_text("story")
    (tmp_path / "in/b.txt").touch()
    source = {"path": str(tmp_path / "in"), "id": "path", "text": "text"}
    tasks = [{"name": "summary", "prompt": "Say: {text}", "max_new_tokens": 64}]
    config = job(tmp_path, input=source, tasks=tasks, max_error_rate=1.0)
    with monkeypatch.context() as before:
        before.setattr(TextRows, "count", lambda self: RowIndex(1 if self._source.file.size else 0))
        assert run(config) == 0
    assert len(pd.read_parquet(tmp_path / "out")) == 1
    for _ in range(2):
        assert run(config) == 0
        frame = pd.read_parquet(tmp_path / "out").set_index("path")
        assert sorted(frame.index) == ["a.txt", "b.txt"]
        assert frame.loc["b.txt", "error"] == "text is empty"
    assert plans(tmp_path) == ["000001", "000002"]


def test_a_file_name_that_is_not_utf_8_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    bad = os.fsencode(tmp_path / "in") + b"/caf\xe9.jsonl"
    with open(bad, "w") as file:
        file.write('{"doc_id": "a", "body": "story", "title": "t"}\nnot json\n')
    assert run(job(tmp_path, input__keep=["title"], max_error_rate=0.5)) == 0
    frame = pd.read_parquet(tmp_path / "out")
    assert frame["summary"].notna().sum() == 1
    assert "row 2" in frame["error"].dropna().item()
    assert run(job(tmp_path, input__keep=["title"], max_error_rate=0.5)) == 0


def test_documents_that_were_cut_are_counted_once_and_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = [{"name": name, "prompt": PROMPT, "max_new_tokens": 64} for name in ("summary", "again")]
    write_stories(tmp_path, "a.parquet", 0, 6, n2="long " * 2000, n5="longer " * 2000)
    write_stories(tmp_path, "b.parquet", 6, 8)
    assert run(job(tmp_path, tasks=tasks)) == 0
    told = "2 documents were cut to fit the model's context (long: truncate)"
    assert told in capsys.readouterr().out.splitlines()
    assert summary_of(tmp_path)["counts"]["truncated"] == 2
    marks = sorted((tmp_path / "out/_nightdesk/runs/000001/shards").iterdir())
    assert [json.loads(mark.read_text())["counts"]["truncated"] for mark in marks] == [1, 1]
    assert print_status(str(tmp_path / "out")) == 0
    assert "8 rows, 0 failed, 2 cut to fit the context, ended" in capsys.readouterr().out
    write_stories(tmp_path, "c.parquet", 8, 9)
    assert run(job(tmp_path, tasks=tasks)) == 0
    assert "cut to fit" not in capsys.readouterr().out


# --- later runs


def test_with_nothing_to_do_a_run_says_so_and_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_stories(tmp_path, "a.parquet", 0, 6)
    run(job(tmp_path))
    before = everything(tmp_path)
    capsys.readouterr()
    engine = StubEngine()
    assert run(job(tmp_path), engine) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert engine.prompts == []
    assert everything(tmp_path) == before


def everything(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted((folder / "out").rglob("*")) if path.is_file()}


def test_new_files_are_answered_by_a_later_run_and_old_ones_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_stories(tmp_path, "b.parquet", 10, 16)
    run(job(tmp_path))
    write_stories(tmp_path, "a.parquet", 0, 3)  # sorts before what is there
    write_stories(tmp_path, "c.parquet", 20, 22)
    opened: set[str] = set()
    monkeypatch.setattr(Corpus, "_reader", noting(opened, Corpus._reader))
    engine = StubEngine()
    assert run(job(tmp_path), engine) == 0
    assert opened == {"a.parquet", "c.parquet"}
    assert len(engine.prompts) == 5
    assert answers(tmp_path) == expected((10, 16), (0, 3), (20, 22))
    assert success(tmp_path) == "000002"
    assert plan_of(tmp_path, "000002")["salt"] == 0


def noting(opened: set[str], reader: Any) -> Any:
    def note(corpus: Corpus, file: Any) -> Any:
        opened.add(file.relative)
        return reader(corpus, file)

    return note


def test_rows_that_a_file_has_gained_anywhere_are_answered(tmp_path: Path) -> None:
    write_stories(tmp_path, "a.parquet", 5, 11)
    write_stories(tmp_path, "b.parquet", 30, 33)
    run(job(tmp_path))
    write_stories(tmp_path, "a.parquet", 2, 14)
    engine = StubEngine()
    assert run(job(tmp_path), engine) == 0
    assert sorted(engine.prompts) == sorted(f"Say: story {n}" for n in (2, 3, 4, 11, 12, 13))
    assert answers(tmp_path) == expected((2, 14), (30, 33))
    assert run(job(tmp_path), StubEngine()) == 0
    assert plans(tmp_path) == ["000001", "000002"]


def test_a_second_copy_of_a_document_in_a_grown_file_is_a_second_row(tmp_path: Path) -> None:
    lines = [{"doc_id": "a", "body": "one", "title": "t"}, {"doc_id": "b", "body": "two", "title": "t"}]
    (tmp_path / "in").mkdir()
    config = job(tmp_path, input__keep=["title"])
    write_lines(tmp_path, lines)
    run(config)
    write_lines(tmp_path, [lines[0], *lines])
    assert run(config) == 0
    frame = pd.read_parquet(tmp_path / "out")
    assert sorted(frame["doc_id"]) == ["a", "a", "b"]


def write_lines(folder: Path, lines: list[dict[str, str]]) -> None:
    (folder / "in/x.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_file_that_was_only_touched_is_no_work(tmp_path: Path) -> None:
    write_stories(tmp_path, "a.parquet", 0, 6)
    run(job(tmp_path))
    os.utime(tmp_path / "in/a.parquet", (time.time() + 5, time.time() + 5))
    assert run(job(tmp_path)) == 0
    assert plans(tmp_path) == ["000001"]
    assert success(tmp_path) == "000001"


def test_a_changed_document_takes_the_place_of_what_it_was(tmp_path: Path) -> None:
    write_stories(tmp_path, "a.parquet", 0, 6)
    run(job(tmp_path))
    write_stories(tmp_path, "a.parquet", 0, 8, n3="a correction")
    engine = StubEngine()
    assert run(job(tmp_path), engine) == 0
    assert sorted(engine.prompts) == ["Say: a correction", "Say: story 6", "Say: story 7"]
    assert answers(tmp_path) == expected((0, 8)) | {"00003": answer_to("Say: a correction")}
    first = pd.read_parquet(tmp_path / "out/part-000001-000000.parquet")
    assert list(first["doc_id"]) == ["00000", "00001", "00002", "00003"], "in its part, at its place"
    assert plan_of(tmp_path, "000002")["salt"] == 1
    assert summary_of(tmp_path, "000002")["replaced_rows"] == 1
    assert success(tmp_path) == "000002"
    assert run(job(tmp_path), StubEngine()) == 0
    assert plans(tmp_path) == ["000001", "000002"]


def test_a_deleted_document_loses_its_row(tmp_path: Path) -> None:
    write_stories(tmp_path, "a.parquet", 0, 20)
    run(job(tmp_path))
    write_stories(tmp_path, "a.parquet", 1, 20)
    engine = StubEngine()
    assert run(job(tmp_path), engine) == 0
    assert engine.prompts == []
    assert answers(tmp_path) == expected((1, 20))
    assert summary_of(tmp_path, "000002")["removed_rows"] == 1
    assert run(job(tmp_path), engine) == 0
    assert plans(tmp_path) == ["000001", "000002"]


def test_more_deletions_than_a_tenth_are_refused_unless_they_are_allowed(tmp_path: Path) -> None:
    write_stories(tmp_path, "a.parquet", 0, 6)
    write_stories(tmp_path, "b.parquet", 6, 8)
    run(job(tmp_path))
    (tmp_path / "in/a.parquet").unlink()
    with pytest.raises(OutputError, match=r"6 of 8 .*00000, .* and 3 more.*--allow-deletions"):
        run(job(tmp_path))
    assert answers(tmp_path) == expected((0, 8))
    assert success(tmp_path) == "000001"
    assert run(job(tmp_path), allow_deletions=True) == 0
    assert answers(tmp_path) == expected((6, 8))
    assert run(job(tmp_path)) == 0
    (tmp_path / "in/b.parquet").unlink()
    with pytest.raises(OutputError, match="--allow-deletions"):
        run(job(tmp_path))


def test_a_part_that_somebody_removed_is_answered_again(tmp_path: Path) -> None:
    write_stories(tmp_path, "a.parquet", 0, 10)
    run(job(tmp_path))
    (tmp_path / "out/part-000001-000001.parquet").unlink()
    assert run(job(tmp_path)) == 0
    assert answers(tmp_path) == expected((0, 10))


# --- limits


def test_a_limit_narrows_a_run_and_the_rest_follows_later(tmp_path: Path) -> None:
    write_stories(tmp_path, "a.parquet", 0, 6)
    write_stories(tmp_path, "b.parquet", 6, 12)
    assert run(job(tmp_path), limit=8) == 0
    assert answers(tmp_path) == expected((0, 8))
    assert run(job(tmp_path), limit=8) == 0
    assert plans(tmp_path) == ["000001"]
    assert run(job(tmp_path), limit=3) == 0
    assert answers(tmp_path) == expected((0, 8))
    assert run(job(tmp_path, input__limit=9)) == 0
    assert answers(tmp_path) == expected((0, 9))
    assert run(job(tmp_path)) == 0
    assert answers(tmp_path) == expected((0, 12))
    assert run(job(tmp_path)) == 0
    assert plans(tmp_path) == ["000001", "000002", "000003"]


def test_a_limit_in_a_file_that_has_grown_at_its_front_loses_no_row(tmp_path: Path) -> None:
    write_stories(tmp_path, "a.parquet", 4, 10)
    run(job(tmp_path))
    write_stories(tmp_path, "a.parquet", 0, 10)
    assert run(job(tmp_path), limit=2) == 0
    assert answers(tmp_path) == expected((4, 10), (0, 2))
    assert run(job(tmp_path)) == 0
    assert answers(tmp_path) == expected((0, 10))


# --- interrupted runs


class Interrupted(StubEngine):
    """An engine during whose work somebody presses Ctrl-C, after some answers."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.after = after

    def stream(self, requests: Iterable[Request | None]) -> Iterator[Completion]:
        for number, completion in enumerate(super().stream(requests)):
            if number == self.after:
                raise KeyboardInterrupt
            yield completion


def stop_after(config: JobConfig, count: int) -> str:
    with pytest.raises(Stopped) as stopped:
        run(config, Interrupted(count))
    return str(stopped.value)


def test_an_interrupted_run_says_how_far_it_came_and_is_continued(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_stories(tmp_path, "a.parquet", 0, 24)
    message = stop_after(job(tmp_path), 16)
    assert "of 24 rows are published" in message
    published = len(pd.read_parquet(tmp_path / "out"))
    assert 0 < published < 24
    assert not (tmp_path / "out" / CLAIM).exists()
    engine = StubEngine()
    assert run(job(tmp_path), engine) == 0
    assert f"continuing run 000001: {published} of 24 rows are there" in capsys.readouterr().err
    assert len(engine.prompts) == 24 - published
    assert answers(tmp_path) == expected((0, 24))
    assert summary_of(tmp_path)["counts"]["requests"] == 24
    assert plans(tmp_path) == ["000001"]


def test_an_open_plan_is_continued_as_it_is_and_what_is_new_is_planned_after_it(tmp_path: Path) -> None:
    write_stories(tmp_path, "a.parquet", 0, 12)
    stop_after(job(tmp_path), 6)
    write_stories(tmp_path, "b.parquet", 12, 14)
    assert run(job(tmp_path)) == 0
    assert answers(tmp_path) == expected((0, 14))
    assert summary_of(tmp_path, "000001")["rows"] == 12
    assert success(tmp_path) == "000002"


def test_shards_of_a_file_that_grew_under_an_open_plan_are_given_up_and_planned_anew(tmp_path: Path) -> None:
    write_stories(tmp_path, "a.parquet", 0, 12)
    write_stories(tmp_path, "b.parquet", 12, 20)
    stop_after(job(tmp_path), 9)
    write_stories(tmp_path, "b.parquet", 12, 23)
    assert run(job(tmp_path)) == 0
    assert answers(tmp_path) == expected((0, 23))
    summary = summary_of(tmp_path, "000001")
    assert summary["dropped_shards"]
    assert summary["dropped_files"] == [str(tmp_path / "in/b.parquet")]
    assert success(tmp_path) == "000002"


def test_a_run_that_was_killed_before_success_is_closed_by_the_next(tmp_path: Path) -> None:
    write_stories(tmp_path, "a.parquet", 0, 4)
    run(job(tmp_path))
    (tmp_path / "out/_SUCCESS").unlink()
    assert run(job(tmp_path)) == 0
    assert success(tmp_path) == "000001"


# --- foreign outputs and fresh starts


def test_a_foreign_fingerprint_is_refused_with_the_keys_that_differ(tmp_path: Path) -> None:
    write_stories(tmp_path, "a.parquet", 0, 4)
    run(job(tmp_path))
    before = everything(tmp_path)
    other = job(tmp_path, seed=7, tasks=[{"name": "summary", "prompt": "Tell: {body}", "max_new_tokens": 64}])
    with pytest.raises(OutputError, match=r"seed \(was 0, is 7\); tasks\.summary\.prompt .*--fresh") as refusal:
        run(other)
    assert "target.model" not in str(refusal.value)
    with pytest.raises(OutputError, match=r"target\.model \(was \"stub\", is \"others\"\)"):
        run(job(tmp_path), target="others")
    assert everything(tmp_path) == before


@pytest.mark.parametrize(
    ("changes", "key"), [({"input__keep": ["title"]}, r"input\.keep"), ({"input__id": None}, r"input\.id")]
)
def test_other_columns_are_refused_too(tmp_path: Path, changes: dict[str, Any], key: str) -> None:
    write_stories(tmp_path, "a.parquet", 0, 4)
    run(job(tmp_path))
    with pytest.raises(OutputError, match=key):
        run(job(tmp_path, **changes))


def test_an_open_plan_of_another_job_is_refused(tmp_path: Path) -> None:
    write_stories(tmp_path, "a.parquet", 0, 12)
    stop_after(job(tmp_path), 6)
    with pytest.raises(OutputError, match="seed"):
        run(job(tmp_path, seed=7))


def test_a_fresh_start_answers_everything_again_under_a_new_number_and_salt(tmp_path: Path) -> None:
    write_stories(tmp_path, "a.parquet", 0, 6)
    run(job(tmp_path))
    other = job(tmp_path, seed=7, input__keep=["title"])
    for number, salt in (("000002", 1), ("000003", 2)):
        engine = StubEngine()
        assert run(other, engine, fresh=True) == 0
        assert len(engine.prompts) == 6
        assert plan_of(tmp_path, number)["salt"] == salt
        assert success(tmp_path) == number
        assert answers(tmp_path) == expected((0, 6))
        assert "published_at" not in pd.read_parquet(tmp_path / "out").columns
    write_stories(tmp_path, "b.parquet", 6, 8)
    assert run(other) == 0
    assert plan_of(tmp_path, "000004")["salt"] == 2
    assert answers(tmp_path) == expected((0, 8))


def test_a_fresh_start_is_refused_while_somebody_is_at_work(tmp_path: Path) -> None:
    write_stories(tmp_path, "a.parquet", 0, 4)
    run(job(tmp_path))
    holder = {"id": "other", "host": "elsewhere", "pid": 7, "heartbeat": time.time()}
    (tmp_path / "out" / CLAIM).write_text(json.dumps(holder))
    with pytest.raises(OutputError, match="process 7 on elsewhere"):
        run(job(tmp_path), fresh=True)
    assert answers(tmp_path) == expected((0, 4))


def test_lost_plans_are_noticed_and_a_fresh_start_mends_them(tmp_path: Path) -> None:
    write_stories(tmp_path, "a.parquet", 0, 4)
    run(job(tmp_path))
    shutil.rmtree(tmp_path / "out/_nightdesk")
    with pytest.raises(OutputError, match="not its plan"):
        run(job(tmp_path))
    assert run(job(tmp_path), fresh=True) == 0
    assert answers(tmp_path) == expected((0, 4))
    assert plans(tmp_path) == ["000002"]


def test_foreign_files_in_the_folder_are_left_alone(tmp_path: Path) -> None:
    write_stories(tmp_path, "a.parquet", 0, 4)
    (tmp_path / "out").mkdir()
    (tmp_path / "out/_notes.md").write_text("mine")
    run(job(tmp_path))
    assert run(job(tmp_path), fresh=True) == 0
    assert (tmp_path / "out/_notes.md").read_text() == "mine"


# --- executors


class Backwards:
    """An executor that is given shards and answers them one by one, last first."""

    def __init__(self) -> None:
        self.given: list[int] = []

    def run(self, work: JobWork, shards: list[Shard], report: Report) -> None:
        self.given = [shard.index for shard in shards]
        for shard in reversed(shards):
            work.answerer(StubEngine(), ByteTokenizer()).run([shard], report)

    def describe(self) -> str:
        return "backwards"


def test_an_executor_decides_the_order_and_is_named_in_the_summary(tmp_path: Path) -> None:
    write_stories(tmp_path, "a.parquet", 0, 10)
    executor = Backwards()
    assert execute(job(tmp_path), executor=executor, models=stub_models()) == 0
    assert executor.given == [0, 1, 2]
    assert answers(tmp_path) == expected((0, 10))
    assert summary_of(tmp_path)["executor"] == "backwards"


def test_beside_another_run_work_begins_at_the_other_end(tmp_path: Path) -> None:
    write_stories(tmp_path, "a.parquet", 0, 10)
    (tmp_path / "out/_nightdesk").mkdir(parents=True)
    holder = {"id": "other", "host": "elsewhere", "pid": 7, "heartbeat": time.time()}
    (tmp_path / "out" / CLAIM).write_text(json.dumps(holder))
    executor = Backwards()
    assert execute(job(tmp_path), executor=executor, models=stub_models()) == 0
    assert executor.given == [2, 1, 0]


def test_an_output_inside_the_input_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    write_stories(tmp_path, "a.parquet", 0, 2)
    with pytest.raises(OutputError, match="its own parts"):
        run(job(tmp_path, output__path=str(tmp_path / "in/out")))
    assert not (tmp_path / "in/out").exists()


@pytest.mark.parametrize("name", ["notes.txt", "other.parquet"])
@pytest.mark.parametrize("fresh", [False, True])
def test_a_folder_with_files_of_somebody_else_is_refused_because_pandas_reads_them_too(
    tmp_path: Path, name: str, fresh: bool
) -> None:
    write_stories(tmp_path, "a.parquet", 0, 2)
    (tmp_path / "out").mkdir()
    (tmp_path / "out/_README").write_text("hidden")
    (tmp_path / "out" / name).write_text("mine")
    with pytest.raises(OutputError, match=name):
        run(job(tmp_path), fresh=fresh)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["_README", name]

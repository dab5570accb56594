"""What is said of a run before it is begun is what the run says of itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jobs.compact import compact_output
from jobs.models import asked
from jobs.prospect import Prospect, foresee
from jobs.run import execute
from pipeline.config import JobConfig
from pipeline.corpus.listing import list_files
from pipeline.errors import OutputError, Stopped
from pipeline.output.folder import Output
from pipeline.output.local_store import LocalStore
from pipeline.records import Completion, Request
from tests.stub_engine import FAILS, StubEngine, job, local, stub_models, write_stories


class Interrupted(StubEngine):
    """An engine during whose work somebody presses Ctrl-C, after some answers."""

    def __init__(self, after: int) -> None:
        super().__init__(slots=1)
        self.after = after

    def stream(self, requests: Iterable[Request | None]) -> Iterator[Completion]:
        for number, completion in enumerate(super().stream(requests)):
            if number == self.after:
                raise KeyboardInterrupt
            yield completion


def run(config: JobConfig, engine: StubEngine | None = None, **options: Any) -> int:
    return execute(config, executor=local(engine), models=stub_models(), **options)


def foreseen(config: JobConfig) -> Prospect:
    """Looked at without a trace in the output."""
    output = Output.of(config.output)
    before = sorted(Path(config.output.path).rglob("*"))
    ask = replace(asked(config, stub_models(), None, False), retry_failed=config.retry_failed)
    found = foresee(config, output, list_files(config.input), ask)
    assert sorted(Path(config.output.path).rglob("*")) == before
    return found


def answered(config: JobConfig) -> int:
    prospect, files = foreseen(config), list_files(config.input)
    return prospect.answered(files, [prospect.rows_of[file.path] for file in files])


def announcement(config: JobConfig, capsys: pytest.CaptureFixture[str], **options: Any) -> str:
    """What `run` says when it has planned, behind the run's name."""
    capsys.readouterr()
    assert run(config, **options) == 0
    (line,) = [line for line in capsys.readouterr().err.splitlines() if " new" in line or " to re" in line]
    return line.partition(": ")[2]


def test_a_first_run_has_all_documents(tmp_path: Path) -> None:
    write_stories(tmp_path, "a.parquet", 0, 9)
    prospect = foreseen(job(tmp_path))
    assert (prospect.said(), prospect.rows, prospect.parts) == ("a run has 9 new (adds 3 parts)", 9, 3)
    assert answered(job(tmp_path)) == 0


def test_changed_deleted_renamed_and_new_documents_are_counted_as_the_run_counts_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NIGHTDESK_EVENTS", "text")
    write_stories(tmp_path, "a.parquet", 0, 30)
    write_stories(tmp_path, "b.parquet", 30, 32)
    assert run(job(tmp_path)) == 0
    assert foreseen(job(tmp_path)).said() == "a run has nothing to do"
    assert answered(job(tmp_path)) == 32
    write_stories(tmp_path, "a.parquet", 2, 33, n7="a correction", n30="one id, two documents")
    prospect = foreseen(job(tmp_path))
    assert prospect.said() == "a run has 3 new, 1 to replace, 2 to remove (adds 1 part)"
    assert answered(job(tmp_path)) == 29
    assert announcement(job(tmp_path), capsys) in prospect.said()
    assert foreseen(job(tmp_path)).said() == "a run has nothing to do"


def test_rows_that_only_go_add_no_part(tmp_path: Path) -> None:
    write_stories(tmp_path, "a.parquet", 0, 20)
    run(job(tmp_path))
    write_stories(tmp_path, "a.parquet", 1, 20)
    assert foreseen(job(tmp_path)).said() == "a run has 1 to remove"
    assert answered(job(tmp_path)) == 19


def test_what_a_run_would_refuse_is_refused_in_its_words(tmp_path: Path) -> None:
    write_stories(tmp_path, "a.parquet", 0, 14)
    run(job(tmp_path))
    tell = [{"name": "summary", "prompt": "Tell: {body}", "max_new_tokens": 64}]
    other = job(tmp_path, tasks=tell)
    kept = job(tmp_path, input__keep=["title"])
    write_stories(tmp_path, "a.parquet", 2, 14)
    for config in (job(tmp_path), other, kept):
        with pytest.raises(OutputError) as refused:
            run(config)
        with pytest.raises(OutputError) as seen:
            foreseen(config)
        assert str(seen.value) == str(refused.value)


def test_a_run_that_would_be_continued_is_named_with_what_is_left(tmp_path: Path) -> None:
    write_stories(tmp_path, "a.parquet", 0, 12)
    with pytest.raises(Stopped):
        run(job(tmp_path), Interrupted(5))
    prospect = foreseen(job(tmp_path))
    assert prospect.said() == (
        "a run continues run 000001: 4 of 12 rows are there, 8 left; then it plans what has changed since"
    )
    assert (prospect.rows, prospect.parts, answered(job(tmp_path))) == (8, 2, 4)


def test_a_compaction_that_would_be_continued_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_stories(tmp_path, "a.parquet", 0, 12)
    run(job(tmp_path))

    class Killed(BaseException):
        pass

    def dying(self: LocalStore, name: str) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "remove", dying)
        patch.setattr(LocalStore, "probe", lambda self: None)
        with pytest.raises(Killed):
            compact_output(str(tmp_path / "out"), 1)
    assert "compaction 000002 first" in foreseen(job(tmp_path)).said()
    assert answered(job(tmp_path)) == 12


def test_a_limit_narrows_what_is_new_and_what_counts_as_answered(tmp_path: Path) -> None:
    write_stories(tmp_path, "a.parquet", 0, 12)
    run(job(tmp_path, input__limit=4))
    limited = job(tmp_path, input__limit=6)
    prospect = foreseen(limited)
    assert prospect.said() == "a run has 2 new (adds 1 part)"
    assert prospect.answered(list_files(limited.input), [6]) == 4


def test_failed_rows_are_counted_where_the_job_asks_again(tmp_path: Path) -> None:
    write_stories(tmp_path, "a.parquet", 0, 12, n3=FAILS)
    run(job(tmp_path, max_error_rate=0.5))
    assert foreseen(job(tmp_path)).said() == "a run has nothing to do"
    assert foreseen(job(tmp_path, retry_failed=True)).said() == "a run has 1 to replace"

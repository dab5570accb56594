"""Every document becomes one row, whatever becomes of its requests, and the engine is kept full."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from pipeline.config import JobConfig
from pipeline.corpus.listing import list_files
from pipeline.errors import Stopped
from pipeline.output.folder import Output
from pipeline.output.plan import Plan
from pipeline.output.store import open_store
from pipeline.planning import Ask, make_plan
from pipeline.records import Completion, Request
from pipeline.stats import Progress
from pipeline.work import JobWork
from tests.stub_engine import (
    CONTEXT,
    FAILS,
    ByteTokenizer,
    StubEngine,
    answer_to,
    answers,
    expected,
    job,
    write_stories,
)

TWO_TASKS = [
    {"name": "summary", "prompt": "Say: {body}", "max_new_tokens": 64},
    {"name": "beat", "prompt": "Beat: {title}", "max_new_tokens": 64},
]


def planned(config: JobConfig) -> JobWork:
    output = Output(open_store(config.output.path))
    ask = Ask({"seed": 0}, CONTEXT, None, fresh=False)
    plan = make_plan(config, output, 1, [], list_files(config.input), ask)
    assert plan is not None
    output.begin(output.create_plan(plan))
    return JobWork(config, plan)


def answer(work: JobWork, engine: Any = None) -> Progress:
    reports: list[Progress] = []
    work.answerer(engine or StubEngine(), ByteTokenizer()).run(work.plan.shards, reports.append)
    return sum(reports, Progress())


def frame(folder: Path) -> pd.DataFrame:
    return pd.read_parquet(folder / "out").sort_values("doc_id").set_index("doc_id")


def test_every_document_is_answered_in_its_own_row(tmp_path: Path) -> None:
    write_stories(tmp_path, "a.parquet", 0, 7)
    write_stories(tmp_path, "b.parquet", 7, 13)
    work = planned(job(tmp_path, tasks=TWO_TASKS))
    total = answer(work)
    assert answers(tmp_path) == expected((0, 13))
    found = frame(tmp_path)
    assert list(found["beat"]) == [answer_to(f"Beat: Title [{n}]") for n in range(13)]
    assert list(found["title"]) == [f"Title [{n}]" for n in range(13)]
    assert list(found["summary_tokens"]) == [len(text.encode()) for text in found["summary"]]
    assert set(found["summary_finish"]) == {"stop"}
    assert found[["error", "summary_error", "summary_logprob"]].isna().all(axis=None)
    assert (total.rows_done, total.error_rows, total.requests) == (13, 0, 26)
    assert (total.drafted, total.accepted, total.steps) == (104, 52, 52)
    assert total.shards_done == len(work.plan.shards) == 4


@pytest.mark.parametrize("slots", [1, 12])
def test_equal_requests_are_generated_once_whether_in_flight_or_answered(tmp_path: Path, slots: int) -> None:
    write_stories(tmp_path, "a.parquet", 0, 12, **{f"n{n}": "the wire copy" for n in range(1, 12, 2)})
    engine = StubEngine(slots, patient=True)
    total = answer(planned(job(tmp_path, output__rows_per_shard=12)), engine)
    assert engine.prompts.count("Say: the wire copy") == 1
    assert total.requests == 7
    found = frame(tmp_path)["summary"]
    assert list(found[1::2]) == [answer_to("Say: the wire copy")] * 6
    assert list(found[::2]) == [answer_to(f"Say: story {n}") for n in range(0, 12, 2)]


def test_the_same_prompt_under_two_tasks_is_two_requests(tmp_path: Path) -> None:
    write_stories(tmp_path, "a.parquet", 0, 1)
    twice = [dict(TWO_TASKS[0]), dict(TWO_TASKS[0], name="again")]
    engine = StubEngine()
    answer(planned(job(tmp_path, tasks=twice)), engine)
    assert engine.prompts == ["Say: story 0"] * 2


def test_one_failing_row_is_an_error_row_among_answers(tmp_path: Path) -> None:
    write_stories(tmp_path, "a.parquet", 0, 100, n42=FAILS)
    total = answer(planned(job(tmp_path, output__rows_per_shard=50, tasks=TWO_TASKS)))
    found = frame(tmp_path)
    bad = found.loc["00042"]
    assert pd.isna(bad["summary"])
    assert (bad["summary_finish"], bad["summary_tokens"]) == ("error", 0)
    assert bad["summary_error"] == "logits are not finite"
    assert bad["beat"] == answer_to("Beat: Title [42]")
    assert found["summary"].notna().sum() == 99
    assert (total.rows_done, total.error_rows) == (100, 1)


def test_a_document_without_text_is_an_error_row_and_asks_nothing(tmp_path: Path) -> None:
    write_stories(tmp_path, "a.parquet", 0, 4, n1="", n2="  ")
    engine = StubEngine()
    total = answer(planned(job(tmp_path)), engine)
    assert len(engine.prompts) == 2
    found = frame(tmp_path)
    assert list(found["error"].notna()) == [False, True, True, False]
    assert list(found["summary_finish"]) == ["stop", "error", "error", "stop"]
    assert list(found["title"]) == [f"Title [{n}]" for n in range(4)]
    assert total.error_rows == 2


def test_a_shard_of_nothing_but_error_rows_is_published(tmp_path: Path) -> None:
    write_stories(tmp_path, "a.parquet", 0, 6, **{f"n{n}": "" for n in range(6)})
    total = answer(planned(job(tmp_path)))
    assert list(frame(tmp_path)["error"].notna()) == [True] * 6
    assert total.shards_done == 2


def test_a_prompt_that_cannot_be_made_is_an_error_of_its_task(tmp_path: Path) -> None:
    write_stories(tmp_path, "a.parquet", 0, 2, n1="long " * CONTEXT)
    tasks = [dict(TWO_TASKS[0], long="error"), TWO_TASKS[1]]
    answer(planned(job(tmp_path, tasks=tasks)))
    bad = frame(tmp_path).loc["00001"]
    assert "long" in bad["summary_error"]
    assert bad["beat"] == answer_to("Beat: Title [1]")
    assert pd.isna(bad["error"])


def test_the_engine_is_full_across_the_borders_of_shards(tmp_path: Path) -> None:
    write_stories(tmp_path, "a.parquet", 0, 60)
    engine = StubEngine(slots=8, patient=True)
    answer(planned(job(tmp_path, output__rows_per_shard=3)), engine)
    assert engine.in_flight == [8] * 53 + [7, 6, 5, 4, 3, 2, 1]


def test_a_shard_that_somebody_else_has_published_is_not_read(tmp_path: Path) -> None:
    write_stories(tmp_path, "a.parquet", 0, 8)
    work = planned(job(tmp_path))
    first = JobWork(work.config, work.plan)
    first.answerer(StubEngine(), ByteTokenizer()).run(work.plan.shards[:1], lambda progress: None)
    engine = StubEngine()
    total = answer(work, engine)
    assert sorted(engine.prompts) == [f"Say: story {n}" for n in range(4, 8)]
    assert (total.rows_done, total.shards_done) == (8, 2)
    assert answers(tmp_path) == expected((0, 8))


def test_a_file_that_changes_while_it_is_read_is_not_published(tmp_path: Path) -> None:
    write_stories(tmp_path, "a.parquet", 0, 4)
    work = planned(job(tmp_path))
    write_stories(tmp_path, "a.parquet", 0, 4, n2="another story")
    with pytest.raises(Stopped, match=r"a\.parquet changed"):
        answer(work)
    assert work.output().parts() == {}


class Forgetful(StubEngine):
    """An engine that ends without answering everything."""

    def stream(self, requests: Iterable[Request | None]) -> Iterator[Completion]:
        answered = super().stream(requests)
        next(answered)
        yield from answered


def test_an_answer_that_never_comes_is_a_broken_invariant_not_a_missing_row(tmp_path: Path) -> None:
    write_stories(tmp_path, "a.parquet", 0, 4)
    with pytest.raises(AssertionError, match=r"shards \[0\] have rows without answers"):
        answer(planned(job(tmp_path)), Forgetful())


def test_work_can_be_sent_to_another_process(tmp_path: Path) -> None:
    import pickle

    write_stories(tmp_path, "a.parquet", 0, 4)
    work = planned(job(tmp_path))
    copy = pickle.loads(pickle.dumps(work))
    assert isinstance(copy.plan, Plan)
    answer(copy)
    assert answers(tmp_path) == expected((0, 4))


class SampleEngine(StubEngine):
    """Says which request it answers, so that samples differ, with log probabilities where they are asked for."""

    def __init__(self) -> None:
        super().__init__(slots=5)
        self.requests: list[Request] = []

    def stream(self, requests: Iterable[Request | None]) -> Iterator[Completion]:
        for completion in super().stream(self._noted(requests)):
            [asked] = [r for r in self.requests if r.key == completion.key]
            scores = [-0.5] * len(completion.token_ids) if asked.params.logprobs != "none" else None
            yield replace(completion, text=completion.key[:8], logprobs=scores)

    def _noted(self, requests: Iterable[Request | None]) -> Iterator[Request | None]:
        for request in requests:
            if request is not None:
                self.requests.append(request)
            yield request


def test_samples_are_lists_of_one_length_whatever_fails(tmp_path: Path) -> None:
    write_stories(tmp_path, "a.parquet", 0, 6, n2="", n4=FAILS)
    task = {"name": "summary", "prompt": "Say: {body}", "max_new_tokens": 64, "n": 3, "logprobs": "raw"}
    engine = SampleEngine()
    total = answer(planned(job(tmp_path, tasks=[task])), engine)
    found = frame(tmp_path)
    assert len(found) == 6
    for suffix in ("", "_finish", "_tokens", "_logprob", "_error"):
        assert {len(cell) for cell in found[f"summary{suffix}"]} == {3}, suffix
    assert all(len(set(found["summary"][i])) == 3 for i in ("00000", "00001", "00003", "00005"))
    assert list(found["summary_finish"]["00002"]) == ["error"] * 3
    assert list(found["summary_error"]["00004"]) == ["logits are not finite"] * 3
    assert list(found["summary"]["00004"]) == [None] * 3
    tokens, scores = found["summary_tokens"]["00000"], found["summary_logprob"]["00000"]
    assert list(scores) == [-0.5 * n for n in tokens]
    assert all(request.params.n == 1 for request in engine.requests)
    assert len({request.key for request in engine.requests}) == len(engine.requests) == total.requests == 15
    assert (total.rows_done, total.error_rows) == (6, 2)
    again = pd.read_parquet(tmp_path / "out")
    assert str(again["summary"].dtype) == "object"


def test_log_probability_is_the_sum_over_the_answer(tmp_path: Path) -> None:
    write_stories(tmp_path, "a.parquet", 0, 3)
    task = {"name": "summary", "prompt": "Say: {body}", "max_new_tokens": 64, "logprobs": "law"}
    answer(planned(job(tmp_path, tasks=[task])), SampleEngine())
    found = frame(tmp_path)
    assert list(found["summary_logprob"]) == [-0.5 * n for n in found["summary_tokens"]]


def test_equal_texts_share_their_samples(tmp_path: Path) -> None:
    write_stories(tmp_path, "a.parquet", 0, 4, n1="the wire copy", n3="the wire copy")
    task = {"name": "summary", "prompt": "Say: {body}", "max_new_tokens": 64, "n": 2}
    total = answer(planned(job(tmp_path, tasks=[task])), SampleEngine())
    found = frame(tmp_path)
    assert list(found["summary"]["00001"]) == list(found["summary"]["00003"])
    assert total.requests == 6

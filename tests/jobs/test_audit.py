"""`audit`, and `audit: true`: right engines of every rule and drafter pass, wrong ones end with exit code 5."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from actors.auditor import audit_on_ray
from jobs import audit as audit_job_module
from jobs import cli
from jobs.audit import audit_job, choose_questions
from jobs.run import execute
from pipeline import audit, speculation
from pipeline.audit import END, Audit, Drawn, GreedyAudit, GreedyText, NextToken, compare
from pipeline.config import JobConfig
from pipeline.engine import auditing, verifier
from pipeline.engine.auditing import Effort, KeepsOneMore
from pipeline.engine.laws import Laws
from pipeline.errors import CorpusError
from pipeline.messages import Verdict, VerifyReply
from tests.actors.tiny_job import nearly, texts
from tests.models import tiny_folder
from tests.stub_engine import FAILS, job, local, stub_models, write_stories

TASK: dict[str, Any] = {"name": "answer", "prompt": "Retell: {body}", "max_new_tokens": 16, "temperature": 0.8}
QUICK = Effort(greedy_tokens=16, prefixes=3, pilot=4, samples=96, most_samples=192)
SMALL = {"num_hidden_layers": 1, "hidden_size": 16, "head_dim": 4, "initializer_range": 0.6}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    target = tiny_folder(root / "target", "llama", seed=4, **SMALL)
    return {"target": target, "draft": nearly(target, root / "draft")}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer and smaller samples: what is wrong here is wrong by far."""
    monkeypatch.setattr(auditing, "EFFORT", QUICK)
    monkeypatch.setattr(audit_job_module, "QUESTIONS", 3)


Job = Callable[..., JobConfig]


@pytest.fixture
def tiny(tmp_path: Path, models: dict[str, Path]) -> Job:
    """A job over twenty documents; some keys of it may not be available to job files yet."""
    documents = tmp_path / "documents.jsonl"
    documents.write_text("".join(json.dumps({"id": str(i), "body": t}) + "\n" for i, t in enumerate(texts(20))))

    def make(
        draft: str = "model",
        rule: str = "ratio",
        dtype: str = "float32",
        tasks: tuple[dict[str, Any], ...] = (TASK,),
        **more: Any,
    ) -> JobConfig:
        drafts = {"none": [], "ngram": [{"kind": "ngram"}]}
        model = [{"kind": "model", "model": str(models["draft"]), "dtype": dtype, "sampling": "sample"}]
        mapping = {
            "name": "tiny",
            "input": {"path": str(documents), "id": "id", "text": "body"},
            "output": {"path": str(tmp_path / "out")},
            "target": {"model": str(models["target"]), "dtype": dtype},
            "draft": drafts.get(draft, model),
            "decoding": {"batch": 64, "draft_tokens": 3, "rule": rule},
            "tasks": list(tasks),
        }
        return JobConfig.model_validate(mapping | more)

    return make


def found_by(config: JobConfig) -> Audit:
    return auditing.audit(config, choose_questions(config), lambda line: None)


# --- right engines


@pytest.mark.parametrize("rule", ["ratio", "block", "coupled"])
@pytest.mark.parametrize("draft", ["none", "ngram", "model"])
def test_a_right_engine_passes_and_a_wrong_one_is_found_out(tiny: Job, draft: str, rule: str) -> None:
    found = found_by(tiny(draft, rule))
    assert found.failure is None
    assert (found.rule, found.draft, found.dtype) == (rule, draft, "float32")
    assert found.greedy.equal == len(found.greedy.texts) == 3
    assert found.wrong.rejected
    assert not found.sampled.rejected
    together = found.sampled.together
    assert (together.drafted > 0) == (draft != "none")
    if draft != "none":
        assert 0 < together.accepted < together.drafted
        assert all(test.drafted > 0 for test in found.sampled.tests)
    assert ("the job has no draft" in " ".join(found.notes)) == (draft == "none")


def test_parameters_of_every_task_are_part_of_it(tiny: Job) -> None:
    tasks = (
        TASK | {"top_p": 0.8, "repetition_penalty": 1.3, "min_new_tokens": 2},
        TASK | {"name": "other", "temperature": 0.0, "bad_words": ["e", "th"], "presence_penalty": 0.5, "stop": ["q"]},
        TASK | {"name": "third", "top_k": 12, "min_p": 0.02, "logit_bias": {70: 4.0}, "n": 3, "logprobs": "law"},
    )
    found = found_by(tiny(tasks=tasks))
    assert found.failure is None
    assert [text.task for text in found.greedy.texts] == ["answer", "other", "third"]
    assert {test.name.split("/")[1].split()[0] for test in found.sampled.tests} == {"answer", "other", "third"}
    assert "greedy tasks (other) were sampled at temperature 1" in found.notes
    assert "stop strings were left out: they cut texts and change no law" in found.notes


def test_texts_that_end_early_are_part_of_it(tiny: Job) -> None:
    found = found_by(tiny("ngram", tasks=(TASK | {"logit_bias": {257: 6.0}},)))  # 257 is the end of text
    assert found.failure is None
    assert any(text.compared < 16 for text in found.greedy.texts)


def test_16_bit_models_are_judged_by_a_margin_that_suits_them(tiny: Job) -> None:
    found = found_by(tiny(dtype="bfloat16"))
    assert found.failure is None
    assert found.greedy.tie == audit.TIES["bfloat16"] > audit.TIES["float32"]


# --- wrong engines


def accept_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under every rule."""
    monkeypatch.setattr(speculation, "judge_ratio", lambda p, q, lengths, u: lengths)
    monkeypatch.setattr(speculation, "accepted_tokens", lambda a, u, rule: (a >= 0).long().sum(-1))
    match = verifier.match

    def matched(laws: Any, base: Any, drafted: Any, keys: Any, starts: Any) -> Any:
        _, next_token = match(laws, base, drafted, keys, starts)
        return drafted.lengths_B, next_token

    monkeypatch.setattr(verifier, "match", matched)


def redraw_from_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a rejection: greedy texts stay right, only the sampled law shows it."""
    draw = Laws.draw
    monkeypatch.setattr(
        Laws, "draw", lambda self, rows, ids, probs, *more: draw(self, rows, ids, torch.zeros_like(probs), *more)
    )


def race_with_other_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """The target of `coupled` draws at another temperature than it should; greedy rows do not race to any effect."""
    race = speculation.race
    monkeypatch.setattr(speculation, "race", lambda ids, logs, u: race(ids, logs * 2, u))


BUGS = [
    (accept_everything, "model", "ratio", "greedy"),
    (accept_everything, "ngram", "coupled", "greedy"),
    (redraw_from_the_target, "ngram", "ratio", "sampled law"),
    (redraw_from_the_target, "ngram", "block", "sampled law"),
    (race_with_other_noise, "none", "coupled", "sampled law"),
]


@pytest.mark.parametrize(("plant", "draft", "rule", "part"), BUGS)
def test_a_wrong_engine_ends_with_5_and_the_part_that_failed(
    plant: Callable[[pytest.MonkeyPatch], None],
    draft: str,
    rule: str,
    part: str,
    tiny: Job,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plant(monkeypatch)
    if plant is redraw_from_the_target:
        monkeypatch.setattr(auditing, "EFFORT", replace(QUICK, samples=384, most_samples=384))  # a smaller mistake
    assert audit_job(tiny(draft, rule)) == 5
    printed = capsys.readouterr()
    assert printed.err.splitlines()[-1].startswith(f"nightdesk: audit failed: {part}: ")
    assert "FAILED" in printed.out


def test_a_penalty_that_is_forgotten_shows_in_the_greedy_texts(tiny: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifier, "edited", lambda logits, *rest: logits)
    found = found_by(tiny("none", tasks=(TASK | {"frequency_penalty": 1.5},)))
    assert found.failure is not None
    assert found.failure.startswith("greedy: document ")
    assert "no near-tie" in found.failure
    assert found.greedy.rate > 0


def test_a_near_tie_in_a_greedy_text_is_reported_and_does_not_fail(tiny: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's second choice, where the margin allows for it."""
    greedy = auditing._Audit._generate

    def nudged(self: Any, requests: Any, wrong: bool = False) -> Any:
        answers = greedy(self, requests, wrong)
        if requests[0].key.startswith("audit/greedy"):
            answers[0] = replace(answers[0], token_ids=[*answers[0].token_ids[:-1], 65])
        return answers

    monkeypatch.setattr(auditing._Audit, "_generate", nudged)
    config = tiny("ngram")
    found = found_by(config)
    difference = found.greedy.texts[0].differences[0]
    assert (difference.position, difference.got) == (15, 65)
    assert found.failure is not None
    monkeypatch.setitem(auditing.TIES, "float32", difference.margin * 1.01)
    again = found_by(config)
    assert again.failure is None
    assert again.greedy.equal == 2


def test_an_audit_without_power_fails_after_doubling_its_samples(tiny: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KeepsOneMore, "verify", lambda self, request: self.right.verify(request))
    lines: list[str] = []
    config = tiny("ngram")
    found = auditing.audit(config, choose_questions(config), lines.append)
    assert found.failure is not None
    assert found.failure.startswith("no power: an engine that keeps one drafted token more than the verdict says ")
    assert not found.sampled.rejected
    assert {test.samples for test in (*found.sampled.tests, *found.wrong.tests)} == {192}
    assert sum("doubling" in line for line in lines) == 1


def test_the_wrong_verifier_keeps_one_more_where_there_is_one() -> None:
    class Right:
        def verify(self, request: Any) -> VerifyReply:
            return VerifyReply(Verdict(np.array([0, 2, 1, 0]), np.array([5, 6, 7, -1])))

    class Asked:
        final = np.array([True, True, True, True])
        proposal = type("P", (), {"lengths": np.array([2, 2, 1, 3])})

    verdict = KeepsOneMore(Right()).verify(Asked()).verdict  # type: ignore[arg-type]
    assert verdict.accepted.tolist() == [1, 2, 1, 0]
    assert verdict.next_token.tolist() == [5, 6, 7, -1]


# --- the command


def test_the_same_seed_finds_the_same_and_another_chooses_other_documents(tiny: Job) -> None:
    one, two = (found_by(tiny("ngram", seed=3)).as_json() for _ in range(2))
    assert one | {"seconds": 0} == two | {"seconds": 0}
    assert choose_questions(tiny(seed=3)) != choose_questions(tiny(seed=4))


def test_the_command_prints_tables_ends_with_json_and_writes_nothing(
    tiny: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny("ngram")
    path = tmp_path / "job.yaml"
    path.write_text(json.dumps(config.model_dump(mode="json", by_alias=True, exclude_defaults=True)))
    before = {file for file in tmp_path.rglob("*")}
    assert cli.main(["audit", str(path), "--set", "seed=1", "--json"]) == 0
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert lines[0].startswith("audit of rule ratio, draft ngram, float32: passed in ")
    assert "1. greedy: 3 of 3 texts are equal to plain decoding; 0.00% of " in printed.out
    assert "2. sampled law: the target’s" in printed.out
    assert "3. an engine that keeps one drafted token more than the verdict says: found out" in printed.out
    document = json.loads(lines[-1])
    assert document["passed"] is True
    assert document["sampled"]["together"]["samples"] == 3 * 96
    assert all(line.startswith("audit: ") for line in printed.err.splitlines())
    assert {file for file in tmp_path.rglob("*")} == before


def test_documents_without_a_prompt_are_passed_over_and_an_empty_corpus_is_refused(tiny: Job, tmp_path: Path) -> None:
    config = tiny()
    lines = [json.dumps({"id": str(i), "body": None if i % 2 else "a story"}) for i in range(8)]
    (tmp_path / "documents.jsonl").write_text("\n".join(lines) + "\n")
    assert {int(q.document) % 2 for q in choose_questions(config)} == {0}
    (tmp_path / "documents.jsonl").write_text("")
    with pytest.raises(CorpusError, match="none of the documents has a prompt"):
        choose_questions(config)


def test_a_limit_narrows_what_is_audited(tiny: Job) -> None:
    config = tiny()
    limited = config.model_copy(update={"input": config.input.model_copy(update={"limit": 3})})
    assert {int(q.document) for q in choose_questions(limited)} == {0, 1, 2}


# --- as part of a run


def finding(passed: bool) -> Audit:
    law = {(): NextToken({0: 0.5, END: 0.5}, 0.0, np.array([True]))}
    right, wrong = (compare(["a"], [law], [Drawn(Counter({(0,): n, (END,): 100 - n}), 4, 2)], 0.0, 1) for n in (50, 95))
    greedy = GreedyAudit((GreedyText("1", "summary", 5, ()),), 1e-3, 8, 6)
    return Audit("ratio", "ngram", "float32", greedy, right if passed else wrong, wrong, "is wrong", (), 2.0)


class Auditor:
    def __init__(self, passes: bool = True) -> None:
        self.passes = passes
        self.asked: list[JobConfig] = []

    def __call__(self, config: JobConfig) -> Audit:
        self.asked.append(config)
        return finding(self.passes)


def run(config: JobConfig, auditor: Auditor, **options: Any) -> int:
    return execute(config, executor=local(), models=stub_models(), auditor=auditor, **options)


def summary_of(folder: Path, run: str = "000001") -> dict[str, Any]:
    document: dict[str, Any] = json.loads((folder / f"out/_nightdesk/runs/{run}/summary.json").read_text())
    return document


def test_a_run_is_audited_once_after_its_answers_and_only_if_it_asks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_stories(tmp_path, "a.parquet", 0, 6)
    auditor = Auditor()
    assert run(job(tmp_path), auditor) == 0
    assert auditor.asked == []
    assert summary_of(tmp_path)["audit"] is None
    write_stories(tmp_path, "b.parquet", 6, 9)
    capsys.readouterr()
    assert run(job(tmp_path, audit=True), auditor, limit=9) == 0
    assert [config.input.limit for config in auditor.asked] == [9]
    assert summary_of(tmp_path, "000002")["audit"] == finding(True).as_json()
    assert "2. sampled law: the target’s" in capsys.readouterr().out
    assert run(job(tmp_path, audit=True), auditor, limit=9) == 0  # nothing to do
    assert len(auditor.asked) == 1


def test_a_failed_audit_ends_a_run_with_5_without_success_and_is_not_forgotten(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_stories(tmp_path, "a.parquet", 0, 6)
    assert run(job(tmp_path, audit=True), Auditor(passes=False)) == 5
    assert "audit failed: sampled law: a: p = " in caplog.text
    assert summary_of(tmp_path)["audit"]["passed"] is False
    assert summary_of(tmp_path)["rows"] == 6
    assert not (tmp_path / "out/_SUCCESS").exists()
    again = Auditor()
    assert run(job(tmp_path, audit=True), again) == 5  # nothing to do, and nothing has become better
    assert again.asked == []
    assert not (tmp_path / "out/_SUCCESS").exists()
    assert run(job(tmp_path), again) == 0
    assert (tmp_path / "out/_SUCCESS").exists()


def test_a_run_stopped_in_its_audit_continues_with_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_stories(tmp_path, "a.parquet", 0, 6)

    def stopped(config: JobConfig) -> Audit:
        raise KeyboardInterrupt

    with pytest.raises(Exception, match="the same command continues with it"):
        execute(job(tmp_path, audit=True), executor=local(), models=stub_models(), auditor=stopped)
    auditor = Auditor()
    assert run(job(tmp_path, audit=True), auditor) == 0
    assert len(auditor.asked) == 1
    assert summary_of(tmp_path)["audit"]["passed"] is True


def test_rows_that_all_failed_leave_nothing_to_audit(tmp_path: Path) -> None:
    write_stories(tmp_path, "a.parquet", 0, 2, n0=FAILS, n1=FAILS)
    auditor = Auditor()
    assert run(job(tmp_path, audit=True), auditor) == 3
    assert auditor.asked == []


@pytest.mark.usefixtures("ray_address")
def test_a_run_on_ray_is_audited_where_its_target_sits(tiny: Job, tmp_path: Path) -> None:
    config = tiny("ngram", audit=True, tasks=(TASK | {"max_new_tokens": 4},))
    assert execute(config, auditor=lambda limited: audit_on_ray(limited, choose_questions(limited), QUICK)) == 0
    found = summary_of(tmp_path)["audit"]
    assert found["passed"] is True
    assert found["sampled"]["together"]["drafted"] > 0

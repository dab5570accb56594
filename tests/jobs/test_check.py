"""`check`: what it finds out about a job, with a tiny model, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from jobs import check, estimate
from jobs.check import Prompts, check_job, examine
from jobs.cli import main
from jobs.run import execute
from pipeline.config import JobConfig, parse_config
from pipeline.errors import ConfigError, CorpusError, ModelError, NightdeskError, OutputError
from tests.s3.bucket import Bucket
from tests.stub_engine import local

CONTEXT = 512


def save_model(folder: Path, tokens: list[str]) -> str:
    """A random Llama of two small layers whose tokenizer knows single bytes, and `tokens` besides."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<s>", "</s>", *alphabet, *tokens])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(vocabulary), hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=CONTEXT, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("model"), ["one"])


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(estimate, "PROBE_SIZE", 256)
    monkeypatch.setattr(estimate, "PROBE_SECONDS", 0.01)
    monkeypatch.setenv("NIGHTDESK_CACHE", str(tmp_path / "cache"))


Job = Callable[..., JobConfig]


@pytest.fixture
def job(tmp_path: Path, model: str) -> Job:
    """A job over five stories, one of them without text; keyword arguments replace whole sections."""
    stories = [{"doc_id": str(i), "body": "word " * (10 + 10 * i), "title": f"T{i}"} for i in range(4)]
    lines = [json.dumps(story) for story in [*stories, {"doc_id": "4", "body": None}]]
    (tmp_path / "stories.jsonl").write_text("\n".join(lines) + "\n")

    def make(**sections: Any) -> JobConfig:
        mapping: dict[str, Any] = {
            "name": "tiny",
            "input": {"path": str(tmp_path / "stories.jsonl"), "id": "doc_id", "text": "body"},
            "output": {"path": str(tmp_path / "out"), "rows_per_shard": 2},
            "target": {"model": model, "dtype": "float32"},
            "decoding": {"batch": 4},
            "tasks": [{"name": "answer", "prompt": "{title}: {body}", "max_new_tokens": 7}],
            "max_error_rate": 0.5,
        }
        return parse_config(mapping | sections, "test")

    return make


def test_it_says_what_a_run_would_do(job: Job) -> None:
    findings = examine(job())
    assert (findings.files, findings.rows, findings.answered, findings.shards) == (1, 5, 0, 3)
    assert (findings.prompts.documents, findings.prompts.errors) == (5, 1)
    assert len(findings.prompts.tokens) == 4
    assert findings.prompts.longest == max(findings.prompts.tokens) + 7
    assert findings.context == 256
    assert findings.slots == 4
    assert findings.seconds is not None
    assert findings.seconds > 0
    assert "probe" in findings.seconds_from
    assert any("20.0% of the sampled documents would be error rows" in text for text in findings.warnings)


def test_memory_is_the_weights_and_the_cache(job: Job, model: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    findings = examine(job())
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    assert findings.memory.weights == sum(p.nbytes for p in loaded.parameters())
    assert findings.memory.cache == 4 * findings.context * 2 * (2 * 1 * 8) * 4  # slots, tokens, layers, K and V, bytes


def test_a_draft_model_takes_memory_too(job: Job, model: str) -> None:
    alone, pair = examine(job()), examine(job(draft={"model": model, "dtype": "float32"}))
    assert pair.memory.needed == 2 * alone.memory.needed
    assert (alone.draft, pair.draft) == ("none", model)
    assert examine(job(draft={"kind": "ngram"})).draft == "ngram"


def test_nothing_is_written(job: Job, tmp_path: Path) -> None:
    examine(job())
    assert not (tmp_path / "out").exists()


def test_a_job_from_s3_to_s3_is_checked_as_any_other(job: Job, tmp_path: Path, s3: Bucket) -> None:
    s3.put("in/stories.jsonl", (tmp_path / "stories.jsonl").read_bytes())
    input = {"path": f"{s3.url}/in/*.jsonl", "id": "doc_id", "text": "body"}
    findings = examine(job(input=input, output={"path": f"{s3.url}/out", "rows_per_shard": 2}))
    assert (findings.files, findings.rows, findings.answered, findings.shards) == (1, 5, 0, 3)
    assert s3.keys() == ["in/stories.jsonl"]
    for sections, error in (
        ({"input": {**input, "path": f"{s3.url}/nowhere"}}, CorpusError),
        ({"input": {**input, "path": "s3://no-such-bucket/in"}}, CorpusError),
        ({"input": input, "output": {"path": "s3://no-such-bucket/out"}}, OutputError),
        ({"input": input, "output": {"path": f"{s3.url}/in"}}, OutputError),
    ):
        with pytest.raises(error):
            examine(job(**sections))


def test_a_limit_narrows_the_rows(job: Job, tmp_path: Path) -> None:
    source = {"path": str(tmp_path / "stories.jsonl"), "text": "body", "limit": 3}
    findings = examine(job(input=source))
    assert (findings.rows, findings.shards, findings.prompts.documents) == (3, 2, 3)


def test_json_is_one_object_on_the_last_line(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    assert check_job(job(), as_json=True) == 0
    lines = capsys.readouterr().out.splitlines()
    found = json.loads(lines[-1])
    assert found["rows"] == 5
    assert found["prompt_tokens"]["max"] == max(examine(job()).prompts.tokens)
    assert sum(bucket["prompts"] for bucket in found["prompt_tokens"]["histogram"]) == 4
    assert len(lines) > 5


def test_the_table_reads_well(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    assert check_job(job()) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "5 documents in 1 file " in text
    assert "0 answered already; a run has 5 new (adds 3 parts)" in text
    assert "in all 5 documents" in text
    assert "about" in text


def test_a_job_that_run_would_refuse_does_not_pass(
    job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job.yaml"
    config = job()
    path.write_text(json.dumps(config.model_dump(mode="json", by_alias=True, exclude_unset=True)))
    assert execute(config, executor=local()) == 0
    assert main(["check", str(path)]) == 0
    assert "5 answered already; a run has nothing to do" in " ".join(capsys.readouterr().out.split())
    (tmp_path / "stories.jsonl").write_text(json.dumps({"doc_id": "0", "body": "a correction", "title": "T0"}) + "\n")
    assert main(["check", str(path)]) == 2
    refusal = capsys.readouterr().err
    assert "3 of 4 answered documents are not in the input any more" in refusal  # the fifth has an error
    with pytest.raises(OutputError) as refused:
        execute(config, executor=local())
    assert refusal == f"nightdesk: {refused.value}\n"
    assert execute(config, executor=local(), allow_deletions=True) == 0
    assert main(["check", str(path), "--set", "tasks.0.prompt={body}"]) == 2
    assert "--reanswer to replace the old answers" in capsys.readouterr().err


def test_a_large_corpus_is_sampled_and_says_so(
    job: Job, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check, "SAMPLE", 3)
    check_job(job())
    assert "in a sample of 3 documents" in " ".join(capsys.readouterr().out.split())


def test_a_sample_is_spread_over_the_files(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "SAMPLE", 4)
    folder = tmp_path / "many"
    folder.mkdir()
    for i in range(4):
        rows = [json.dumps({"body": f"file {i}", "title": "x"})] * (0 if i == 1 else 50)
        (folder / f"{i}.jsonl").write_text("".join(row + "\n" for row in rows))
    config = job(input={"path": str(folder), "text": "body"})
    seen: list[str] = []
    original = check.read_prompts

    def noting(config: JobConfig, prompters: Any, documents: Any) -> Prompts:
        kept = list(documents)
        seen.extend(document.text for document in kept)
        return original(config, prompters, iter(kept))

    monkeypatch.setattr(check, "read_prompts", noting)
    examine(config)
    assert set(seen) == {"file 0", "file 2", "file 3"}
    assert len(seen) == 4


def test_an_empty_corpus_is_a_warning(job: Job, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    findings = examine(job(input={"path": str(tmp_path / "empty"), "text": "body"}))
    assert (findings.rows, findings.seconds) == (0, None)
    assert findings.warnings[0].startswith("there are no documents")


def test_a_prompt_without_the_text_is_a_warning(job: Job) -> None:
    findings = examine(job(tasks=[{"name": "answer", "prompt": "{title}?", "max_new_tokens": 3}]))
    assert any("does not name the text column, {body}" in text for text in findings.warnings)


def test_time_can_be_measured(job: Job) -> None:
    findings = examine(job(draft={"kind": "ngram"}), timed=True)
    assert findings.seconds is not None
    assert findings.seconds > 0
    assert findings.seconds_from == "timing 3 prompts"


@pytest.mark.parametrize(
    ("sections", "kind", "expected"),
    [
        ({"input": {"path": "/no/such/folder", "text": "body"}}, CorpusError, "/no/such/folder does not exist"),
        ({"target": {"model": "./no-such-model"}}, ModelError, "no-such-model"),
        ({"target": {"model": "no/such.gguf"}}, ModelError, "such.gguf"),
        ({"tasks": [{"name": "a", "prompt": "{bdy}"}]}, CorpusError, "no input file has a column 'bdy'"),
        ({"tasks": [{"name": "a", "prompt": "{body}", "max_new_tokens": CONTEXT}]}, ConfigError, "max_new_tokens"),
        ({"tasks": [{"name": "a", "prompt": "{body}", "system": "Be brief."}]}, ConfigError, "system"),
        (
            {"tasks": [{"name": "a", "prompt": "{body}", "logit_bias": {9999: 1.0}}]},
            ConfigError,
            "tasks.0.logit_bias: 9999 is no token",
        ),
        ({"decoding": {"context": CONTEXT + 1}}, ConfigError, "decoding.context"),
        ({"decoding": {"batch": 10**9}}, ModelError, "lower decoding.batch"),
    ],
)
def test_what_would_stop_a_run_is_refused(
    job: Job, sections: dict[str, Any], kind: type[NightdeskError], expected: str
) -> None:
    with pytest.raises(kind) as caught:
        examine(job(**sections))
    assert expected in str(caught.value)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)


def test_a_kept_column_that_no_file_has_is_refused(job: Job, tmp_path: Path) -> None:
    source = {"path": str(tmp_path / "stories.jsonl"), "text": "body", "keep": ["sorce"]}
    with pytest.raises(CorpusError, match=r"input\.keep.*: no input file has a column 'sorce'"):
        examine(job(input=source))


def test_another_tokenizer_is_refused_with_the_first_token_that_differs(job: Job, tmp_path: Path) -> None:
    other = save_model(tmp_path / "other", ["two"])
    with pytest.raises(ModelError) as caught:
        examine(job(draft={"model": other}))
    assert "token 258" in str(caught.value)
    assert "'two'" in str(caught.value)
    assert "'one'" in str(caught.value)


def test_the_command_ends_with_2_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(
        "name: x\ninput: {path: /no/such/folder, text: b}\noutput: {path: o}\n"
        "target: {model: m}\ntasks: [{name: a, prompt: '{b}'}]\n"
    )
    assert main(["check", str(path), "--json"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "nightdesk: input.path: /no/such/folder does not exist\n"


def test_histogram_bounds_are_powers_of_two_without_empty_ends() -> None:
    prompts = Prompts(5, 0, None, (3, 4, 5, 17, 32), 40, ())
    assert prompts.histogram() == [(4, 2), (8, 1), (16, 0), (32, 2)]
    assert Prompts(0, 0, None, (), 0, ()).histogram() == []


def test_no_prompt_has_no_block_and_one_is_singular(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = Prompts(3, 0, None, (1, 17, 3), 40, ())
    check.show(replace(examine(job()), rows=1, prompts=prompts), Console(width=200, highlight=False))
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "up to 8 tokens 0" in lines
    assert any(line.startswith("up to 1 token █") for line in lines)
    assert "input 1 document in 1 file" in lines


def test_the_container_limit_bounds_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = estimate.available_memory("cpu")
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(estimate, "CGROUP_LIMITS", (str(limit), str(tmp_path / "absent")))
    limit.write_text("max\n")
    assert estimate.available_memory("cpu") > free / 2
    limit.write_text("1000\n")
    assert estimate.available_memory("cpu") == 0

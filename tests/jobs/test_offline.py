"""`check --offline`: what it says of a job whose models are nowhere, what it refuses, and that it stays offline."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jobs.cli import main
from jobs.offline import examine_offline
from pipeline.config import JobConfig, parse_config
from pipeline.errors import ConfigError, CorpusError, NightdeskError, OutputError

Job = Callable[..., JobConfig]


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """A job over three stories with models that are nowhere; keyword arguments replace whole sections."""
    stories = [{"doc_id": str(i), "body": "word " * (i + 1), "title": f"T{i}"} for i in range(3)]
    (tmp_path / "stories.jsonl").write_text("".join(json.dumps(story) + "\n" for story in stories))

    def make(**sections: Any) -> JobConfig:
        mapping: dict[str, Any] = {
            "name": "tiny",
            "input": {"path": str(tmp_path / "stories.jsonl"), "id": "doc_id", "text": "body"},
            "output": {"path": str(tmp_path / "out")},
            "target": {"model": "nobody/has-this-model"},
            "tasks": [{"name": "answer", "prompt": "{title}: {body}"}],
        }
        return parse_config(mapping | sections, "test")

    return make


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def test_it_reads_the_input_and_leaves_out_the_models_by_name(job: Job) -> None:
    found = examine_offline(job())
    assert found.documents is not None
    assert (found.documents.files, found.documents.rows, found.documents.unreadable) == (1, 3, 0)
    assert found.fields == ("title", "body")
    assert found.workers == ("1 target on processors, or as many as fit",)
    (left_out,) = found.left_out
    assert left_out.startswith("models (nobody/has-this-model): ")
    assert found.warnings == ()


def test_storage_elsewhere_is_left_out_by_name_and_not_asked(job: Job) -> None:
    found = examine_offline(
        job(input={"path": "s3://in/**/*.jsonl", "text": "body"}, output={"path": "s3://out/answers"})
    )
    assert found.documents is None
    assert [line.split(":", 1)[0] for line in found.left_out[1:]] == ["input (s3", "output (s3"]


@pytest.mark.parametrize("path", ["nowhere.jsonl", "nowhere/**/*.jsonl"])
def test_an_input_that_is_not_here_is_left_out(job: Job, tmp_path: Path, path: str) -> None:
    found = examine_offline(job(input={"path": str(tmp_path / path), "text": "body"}))
    assert found.documents is None
    assert any("nowhere" in line for line in found.left_out)


def test_a_glob_over_a_folder_that_is_here_is_read(job: Job, tmp_path: Path) -> None:
    found = examine_offline(job(input={"path": str(tmp_path / "*.jsonl"), "text": "body"}))
    assert found.documents is not None
    assert found.documents.rows == 3


def test_the_least_that_a_run_takes_of_a_cluster(job: Job) -> None:
    draft = {"kind": "model", "model": "nobody/has-this-draft", "gpus": 1, "accelerator": "L4", "replicas": 3}
    target = {"model": "nobody/has-this-model", "gpus": 4, "accelerator": "H100", "replicas": 2}
    found = examine_offline(job(target=target, draft=draft))
    assert found.workers == ("2 targets with 4 H100 on one node", "3 draft workers with 1 L4")
    assert "nobody/has-this-draft" in found.left_out[0]


def without_title(tmp_path: Path) -> None:
    (tmp_path / "stories.jsonl").write_text('{"doc_id": "0", "body": "word"}\n')


@pytest.mark.parametrize(
    ("sections", "before", "kind", "message"),
    [
        ({}, without_title, CorpusError, "title"),
        ({"target": {"model": "a/b", "gpus": 4}, "decoding": {"placement": "colocated"}}, None, ConfigError,
         "target.gpus asks for 4 ranks"),
        ({"target": {"model": "a/b", "label_selector": {"k": "!in(a"}}}, None, ConfigError, "is no condition"),
        ({}, lambda folder: (folder / "out").mkdir() or (folder / "out" / "x.parquet").write_bytes(b"x"), OutputError,
         "x.parquet"),
    ],
)  # fmt: skip
def test_what_would_stop_a_run_is_refused(
    job: Job,
    tmp_path: Path,
    sections: dict[str, Any],
    before: Callable[[Path], object] | None,
    kind: type[NightdeskError],
    message: str,
) -> None:
    if before is not None:
        before(tmp_path)
    with pytest.raises(kind, match=message.replace("(", r"\(")):
        examine_offline(job(**sections))


def test_an_output_that_is_read_as_input_is_refused(job: Job, tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="own parts"):
        examine_offline(job(input={"path": str(tmp_path), "text": "body"}, output={"path": str(tmp_path / "out")}))


def test_what_may_not_be_meant_is_a_warning(job: Job, tmp_path: Path) -> None:
    (tmp_path / "stories.jsonl").write_text('{"doc_id": "0", "body": "word", "title": "T"}\n{"doc_id": "1"\n')
    found = examine_offline(job(tasks=[{"name": "answer", "prompt": "{title}"}]))
    assert found.warnings[0] == "the prompt of task answer does not name the text column, {body}"
    assert found.warnings[1].startswith("50.0% of the sampled documents would be error rows")


def test_nothing_is_written(job: Job, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    examine_offline(job())
    assert sorted(tmp_path.rglob("*")) == before


def job_file(tmp_path: Path) -> str:
    path = tmp_path / "job.yaml"
    path.write_text(
        "name: x\ninput: {path: s3://in/x, text: body}\noutput: {path: s3://out/x}\ntarget: {model: a/b}\n"
        "tasks: [{name: answer, prompt: '{body}'}]\n"
    )
    return str(path)


def test_the_command_ends_with_0_and_one_object_of_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--offline", "--json", job_file(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "left out" in out
    assert json.loads(out.splitlines()[-1])["left_out"]


@pytest.mark.parametrize("other", ["--time", "--cluster"])
def test_what_needs_models_or_a_cluster_is_refused_beside_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], other: str
) -> None:
    assert main(["check", "--offline", other, job_file(tmp_path)]) == 2
    assert other in capsys.readouterr().err


def test_without_it_a_model_that_is_not_here_is_named(
    job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    job()
    path = tmp_path / "job.yaml"
    path.write_text(
        f"name: x\ninput: {{path: {tmp_path}/stories.jsonl, text: body}}\noutput: {{path: {tmp_path}/out}}\n"
        "target: {model: nobody/has-this-model}\ntasks: [{name: answer, prompt: '{body}'}]\n"
    )
    assert main(["check", str(path)]) == 2
    assert "nobody/has-this-model" in capsys.readouterr().err

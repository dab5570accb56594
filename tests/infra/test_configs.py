"""Every job file of configs/ loads, and passes a check without models and network."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs.cli import main
from jobs.offline import examine_offline
from pipeline.config import JobConfig, load_config
from tests.infra.manifests import CONFIGS, ROOT

JOBS = sorted(CONFIGS.glob("*.yaml"))


def load(name: str) -> JobConfig:
    return load_config(CONFIGS / name)


def test_they_are_all_here() -> None:
    names = {"demo.yaml", "cluster.yaml", "72b-four-h100.yaml", "nightly-s3.yaml", "cpu.yaml", "8b-ngram.yaml"}
    assert {path.name for path in JOBS} == names


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.stem)
def test_each_passes_an_offline_check(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    assert main(["check", "--offline", str(path)]) == 0
    assert "warning" not in capsys.readouterr().out


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.stem)
def test_each_says_how_it_is_started(path: Path) -> None:
    head = path.read_text().partition("name:")[0]
    assert f"configs/{path.name}" in head


def test_the_job_on_four_h100_asks_for_them_and_for_two_l4() -> None:
    workers = examine_offline(load("72b-four-h100.yaml")).workers
    assert workers == ("1 target with 4 H100 on one node, or as many as fit", "2 draft workers with 1 L4")


def test_the_nightly_job_goes_from_s3_to_partitions_on_s3() -> None:
    config = load("nightly-s3.yaml")
    assert all(path.startswith("s3://") for path in (*config.input.paths, config.output.path))
    assert config.output.partition_by


def test_the_job_for_processors_asks_for_no_gpu() -> None:
    config = load("cpu.yaml")
    assert not any(section.gpus for section in (config.target, *config.draft))


def test_the_8b_job_takes_one_gpu_and_no_draft_model() -> None:
    config = load("8b-ngram.yaml")
    assert (config.target.gpus, [draft.kind for draft in config.draft]) == (1, ["ngram"])

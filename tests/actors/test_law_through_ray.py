"""Sampled answers of a whole job on Ray, target and draft in workers of their own, against the enumerated law."""

from __future__ import annotations

import json
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from actors.executor import RayExecutor
from jobs.run import execute
from pipeline.config import JobConfig, TaskConfig, parse_config
from pipeline.engine import Engine
from pipeline.prompts.templates import Prompter
from pipeline.records import Document
from pipeline.work import LocalExecutor
from tests import oracle
from tests.actors.tiny_job import nearly
from tests.decoding import configured_law
from tests.models import EOS, TOKENS, byte_tokenizer, tiny_folder, tiny_model
from tests.oracle import SequenceLaw

pytestmark = pytest.mark.usefixtures("ray_address")
FITS, MISFITS = 1e-3, 1e-6
TARGET: dict[str, Any] = {"seed": 0, "num_hidden_layers": 1}
BODIES = ("ships left", "a harbour", "the")
LETTERS = {token: 40.0 for token in byte_tokenizer().encode("abc", add_special_tokens=False)}
TASKS: list[dict[str, Any]] = [  # each leaves three letters alone in the law
    {"name": "cool", "temperature": 0.7, "top_k": 3, "max_new_tokens": 2, "n": 70},
    {"name": "hot", "temperature": 1.3, "top_k": 3, "repetition_penalty": 1.02, "max_new_tokens": 2, "n": 70},
    {"name": "certain", "temperature": 0.0, "max_new_tokens": 3, "n": 1},
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    target = tiny_folder(folder / "target", **TARGET)
    return target, nearly(target, folder / "draft")


def job(folder: Path, models: tuple[Path, Path], out: str, tasks: list[dict[str, Any]], **decoding: Any) -> JobConfig:
    documents = folder / "documents.jsonl"
    documents.write_text("".join(json.dumps({"id": str(i), "body": body}) + "\n" for i, body in enumerate(BODIES)))
    target, draft = ({"model": str(model), "dtype": "float32"} for model in models)
    mapping = {
        "name": "law",
        "input": {"path": str(documents), "id": "id", "text": "body"},
        "output": {"path": str(folder / out), "rows_per_shard": 2},
        "target": target,
        "draft": {"kind": "model", "sampling": "sample", **draft},
        "decoding": {"batch": 32, "draft_tokens": 2, "placement": "separate", **decoding},
        "tasks": [{"prompt": "Say {body}: ", "logit_bias": LETTERS, **task} for task in tasks],
    }
    return parse_config(mapping, "test")


@cache
def logits_after(tokens: tuple[int, ...]) -> np.ndarray:
    found: np.ndarray = tiny_model("llama", **TARGET)(torch.tensor([tokens])).logits[0, -1, :TOKENS].numpy()
    return found


def expected_law(task: TaskConfig, body: str) -> dict[str, float]:
    prompt = tuple(Prompter(task, byte_tokenizer(), "body", 512).render(Document("0", "", body, {"body": body})))
    law: SequenceLaw = oracle.enumerate_law(
        lambda text: configured_law(logits_after(prompt + text), task.sampling(), prompt, text, (EOS,)),
        task.max_new_tokens,
    )
    return {byte_tokenizer().decode(list(text)): p for text, p in law.items()}


@pytest.mark.slow
def test_sampled_answers_have_the_targets_law(models: tuple[Path, Path], tmp_path: Path) -> None:
    """Mixed parameters in one batch, under the rule `block`."""
    config = job(tmp_path, models, "out", TASKS, rule="block")
    executor = RayExecutor(config)
    assert execute(config, executor=executor) == 0
    assert "separate" in executor.describe()
    frame = pd.read_parquet(config.output.path).set_index("id")
    for task in config.tasks:
        found = [frame.loc[str(i), task.name] for i in range(len(BODIES))]
        laws = [expected_law(task, body) for body in BODIES]
        if task.temperature == 0:
            assert [set(law) for law in laws] == [{text} for text in found]
            continue
        counts = Counter((i, text) for i, texts in enumerate(found) for text in texts)
        law = {(i, text): p / len(BODIES) for i, law in enumerate(laws) for text, p in law.items()}
        even = {outcome: 1 / len(law) for outcome in law}
        assert sum(counts.values()) == len(BODIES) * task.n
        assert oracle.g_test(counts, law) > FITS
        assert oracle.g_test(counts, even) < MISFITS
    [summary] = Path(config.output.path).glob("_nightdesk/runs/*/summary.json")
    assert json.loads(summary.read_text())["counts"]["drafted"] > 200


def test_coupled_text_is_the_same_through_ray_and_in_one_process(models: tuple[Path, Path], tmp_path: Path) -> None:
    tasks = [
        {"name": "warm", "temperature": 1.0, "max_new_tokens": 24, "n": 3, "logit_bias": {}},
        {"name": "filtered", "temperature": 1.3, "top_p": 0.8, "max_new_tokens": 12, "frequency_penalty": 0.4},
    ]
    config = job(tmp_path, models, "ray", tasks, rule="coupled")
    assert execute(config, executor=RayExecutor(config)) == 0
    alone = job(tmp_path, models, "alone", tasks, rule="coupled", batch=3).model_copy(update={"draft": ()})
    here = LocalExecutor(lambda work: Engine.from_config(alone), lambda work: byte_tokenizer())
    assert execute(alone, executor=here) == 0
    found, expected = (pd.read_parquet(c.output.path).set_index("id").sort_index() for c in (config, alone))
    for task in tasks:
        assert [list(a) for a in found[task["name"]]] == [list(a) for a in expected[task["name"]]]
    assert len({text for texts in found["warm"] for text in texts}) == 3 * len(BODIES)

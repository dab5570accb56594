"""Jobs over a few short documents with tiny models, and what one process answers to them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from safetensors.torch import load_file, save_file

from jobs.run import execute
from pipeline.config import JobConfig, parse_config
from pipeline.engine import Engine
from pipeline.engine.checkpoint import resolve
from pipeline.errors import Stopped
from pipeline.fingerprint import request_key
from pipeline.output.plan import Shard
from pipeline.prompts.templates import Prompter
from pipeline.records import Document, Request
from pipeline.work import JobWork, Report

PROMPT = "Retell: {body}"


def texts(rows: int) -> list[str]:
    return [f"{i} ships left the harbour" + " and sailed on" * (i % 5) for i in range(rows)]


def nearly(model: Path, folder: Path) -> Path:
    """A copy of a model with some noise on its weights: a draft that is often right, and not always."""
    shutil.copytree(model, folder)
    weights = load_file(folder / "model.safetensors")
    noise = torch.Generator().manual_seed(0)
    noisy = {name: w + 0.03 * w.std() * torch.randn(w.shape, generator=noise) for name, w in weights.items()}
    save_file(noisy, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def tiny_job(
    folder: Path,
    models: tuple[Path, Path],
    rows: int,
    tokens: int,
    rows_per_shard: int = 8,
    target: dict[str, Any] | None = None,
    draft: dict[str, Any] | None = None,
    task: dict[str, Any] | None = None,
    **decoding: Any,
) -> JobConfig:
    """Greedy answers of `tokens` tokens to `rows` documents; `models` are target and draft.

    `target`, `draft` and `task` add keys to those sections.
    """
    documents = folder / "documents.jsonl"
    documents.write_text("".join(json.dumps({"id": str(i), "body": text}) + "\n" for i, text in enumerate(texts(rows))))
    big, small = ({"model": str(model), "dtype": "float32"} for model in models)
    mapping = {
        "name": "tiny",
        "input": {"path": str(documents), "id": "id", "text": "body"},
        "output": {"path": str(folder / "out"), "rows_per_shard": rows_per_shard},
        "target": {**big, **(target or {})},
        "draft": {"kind": "model", **small, **(draft or {})},
        "decoding": {"batch": 4, "draft_tokens": 3, **decoding},
        "tasks": [{"name": "answer", "prompt": PROMPT, "max_new_tokens": tokens, **(task or {})}],
    }
    return parse_config(mapping, "test")


def planned(config: JobConfig) -> tuple[JobWork, list[Shard]]:
    """The work of a run that has just been planned."""

    class Taken:
        def run(self, work: JobWork, shards: list[Shard], report: Report) -> None:
            self.work, self.shards = work, shards
            raise Stopped("planned")

        def describe(self) -> str:
            return "nobody"

    taken = Taken()
    try:
        execute(config, executor=taken)
    except Stopped:
        return taken.work, taken.shards
    raise AssertionError("there was nothing to do")


def alone(config: JobConfig, rows: int, fingerprint: str = "") -> dict[str, str]:
    """What one process without Ray and without drafts answers, by id.

    Where answers are drawn, randomness hangs on the `fingerprint` of the run's plan.
    """
    target = config.target.model_copy(update={"gpus": 0})
    engine = Engine.from_config(config.model_copy(update={"draft": (), "target": target}))
    checkpoint = resolve(config.target.model)
    prompter = Prompter(config.tasks[0], checkpoint.tokenizer(), "body", checkpoint.context_limit())
    documents = [Document(str(i), "", text, {"body": text}) for i, text in enumerate(texts(rows))]
    prompts = [prompter.render(document) for document in documents]
    keys = [request_key(fingerprint, config.tasks[0].name, prompt) for prompt in prompts]
    requests = [Request(k, p, config.tasks[0].sampling()) for k, p in zip(keys, prompts, strict=True)]
    return {d.id: c.text for d, c in zip(documents, engine.generate(requests), strict=True)}


def answers(config: JobConfig) -> dict[str, str]:
    """What is published, by id; every row once and without error."""
    frame = pd.read_parquet(config.output.path)
    assert frame["id"].is_unique
    assert frame["answer_error"].isna().all()
    return dict(zip(frame["id"], frame["answer"], strict=True))

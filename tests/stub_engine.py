"""A model that is none: bytes as tokens, and answers that a test can predict. No torch, no Ray.

The answer to a prompt is `answer_to(prompt)`. Prompts that hold FAILS come back with an error.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer, models, pre_tokenizers

from jobs.models import Models
from pipeline.config import JobConfig, parse_config
from pipeline.records import Completion, CompletionStats, FinishReason, Request
from pipeline.work import JobWork, LocalExecutor

FAILS = "NOT-A-NUMBER"
PROMPT = "Say: {body}"
CONTEXT = 4096
RECORDED = 1000  # requests that an engine remembers


def answer_to(prompt: str) -> str:
    return f"re {prompt.removeprefix('Say: ')[:40]} ({len(prompt)})"


def byte_alphabet() -> list[str]:
    """The character that byte-level tokenizers write for each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte if byte in plain else next(others)) for byte in range(256)]


class ByteTokenizer:
    """What a `Prompter` needs of a fast tokenizer; token ids are the bytes of the text."""

    chat_template = None
    unk_token = None

    def __len__(self) -> int:
        return 256

    @cached_property
    def backend_tokenizer(self) -> Tokenizer:
        vocabulary = {character: byte for byte, character in enumerate(byte_alphabet())}
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return tokenizer


class StubModel:
    """A checkpoint's face."""

    def __init__(self, content: str = "stub") -> None:
        self.content = content

    def fingerprint(self) -> str:
        return self.content

    def context_limit(self) -> int:
        return CONTEXT

    def tokenizer(self) -> Any:
        return ByteTokenizer()


class StubEngine:
    """Keeps `slots` requests in flight and finishes them out of order, each after `seconds`.

    A patient one waits for the next document, a second at most, before it finishes anything.
    """

    def __init__(self, slots: int = 8, seconds: float = 0.0, patient: bool = False) -> None:
        self.slots = slots
        self.seconds = seconds
        self.patience = 1.0 if patient else 0.0
        self.prompts: list[str] = []  # the first RECORDED, in the order in which they came
        self.in_flight: list[int] = []  # whenever one finishes

    def stream(self, requests: Iterable[Request | None]) -> Iterator[Completion]:
        source = iter(requests)
        order = random.Random(0)
        running: list[Request] = []
        exhausted = False
        while True:
            until = time.monotonic() + self.patience
            while not exhausted and len(running) < self.slots:
                try:
                    request = next(source)
                except StopIteration:
                    exhausted = True
                    break
                if request is None and time.monotonic() < until:
                    time.sleep(0.0005)
                    continue
                if request is None:
                    break
                assert request.key not in {other.key for other in running}, "one key twice in flight"
                if len(self.prompts) < RECORDED:
                    self.prompts.append(bytes(request.prompt_token_ids).decode())
                running.append(request)
            if running:
                if len(self.in_flight) < RECORDED:
                    self.in_flight.append(len(running))
                if self.seconds:
                    time.sleep(self.seconds)
                yield completion(running.pop(order.randrange(len(running))))
            elif exhausted:
                return
            else:
                time.sleep(0.0005)


def completion(request: Request) -> Completion:
    prompt = bytes(request.prompt_token_ids).decode()
    stats = CompletionStats(drafted=4, accepted=2, steps=2, prompt_tokens=len(request.prompt_token_ids))
    if FAILS in prompt:
        return Completion(request.key, [], "", FinishReason.ERROR, None, stats, "logits are not finite")
    text = answer_to(prompt)
    return Completion(request.key, list(text.encode()), text, FinishReason.STOP, None, stats)


def job(folder: Path, **changes: Any) -> JobConfig:
    """A job file over `folder`/in that leaves `folder`/out; `changes` are keys such as output__rows_per_shard."""
    mapping: dict[str, Any] = {
        "name": "stub",
        "input": {"path": str(folder / "in"), "id": "doc_id", "text": "body", "keep": ["title", "published_at"]},
        "output": {"path": str(folder / "out"), "rows_per_shard": 4},
        "target": {"model": "stub"},
        "tasks": [{"name": "summary", "prompt": PROMPT, "max_new_tokens": 64}],
    }
    for key, value in changes.items():
        section, _, name = key.partition("__")
        if name:
            mapping.setdefault(section, {})[name] = value
        else:
            mapping[section] = value
    return parse_config(mapping, "test")


def stub_models(content: str = "stub") -> Models:
    return Models(StubModel(content), None, CONTEXT)


def local(engine: StubEngine | None = None) -> LocalExecutor:
    """An executor around one engine, whatever the plan."""
    chosen = engine or StubEngine()

    def same(work: JobWork) -> StubEngine:
        return chosen

    return LocalExecutor(same, lambda work: ByteTokenizer())


def write_stories(
    folder: Path, name: str, start: int, stop: int, title: str = "Title [{}]", **changed: str
) -> None:
    """Stories `start` to `stop` as `folder`/in/`name`; `changed` gives another body to a story, `n17="…"`."""
    (folder / "in").mkdir(parents=True, exist_ok=True)
    numbers = range(start, stop)
    noon = datetime(2024, 5, 17, 12, tzinfo=UTC)
    table = pa.table(
        {
            "doc_id": [f"{n:05d}" for n in numbers],
            "body": [changed.get(f"n{n}", f"story {n}") for n in numbers],
            "title": [title.format(n) for n in numbers],
            "published_at": pa.array([noon for _ in numbers], pa.timestamp("us", "Europe/Paris")),
        }
    )
    pq.write_table(table, folder / "in" / name)


def expected(*spans: tuple[int, int]) -> dict[str, str]:
    """Id → answer of the stories that `write_stories` wrote."""
    return {f"{n:05d}": answer_to(f"Say: story {n}") for start, stop in spans for n in range(start, stop)}


def answers(folder: Path) -> dict[str, str]:
    """Id → answer as an analyst reads them; no id may be there twice."""
    frame = pd.read_parquet(folder / "out")
    assert frame["doc_id"].is_unique, sorted(frame["doc_id"][frame["doc_id"].duplicated()])
    return dict(zip(frame["doc_id"], frame["summary"], strict=True))

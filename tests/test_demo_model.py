"""The demo's real model: every row's tokens are those of transformers' own `generate` for that prompt alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from jobs.run import execute
from pipeline.config import JobConfig, parse_config
from pipeline.corpus.listing import list_files
from pipeline.corpus.readers import Corpus
from pipeline.engine import Engine
from pipeline.engine.checkpoint import Checkpoint, load_model, resolve
from pipeline.planning import prompt_fields
from pipeline.prompts.templates import Prompter
from pipeline.records import Document, Request
from pipeline.wording import Wording
from tests.models import tiny_model

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / ".cache/models/smollm2-135m-instruct.gguf"
SAMPLE = ROOT / "configs/sample/stories.parquet"
STORIES = ROOT.parent / "shared/data/lee_background.cor"
TIE = 1e-3  # logits; two tokens closer than this may come out either way in float32
NO_DRAFT: list[dict[str, Any]] = []

pytestmark = pytest.mark.skipif(not MODEL.exists(), reason="the demo's model is not there: make model")


def job(path: Path, text: str, tokens: int, output: Path, draft: list[dict[str, Any]], **changes: Any) -> JobConfig:
    return parse_config(
        {
            "name": "demo-model",
            "input": {"path": str(path), "text": text, **changes},
            "output": {"path": str(output), "rows_per_shard": 50},
            "target": {"model": str(MODEL), "dtype": "float32"},
            "draft": draft,
            "tasks": [
                {"name": "summary", "prompt": f"Summarise in one sentence.\n\n{{{text}}}", "max_new_tokens": tokens}
            ],
        },
        "test",
    )


@dataclass
class Reference:
    """transformers' model, asked for one prompt at a time."""

    checkpoint: Checkpoint
    model: Any

    def generate(self, prompt: list[int], tokens: int) -> list[int]:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            out = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=tokens,
                do_sample=False,
                eos_token_id=list(self.checkpoint.eos_ids()),
                pad_token_id=0,
                temperature=None,
                top_p=None,
                top_k=None,
            )[0, len(prompt) :].tolist()
        ends = [i for i, token in enumerate(out) if token in self.checkpoint.eos_ids()]
        return out[: ends[0]] if ends else out

    def near_tie(self, prompt: list[int], expected: list[int], got: list[int]) -> float | None:
        """Margin between the two best tokens where the texts part; None where they do not."""
        if expected == got:
            return None
        at = next((i for i, (a, b) in enumerate(zip(expected, got, strict=False)) if a != b), None)
        at = min(len(expected), len(got)) if at is None else at
        with torch.inference_mode():
            logits = self.model(torch.tensor([prompt + expected[:at]])).logits[0, -1]
        best = logits.topk(2).values
        return float(best[0] - best[1])

    def margin(self, prompt: list[int], text: list[int], tokens: int) -> float:
        """How far, in logits, the text is from being the likeliest token everywhere; 0 where it is."""
        eos = list(self.checkpoint.eos_ids())
        with torch.inference_mode():
            logits = self.model(torch.tensor([prompt + text]), logits_to_keep=len(text) + 1).logits[0]
        chosen = torch.tensor(text)
        short = logits[:-1].max(-1).values - logits[:-1].gather(1, chosen[:, None])[:, 0]
        worst = float(short.max()) if text else 0.0
        if len(text) < tokens:  # it ended by itself: an end-of-text token must be the likeliest
            worst = max(worst, float(logits[-1].max() - logits[-1, eos].max()))
        return worst

    def check(self, prompts: list[list[int]], expected: list[list[int]], got: list[list[int]]) -> None:
        """All equal, near-ties excepted, which are listed."""
        margins = [self.near_tie(p, e, g) for p, e, g in zip(prompts, expected, got, strict=True)]
        ties = {row: margin for row, margin in enumerate(margins) if margin is not None}
        if ties:
            print(f"rows that part from the reference at a near-tie, and its margin: {ties}")
        assert all(margin < TIE for margin in ties.values()), ties
        assert len(ties) <= len(prompts) // 20


@pytest.fixture(scope="module")
def reference() -> Reference:
    checkpoint = resolve(str(MODEL))
    return Reference(checkpoint, load_model(checkpoint, "float32"))


@pytest.fixture(scope="module")
def random_draft(reference: Reference, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model with the target's tokenizer."""
    folder = tmp_path_factory.mktemp("draft")
    size = len(reference.checkpoint.tokenizer())
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    tiny_model("llama", vocab=size, max_position_embeddings=8192, **special).save_pretrained(folder)
    reference.checkpoint.tokenizer().save_pretrained(folder)
    return folder


def requests_of(config: JobConfig, reference: Reference) -> tuple[list[Document], list[Request]]:
    """The job's own documents and prompts."""
    files = list_files(config.input)
    corpus = Corpus(config.input, prompt_fields(config), files)
    documents = [
        document
        for index in range(len(files))
        for batch in corpus.read([corpus.count_rows(index).range(index, 0, corpus.count_rows(index).rows)])
        for document in batch.documents
    ]
    context = reference.checkpoint.context_limit()
    prompter = Prompter(config.tasks[0], reference.checkpoint.tokenizer(), config.input.text, context)
    params = config.tasks[0].sampling()
    return documents, [Request(str(i), prompter.render(d), params) for i, d in enumerate(documents)]


def drafters(random_draft: Path) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    yield "none", NO_DRAFT
    yield "ngram", [{"kind": "ngram"}]
    yield "random model", [{"kind": "model", "model": str(random_draft)}]
    yield "itself", [{"kind": "model", "model": str(MODEL), "dtype": "float32"}]


def check_every_drafter(
    path: Path, text: str, tokens: int, count: int, reference: Reference, random_draft: Path, tmp: Path
) -> list[list[int]]:
    _, requests = requests_of(job(path, text, tokens, tmp, NO_DRAFT), reference)
    requests = requests[:count]
    prompts = [request.prompt_token_ids for request in requests]
    expected = [reference.generate(prompt, tokens) for prompt in prompts]
    for name, draft in drafters(random_draft):
        answers = Engine.from_config(job(path, text, tokens, tmp, draft)).generate(requests)
        print(name)
        reference.check(prompts, expected, [a.token_ids for a in answers])
        drafted, accepted = sum(a.stats.drafted for a in answers), sum(a.stats.accepted for a in answers)
        assert (drafted > 0) == (name != "none")
        if name == "itself":  # all that is drafted is kept, but what stands behind an end of text
            assert accepted >= drafted - 4 * len(answers)
            assert all(a.stats.accepted == a.stats.drafted for a in answers if a.finish_reason == "length")
    return expected


@pytest.fixture(scope="module")
def short_stories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight bundled stories, all of them short."""
    table = pq.read_table(SAMPLE)
    words = np.array([len(body.split()) for body in table["body"].to_pylist()])
    path = tmp_path_factory.mktemp("short") / "stories.parquet"
    pq.write_table(table.take(pa.array(np.argsort(words, kind="stable")[:16:2])), path)
    return path


@pytest.mark.timeout(900)
def test_eight_bundled_stories_equal_generate_with_every_drafter(
    reference: Reference, random_draft: Path, short_stories: Path, tmp_path: Path
) -> None:
    check_every_drafter(short_stories, "body", 24, 8, reference, random_draft, tmp_path)


@pytest.mark.timeout(900)
def test_eight_bundled_stories_come_out_of_the_whole_job_once_with_their_columns(
    short_stories: Path, tmp_path: Path
) -> None:
    kept = ["headline", "published_at"]
    config = job(short_stories, "body", 24, tmp_path / "out", [{"kind": "ngram"}], id="doc_id", keep=kept)
    assert execute(config) == 0
    found = pd.read_parquet(tmp_path / "out").sort_values("doc_id").reset_index(drop=True)
    source = pd.read_parquet(short_stories).sort_values("doc_id").reset_index(drop=True)
    pd.testing.assert_frame_equal(found[["doc_id", *kept]], source[["doc_id", *kept]])
    assert found["summary"].str.len().gt(0).all()
    assert found["summary_error"].isna().all()


@pytest.fixture
def real_stories(tmp_path: Path) -> Path:
    """The 300 stories as JSON Lines with columns to keep."""
    if not STORIES.exists():
        pytest.skip("../shared/data/lee_background.cor is not here")
    lines = STORIES.read_text().split("\n")
    assert len(lines) == 300
    when = pd.date_range("2001-01-01", periods=300, freq="h", tz="UTC").as_unit("us")
    frame = pd.DataFrame({"nr": [f"{i:05d}" for i in range(300)], "story": lines, "at": when})
    path = tmp_path / "stories.parquet"
    frame.to_parquet(path, index=False)
    return path


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_300_real_stories_equal_transformers_with_every_drafter_and_come_out_once(
    reference: Reference, random_draft: Path, real_stories: Path, tmp_path: Path
) -> None:
    """All 300: plainly, through Ray with n-grams, and with each draft model.

    transformers scores every row's own text in one pass over that prompt alone: each token must be its likeliest, which
    is what `generate` would have chosen. `generate` itself is asked for every tenth row, being much slower.
    """
    tokens = 48
    config = job(real_stories, "story", tokens, tmp_path / "out", [{"kind": "ngram"}], id="nr", keep=["at"])
    _, requests = requests_of(config, reference)
    prompts = [request.prompt_token_ids for request in requests]
    plain = Engine.from_config(job(real_stories, "story", tokens, tmp_path, NO_DRAFT)).generate(requests)
    texts = [answer.token_ids for answer in plain]
    parted = {row: margin for row in range(300) if (margin := reference.margin(prompts[row], texts[row], tokens)) > 0}
    print("rows of plain decoding that part from transformers, and by how much:", parted)
    assert all(margin < TIE for margin in parted.values())
    assert len(parted) <= 3
    for row in range(0, 300, 10):
        assert row in parted or reference.generate(prompts[row], tokens) == texts[row]

    assert execute(config) == 0
    found = pd.read_parquet(tmp_path / "out").sort_values("nr").reset_index(drop=True)
    source = pd.read_parquet(real_stories)
    assert found["nr"].tolist() == source["nr"].tolist()
    assert found["at"].equals(source["at"])
    assert found["error"].isna().all()
    assert found["summary_error"].isna().all()
    words = list(map(Wording(reference.checkpoint.tokenizer()), texts))
    other = [row for row in range(300) if found["summary"][row] != words[row]]
    print("rows whose text with n-grams through Ray parts from plain decoding:", other)
    assert len(other) <= 3
    assert all(found["summary_tokens"][row] == len(texts[row]) for row in range(300) if row not in other)
    assert execute(config) == 0  # nothing to do
    assert len(pd.read_parquet(tmp_path / "out")) == 300

    for name, draft in drafters(random_draft):
        if draft and draft[0]["kind"] == "model":
            answers = Engine.from_config(job(real_stories, "story", tokens, tmp_path, draft)).generate(requests)
            print(name)
            reference.check(prompts, texts, [a.token_ids for a in answers])

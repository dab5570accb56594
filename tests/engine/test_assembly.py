"""An engine as a job file asks for it: rules, draft sampling, vocabularies, salts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.config import JobConfig, parse_config
from pipeline.engine import Engine
from pipeline.engine.drafters.model import ModelDrafter
from pipeline.engine.translation import TranslatingRunner
from pipeline.engine.verifier import TargetVerifier
from pipeline.errors import ModelError
from pipeline.records import Completion, Request, SamplingParams
from tests.engine.conftest import FolderOf
from tests.engine.vocabulary_pairs import merged_tokenizer
from tests.models import tiny_folder

PROMPTS = [list(b"The harbour reopened on"), list(b"Prices of tea and"), list(b"A")]
WARM = SamplingParams(12, temperature=1.0, ignore_eos=True)


def job(target: Path, draft: dict[str, Any] | None = None, **decoding: Any) -> JobConfig:
    sections: dict[str, Any] = {
        "name": "tiny",
        "input": {"path": "/nowhere", "text": "body"},
        "output": {"path": "/nowhere/out"},
        "target": {"model": str(target), "dtype": "float32"},
        "decoding": {"batch": 4, **decoding},
        "tasks": [{"name": "answer", "prompt": "{body}"}],
    }
    return parse_config(sections | ({"draft": draft} if draft else {}), "test")


def answers(config: JobConfig, params: SamplingParams, salt: int = 0) -> list[Completion]:
    requests = [Request(str(i), prompt, params) for i, prompt in enumerate(PROMPTS)]
    return Engine.from_config(config, salt).generate(requests)


def texts(config: JobConfig, params: SamplingParams, salt: int = 0) -> list[list[int]]:
    return [completion.token_ids for completion in answers(config, params, salt)]


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """A model whose tokenizer merges bytes and numbers everything otherwise."""
    folder = tiny_folder(tmp_path / "foreign", "qwen2", 3, vocab=300)
    merged_tokenizer().save_pretrained(folder)
    return folder


def test_draft_with_another_tokenizer_is_refused_with_the_remedy(folder_of: FolderOf, foreign: Path) -> None:
    with pytest.raises(ModelError, match=r"token 0 is .*draft\.vocabulary: intersect"):
        Engine.from_config(job(folder_of(), {"model": str(foreign)}))


@pytest.mark.parametrize("rule", ["ratio", "block", "coupled"])
def test_draft_with_another_tokenizer_drafts_and_leaves_greedy_texts_alone(
    folder_of: FolderOf, foreign: Path, rule: str
) -> None:
    greedy = SamplingParams(24, ignore_eos=True)
    crossed = job(folder_of(), {"model": str(foreign), "vocabulary": "intersect"}, rule=rule)
    found = answers(crossed, greedy)
    assert [c.token_ids for c in found] == texts(job(folder_of()), greedy)
    assert sum(c.stats.drafted for c in found) > 24


def test_coupled_text_depends_on_nothing_but_seed_and_target(folder_of: FolderOf, foreign: Path) -> None:
    plain = texts(job(folder_of(), rule="coupled"), WARM)
    drafts: list[dict[str, Any]] = [
        {"kind": "ngram"},
        {"model": str(folder_of())},
        {"model": str(folder_of(seed=4)), "support": 5},
        {"model": str(foreign), "vocabulary": "intersect"},
    ]
    for number, draft in enumerate(drafts):
        config = job(folder_of(), draft, rule="coupled", draft_tokens=number + 1, batch=number + 1)
        assert texts(config, WARM, salt=number) == plain, draft
    assert texts(job(folder_of(), rule="coupled").model_copy(update={"seed": 1}), WARM) != plain


def test_salts_draw_anew_under_the_other_rules(folder_of: FolderOf) -> None:
    config = job(folder_of(), rule="block")
    assert texts(config, WARM, salt=0) == texts(config, WARM, salt=0)
    assert texts(config, WARM, salt=0) != texts(config, WARM, salt=1)


def test_target_as_its_own_draft_under_coupled_has_everything_accepted(folder_of: FolderOf) -> None:
    """Even cut to 64 tokens, the draft's law races with the target's noise and mostly ends at the same token."""
    config = job(folder_of(), {"model": str(folder_of()), "dtype": "float32", "support": 272}, rule="coupled")
    for completion in answers(config, WARM):
        assert completion.stats.accepted == completion.stats.drafted > 0


@pytest.mark.parametrize(
    ("sampling", "rule", "compared"), [("auto", "ratio", True), ("sample", "ratio", False), ("auto", "coupled", False)]
)
def test_drafts_are_compared_where_there_is_a_choice(
    folder_of: FolderOf, sampling: str, rule: str, compared: bool
) -> None:
    config = job(folder_of(), {"model": str(folder_of(seed=4)), "sampling": sampling}, rule=rule)
    decoder = Engine.from_config(config).decoder
    assert isinstance(decoder.verifier, TargetVerifier)
    assert isinstance(decoder.drafter, ModelDrafter)
    assert decoder.verifier.compare_sampling is compared
    assert not isinstance(decoder.drafter.runner, TranslatingRunner)

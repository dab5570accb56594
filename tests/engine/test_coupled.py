"""What a text hangs on: under `coupled` on seed and target alone; under `ratio` and `block` on draft and k as well.

Temperature 1 and float32, where the texts of other batches differ by rounding only, which fixed seeds do not meet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.config import parse_config
from pipeline.decode import Decoder
from pipeline.engine import Engine
from pipeline.engine.drafters.ngram import one_hot
from pipeline.engine.laws import Laws
from pipeline.engine.verifier import Rule
from pipeline.errors import CacheMiss, WorkerLost
from pipeline.messages import DraftRequest, Proposal, VerifyReply, VerifyRequest
from pipeline.randomness import coupled_uniforms, philox_key
from pipeline.records import Completion, Request, SamplingParams
from tests.decoding import configured_law, decoded, decoder, drafter_of, ragged_requests, verifier_of
from tests.engine.conftest import FolderOf
from tests.models import VOCABULARY, tiny_model

VARIED: tuple[dict[str, Any], ...] = (
    {},
    {"top_p": 0.8},
    {"top_k": 7, "min_p": 0.05},
    {"temperature": 0.7, "repetition_penalty": 1.3},
    {"temperature": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.3, "logit_bias": {3: 2.0, 5: -100.0}},
    {"temperature": 0.0},
    {"min_new_tokens": 9, "n": 2},
)
EOS = (7, 70, 170)  # some texts end by themselves


@cache
def requests() -> tuple[Request, ...]:
    """Ragged prompts, some beginning alike; warm, and with every kind of parameter."""
    asked = ragged_requests(12, VOCABULARY, seed=2, longest=24, temperature=1.0)
    return tuple(
        replace(r, params=replace(r.params, **VARIED[i % len(VARIED)])) for i, r in enumerate(asked)
    )


def engine(
    kind: str,
    rule: Rule = "coupled",
    slots: int = 4,
    draft_tokens: int = 4,
    prefill_chunk: int = 24,
    seed: int = 0,
    eos: Sequence[int] = EOS,
) -> Decoder:
    drafter = drafter_of(kind, "llama", slots, coupled=rule == "coupled", eos=eos, chunk=prefill_chunk)
    verifier = verifier_of("llama", slots, rule=rule, eos=eos, compare_sampling=kind == "auto")
    return decoder(
        verifier, drafter, slots, draft_tokens=draft_tokens, eos=eos, seed=seed, prefill_chunk=prefill_chunk
    )


def texts(answers: Iterable[Completion]) -> list[tuple[list[int], str]]:
    return [(a.token_ids, a.finish_reason) for a in answers]


@cache
def plain() -> list[tuple[list[int], str]]:
    """What the target alone says, one request at a time."""
    alone = engine("none", slots=1)
    return [text for r in requests() for text in texts(decoded(alone, [r]))]


# ------------------------------------------------------------------------------------------------ the rule coupled


def test_the_texts_compared_say_something() -> None:
    found = [tuple(ids) for ids, _ in plain()]
    assert len(set(found)) == len(found)
    assert {str(finish) for _, finish in plain()} == {"stop", "length"}
    greedy = decoded(engine("none"), [replace(r, params=replace(r.params, temperature=0.0)) for r in requests()])
    assert sum(a.token_ids != list(ids) for a, ids in zip(greedy, found, strict=True)) > 8
    assert max(len(ids) for ids in found) > 15


@pytest.mark.parametrize("kind", ["none", "ngram", "model", "itself", "greedy", "auto"])
def test_text_is_the_same_with_any_drafter(kind: str) -> None:
    answers = decoded(engine(kind), requests())
    assert texts(answers) == plain()
    drafted, accepted = (sum(getattr(a.stats, f) for a in answers) for f in ("drafted", "accepted"))
    if kind == "itself":  # the same noise on the same laws: but for what the draft's support leaves out
        assert accepted > 0.5 * drafted > 50
    if kind in ("model", "greedy", "auto"):
        assert drafted > 100


@pytest.mark.parametrize("draft_tokens", range(7))
def test_text_is_the_same_with_any_k(draft_tokens: int) -> None:
    answers = decoded(engine("itself", draft_tokens=draft_tokens), requests())
    assert texts(answers) == plain()
    assert max(len(a.stats.accepted_at) for a in answers) == draft_tokens


@pytest.mark.parametrize(("slots", "prefill_chunk"), [(1, 3), (2, 300), (7, 3), (16, 24), (16, 300)])
def test_text_is_the_same_in_any_batch_and_with_any_prefill_chunk(slots: int, prefill_chunk: int) -> None:
    assert texts(decoded(engine("itself", slots=slots, prefill_chunk=prefill_chunk), requests())) == plain()


@pytest.mark.parametrize(
    ("rule", "kind"),
    [
        ("coupled", "auto"),
        *(("ratio", kind) for kind in ("model", "ngram", "auto")),
        *(("block", kind) for kind in ("itself", "model", "ngram")),
    ],
)
def test_text_is_the_same_in_any_order_and_company(rule: Rule, kind: str) -> None:
    """Under each rule, for the same k and draft."""
    chosen = requests()[:8]
    alone = engine(kind, rule, slots=1)
    expected = {r.key: texts(decoded(alone, [r])) for r in chosen}
    for seed, slots in ((0, 4), (1, 9)):
        rng = np.random.default_rng(seed)
        strangers = [
            replace(r, key=f"stranger{r.key}")
            for r in ragged_requests(4, VOCABULARY, seed + 20, longest=12, temperature=1.0)
        ]
        copies = [replace(r, key=f"copy{r.key}") for r in chosen[::2]]  # the same prompts: prefixes are shared
        company = [*chosen, *strangers, *copies]
        order = [company[i] for i in rng.permutation(len(company))]
        found: dict[str, list[Completion]] = {}
        for request, _, completion in sorted(engine(kind, rule, slots).answers(order), key=lambda a: a.sample):
            found.setdefault(request.key, []).append(completion)
        assert {r.key: texts(found[r.key]) for r in chosen} == expected


@pytest.mark.parametrize("kind", ["none", "itself"])
def test_text_is_the_same_again_in_a_used_engine(kind: str) -> None:
    used = engine(kind)
    assert texts(decoded(used, requests())) == texts(decoded(used, requests())) == plain()


def test_text_is_the_same_behind_the_end_of_the_drafts_context() -> None:
    short = 48  # tokens; some prompts are longer than that
    draft = drafter_of("itself", "llama", context=short, coupled=True, eos=EOS)
    decoding = decoder(verifier_of("llama", rule="coupled", eos=EOS), draft, eos=EOS)
    decoding.scheduler.limits = replace(decoding.scheduler.limits, draft_context=short)
    answers = decoded(decoding, requests())
    assert texts(answers) == plain()
    assert {a.stats.drafted > 0 for a in answers} == {True, False}


@pytest.mark.parametrize("kind", ["model", "itself"])
def test_a_drafted_token_that_is_rejected_makes_no_error_though_the_target_could_not_go_on_behind_it(kind: str) -> None:
    """Its logits behind some tokens are not finite: rows that choose one end as without a draft, and no others."""
    asked = [Request(str(i), [3, 1 + i, 2], SamplingParams(12, temperature=1.0, n=2)) for i in range(15)]
    found = []
    for drafting in ("none", kind):
        verifier = verifier_of("llama", rule="coupled")
        verifier.runner.model.get_input_embeddings().weight.data[100:110] = torch.nan
        answers = decoded(decoder(verifier, drafter_of(drafting, "llama", coupled=True)), asked)
        found.append([(a.token_ids, a.error) for a in answers])
    assert found[0] == found[1]
    assert 5 < sum(error is not None for _, error in found[0]) < 25


class Shaky:
    """Workers that are emptied, or lose what they did, now and then. Both of `decode`'s protocols."""

    def __init__(self, make: Callable[[], Any], rng: np.random.Generator) -> None:
        self.make, self.inner, self.rng = make, make(), rng
        self.keeps_proposals = getattr(self.inner, "keeps_proposals", True)
        self.chunk = getattr(self.inner, "chunk", None)
        self.trouble = 0

    def ready(self) -> bool:
        return bool(self.rng.random() < 0.9)

    def _shake(self, request: Any) -> None:
        if self.rng.random() < 0.15:
            self.trouble += 1
            self.inner = self.make()

    def verify(self, request: VerifyRequest) -> VerifyReply:
        self._shake(request)
        reply: VerifyReply = self.inner.verify(request)
        if self.rng.random() < 0.1:
            self.trouble += 1
            raise CacheMiss(request.feed.sequences)  # killed when it had answered, and nobody heard it
        return reply

    def propose(self, request: DraftRequest) -> Proposal:
        self._shake(request)
        proposal: Proposal = self.inner.propose(request)
        if self.rng.random() < 0.1:
            self.trouble += 1
            self.inner = self.make()
            raise WorkerLost("the draft worker is gone")
        return proposal


@pytest.mark.parametrize("seed", range(4))
def test_text_is_the_same_after_any_kill(seed: int) -> None:
    """Forgotten targets and drafts, steps that were done for nothing, steps without the drafter."""
    rng = np.random.default_rng(seed)
    target = Shaky(lambda: verifier_of("llama", rule="coupled", eos=EOS), rng)
    draft = Shaky(lambda: drafter_of("itself", "llama", coupled=True, eos=EOS), rng)
    answers = decoded(decoder(target, draft, eos=EOS), requests())
    assert texts(answers) == plain()
    assert min(target.trouble, draft.trouble) > 3


def test_another_seed_and_another_key_are_other_texts() -> None:
    warm = [r for r in requests() if r.params.temperature > 0 and r.params.n == 1 and r.params.max_new_tokens > 5]
    first = texts(decoded(engine("itself"), warm))
    renamed = [replace(r, key=f"{r.key}'") for r in warm]
    for others in (texts(decoded(engine("itself", seed=1), warm)), texts(decoded(engine("itself"), renamed))):
        assert not any(a == b for a, b in zip(first, others, strict=True))


def test_samples_of_a_request_are_different_texts() -> None:
    request = replace(requests()[0], params=SamplingParams(12, temperature=1.0, n=5))
    answers = [tuple(a.token_ids) for a in decoded(engine("itself"), [request])]
    assert len(set(answers)) == 5
    assert sum(a[0] == b[0] for a, b in pairwise(answers)) < 4


def test_a_sample_is_the_same_however_many_are_asked_for() -> None:
    few, many = (replace(requests()[0], params=SamplingParams(12, temperature=1.0, n=n)) for n in (2, 5))
    assert texts(decoded(engine("itself"), [many]))[:2] == texts(decoded(engine("none"), [few]))


# ----------------------------------------------------------------------------------------------- where it comes from


def of_bytes() -> list[Request]:
    """The same requests in tokens that the tokenizer has."""
    return [replace(r, prompt_token_ids=[t % 256 for t in r.prompt_token_ids]) for r in requests()]


def test_salt_matters_to_ratio_and_block_and_not_to_coupled(folder_of: FolderOf) -> None:
    folder = str(folder_of("llama", seed=0))
    found = {}
    for rule in ("coupled", "ratio", "block"):
        for salt in (0, 3):
            found[rule, salt] = [a.token_ids for a in from_job(folder, rule, salt).generate(of_bytes())]
    assert found["coupled", 0] == found["coupled", 3]
    for rule in ("ratio", "block"):
        same = [a == b for a, b in zip(found[rule, 0], found[rule, 3], strict=True)]
        assert sum(same) < 4  # a greedy one or so


def from_job(folder: str, rule: str, salt: int, **draft: Any) -> Engine:
    mapping = {
        "name": "coupled",
        "input": {"path": "nowhere.jsonl", "text": "body"},
        "output": {"path": "nowhere"},
        "target": {"model": folder, "dtype": "float32"},
        "draft": {"kind": "ngram", **draft},
        "decoding": {"rule": rule, "batch": 4, "context": 200},
        "tasks": [{"name": "t", "prompt": "{body}"}],
    }
    return Engine.from_config(parse_config(mapping, "test"), salt)


def test_engines_of_job_files_agree_whatever_their_draft(folder_of: FolderOf) -> None:
    folder, other = str(folder_of("llama", seed=0)), str(folder_of("llama", seed=5))
    drafts: list[dict[str, Any]] = [
        {"kind": "none"},
        {"kind": "ngram"},
        *({"kind": "model", "model": other, "dtype": "float32", "sampling": s} for s in ("sample", "greedy", "auto")),
        {"kind": "model", "model": folder, "dtype": "bfloat16", "support": 4},
    ]
    first, *others = [texts(from_job(folder, "coupled", 0, **d).generate(of_bytes())) for d in drafts]
    assert all(found == first for found in others)
    assert sum(len(ids) for ids, _ in first) > 100


def test_noise_depends_on_key_position_and_token_only() -> None:
    """The whole engine's choice, worked out by hand: the token whose waiting time is least under the plain law."""
    model = tiny_model("llama")
    for request, (text, _) in zip(requests()[:5], plain()[:5], strict=True):
        key = philox_key(0, 0, request.key, 0)
        for position, token in enumerate(text):
            before = [*request.prompt_token_ids, *text[:position]]
            logits = model(torch.tensor([before])).logits[0, -1].numpy()
            law = configured_law(logits, request.params, request.prompt_token_ids, text[:position], EOS)
            noise = [coupled_uniforms([key], [position], [t])[0, 0] for t in range(VOCABULARY)]
            with np.errstate(divide="ignore"):
                times = -np.log1p(-np.array(noise)) / law
            assert int(np.argmin(times)) == token


def test_planted_bug_noise_that_ignores_the_position_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine agrees with itself, whatever the draft, and yet each token is drawn with the last one's noise."""
    asked = [replace(r, params=SamplingParams(24, temperature=1.0)) for r in requests()]
    honest = [a.token_ids for a in decoded(engine("none", eos=()), asked)]
    race = Laws.race
    monkeypatch.setattr(Laws, "race", lambda self, rows, keys, places: race(self, rows, keys, places * 0))
    planted = [a.token_ids for a in decoded(engine("none", eos=()), asked)]
    assert repetitions(planted) > 3 * repetitions(honest)


def repetitions(found: list[list[int]]) -> int:
    """How often a token follows itself."""
    return sum(a == b for text in found for a, b in pairwise(text))


# -------------------------------------------------------------------------------- what a proposal may know of its judge


def test_a_proposal_may_be_anything_under_coupled() -> None:
    """Even the text itself, which was chosen by the very noise that judges it."""
    known = {r.key: text for r, text in zip(requests()[:5], plain(), strict=False)}
    asked = [r for r in requests()[:5]]

    class Knowing:
        keeps_proposals = False
        chunk = None

        def ready(self) -> bool:
            return True

        def propose(self, request: DraftRequest) -> Proposal:
            sequences = {s.handle: s for s in decoding.scheduler.running}
            drafts = []
            for b, handle in enumerate(request.feed.sequences.tolist()):
                s, wanted = sequences[handle], int(request.wanted[b])
                drafts.append(known[s.request.key][0][s.generated : s.generated + wanted] if wanted else [])
            return one_hot(drafts)

    decoding = decoder(verifier_of("llama", rule="coupled", eos=EOS), Knowing(), eos=EOS)
    answers = decoded(decoding, asked)
    assert texts(answers) == plain()[:5]
    assert sum(a.stats.accepted for a in answers) == sum(a.stats.drafted for a in answers)

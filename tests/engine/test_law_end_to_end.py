"""The law of what the whole packed engine emits: thousands of requests, against enumeration with the plain model.

Fixed seeds. What is ours fits well; each planted bug misses by a wide margin.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from pipeline import randomness, speculation
from pipeline.decode import Decoder, Drafter
from pipeline.engine import verifier as verifier_module
from pipeline.engine.drafters import model as model_drafter
from pipeline.engine.drafters.model import ModelDrafter, Sampling
from pipeline.engine.drafters.ngram import NgramDrafter, one_hot
from pipeline.engine.edits import Positions
from pipeline.engine.laws import Decoding, Laws
from pipeline.engine.verifier import Rule, TargetVerifier
from pipeline.messages import DraftRequest, Proposal
from pipeline.randomness import Stream
from pipeline.records import Completion, Request, SamplingParams
from tests import oracle
from tests.decoding import configured_law, decoded, decoder, packed, runner
from tests.models import tiny_model
from tests.oracle import SequenceLaw

VOCABULARY, LENGTH, SLOTS, CONTEXT = 6, 3, 64, 40
EOS = (0,)  # kept out of the laws of answers that have a minimum length; no text ends by it here
SAMPLES, SAMPLES_OF_FEW, SAMPLES_OF_BUGS = 2000, 1300, 1300  # filtered texts are few; most bugs show sooner
FITS, MISFITS = 1e-3, 1e-6
SHAPE: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "head_dim": 4,
    "vocab": VOCABULARY,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "initializer_range": 0.25,
}
TARGET_SEED, DRAFT_SEED = 1, 0  # laws that differ, and a target that goes on with the loop every second time or so
PROMPT = (2, 1, 4, 2, 1, 4, 2, 1)  # loops, so that n-gram lookup proposes from the first token on
WARM = SamplingParams(LENGTH, temperature=1.0)
NUCLEUS = SamplingParams(LENGTH, temperature=1.0, top_p=0.8)


# what is expected


@cache
def target() -> PreTrainedModel:
    return tiny_model("llama", TARGET_SEED, **SHAPE)


@cache
def logits_after(tokens: tuple[int, ...]) -> np.ndarray:
    return target()(torch.tensor([tokens])).logits[0, -1].double().numpy()


def expected_law(prompt: tuple[int, ...], params: SamplingParams) -> SequenceLaw:
    """By enumeration of the plain model, each law worked out from the formulas. Texts are not ended by EOS here."""
    law = lambda text: configured_law(logits_after(prompt + text), params, prompt, text, EOS)  # noqa: E731
    return oracle.enumerate_law(law, params.max_new_tokens)


# what the engine does


def drafter_named(kind: str, coupled: bool = False) -> Drafter | None:
    if kind == "none":
        return None
    if kind == "ngram":
        return NgramDrafter(SLOTS)
    seed, support = (DRAFT_SEED, 4) if kind in ("model", "greedy", "auto") else (TARGET_SEED, VOCABULARY)
    sampling: Sampling = "greedy" if kind == "greedy" else "auto" if kind == "auto" else "sample"
    run = runner(lambda: packed("llama", seed, **SHAPE), SLOTS, CONTEXT)
    if kind == "noisy":  # chances to accept that differ a lot, which is where `block` and `ratio` part
        support, noise = 4, torch.Generator().manual_seed(3)
        for weights in run.model.parameters():
            weights.data += weights.std() * torch.randn(weights.shape, generator=noise)
    return ModelDrafter(run, support, sampling, 10**6, coupled, EOS)


def answered(kind: str, requests: list[Request], draft_tokens: int = 2, rule: Rule = "ratio") -> list[Completion]:
    run = runner(lambda: packed("llama", TARGET_SEED, **SHAPE), SLOTS, CONTEXT)
    verifier = TargetVerifier(run, rule, EOS, compare_sampling=kind == "auto")
    chunk = SLOTS * CONTEXT  # no need to cut these prompts
    drafter = drafter_named(kind, rule == "coupled")
    decoding = decoder(verifier, drafter, SLOTS, CONTEXT, draft_tokens, seed=5, prefill_chunk=chunk)
    return decoded(decoding, requests)


def emitted(kind: str, requests: list[Request], draft_tokens: int = 2, rule: Rule = "ratio") -> list[tuple[int, ...]]:
    answers = answered(kind, requests, draft_tokens, rule)
    if kind != "none":
        drafted, accepted = (sum(getattr(a.stats, f) for a in answers) for f in ("drafted", "accepted"))
        assert drafted > len(requests) / 2
        assert accepted > (0.99 if kind == "itself" else 0.05) * drafted
        assert kind == "itself" or accepted < 0.95 * drafted
    return [tuple(a.token_ids) for a in answers]


def p_value(kind: str, params: SamplingParams, samples: int, rule: Rule = "ratio") -> float:
    requests = [Request(str(i), list(PROMPT), params) for i in range(samples)]
    texts = emitted(kind, requests, params.max_new_tokens - 1, rule)
    return oracle.g_test(Counter(texts), expected_law(PROMPT, params))


def test_the_laws_compared_differ_from_each_other_and_from_even_ones() -> None:
    """Or the tests below would say little."""
    warm, nucleus = (expected_law(PROMPT, params) for params in (WARM, NUCLEUS))
    assert oracle.total_variation(warm, nucleus) > 0.1
    even = dict.fromkeys(itertools.product(range(VOCABULARY), repeat=LENGTH), VOCABULARY**-LENGTH)
    assert oracle.total_variation(warm, even) > 0.2
    assert len(warm) == VOCABULARY**LENGTH
    for prompt, params in MIXED:
        bare = SamplingParams(params.max_new_tokens, temperature=params.temperature)
        if params not in (bare, replace(bare, n=params.n)):
            assert oracle.total_variation(expected_law(prompt, params), expected_law(prompt, bare)) > 0.1, params


# One batch holds all of these, each with the law of its own parameters.
MIXED: list[tuple[tuple[int, ...], SamplingParams]] = [
    (PROMPT, SamplingParams(3, temperature=0.0)),
    (PROMPT, SamplingParams(3, temperature=0.7)),
    (PROMPT[:3], SamplingParams(2, temperature=1.3, n=2)),
    ((4,), SamplingParams(4, temperature=0.0, repetition_penalty=1.5, presence_penalty=0.3)),
    (PROMPT, SamplingParams(3, temperature=1.0, top_p=0.8)),
    (PROMPT[:5], SamplingParams(3, temperature=1.3, top_k=3)),
    (PROMPT, SamplingParams(3, temperature=0.7, min_p=0.3)),
    (PROMPT, SamplingParams(3, temperature=1.0, repetition_penalty=2.0)),
    (PROMPT[:4], SamplingParams(3, temperature=0.7, presence_penalty=0.6, frequency_penalty=0.5)),
    (PROMPT, SamplingParams(2, temperature=1.3, logit_bias={1: -100.0, 3: 1.5})),
    (PROMPT[2:], SamplingParams(3, temperature=1.3, top_p=0.9, repetition_penalty=1.4, logit_bias={5: 1.0})),
    (PROMPT, SamplingParams(2, temperature=1.0, min_new_tokens=2, frequency_penalty=-0.5)),
    (PROMPT, SamplingParams(1, temperature=1.0)),
]
EACH = 60  # requests per kind of row
COVERED: list[tuple[Rule, str]] = [
    ("ratio", "none"),
    *(("ratio", kind) for kind in ("ngram", "model", "itself", "auto")),
    *(("block", kind) for kind in ("ngram", "model", "itself", "greedy")),
    *(("coupled", kind) for kind in ("none", "ngram", "model", "greedy")),
]


@pytest.mark.parametrize(("rule", "kind"), COVERED)
def test_mixed_batch_gives_each_kind_of_row_its_own_law(rule: Rule, kind: str) -> None:
    """Ragged prompts and lengths, greedy and sampled, every kind of parameter, all in each other's company."""
    requests = [Request(f"{i}/{k}", list(p), params) for i in range(EACH) for k, (p, params) in enumerate(MIXED)]
    texts: dict[int, list[tuple[int, ...]]] = {k: [] for k in range(len(MIXED))}
    owners = [int(r.key.split("/")[1]) for r in requests for _ in range(r.params.n)]
    for k, answer in zip(owners, answered(kind, requests, 3, rule), strict=True):
        texts[k].append(tuple(answer.token_ids))
    counts: Counter[tuple[int, ...]] = Counter()
    law: SequenceLaw = {}
    total = sum(len(texts[k]) for k, (_, params) in enumerate(MIXED) if params.temperature)
    for k, (prompt, params) in enumerate(MIXED):
        expected = expected_law(prompt, params)
        if params.temperature == 0.0:
            assert set(texts[k]) == set(expected)
            continue
        counts.update((k, *text) for text in texts[k])
        law |= {(k, *text): p * len(texts[k]) / total for text, p in expected.items()}
    assert oracle.g_test(counts, law) > FITS


@pytest.mark.parametrize(
    ("rule", "kind", "params"),
    [
        ("ratio", "model", WARM),
        ("ratio", "model", NUCLEUS),
        ("block", "model", WARM),
        ("block", "ngram", NUCLEUS),
        ("coupled", "itself", WARM),
    ],
    ids=lambda value: value if isinstance(value, str) else "nucleus" if value is NUCLEUS else "warm",
)
def test_emitted_texts_have_the_targets_law(rule: Rule, kind: str, params: SamplingParams) -> None:
    assert p_value(kind, params, SAMPLES if params is WARM else SAMPLES_OF_FEW, rule) > FITS


@pytest.mark.parametrize(("rule", "kind"), [("ratio", "ngram"), ("block", "model"), ("coupled", "model")])
def test_samples_of_a_request_are_independent_draws(rule: Rule, kind: str) -> None:
    """Two samples of one request, taken together, have the product of their laws."""
    pairs = replace(WARM, max_new_tokens=2, n=2)
    requests = [Request(str(i), list(PROMPT), pairs) for i in range(SAMPLES // 3)]
    texts = emitted(kind, requests, 1, rule)
    joined = [a + b for a, b in zip(texts[::2], texts[1::2], strict=True)]
    alone = expected_law(PROMPT, pairs)
    law = {a + b: p * q for a, p in alone.items() for b, q in alone.items()}
    assert oracle.g_test(Counter(joined), law) > FITS
    firsts = Counter((a[0], b[0]) for a, b in zip(texts[::2], texts[1::2], strict=True))
    one = expected_law(PROMPT, replace(pairs, max_new_tokens=1))
    assert oracle.g_test(firsts, {a + b: p * q for a, p in one.items() for b, q in one.items()}) > FITS


class Digits:
    """Every token writes its number."""

    def raw(self, ids: list[int]) -> str:
        return "".join(map(str, ids))

    __call__ = raw

    def spellings(self, word: str) -> tuple[tuple[int, ...], ...]:
        return (tuple(map(int, word)),)


def ended(text: tuple[int, ...], params: SamplingParams) -> tuple[int, ...]:
    """Where EOS or a stop string of two digits cuts a text of ordinary tokens, and -1 behind it if one does."""
    for n in range(1, len(text) + 1):
        if text[n - 1] in EOS:
            return (*text[: n - 1], -1)
        if "".join(map(str, text[n - 2 : n])) in params.stop:
            return (*text[: n - 2], -1)
    return text


@pytest.mark.parametrize(("rule", "kind"), [("ratio", "model"), ("block", "noisy"), ("coupled", "ngram")])
def test_texts_that_end_by_themselves_have_their_law(rule: Rule, kind: str) -> None:
    """EOS and stop strings cut inside accepted blocks; below a minimum length there is neither."""
    ends = SamplingParams(4, temperature=1.3, stop=("12", "35"), bad_words=("43",))
    run = runner(lambda: packed("llama", TARGET_SEED, **SHAPE), SLOTS, CONTEXT)
    drafter = drafter_named(kind, rule == "coupled")
    decoding = decoder(TargetVerifier(run, rule, EOS), drafter, SLOTS, CONTEXT, 3, EOS, wording=Digits())  # type: ignore[arg-type]
    answers = decoded(decoding, [Request(str(i), list(PROMPT), ends) for i in range(SAMPLES_OF_FEW)])
    found = Counter((*a.token_ids, *((-1,) if a.finish_reason == "stop" else ())) for a in answers)

    def without_bad_words(text: tuple[int, ...]) -> oracle.Law:
        logits = logits_after(PROMPT + text).copy()
        logits[3] = -np.inf if (PROMPT + text)[-1] == 4 else logits[3]
        return configured_law(logits, ends, PROMPT, text)

    law: SequenceLaw = {}
    for text, p in oracle.enumerate_law(without_bad_words, 4).items():
        law[ended(text, ends)] = law.get(ended(text, ends), 0.0) + p
    assert oracle.g_test(found, law) > FITS
    assert sum(count for text, count in found.items() if text[-1] == -1) > len(answers) / 4


@pytest.mark.parametrize(("rule", "kind"), [("ratio", "model"), ("block", "noisy")])
def test_a_target_that_cannot_go_on_behind_some_token_has_its_own_share_of_errors(rule: Rule, kind: str) -> None:
    """Not finite behind token 3: whoever chose it is an error, and nobody to whom it was only proposed."""
    run = runner(lambda: packed("llama", TARGET_SEED, **SHAPE), SLOTS, CONTEXT)
    run.model.get_input_embeddings().weight.data[3] = torch.nan
    drafter = drafter_named(kind, rule == "coupled")
    decoding = decoder(TargetVerifier(run, rule, EOS), drafter, SLOTS, CONTEXT, 2, prefill_chunk=SLOTS * CONTEXT)
    answers = decoded(decoding, [Request(str(i), list(PROMPT), WARM) for i in range(900)])
    found = Counter((-1,) if a.error else tuple(a.token_ids) for a in answers)
    law: SequenceLaw = {}
    for text, p in expected_law(PROMPT, WARM).items():
        outcome = (-1,) if 3 in text[:-1] else text
        law[outcome] = law.get(outcome, 0.0) + p
    assert oracle.g_test(found, law) > FITS
    assert law[(-1,)] > 0.05


# planted bugs


def redraw_from_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = Laws.draw
    monkeypatch.setattr(Laws, "draw", lambda self, rows, ids, probs, *rest: draw(self, rows, ids, probs * 0, *rest))


def claim_the_whole_law(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws from the four likeliest tokens and says what each had among all."""
    propose = ModelDrafter.propose

    def lying(self: ModelDrafter, request: Any) -> Any:
        proposal = propose(self, request)
        rows, places, _ = proposal.support_probs.shape
        rest = 1.0 - proposal.support_probs.sum(-1, keepdims=True)
        ids = np.full((rows, places, 1), VOCABULARY, dtype=np.int64)  # where the rest of the mass is said to be
        return type(proposal)(
            proposal.tokens,
            proposal.lengths,
            np.concatenate([proposal.support_ids, ids], -1),
            np.concatenate([proposal.support_probs, rest], -1).clip(min=0),
        )

    monkeypatch.setattr(ModelDrafter, "propose", lying)


def claim_a_cooler_law(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws at the sequence's temperature and ships the law of another."""
    top = Laws.top

    def tempered(self: Laws, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        ids, probs = top(self, size)
        return ids, Shipped(probs)

    class Shipped:
        """Draws as itself, is sent as its square."""

        def __init__(self, probs: torch.Tensor) -> None:
            self.probs = probs

        def double(self) -> torch.Tensor:
            return self.probs.double()

        def cpu(self) -> torch.Tensor:
            return self.probs.square()

    monkeypatch.setattr(Laws, "top", tempered)


def draft_with_the_numbers_that_judge(monkeypatch: pytest.MonkeyPatch) -> None:
    uniforms = randomness.uniforms
    monkeypatch.setattr(model_drafter, "uniforms", lambda k, s, o, stream: uniforms(k, s, o, Stream.ACCEPT))


def redraw_with_the_numbers_that_drafted(monkeypatch: pytest.MonkeyPatch) -> None:
    def shared(keys: Any, starts: Any, count: int) -> np.ndarray:
        numbers = randomness.verdict_uniforms(keys, starts, count)
        numbers[..., 1] = randomness.uniforms(keys, starts, count, Stream.DRAFT)
        return numbers

    monkeypatch.setattr(verifier_module, "verdict_uniforms", shared)


def keep_whatever_is_likely(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accepts with p(x), as if every proposed token had been certain."""
    judge = speculation.judge_ratio
    monkeypatch.setattr(
        speculation, "judge_ratio", lambda p, q, lengths, u: judge(p, torch.where(q > 0, 1.0, 0.0).double(), lengths, u)
    )


def forget_the_filters_of_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Applies top-p where the next token is drawn without a draft, and the bare law elsewhere."""
    repeat = Decoding.repeat

    def bare(self: Decoding, counts: np.ndarray) -> Decoding:
        full = repeat(self, counts)
        return replace(full, top_p_R=np.where(np.repeat(counts, counts) > 1, 1.0, full.top_p_R))

    monkeypatch.setattr(Decoding, "repeat", bare)


def count_only_what_is_final(monkeypatch: pytest.MonkeyPatch) -> None:
    """Penalties that do not see the drafted tokens before a position."""

    def first(cls: Any, slots: Any, before: np.ndarray, generated: np.ndarray, counts: np.ndarray) -> Positions:
        owner = np.repeat(np.arange(len(counts)), counts)
        return Positions(owner, slots[owner], before[owner], generated[owner])

    monkeypatch.setattr(Positions, "of_blocks", classmethod(first))


def edit_the_last_position_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A logit bias that reaches the bonus token and none inside the block."""
    edited = verifier_module.edited

    def last(logits: torch.Tensor, openings: Any, positions: Positions, *rest: Any) -> torch.Tensor:
        changed = edited(logits, openings, positions, *rest)
        is_last = torch.as_tensor(np.append(np.diff(positions.owner_R) > 0, True))
        return torch.where(is_last[:, None], changed, logits.to(changed.dtype))

    monkeypatch.setattr(verifier_module, "edited", last)


def judge_a_greedy_draft_as_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Proposes the likeliest token, and says that it was drawn."""
    monkeypatch.setattr(model_drafter, "uniforms", lambda keys, s, o, stream: np.zeros((len(keys), len(o))))


def drop_what_looks_unlikely(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ends a draft before the first token that turned out to be an unlikely one."""
    propose = ModelDrafter.propose

    def choosy(self: ModelDrafter, request: Any) -> Any:
        proposal = propose(self, request)
        is_token = proposal.support_ids == proposal.tokens[:, :, None]
        unlikely = np.pad((proposal.support_probs * is_token).sum(-1) < 0.25, ((0, 0), (0, 1)), constant_values=True)
        return replace(proposal, lengths=np.minimum(proposal.lengths, unlikely.argmax(1)))

    monkeypatch.setattr(ModelDrafter, "propose", choosy)


def judge_each_position_with_its_own_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uniforms by position alone: `block` judges the next block with numbers that it has looked at."""

    def by_position(keys: Any, starts: np.ndarray, count: int) -> np.ndarray:
        positions = np.asarray(starts)[:, None] + np.arange(count)
        streams = (randomness.uniforms(keys, starts * 0, positions, s) for s in (Stream.ACCEPT, Stream.RESIDUAL))
        return np.stack(list(streams), -1)

    monkeypatch.setattr(verifier_module, "verdict_uniforms", by_position)


def redraw_without_the_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """The residual of `block` as if it were that of `ratio`."""
    draw = Laws.draw
    monkeypatch.setattr(Laws, "draw", lambda self, rows, ids, probs, u, scale: draw(self, rows, ids, probs, u))


def race_with_the_same_noise_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise of `coupled` that ignores the position."""
    race = Laws.race
    monkeypatch.setattr(Laws, "race", lambda self, rows, keys, places: race(self, rows, keys, places * 0))


PENALISED = SamplingParams(LENGTH, temperature=1.0, repetition_penalty=1.5, presence_penalty=1.0, frequency_penalty=0.5)
BIASED = SamplingParams(LENGTH, temperature=1.0, logit_bias={1: -100.0, 3: 1.0})
LONGER = SamplingParams(4, temperature=1.0)
BUGS: list[tuple[Callable[[pytest.MonkeyPatch], None], Rule, str, SamplingParams]] = [
    (redraw_from_the_target, "ratio", "model", WARM),
    (redraw_from_the_target, "block", "ngram", WARM),
    (claim_the_whole_law, "ratio", "model", WARM),
    (claim_a_cooler_law, "ratio", "model", WARM),
    (draft_with_the_numbers_that_judge, "ratio", "model", WARM),
    (redraw_with_the_numbers_that_drafted, "ratio", "model", WARM),
    (keep_whatever_is_likely, "ratio", "model", WARM),
    (forget_the_filters_of_the_block, "ratio", "model", NUCLEUS),
    (forget_the_filters_of_the_block, "coupled", "model", NUCLEUS),
    (count_only_what_is_final, "ratio", "model", PENALISED),
    (count_only_what_is_final, "coupled", "model", PENALISED),
    (edit_the_last_position_alone, "ratio", "ngram", BIASED),
    (judge_a_greedy_draft_as_sampled, "ratio", "model", WARM),
    (drop_what_looks_unlikely, "ratio", "model", WARM),
    (judge_each_position_with_its_own_numbers, "block", "model", LONGER),
    (redraw_without_the_scale, "block", "noisy", LONGER),
    (race_with_the_same_noise_everywhere, "coupled", "model", WARM),
]
SEEN_LATE = (redraw_with_the_numbers_that_drafted,)


def named(value: Any) -> str:
    names = {id(params): name for name, params in globals().items() if isinstance(params, SamplingParams)}
    return value if isinstance(value, str) else names.get(id(value), getattr(value, "__name__", "")).lower()


@pytest.mark.parametrize(("plant", "rule", "kind", "params"), BUGS, ids=named)
def test_planted_bug_misses_the_law(
    plant: Callable[[pytest.MonkeyPatch], None],
    rule: Rule,
    kind: str,
    params: SamplingParams,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(monkeypatch)
    samples = 6000 if params is LONGER else 3000 if plant in SEEN_LATE else SAMPLES_OF_BUGS
    assert p_value(kind, params, samples, rule) < MISFITS


@pytest.mark.parametrize(
    ("rule", "kind", "params"),
    [
        ("ratio", "model", PENALISED),
        ("coupled", "model", PENALISED),
        ("ratio", "ngram", BIASED),
        ("block", "noisy", LONGER),
    ],
    ids=named,
)
def test_what_the_planted_bugs_break_is_sound(rule: Rule, kind: str, params: SamplingParams) -> None:
    assert p_value(kind, params, SAMPLES if params is LONGER else SAMPLES_OF_BUGS, rule) > FITS


# a drafter that remembers


class Remembering:
    """Proposes what a memory holds of a request, as certain."""

    keeps_proposals = False
    chunk = None

    def __init__(self, memory: dict[str, tuple[int, ...]]) -> None:
        self.memory = memory
        self.decoder: Decoder | None = None

    def ready(self) -> bool:
        return True

    def propose(self, request: DraftRequest) -> Proposal:
        assert self.decoder is not None
        running = {s.handle: s for s in self.decoder.scheduler.running}
        drafts = []
        for handle, wanted in zip(request.feed.sequences.tolist(), request.wanted.tolist(), strict=True):
            sequence = running[handle]
            done = tuple(sequence.tokens[len(PROMPT) :])
            held = self.memory.get(sequence.request.key, ())
            drafts.append(list(held[len(done) : len(done) + wanted]) if wanted and held[: len(done)] == done else [])
        return one_hot(drafts)


def answered_again(rule: Rule, remembered: Callable[[int], int | None], salt: int) -> float:
    """The p-value of texts to which a drafter proposes those of an earlier run: of request i, or of another one."""
    requests = [Request(str(i), list(PROMPT), WARM) for i in range(SAMPLES_OF_BUGS)]
    earlier = emitted("none", requests, rule=rule)
    memory = {str(i): earlier[j] for i in range(len(requests)) if (j := remembered(i)) is not None}
    drafter = Remembering(memory)
    run = runner(lambda: packed("llama", TARGET_SEED, **SHAPE), SLOTS, CONTEXT)
    verifier = TargetVerifier(run, rule, EOS)
    drafter.decoder = decoder(verifier, drafter, SLOTS, CONTEXT, 2, seed=5, prefill_chunk=SLOTS * CONTEXT, salt=salt)
    answers = decoded(drafter.decoder, requests)
    assert sum(a.stats.drafted for a in answers) > len(requests)
    return oracle.g_test(Counter(tuple(a.token_ids) for a in answers), expected_law(PROMPT, WARM))


@pytest.mark.parametrize("rule", ["ratio", "block"])
def test_proposing_a_request_its_own_earlier_text_is_caught(rule: Rule) -> None:
    """The numbers that judge the text chose it. A new salt is one remedy; never showing a key its own text, another."""
    assert answered_again(rule, lambda i: i, salt=0) < MISFITS
    assert answered_again(rule, lambda i: i, salt=1) > FITS
    assert answered_again(rule, lambda i: (i + 1) % SAMPLES_OF_BUGS, salt=0) > FITS


# what the rules are chosen for


def test_block_accepts_more_tokens_than_ratio() -> None:
    """At least as many on average; by enumeration in tests/test_speculation.py, here through the engine."""
    long = SamplingParams(16, temperature=1.0)
    requests = [Request(str(i), list(PROMPT), long) for i in range(250)]
    per_step = {}
    for rule in ("ratio", "block"):
        answers = answered("noisy", requests, 3, rule)
        per_step[rule] = sum(a.stats.accepted for a in answers) / sum(a.stats.steps for a in answers)
    assert per_step["block"] > per_step["ratio"] + 0.03

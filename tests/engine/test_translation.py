"""A draft model that is spoken to in another model's tokens answers as the plain model does on the translated text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from pipeline.engine.drafters.model import ModelDrafter
from pipeline.engine.intersection import Intersection
from pipeline.engine.translation import TranslatingRunner
from pipeline.engine.verifier import TargetVerifier
from pipeline.engine.vocabularies import Vocabulary
from pipeline.errors import CacheMiss
from pipeline.messages import DraftRequest, Feed, Opening, PrefixCopy, Proposal
from pipeline.randomness import philox_key
from pipeline.records import Request, SamplingParams
from tests import oracle
from tests.decoding import decoded, decoder, packed, ragged_requests, runner
from tests.engine.vocabulary_pairs import merged_tokenizer, sentencepiece_tokenizer
from tests.models import TOKENS, byte_tokenizer, tiny_model

SHAPE: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "head_dim": 4,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
TOKENIZERS = {"bytes": byte_tokenizer, "merged": merged_tokenizer, "pieces": sentencepiece_tokenizer}
PAIRS = [("bytes", "merged"), ("merged", "bytes"), ("pieces", "merged"), ("merged", "pieces"), ("pieces", "bytes")]
PARAMS = SamplingParams(9, temperature=1.0)
SLOTS = 5
CLOSE = {"atol": 2e-5, "rtol": 1e-4}


@cache
def vocabulary(kind: str) -> Vocabulary:
    tokenizer = TOKENIZERS[kind]()
    return Vocabulary.of(tokenizer, len(tokenizer))


class Pair:
    """A tiny draft model of one tokenizer behind a `TranslatingRunner` for another, and what to expect of it."""

    def __init__(self, ours: str, theirs: str, capacity: int = 300, seed: int = 3) -> None:
        self.intersection = Intersection.of(vocabulary(ours), vocabulary(theirs))
        vocab = self.intersection.draft_vocabulary + 5  # padded
        shape = {**SHAPE, "vocab": vocab}
        self.plain = tiny_model("llama", seed, **shape)
        inner = runner(
            lambda: packed("llama", seed, **shape), SLOTS, capacity, vocabulary=self.intersection.draft_vocabulary
        )
        self.runner = TranslatingRunner(inner, self.intersection)
        self.capacity = capacity

    def draft_tokens(self, tokens: Sequence[int]) -> list[int]:
        return self.intersection.write(np.array(tokens, dtype=np.int64)).tolist()

    def expected(self, tokens: Sequence[int]) -> np.ndarray:
        """Logits over the target's vocabulary after a text, by the plain model without a cache."""
        logits = np.full(self.intersection.vocabulary, -np.inf)
        translated = self.draft_tokens(tokens)
        if len(translated) <= self.capacity:
            whole = self.plain(torch.tensor([translated])).logits[0, -1].double().numpy()
            logits[self.intersection.target_ids] = whole[self.intersection.draft_ids]
        return logits

    def random_text(self, rng: np.random.Generator, length: int) -> list[int]:
        return rng.integers(0, self.intersection.vocabulary, length).tolist()


def feed(rows: Sequence[tuple[int, int, int, Sequence[int]]]) -> Feed:
    """Rows of (sequence, slot, cached, tokens fed)."""
    return Feed(
        np.array([r[0] for r in rows]),
        np.array([r[1] for r in rows]),
        np.array([r[2] for r in rows]),
        np.array([len(r[3]) for r in rows]),
        np.array([token for r in rows for token in r[3]], dtype=np.int64),
    )


def openings(*sequences: int, params: SamplingParams = PARAMS) -> tuple[Opening, ...]:
    return tuple(opening(s, params) for s in sequences)


def opening(sequence: int, params: SamplingParams = PARAMS) -> Opening:
    return Opening(sequence, philox_key(0, 0, str(sequence), 0), params)


NO_EXTRA = np.empty(0, dtype=np.int64)


def run(made: TranslatingRunner, rows: Sequence[tuple[int, int, int, Sequence[int]]]) -> np.ndarray:
    """Logits at every fed position, row after row."""
    fed = feed(rows)
    return made.forward(fed, [NO_EXTRA] * len(rows), np.arange(len(fed.tokens))).double().numpy()


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_ragged_rows_in_chunks_with_rollbacks_and_copies_equal_the_plain_model(ours: str, theirs: str) -> None:
    """Forty random steps: chunks of any length, tokens taken back, prefixes copied, slots given to others."""
    pair = Pair(ours, theirs)
    made, rng = pair.runner, np.random.default_rng(11)
    owners = list(range(SLOTS))
    texts: list[list[int]] = [[] for _ in range(SLOTS)]
    made.open(openings(*owners), (), feed([(s, s, 0, [0]) for s in owners]))
    compared = 0
    for step in range(40):
        slots = rng.choice(SLOTS, int(rng.integers(1, SLOTS + 1)), replace=False).tolist()
        opened, copies, rows = [], [], []
        for slot in slots:
            kind = rng.random()
            if kind < 0.2:  # a new sequence, with the beginning of another's text
                source = int(rng.integers(SLOTS))
                length = int(rng.integers(0, len(texts[source]) + 1))
                owners[slot], texts[slot] = 1000 * (step + 1) + slot, texts[source][:length]
                opened.append(owners[slot])
                copies.append(PrefixCopy(source, slot, length))
            elif kind < 0.6:  # tokens taken back
                texts[slot] = texts[slot][: int(rng.integers(max(len(texts[slot]) - 4, 0), len(texts[slot]) + 1))]
            rows.append((owners[slot], slot, len(texts[slot]), pair.random_text(rng, int(rng.integers(1, 6)))))
        made.open(openings(*opened), copies, feed(rows))
        logits = run(made, rows)
        at = 0
        for _, slot, _, new in rows:
            for token in new:
                texts[slot] = [*texts[slot], token]
                if rng.random() < 0.3:
                    np.testing.assert_allclose(logits[at], pair.expected(texts[slot]), **CLOSE)
                    compared += 1
                at += 1
            assert made.texts.tokens[slot, : len(texts[slot])].tolist() == texts[slot]
            assert made.held[slot] == len(texts[slot])
            assert made.inner.held[slot] == len(pair.draft_tokens(texts[slot]))
            assert made.inner.owners[slot] == owners[slot]
    assert compared > 60
    assert any(len(pair.draft_tokens(text)) > len(text) for text in texts) or ours == "bytes"


def test_extra_tokens_follow_the_fed_ones() -> None:
    pair = Pair("pieces", "bytes")
    rng = np.random.default_rng(1)
    fed = [pair.random_text(rng, n) for n in (3, 1, 4)]
    extra = [pair.random_text(rng, n) for n in (2, 0, 1)]
    rows = [(i, i, 0, tokens) for i, tokens in enumerate(fed)]
    pair.runner.open(openings(0, 1, 2), (), feed(rows))
    logits = pair.runner.forward(feed(rows), [np.array(e, dtype=np.int64) for e in extra], np.array([2, 4, 5, 9, 10]))
    texts = [fed[0], fed[0] + extra[0], fed[1], fed[2], fed[2] + extra[2]]
    for row, text in enumerate(texts):
        np.testing.assert_allclose(logits[row].double().numpy(), pair.expected(text), **CLOSE)
    assert pair.runner.held[:3].tolist() == [5, 1, 5]
    assert pair.runner.texts.tokens[0, :5].tolist() == fed[0] + extra[0]


def test_nothing_wanted_feeds_all_the_same() -> None:
    pair = Pair("pieces", "bytes")
    row = (7, 2, 0, [260, 261, 262])
    pair.runner.open(openings(7), (), feed([row]))
    assert pair.runner.forward(feed([row]), [NO_EXTRA], NO_EXTRA).shape == (0, pair.intersection.vocabulary)
    assert pair.runner.held[2] == 3


def test_same_tokenizer_changes_nothing() -> None:
    pair = Pair("merged", "merged")
    text = pair.random_text(np.random.default_rng(2), 9)
    pair.runner.open(openings(1), (), feed([(1, 0, 0, text)]))
    whole = pair.plain(torch.tensor([text])).logits[0, :, : pair.intersection.draft_vocabulary].double().numpy()
    np.testing.assert_allclose(run(pair.runner, [(1, 0, 0, text)]), whole, **CLOSE)


# laws


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_shipped_law_is_the_drafts_restricted_to_common_tokens_and_renormalised(ours: str, theirs: str) -> None:
    pair = Pair(ours, theirs)
    text = pair.random_text(np.random.default_rng(5), 12)
    proposal = drafted(pair, [text], [PARAMS], 3)
    both = [(a, b) for a, b in zip(pair.intersection.target_ids, pair.intersection.draft_ids, strict=True)]
    for place in range(3):
        before = pair.draft_tokens([*text, *proposal.tokens[0, :place].tolist()])
        logits = pair.plain(torch.tensor([before])).logits[0, -1].double().numpy()
        whole = oracle.softmax(logits[: pair.intersection.draft_vocabulary])
        law = np.zeros(pair.intersection.vocabulary)
        for target_id, draft_id in both:
            law[target_id] = whole[draft_id]
        assert law.sum() < 0.9999  # something is cut away
        np.testing.assert_allclose(shipped(proposal, place, len(law)), law / law.sum(), atol=1e-5)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(9, temperature=0.7, top_p=0.6),
        SamplingParams(9, temperature=1.3, top_k=5),
        SamplingParams(9, temperature=1.0, top_k=270),  # more than are common
        SamplingParams(9),
    ],
)
def test_filters_work_on_the_restricted_law(params: SamplingParams) -> None:
    pair = Pair("merged", "pieces")
    text = pair.random_text(np.random.default_rng(5), 12)
    proposal = drafted(pair, [text], [params], 2)
    for place in range(2):
        logits = pair.expected([*text, *proposal.tokens[0, :place].tolist()])
        common = pair.intersection.target_ids
        top_k = params.top_k if params.top_k < len(common) else 0
        law = np.zeros(len(logits))
        law[common] = oracle.filtered(logits[common], params.temperature, top_k, params.top_p)
        np.testing.assert_allclose(shipped(proposal, place, len(law)), law, atol=1e-5)


def drafted(pair: Pair, texts: list[list[int]], params: list[SamplingParams], wanted: int) -> Proposal:
    """What a model drafter proposes behind new sequences, with laws over the whole vocabulary."""
    made = ModelDrafter(pair.runner, 10**6, "sample", 10**6)
    rows = [(i, i, 0, text) for i, text in enumerate(texts)]
    opened = tuple(opening(i, p) for i, p in enumerate(params))
    zeros = np.zeros(len(texts), dtype=np.int64)
    return made.propose(DraftRequest(feed(rows), opened, (), zeros + wanted, zeros, zeros > 0))


def shipped(proposal: Proposal, place: int, size: int) -> np.ndarray:
    law = np.zeros(size)
    ids, probs = proposal.support_ids[0, place], proposal.support_probs[0, place].astype(np.float64)
    law[ids[ids >= 0]] = probs[ids >= 0]
    return law / law.sum()


def test_number_that_is_not_finite_reaches_the_law_of_its_row_alone() -> None:
    pair = Pair("pieces", "bytes")
    made, harmful = pair.runner, int(pair.intersection.target_ids[7])
    made.model.get_input_embeddings().weight.data[pair.draft_tokens([harmful])] = torch.nan
    proposal = drafted(pair, [[260, 261], [harmful, 260], [262]], [PARAMS] * 3, 2)
    assert proposal.lengths.tolist() == [2, 0, 2]
    assert made.held[1] == made.inner.held[1] == 0


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_bad_logit_counts_where_it_is_common_and_nowhere_else(number: float) -> None:
    pair = Pair("pieces", "bytes")
    common = set(pair.intersection.draft_ids.tolist())
    alone = next(i for i in range(pair.intersection.draft_vocabulary) if i not in common)
    for token, expected in ((alone, 1), (int(pair.intersection.draft_ids[4]), 0), (TOKENS + 1, 1)):
        made = Pair("pieces", "bytes")
        forward = made.runner.inner.model.forward

        def spoiled(*args: Any, forward: Callable[..., Any] = forward, token: int = token, **kwargs: Any) -> Any:
            out = forward(*args, **kwargs)
            out.logits[..., token] = number
            return out

        made.runner.inner.model.forward = spoiled
        assert drafted(made, [[260, 261]], [PARAMS], 1).lengths.tolist() == [expected]


# what is held


def test_prefix_that_is_not_held_is_a_cache_miss_of_these_rows() -> None:
    pair = Pair("pieces", "bytes")
    made = pair.runner
    made.open(openings(1, 2), (), feed([(1, 0, 0, [260] * 4), (2, 1, 0, [260] * 4)]))
    run(made, [(1, 0, 0, [260] * 4), (2, 1, 0, [260] * 4)])
    for rows, missed in (
        ([(1, 0, 5, [260]), (2, 1, 4, [260])], (1,)),  # more than it was fed
        ([(1, 0, 4, [260]), (9, 1, 4, [260])], (9,)),  # somebody else's slot
        ([(5, 3, 400, [260])], (5,)),  # far more than anyone was fed
    ):
        with pytest.raises(CacheMiss) as miss:
            made.open((), (), feed(rows))
        assert miss.value.sequences == missed
    made.open((), (), feed([(1, 0, 4, [260]), (2, 1, 2, [260])]))


def test_slot_that_was_scrubbed_holds_nothing() -> None:
    pair = Pair("pieces", "bytes")
    made = pair.runner
    made.open(openings(1), (), feed([(1, 0, 0, [260] * 4)]))
    run(made, [(1, 0, 0, [260] * 4)])
    made.scrub(0)
    assert not any(bool(keys[0].any()) for keys in made.inner.cache.keys)
    with pytest.raises(CacheMiss):
        made.open((), (), feed([(1, 0, 4, [260])]))


def test_copy_that_misses_leaves_only_what_is_really_held() -> None:
    """The first copy is made, the second has no source; whoever relies on the first is served, nobody else is."""
    pair = Pair("pieces", "bytes")
    made, text = pair.runner, [260, 264, 270, 271]
    made.open(openings(1), (), feed([(1, 0, 0, text)]))
    run(made, [(1, 0, 0, text)])
    rows = [(2, 1, 4, [261]), (3, 2, 4, [261])]
    with pytest.raises(CacheMiss) as miss:
        made.open(openings(2, 3), (PrefixCopy(0, 1, 4), PrefixCopy(4, 2, 4)), feed(rows))
    assert miss.value.sequences == (3,)
    with pytest.raises(CacheMiss):
        made.open(openings(3), (), feed([rows[1]]))
    made.open(openings(2), (), feed([rows[0]]))
    np.testing.assert_allclose(run(made, [rows[0]])[0], pair.expected([*text, 261]), **CLOSE)


def test_pass_that_failed_is_not_relied_on() -> None:
    pair = Pair("pieces", "bytes")
    made, text = pair.runner, [260, 264, 270, 271]
    made.open(openings(1), (), feed([(1, 0, 0, text)]))
    run(made, [(1, 0, 0, text)])
    forward = made.inner.model.forward
    made.inner.model.forward = None
    with pytest.raises(TypeError):
        run(made, [(1, 0, 2, [262, 263])])
    made.inner.model.forward = forward
    assert made.held[0] == 2
    with pytest.raises(CacheMiss):
        made.open((), (), feed([(1, 0, 4, [260])]))
    made.open((), (), feed([(1, 0, 2, [265])]))
    np.testing.assert_allclose(run(made, [(1, 0, 2, [265])])[0], pair.expected([*text[:2], 265]), **CLOSE)


# beyond the draft's capacity


def wide(pair: Pair, count: int) -> list[int]:
    """Target tokens of two draft tokens each."""
    return np.resize(np.flatnonzero(pair.intersection.lengths == 2), count).tolist()


def test_tokens_beyond_the_capacity_are_not_fed_and_have_an_empty_law() -> None:
    pair = Pair("pieces", "bytes", capacity=9)
    made, text = pair.runner, [*wide(pair, 6), 260]
    rows = [(1, 0, 0, text), (2, 1, 0, text[:3])]
    made.open(openings(1, 2), (), feed(rows))
    logits = run(made, rows)
    for place in range(len(text)):
        np.testing.assert_allclose(logits[place], pair.expected(text[: place + 1]), **CLOSE)
    assert (logits[4:7] == -np.inf).all()
    np.testing.assert_allclose(logits[-1], pair.expected(text[:3]), **CLOSE)
    assert made.held[:2].tolist() == [7, 3]
    assert made.inner.held[:2].tolist() == [8, 6]


def test_text_that_outgrew_the_capacity_costs_no_pass_and_comes_back_after_a_rollback() -> None:
    pair = Pair("pieces", "bytes", capacity=9)
    made, text = pair.runner, wide(pair, 6)
    made.open(openings(1), (), feed([(1, 0, 0, text)]))
    run(made, [(1, 0, 0, text)])
    forward, made.inner.forward = made.inner.forward, None  # type: ignore[assignment,method-assign]
    for cached in (6, 5, 4):
        made.open((), (), feed([(1, 0, cached, [text[0]])]))
        assert (run(made, [(1, 0, cached, [text[0]])]) == -np.inf).all()
        made.scrub(0)  # as a drafter does where a law is not finite
        assert made.held[0] == cached + 1
    made.inner.forward = forward  # type: ignore[method-assign]
    made.open((), (), feed([(1, 0, 3, [text[5]])]))
    np.testing.assert_allclose(run(made, [(1, 0, 3, [text[5]])])[0], pair.expected([*text[:3], text[5]]), **CLOSE)


@pytest.mark.parametrize("length", [2, 4, 5, 6])
def test_prefix_copied_from_a_text_that_outgrew_the_capacity(length: int) -> None:
    pair = Pair("pieces", "bytes", capacity=9)
    made, text = pair.runner, wide(pair, 6)
    made.open(openings(1), (), feed([(1, 0, 0, text)]))
    run(made, [(1, 0, 0, text)])
    row = (2, 1, length, [260])
    made.open(openings(2), (PrefixCopy(0, 1, length),), feed([row]))
    np.testing.assert_allclose(run(made, [row])[0], pair.expected([*text[:length], 260]), **CLOSE)
    row = (2, 1, 3, [text[0]])
    if length > 3:
        made.open((), (), feed([row]))
        np.testing.assert_allclose(run(made, [row])[0], pair.expected([*text[:3], text[0]]), **CLOSE)


def test_drafting_stops_for_the_row_that_reaches_the_capacity_alone() -> None:
    pair = Pair("pieces", "bytes", capacity=9)
    text = wide(pair, 4)  # eight draft tokens: one more may be fed, so two are drafted
    proposal = drafted(pair, [text, text[:1], [*text, text[0]]], [PARAMS] * 3, 4)
    assert proposal.lengths.tolist() == [2, 4, 0]


# whole decodes


@pytest.mark.parametrize("capacity", [400, 30])
@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_greedy_texts_equal_plain_decoding(ours: str, theirs: str, capacity: int) -> None:
    """With a capacity of 30 most texts outgrow it; no prefix is ever missed."""
    pair = Pair(ours, theirs, capacity)
    requests = ragged_requests(10, pair.intersection.vocabulary, seed=2, longest=20)
    plain = decoded(decoder(verifier(ours), slots=SLOTS), requests)
    made = Counting(ModelDrafter(pair.runner, 16, "sample", 24))
    answers = decoded(decoder(verifier(ours), made, slots=SLOTS), requests)
    assert [a.token_ids for a in answers] == [a.token_ids for a in plain]
    assert made.misses == 0
    assert sum(a.stats.drafted for a in answers) > 30


class Counting(ModelDrafter):
    """A drafter that counts what it misses."""

    misses = 0

    def __init__(self, drafter: ModelDrafter) -> None:
        self.__dict__.update(drafter.__dict__)

    def propose(self, request: DraftRequest) -> Proposal:
        try:
            return super().propose(request)
        except CacheMiss:
            self.misses += 1
            raise


def verifier(ours: str, seed: int = 0) -> TargetVerifier:
    size = vocabulary(ours).size
    return TargetVerifier(runner(lambda: packed("llama", seed, **SHAPE, vocab=size), SLOTS, vocabulary=size))


def test_target_under_other_ids_as_its_own_draft_has_everything_accepted() -> None:
    """The draft is the target with its tokens renumbered: what it proposes is what the target would choose."""
    size = 40
    order = np.random.default_rng(4).permutation(size)  # the draft's id of each target token
    made = hand_made([[int(i)] for i in order], {t: int(order[t]) for t in range(size)}, size)
    target = packed("llama", 1, **SHAPE, vocab=size)
    draft = packed("llama", 1, **SHAPE, vocab=size)
    for layer in (draft.get_input_embeddings(), draft.get_output_embeddings()):
        layer.weight.data[order] = layer.weight.data.clone()
    translating = TranslatingRunner(runner(lambda: draft, SLOTS), made)
    requests = ragged_requests(9, size, seed=2, temperature=0.8)
    answers = decoded(
        decoder(TargetVerifier(runner(lambda: target, SLOTS)), ModelDrafter(translating, size, "sample", 24), SLOTS),
        requests,
    )
    drafted_tokens, accepted = (sum(getattr(a.stats, f) for a in answers) for f in ("drafted", "accepted"))
    assert drafted_tokens > 100
    assert accepted > 0.99 * drafted_tokens


def hand_made(pieces: list[list[int]], pairs: dict[int, int], draft_vocabulary: int) -> Intersection:
    lengths = np.array([len(p) for p in pieces])
    return Intersection(
        np.array(sorted(pairs)),
        np.array([pairs[t] for t in sorted(pairs)]),
        lengths,
        np.cumsum(lengths) - lengths,
        np.array([token for p in pieces for token in p]),
        draft_vocabulary,
    )


# the law of what is emitted

SIZE, LENGTH, ROWS, SAMPLES = 6, 3, 64, 2500
DRAFT_SEED = 2
PROMPT = (2, 1, 4, 2, 1)
SMALL = {**SHAPE, "initializer_range": 0.25}


@cache
def small_target() -> PreTrainedModel:
    return tiny_model("llama", 1, **SMALL, vocab=SIZE)


@cache
def expected_law(top_p: float) -> oracle.SequenceLaw:
    def law(prefix: tuple[int, ...]) -> np.ndarray:
        logits = small_target()(torch.tensor([PROMPT + prefix])).logits[0, -1].double().numpy()
        return oracle.filtered(logits, 1.0, top_p=top_p)

    return oracle.enumerate_law(law, LENGTH)


def emitted(top_p: float) -> Counter[tuple[int, ...]]:
    """Four of six target tokens are common with a draft of nine; the others take two or three draft tokens."""
    intersection = hand_made([[5], [1, 2], [8], [7, 7, 3], [0], [4]], {0: 5, 2: 8, 4: 0, 5: 4}, 9)
    inner = runner(lambda: packed("llama", DRAFT_SEED, **SMALL, vocab=9), ROWS, 40)
    made = ModelDrafter(TranslatingRunner(inner, intersection), 3, "sample", 10**6)
    target = TargetVerifier(runner(lambda: packed("llama", 1, **SMALL, vocab=SIZE), ROWS, 40))
    decoding = decoder(target, made, ROWS, 40, draft_tokens=2, seed=5)
    decoding.scheduler.limits = replace(decoding.scheduler.limits, prefill_chunk=ROWS * 40)
    params = SamplingParams(LENGTH, temperature=1.0, top_p=top_p)
    answers = decoded(decoding, [Request(str(i), list(PROMPT), params) for i in range(SAMPLES)])
    accepted, drafted_tokens = (sum(getattr(a.stats, f) for a in answers) for f in ("accepted", "drafted"))
    assert 0.1 < accepted / drafted_tokens < 0.95, accepted / drafted_tokens
    return Counter(tuple(a.token_ids) for a in answers)


@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_emitted_texts_have_the_targets_law(top_p: float) -> None:
    assert oracle.g_test(emitted(top_p), expected_law(top_p)) > 1e-3


def test_tokens_moved_to_the_wrong_ids_after_they_were_drawn_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted bug: laws shipped in target ids that are not those drawn from."""
    propose = ModelDrafter.propose

    def lying(self: ModelDrafter, request: Any) -> Proposal:
        proposal = propose(self, request)
        return replace(proposal, support_ids=np.roll(proposal.support_ids, 1, -1))

    monkeypatch.setattr(ModelDrafter, "propose", lying)
    assert oracle.g_test(emitted(1.0), expected_law(1.0)) < 1e-6


def test_slots_beyond_the_first_come_into_being_and_can_be_let_go() -> None:
    """Rows in far slots, a prefix copied to one further on, and all of it forgotten."""
    pair = Pair("pieces", "bytes")
    made, rng = pair.runner, np.random.default_rng(7)
    far, text = 3 * SLOTS, pair.random_text(rng, 6)
    made.open(openings(1), (), feed([(1, far, 0, text)]))
    run(made, [(1, far, 0, text)])
    row = (2, 2 * far, 5, text[5:])
    made.open(openings(2), (PrefixCopy(far, 2 * far, 5),), feed([row]))
    np.testing.assert_allclose(run(made, [row])[0], pair.expected(text), **CLOSE)
    made.release()
    assert not len(made.held)
    assert made.texts.tokens.size == made._ends.tokens.size == made.inner.texts.tokens.size == 0
    with pytest.raises(CacheMiss):
        made.open((), (), feed([(2, 2 * far, 6, [text[0]])]))
    made.open(openings(2), (), feed([(2, 1, 0, text)]))
    np.testing.assert_allclose(run(made, [(2, 1, 0, text)])[-1], pair.expected(text), **CLOSE)

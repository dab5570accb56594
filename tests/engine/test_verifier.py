"""The engine judges on drafted tokens' probabilities alone; here that is tied to the rule on whole laws."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from pipeline import speculation
from pipeline.engine.laws import SMALL_VOCABULARY, Decoding, Laws
from pipeline.engine.verifier import TargetVerifier, judge
from pipeline.errors import CacheMiss, OutOfMemory
from pipeline.messages import Feed, Opening, Proposal, VerifyRequest
from pipeline.randomness import philox_key, verdict_uniforms
from pipeline.records import Request, SamplingParams
from pipeline.step import empty_proposal
from tests.decoding import generated_alone, packed, runner
from tests.models import tiny_model

PARAMS = [
    SamplingParams(9),
    SamplingParams(9, temperature=1.0),
    SamplingParams(9, temperature=0.6),
    SamplingParams(9, temperature=1.0, top_p=0.8),
    SamplingParams(9, temperature=1.3, top_k=3),
    SamplingParams(9, temperature=0.9, top_k=5, top_p=0.7),
]


def random_case(
    rng: np.random.Generator, rows: int, vocabulary: int, positions: int, support: int
) -> tuple[Laws, np.ndarray, Proposal, np.ndarray]:
    """Laws of ragged rows laid end to end, a proposal whose tokens are drawn from its laws, and uniforms."""
    lengths = rng.integers(0, positions + 1, rows)
    params = [PARAMS[i] for i in rng.integers(0, len(PARAMS), rows)]
    logits = torch.as_tensor(2 * rng.normal(size=(int((lengths + 1).sum()), vocabulary)), dtype=torch.float32)
    laws = Laws(logits, Decoding.of(params).repeat(lengths + 1))
    bases = np.cumsum(lengths + 1) - (lengths + 1)
    proposal = empty_proposal(rows, positions, support)
    proposal.lengths[:] = lengths
    for b in range(rows):
        for i in range(lengths[b]):
            p = laws.whole(torch.tensor([bases[b] + i]))[0].numpy()
            ids = rng.permutation(vocabulary)[:support]
            ids[0] = p.argmax() if p.argmax() not in ids else ids[0]
            near = np.maximum(p[ids], 1e-3) * rng.uniform(0.3, 1.5, support)  # so that some are kept and some not
            proposal.support_ids[b, i], proposal.support_probs[b, i] = ids, near
            proposal.tokens[b, i] = rng.choice(ids, p=near / near.sum())
    return laws, bases, proposal, rng.random((rows, positions + 1, 2))


def whole_laws(laws: Laws, bases: np.ndarray, lengths: np.ndarray, positions: int) -> torch.Tensor:
    """[B, K+1, V], with junk beyond the lengths."""
    whole = torch.full((len(bases), positions + 1, laws.size), torch.nan, dtype=torch.float64)
    for b, (base, length) in enumerate(zip(bases, lengths, strict=True)):
        whole[b, : length + 1] = laws.whole(torch.arange(base, base + length + 1))
    return whole


def judged(
    laws: Laws, bases: np.ndarray, proposal: Proposal, uniforms: np.ndarray, rule: str = "ratio"
) -> tuple[np.ndarray, np.ndarray]:
    drafted = speculation.read(proposal, laws.device)
    accepted, following = judge(laws, torch.as_tensor(bases), drafted, torch.as_tensor(uniforms), rule)
    return accepted.numpy(), following.numpy()


@pytest.mark.parametrize("rule", ["ratio", "block"])
@pytest.mark.parametrize(
    ("vocabulary", "positions", "support", "cases"),
    [(5, 3, 1, 12), (5, 3, 5, 12), (9, 4, 4, 12), (40, 6, 8, 6), (40, 1, 40, 6), (SMALL_VOCABULARY + 9, 3, 6, 2)],
)
def test_judging_equals_the_rule_on_whole_laws(
    vocabulary: int, positions: int, support: int, cases: int, rule: str
) -> None:
    rng = np.random.default_rng([vocabulary, positions, support])
    kept, rows_seen = [], 0
    for _ in range(cases):
        rows = 40 if vocabulary < 1000 else 12
        laws, bases, proposal, uniforms = random_case(rng, rows, vocabulary, positions, support)
        accepted, following = judged(laws, bases, proposal, uniforms, rule)
        whole = whole_laws(laws, bases, proposal.lengths, positions)
        expected = speculation.verify(whole, proposal, uniforms, rule)
        assert accepted.tolist() == expected.accepted.tolist()
        assert following.tolist() == expected.next_token.tolist()
        kept += accepted[proposal.lengths > 0].tolist()
        rows_seen += rows
    assert 0 < np.mean(kept) < positions  # the cases say something
    assert rows_seen > 20


def test_nothing_drafted_at_all() -> None:
    rng = np.random.default_rng(0)
    laws, bases, _, uniforms = random_case(rng, 20, 9, 0, 1)
    accepted, following = judged(laws, bases, empty_proposal(20), uniforms)
    assert accepted.tolist() == [0] * 20
    expected = speculation.draw(laws.whole(torch.as_tensor(bases)), torch.as_tensor(uniforms[:, 0, 1]))
    assert following.tolist() == expected.tolist()


def test_own_law_as_the_draft_is_always_kept() -> None:
    rng = np.random.default_rng(1)
    logits = torch.as_tensor(rng.normal(size=(8, 7)), dtype=torch.float32)
    laws = Laws(logits, Decoding.of([SamplingParams(1, temperature=1.0)] * 8))
    ids, probs = laws.top(7)
    proposal = empty_proposal(4, 1, 7)
    proposal.lengths[:] = 1
    proposal.support_ids[:, 0], proposal.support_probs[:, 0] = ids[::2].numpy(), probs[::2].numpy()
    for place in range(7):
        proposal.tokens[:, 0] = ids[::2, place].numpy()
        uniforms = np.full((4, 2, 2), 1 - 1e-6)
        accepted, _ = judged(laws, np.arange(0, 8, 2), proposal, uniforms)
        assert accepted.tolist() == [1] * 4


def test_drafted_id_beyond_the_vocabulary_is_rejected() -> None:
    laws = Laws(torch.zeros(2, 5), Decoding.of([SamplingParams(1, temperature=1.0)] * 2))
    proposal = Proposal(np.array([[7]]), np.array([1]), np.array([[[7, 2]]]), np.array([[[0.9, 0.1]]]))
    accepted, following = judged(laws, np.array([0]), proposal, np.zeros((1, 2, 2)))
    assert accepted.tolist() == [0]
    assert 0 <= following[0] < 5


@pytest.mark.parametrize("place", [0, 1, 2])
def test_row_that_comes_to_a_law_that_is_not_finite_has_no_verdict(place: int) -> None:
    rng = np.random.default_rng(2)
    laws, bases, proposal, uniforms = random_case(rng, 6, 9, 3, 4)
    row = int(np.flatnonzero(proposal.lengths >= 2)[0])
    clean = judged(laws, bases, proposal, uniforms)
    logits = laws.logits_RV.clone()
    logits[bases[row] + place] = torch.nan
    again = Laws(
        logits, Decoding.of([SamplingParams(1, temperature=1.0, top_p=0.9)] * len(logits))
    )
    for u, reached in ((0.0, True), (1.0 - 1e-9, place == 0)):  # everything is kept that can be, or as good as nothing
        uniforms[row] = u
        accepted, following = judged(again, bases, proposal, uniforms)
        assert accepted[row] <= place
        assert (following[row] == -1) == (reached or accepted[row] == place)
    assert (np.delete(following, row) >= 0).all()
    assert len(accepted) == len(clean[0])


# the whole verifier


def request_of(
    sequences: list[list[int]], params: SamplingParams, drafts: list[list[int]], final: list[bool] | None = None
) -> VerifyRequest:
    """New sequences, fed whole, each in a slot of its own; drafts are claimed as certain."""
    rows = len(sequences)
    proposal = empty_proposal(rows, max(len(d) for d in drafts))
    for b, draft in enumerate(drafts):
        proposal.tokens[b, : len(draft)], proposal.lengths[b] = draft, len(draft)
    proposal.support_ids[..., 0], proposal.support_probs[..., 0] = proposal.tokens, proposal.tokens >= 0
    handles = np.arange(1, rows + 1)
    return VerifyRequest(
        feed=Feed(
            handles,
            np.arange(rows),
            np.zeros(rows, dtype=np.int64),
            np.array([len(s) for s in sequences]),
            np.concatenate([np.array(s) for s in sequences]),
        ),
        openings=tuple(Opening(int(h), philox_key(0, 0, str(h), 0), params) for h in handles),
        copies=(),
        final=np.array(final or [True] * rows),
        starts=np.zeros(rows, dtype=np.int64),
        proposal=proposal,
    )


SEQUENCES = [[1, 2, 3], [4], [5, 6, 7, 8, 9], [10, 11]]
DRAFTS: list[list[int]] = [[1, 2], [], [3], [4, 5, 6]]


def plain_laws(sequences: list[list[int]], drafts: list[list[int]], temperature: float) -> torch.Tensor:
    model = tiny_model("llama")
    whole = torch.full((len(sequences), max(map(len, drafts)) + 1, model.config.vocab_size), torch.nan).double()
    for b, (tokens, draft) in enumerate(zip(sequences, drafts, strict=True)):
        logits = model(torch.tensor([[*tokens, *draft]])).logits[0, len(tokens) - 1 :].double()
        whole[b, : len(draft) + 1] = torch.softmax(logits / temperature, -1)
    return whole


def test_verdict_is_the_rule_on_the_plain_models_laws() -> None:
    temperature, kept = 0.7, []
    params = SamplingParams(3, temperature=temperature)
    likely = [generated_alone(tiny_model("llama"), Request("", s, SamplingParams(3))) for s in SEQUENCES]
    drafts = [text[: len(d)] for text, d in zip(likely, DRAFTS, strict=True)]
    request = request_of(SEQUENCES, params, drafts)
    whole = plain_laws(SEQUENCES, drafts, temperature)
    verifier = TargetVerifier(runner(lambda: packed("llama")))
    for start in range(12):  # other positions, other uniforms
        starts = np.full(len(SEQUENCES), start)
        verdict = verifier.verify(replace(request, starts=starts)).verdict
        keys = np.array([o.philox_key for o in request.openings])
        expected = speculation.verify(whole, request.proposal, verdict_uniforms(keys, starts, 4))
        assert verdict.accepted.tolist() == expected.accepted.tolist()
        assert verdict.next_token.tolist() == expected.next_token.tolist()
        kept += verdict.accepted.tolist()
    assert len(set(kept)) > 2


def test_rows_that_are_not_final_have_no_verdict_and_do_not_write_their_drafts() -> None:
    run = runner(lambda: packed("llama"))
    request = request_of(SEQUENCES, SamplingParams(9), DRAFTS, final=[False, True, True, False])
    verdict = TargetVerifier(run).verify(request).verdict
    assert (verdict.next_token < 0).tolist() == [True, False, False, True]
    assert verdict.accepted[[0, 3]].tolist() == [0, 0]
    assert run.held.tolist() == [3, 1, 6, 2]


def test_no_final_row_at_all() -> None:
    request = request_of(SEQUENCES, SamplingParams(9), [[]] * 4, final=[False] * 4)
    verdict = TargetVerifier(runner(lambda: packed("llama"))).verify(request).verdict
    assert verdict.next_token.tolist() == [-1] * 4


@pytest.mark.parametrize("params", PARAMS)
def test_only_row_of_a_batch_is_not_finite(params: SamplingParams) -> None:
    """Whatever its filters, there is a verdict of -1 and no failure, and its slot is clean again."""
    run = runner(lambda: packed("llama"))
    run.model.get_input_embeddings().weight.data[7] = torch.nan
    verifier = TargetVerifier(run)
    assert verifier.verify(request_of([[1, 7, 2]], params, [[3]])).verdict.next_token.tolist() == [-1]
    assert run.held[0] == 0
    assert all(bool(buffer[0].isfinite().all()) for buffer in run.cache.keys + run.cache.values)
    assert verifier.verify(request_of([[1, 2]], params, [[3]])).verdict.next_token[0] >= 0


def test_a_target_out_of_memory_forgets_everything_and_goes_on_when_it_is_fed_again() -> None:
    verifier = TargetVerifier(runner(lambda: packed("llama")))
    request = request_of(SEQUENCES, SamplingParams(9), DRAFTS)
    expected = verifier.verify(request).verdict
    forward = verifier.runner.model.forward

    def exhausted(*arguments: object, **named: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    verifier.runner.model.forward = exhausted  # type: ignore[assignment]
    with pytest.raises(OutOfMemory, match="the target ran out of memory"):
        verifier.verify(request)
    verifier.runner.model.forward = forward
    with pytest.raises(CacheMiss):
        verifier.verify(replace(request, feed=replace(request.feed, cached=request.feed.cached + 1)))
    verdict = verifier.verify(request).verdict
    assert verdict.accepted.tolist() == expected.accepted.tolist()
    assert verdict.next_token.tolist() == expected.next_token.tolist()

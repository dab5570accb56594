"""Situations that broke systems like this one (../shared/cases/CASES.md, table Decoding), and where each is tested.

| situation | test (of this file, if no other is named) |
| --- | --- |
| temperature 0, 128 tokens, with and without a draft | test_128_greedy_tokens_are_the_same_with_and_without_a_draft |
|   in bfloat16: the rate of divergence and the margin | jobs/test_audit.py, test_audit.py (`GreedyAudit`) |
| a prompt of one token; one less than the context; 2 places left | test_the_context_ends_with_few_places_left, |
|   | engine/test_packed_decoding.py::test_length_ends_at_the_context |
| a greedy draft judged as sampled | engine/test_model_drafter.py::test_greedy_sampling_ships_certainty_…, |
|   | engine/test_law_end_to_end.py::test_planted_bug_misses_the_law[judge_a_greedy_draft_as_sampled] |
| logit bias, min-p, a bias inside a block | test_a_forbidden_token_inside_a_block_is_never_kept, |
|   | engine/test_law_end_to_end.py::test_mixed_batch_… and [edit_the_last_position_alone] |
| repetition penalty with a word repeated in the block | test_penalties_count_the_drafted_tokens_before_each_position |
| EOS in mid-block; stop strings in and across blocks | test_an_end_inside_a_block_cuts_everything_there, |
|   | engine/test_scores.py::test_lists_are_as_long_as_the_answer_wherever_it_is_cut |
| stop string and length limit in one block | test_a_stop_string_counts_before_the_limit_of_the_same_block |
| log probabilities with speculation on | engine/test_scores.py |
| the same seed twice; other neighbours; another k | engine/test_coupled.py |
| draft and target tokenizers differ | jobs/test_check.py::test_another_tokenizer_is_refused_with_the_first_token_… |
| embedding matrices padded to different sizes | test_padding_of_either_embedding_is_never_drawn_… |
| a sliding window and a rollback across its edge | engine/test_packed_decoding.py::test_sliding_window_… |
| a batch of one long row and "Hi" | test_a_short_row_beside_a_long_one_gives_what_it_gives_alone |
| an empty prompt, a blank one, null | test_answering.py::test_a_document_without_text_is_an_error_row_… |
| a prompt longer than the context | prompts/test_templates.py, test_answering.py |
| NaN in the logits of one sequence | engine/test_packed_decoding.py::test_non_finite_row_…, engine/test_verifier.py |
| a chat template that adds BOS | prompts/test_templates.py::test_a_prompt_is_what_…_gives_with_one_bos |
| output that ends inside a multi-byte character | test_no_text_ends_in_half_a_character, test_wording.py |

And the whole kind of the ends: greedy decoding with any stop strings, EOS tokens, minimum lengths, bad words and blocks
equals plain decoding, token by token, cut by a naive reading of the text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from pipeline.decode import Decoder, Drafter
from pipeline.engine import edits
from pipeline.engine.drafters.model import ModelDrafter
from pipeline.engine.drafters.ngram import NgramDrafter
from pipeline.engine.verifier import Rule, TargetVerifier
from pipeline.records import Completion, FinishReason, Request, SamplingParams
from pipeline.sequence import Sequence
from pipeline.stopping import StopWatch
from pipeline.wording import Wording
from tests.decoding import (
    TabularRunner,
    decoded,
    decoder,
    drafter_of,
    generated_alone,
    packed,
    ragged_requests,
    runner,
    verifier_of,
)
from tests.models import EOS, PAD, TOKENS, VOCABULARY, byte_tokenizer, tiny_model

RULES: tuple[Rule, ...] = ("ratio", "block", "coupled")
Logits = Callable[[tuple[int, ...]], np.ndarray]


class Words:
    """A tokenizer of six tokens, some of which write several characters; the last one is EOS and writes nothing."""

    PIECES = ("a", "b", "ab", "ba", "c", "")

    def raw(self, ids: list[int]) -> str:
        return "".join(self.PIECES[i] for i in ids)

    def __call__(self, ids: list[int]) -> str:
        return self.raw(ids)

    def spellings(self, word: str) -> tuple[tuple[int, ...], ...]:
        """Character by character, and as one piece where there is one."""
        letters = tuple(self.PIECES.index(character) for character in word)
        return tuple({letters, *((i,) for i, piece in enumerate(self.PIECES) if piece == word)})


END = len(Words.PIECES) - 1


def scripted(prompt: list[int], script: list[int], size: int) -> Logits:
    """A model that says the script after the prompt, whatever stands there, each token with probability 0.9 or so."""

    def logits(tokens: tuple[int, ...]) -> np.ndarray:
        place = len(tokens) - len(prompt)
        return np.where(np.arange(size) == (script[place] if 0 <= place < len(script) else 0), 9.0, 0.0)

    return logits


def engine(
    target: Logits, draft: Logits | None, size: int, rule: Rule, k: int, eos: tuple[int, ...], wording: object
) -> Decoder:
    """The engine around functions instead of models; `draft` None: n-gram lookup."""
    slots = 3
    drafter: Drafter = NgramDrafter(slots)
    if draft is not None:
        drafter = ModelDrafter(TabularRunner(draft, slots, size), 4, "sample", 24, rule == "coupled", eos)
    verifier = TargetVerifier(TabularRunner(target, slots, size), rule, eos)  # type: ignore[arg-type]
    return decoder(verifier, drafter, slots, 60, k, eos=eos, wording=wording)  # type: ignore[arg-type]


def says(script: list[int], params: SamplingParams, k: int, rule: Rule, eos: tuple[int, ...] = ()) -> Completion:
    """The answer of a target that says the script, to a draft that knows it: every block is accepted whole."""
    prompt, wording = [40, 41, 42], Wording(byte_tokenizer())
    model = scripted(prompt, script, TOKENS)
    [answer] = decoded(engine(model, model, TOKENS, rule, k, eos, wording), [Request("k", prompt, params)])
    return answer


def ids(text: str | bytes) -> list[int]:
    """The byte tokenizer's ids; a byte has one whatever stands around it."""
    data = text.encode() if isinstance(text, str) else text
    return [byte_ids()[byte] for byte in data]


@cache
def byte_ids() -> dict[int, int]:
    tokenizer = byte_tokenizer()
    ascii_ids = {b: tokenizer.encode(chr(b), add_special_tokens=False)[0] for b in range(128)}
    for character in map(chr, range(128, 0x800)):
        first, second = tokenizer.encode(character, add_special_tokens=False)
        ascii_ids[character.encode()[0]], ascii_ids[character.encode()[1]] = first, second
    for character in "你😀":
        ascii_ids.update(zip(character.encode(), tokenizer.encode(character, add_special_tokens=False), strict=True))
    return ascii_ids


# ------------------------------------------------------------------------------------------------------ greedy texts


def test_128_greedy_tokens_are_the_same_with_and_without_a_draft() -> None:
    asked = [replace(r, params=SamplingParams(128)) for r in ragged_requests(4, VOCABULARY, seed=6)]
    expected = [generated_alone(tiny_model("llama"), r) for r in asked]
    for kind, rule in (("none", "ratio"), ("model", "ratio"), ("ngram", "block"), ("itself", "coupled")):
        answers = decoded(decoder(verifier_of("llama", rule=rule), drafter_of(kind, "llama")), asked)  # type: ignore[arg-type]
        assert [a.token_ids for a in answers] == expected
    assert {len(text) for text in expected} == {128}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("prompt_length", [1, 38, 39])
def test_the_context_ends_with_few_places_left(rule: Rule, prompt_length: int) -> None:
    """A prompt of one token; two places left with k = 4; one token less than the context; warm."""
    params = SamplingParams(100, temperature=1.0, logprobs="raw")
    request = Request("c", np.random.default_rng(2).integers(0, VOCABULARY, prompt_length).tolist(), params)
    for kind in ("none", "ngram", "model", "itself"):
        drafter = drafter_of(kind, "llama", context=40, coupled=rule == "coupled")
        [answer] = decoded(decoder(verifier_of("llama", context=40, rule=rule), drafter, context=40), [request])
        assert answer.finish_reason is FinishReason.LENGTH
        assert len(answer.token_ids) == len(answer.logprobs or ()) == 40 - prompt_length


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", ["ngram", "model", "itself"])
def test_penalties_count_the_drafted_tokens_before_each_position(rule: Rule, kind: str) -> None:
    """As transformers' own text with a repetition penalty; prompts that loop, so that drafts repeat what they hold."""
    rng = np.random.default_rng(5)
    phrases = [rng.integers(0, VOCABULARY, n).tolist() for n in (2, 3, 5, 1)]
    asked = [
        Request(str(i), phrase * 5, SamplingParams(24, repetition_penalty=(1.3, 0.8)[i % 2]))
        for i, phrase in enumerate(phrases)
    ]
    drafter = drafter_of(kind, "llama", coupled=rule == "coupled")
    answers = decoded(decoder(verifier_of("llama", rule=rule), drafter, draft_tokens=6), asked)
    for request, answer in zip(asked, answers, strict=True):
        assert answer.token_ids == penalised_alone(request)
    assert sum(a.stats.drafted for a in answers) > 20
    if kind == "itself":
        assert all(a.stats.accepted == a.stats.drafted for a in answers)


@cache
def plain_model() -> torch.nn.Module:
    return tiny_model("llama")


def penalised_alone(request: Request) -> list[int]:
    prompt = torch.tensor([request.prompt_token_ids])
    out = plain_model().generate(  # type: ignore[operator]
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=request.params.max_new_tokens,
        repetition_penalty=request.params.repetition_penalty,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    text: list[int] = out[0, prompt.shape[1] :].tolist()
    return text


@pytest.mark.parametrize("rule", RULES)
def test_a_forbidden_token_inside_a_block_is_never_kept(rule: Rule) -> None:
    """The target likes it above all, the draft proposes it: -100 applies wherever it stands."""
    prompt = [1, 2, 3, 4, 1, 2, 3, 4, 1]
    likes = scripted(prompt, [2, 3, 4, 1] * 5, 9)
    for params in (
        SamplingParams(16, logit_bias={4: -100.0}),
        SamplingParams(16, temperature=1.0, logit_bias={4: -100.0}),
        SamplingParams(16, temperature=1.0, min_p=0.5, logit_bias={4: 100.0}),
    ):
        for draft in (None, likes):  # n-gram lookup knows no bias
            decoding = engine(likes, draft, 9, rule, 4, (), None)
            decoding.scheduler.wording = None
            [answer] = decoded(decoding, [Request("k", prompt, params)])
            assert len(answer.token_ids) == 16
            assert answer.stats.drafted > 3
            assert set(answer.token_ids) == {4} if params.min_p else 4 not in answer.token_ids


def test_a_short_row_beside_a_long_one_gives_what_it_gives_alone() -> None:
    rng = np.random.default_rng(0)
    short = Request("Hi", ids("Hi"), SamplingParams(20))
    long = Request("long", rng.integers(0, 256, 150).tolist(), SamplingParams(40))
    expected = generated_alone(tiny_model("llama"), short)
    for kind in ("none", "model"):
        answers = decoded(decoder(verifier_of("llama"), drafter_of(kind, "llama")), [long, short])
        assert answers[1].token_ids == expected


@pytest.mark.parametrize("rule", RULES)
def test_padding_of_either_embedding_is_never_drawn_and_special_tokens_are(rule: Rule) -> None:
    """Target and draft have 272 and 288 rows for 259 tokens; at this temperature padding would be drawn soon."""
    target = runner(lambda: packed("llama", vocab=272), vocabulary=TOKENS)
    draft = runner(lambda: packed("llama", seed=1, vocab=288), vocabulary=TOKENS)
    drafter = ModelDrafter(draft, 300, "sample", 24, rule == "coupled")
    params = SamplingParams(40, temperature=50.0, top_logprobs=300, logprobs="law", ignore_eos=True)
    asked = [Request(str(i), [i, 2], params) for i in range(12)]
    answers = decoded(decoder(TargetVerifier(target, rule), drafter, eos=(EOS,)), asked)
    drawn = {token for a in answers for token in a.token_ids}
    assert max(drawn) < TOKENS
    assert len(drawn) > 200
    for answer in answers:
        for alternatives in answer.top_logprobs or ():
            assert {token for token, _ in alternatives} == set(range(TOKENS))  # PAD and EOS among them, and no padding
    assert drawn & {EOS, PAD}


# --------------------------------------------------------------------------------------------------------------- ends


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("k", [0, 1, 2, 5])
@pytest.mark.parametrize("temperature", [0.0, 0.3])
def test_a_stop_string_counts_before_the_limit_of_the_same_block(rule: Rule, k: int, temperature: float) -> None:
    """[10, 11, STOP, 20, 21, 22], limit 5: `stop`, two tokens."""
    [stop] = ids("!")
    params = SamplingParams(5, temperature=temperature, stop=("!",), logprobs="raw")
    answer = says([10, 11, stop, 20, 21, 22], params, k, rule)
    assert answer.token_ids == [10, 11]
    assert answer.finish_reason is FinishReason.STOP
    assert answer.text == Wording(byte_tokenizer())([10, 11])
    assert len(answer.logprobs or ()) == 2
    assert answer.stats.accepted <= 2
    eos = says([10, 11, 12, 20, 21, 22], params, k, rule, eos=(12,))
    assert (eos.token_ids, eos.finish_reason) == ([10, 11], FinishReason.STOP)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("k", range(7))
def test_an_end_inside_a_block_cuts_everything_there(rule: Rule, k: int) -> None:
    """EOS, a stop string, and one that k cuts into two blocks or not: ids, text, log probabilities and counts agree."""
    for script, stop, text in (
        ([*ids("one two."), EOS, *ids("three")], (), "one two."),
        (ids("one two. STOP three"), ("STOP",), "one two. "),
        (ids("one SSTOPT"), ("STOP", "T"), "one SS"),
        (ids("über 你你STOP"), ("你ST",), "über 你"),
        (ids("STOP"), ("STOP",), ""),
        ([EOS], (), ""),
    ):
        params = SamplingParams(30, temperature=0.3, stop=stop, logprobs="law", top_logprobs=1)
        answer = says(script, params, k, rule, eos=(EOS,))
        assert answer.finish_reason is FinishReason.STOP
        assert (answer.text, answer.token_ids) == (text, ids(text))
        assert len(answer.logprobs or ()) == len(answer.top_logprobs or ()) == len(answer.token_ids)
        assert answer.stats.accepted == sum(answer.stats.accepted_at) <= min(answer.stats.drafted, len(ids(text)))
        assert answer.stats.steps <= len(script)


@pytest.mark.parametrize("k", [0, 1, 3, 6])
def test_ignored_eos_stays_and_is_no_text(k: int) -> None:
    params = SamplingParams(6, ignore_eos=True, logprobs="raw")
    answer = says([*ids("ab"), EOS, *ids("cde")], params, k, "ratio", eos=(EOS,))
    assert answer.token_ids == [*ids("ab"), EOS, *ids("cde")]
    assert (answer.text, answer.finish_reason) == ("abcde", FinishReason.LENGTH)
    assert len(answer.logprobs or ()) == 6


@pytest.mark.parametrize("k", [0, 1, 3, 6])
@pytest.mark.parametrize(("limit", "text"), [(2, "a"), (3, "a"), (4, "a你"), (6, "a你"), (8, "a你😀"), (9, "a你😀b")])
def test_no_text_ends_in_half_a_character(k: int, limit: int, text: str) -> None:
    answer = says(ids("a你😀bc"), SamplingParams(limit), k, "ratio")
    assert (answer.text, len(answer.token_ids)) == (text, limit)
    assert answer.finish_reason is FinishReason.LENGTH


# ------------------------------------------------------------------------------------------------------- the whole kind


def random_logits(seed: int) -> Logits:
    """A model that is random in all tokens before."""

    @cache
    def logits(tokens: tuple[int, ...]) -> np.ndarray:
        found: np.ndarray = np.random.default_rng([seed, *tokens]).normal(0, 2, len(Words.PIECES))
        return found

    return logits


def plain(
    logits: Logits, prompt: list[int], params: SamplingParams, watch: Callable[[list[int]], tuple[int, str] | None]
) -> tuple[list[int], str, str]:
    """Greedy decoding token by token, with a reading of the whole text after each."""
    tokens: list[int] = []
    while len(tokens) < params.max_new_tokens:
        scores = logits((*prompt, *tokens)).copy()
        if len(tokens) < params.min_new_tokens and not params.ignore_eos:
            scores[END] = -np.inf
        for spelling in (s for word in params.bad_words for s in Words().spellings(word)):
            if [*prompt, *tokens][len(prompt) + len(tokens) + 1 - len(spelling) :] == list(spelling[:-1]):
                scores[spelling[-1]] = -np.inf
        token = int(np.argmax(scores))
        if token == END and not params.ignore_eos:
            return tokens, Words().raw(tokens), "stop"
        tokens.append(token)
        cut = watch(tokens)
        if cut is not None:
            return tokens[: cut[0]], cut[1], "stop"
    return tokens, Words().raw(tokens), "length"


def reading(params: SamplingParams) -> Callable[[list[int]], tuple[int, str] | None]:
    """Where the last token completes a stop string: tokens before it, and text."""
    raw = Words().raw

    def watch(tokens: list[int]) -> tuple[int, str] | None:
        text, before = raw(tokens), len(raw(tokens[:-1]))
        ends = [
            (begin + len(stop), begin)
            for stop in params.stop
            for begin in range(len(text))
            if text.startswith(stop, begin) and begin + len(stop) > before
        ]
        if not ends or len(tokens) <= params.min_new_tokens:
            return None
        begin = min(ends)[1]
        holds = next(n for n, _ in enumerate(tokens) if len(raw(tokens[: n + 1])) > begin)
        return holds, text[:begin]

    return watch


request_params = st.builds(
    SamplingParams,
    max_new_tokens=st.integers(1, 14),
    stop=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3).map(tuple),
    min_new_tokens=st.integers(0, 6),
    ignore_eos=st.booleans(),
    bad_words=st.lists(st.sampled_from(["ab", "ba", "cc", "aba", "b"]), max_size=2).map(tuple),
    logprobs=st.sampled_from(["none", "raw", "law"]),
)


def by_processors(logits: np.ndarray, tokens: list[int], prompt: int, params: SamplingParams) -> np.ndarray:
    """The law as transformers' own processors make it."""
    ids_1T = torch.tensor([tokens])
    bad_words = [list(s) for word in params.bad_words for s in Words().spellings(word)]
    processors = [
        SequenceBiasLogitsProcessor([[[token], bias] for token, bias in params.logit_bias.items()])
        if params.logit_bias
        else None,
        RepetitionPenaltyLogitsProcessor(params.repetition_penalty),
        NoBadWordsLogitsProcessor(bad_words, END) if bad_words else None,
        MinNewTokensLengthLogitsProcessor(prompt, params.min_new_tokens, END) if params.min_new_tokens else None,
        TemperatureLogitsWarper(params.temperature),
        TopKLogitsWarper(params.top_k) if params.top_k else None,
        TopPLogitsWarper(params.top_p) if params.top_p < 1 else None,
        MinPLogitsWarper(params.min_p) if params.min_p else None,
    ]
    scores_1V = torch.tensor(logits, dtype=torch.float64)[None]
    for processor in processors:
        scores_1V = scores_1V if processor is None else processor(ids_1T, scores_1V)
    law: np.ndarray = scores_1V[0].softmax(-1).numpy()
    return law


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    target=st.integers(0, 50),
    params=st.lists(
        st.builds(
            SamplingParams,
            max_new_tokens=st.integers(2, 9),
            temperature=st.sampled_from([0.5, 1.0, 1.7]),
            top_k=st.integers(0, 4),
            top_p=st.sampled_from([1.0, 0.85, 0.6]),
            min_p=st.sampled_from([0.0, 0.15]),
            repetition_penalty=st.sampled_from([1.0, 1.4, 0.8]),
            logit_bias=st.dictionaries(st.integers(0, END), st.sampled_from([-100.0, -1.0, 2.0]), max_size=2),
            bad_words=st.lists(st.sampled_from(["ab", "cc", "aba"]), max_size=2).map(tuple),
            min_new_tokens=st.integers(0, 4),
            logprobs=st.just("law"),
            top_logprobs=st.just(END + 1),
        ),
        min_size=1,
        max_size=4,
    ),
    k=st.integers(0, 6),
    rule=st.sampled_from(RULES),
)
def test_law_at_every_position_of_a_block_is_that_of_transformers_processors(
    target: int, params: list[SamplingParams], k: int, rule: Rule
) -> None:
    """Token by token, of blocks that a draft drew from the same law and that are kept whole."""
    model = random_logits(target)
    asked = [Request(str(i), [0, 1, 4, 0, i % 3], p) for i, p in enumerate(params)]
    for request, answer in zip(
        asked, decoded(engine(model, model, END + 1, rule, k, (END,), Words()), asked), strict=True
    ):
        tokens, prompt = list(request.prompt_token_ids), len(request.prompt_token_ids)
        for token, alternatives in zip(answer.token_ids, answer.top_logprobs or (), strict=True):
            logits = model(tuple(tokens)).astype(np.float32)
            law = by_processors(logits, tokens, prompt, request.params)
            found = np.zeros(END + 1)
            found[[i for i, _ in alternatives]] = np.exp([p for _, p in alternatives])
            assert found == pytest.approx(law, abs=1e-9)
            tokens.append(token)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    target=st.integers(0, 50),
    draft=st.none() | st.integers(0, 3),
    params=st.lists(request_params, min_size=1, max_size=5),
    prompts=st.lists(st.lists(st.integers(0, END - 1), min_size=1, max_size=9), min_size=5, max_size=5),
    k=st.integers(0, 6),
    rule=st.sampled_from(RULES),
)
def test_greedy_text_is_plain_decoding_cut_by_a_naive_reading(
    target: int,
    draft: int | None,
    params: list[SamplingParams],
    prompts: list[list[int]],
    k: int,
    rule: Rule,
) -> None:
    """Drafts: n-gram lookup, the target itself (0), and others, whose blocks are cut anywhere."""
    model = random_logits(target)
    proposing = None if draft is None else model if draft == 0 else random_logits(target + 100 * draft)
    asked = [Request(str(i), prompt, p) for i, (p, prompt) in enumerate(zip(params, prompts, strict=False))]
    answers = decoded(engine(model, proposing, END + 1, rule, k, (END,), Words()), asked)
    for request, answer in zip(asked, answers, strict=True):
        tokens, text, finish = plain(model, request.prompt_token_ids, request.params, reading(request.params))
        assert (answer.token_ids, answer.text, str(answer.finish_reason)) == (tokens, text, finish)
        stats = answer.stats
        assert stats.accepted == sum(stats.accepted_at) <= min(len(tokens), stats.drafted)
        assert sum(stats.drafted_at) == stats.drafted
        if request.params.logprobs == "none":
            assert answer.logprobs is None
        else:
            assert len(answer.logprobs or ()) == len(tokens)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    target=st.integers(0, 50),
    params=st.lists(
        st.builds(
            SamplingParams,
            max_new_tokens=st.integers(1, 14),
            temperature=st.sampled_from([0.0, 0.7, 1.0, 1.5]),
            top_k=st.integers(0, 3),
            top_p=st.sampled_from([1.0, 0.8, 0.5]),
            min_p=st.sampled_from([0.0, 0.2]),
            repetition_penalty=st.sampled_from([1.0, 1.4, 0.8]),
            presence_penalty=st.sampled_from([0.0, 0.7]),
            frequency_penalty=st.sampled_from([0.0, -0.4]),
            logit_bias=st.dictionaries(st.integers(0, END), st.sampled_from([-100.0, -1.0, 2.0]), max_size=2),
            stop=st.lists(st.text("abc", min_size=1, max_size=4), max_size=2).map(tuple),
            n=st.integers(1, 2),
            min_new_tokens=st.integers(0, 4),
        ),
        min_size=1,
        max_size=5,
    ),
    k=st.integers(1, 6),
    draft=st.none() | st.integers(0, 3),
)
def test_coupled_text_is_that_of_plain_decoding_whatever_draft_and_block(
    target: int, params: list[SamplingParams], k: int, draft: int | None
) -> None:
    model = random_logits(target)
    proposing = None if draft is None else model if draft == 0 else random_logits(target + 100 * draft)
    asked = [Request(str(i), [0, 1, 0, 1, i % 3], p) for i, p in enumerate(params)]
    with_draft = decoded(engine(model, proposing, END + 1, "coupled", k, (END,), Words()), asked)
    without = decoded(engine(model, None, END + 1, "coupled", 0, (END,), Words()), asked)
    assert [(a.token_ids, a.text, a.finish_reason) for a in with_draft] == [
        (a.token_ids, a.text, a.finish_reason) for a in without
    ]


def end_at_the_last_eos(monkeypatch: pytest.MonkeyPatch) -> None:
    extend = Sequence.extend

    def late(self: Sequence, drafted: list[int], accepted: int, following: int, eos: frozenset[int]) -> int:
        return extend(self, drafted, accepted, following, eos if following in eos else frozenset())

    monkeypatch.setattr(Sequence, "extend", late)


def look_at_the_last_token_of_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    look = StopWatch.look
    monkeypatch.setattr(StopWatch, "look", lambda self, tokens, new: look(self, tokens, min(new, 1)))


def begin_anew_with_each_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Finds no stop string that two blocks share."""
    def look(self: StopWatch, tokens: list[int], new: int) -> object:
        fresh = StopWatch(self._stops, self._raw, self._at_least - (len(tokens) - new))
        cut = fresh._looked(tokens[len(tokens) - new :], new)  # type: ignore[attr-defined]
        return cut and replace(cut, tokens=cut.tokens + len(tokens) - new)

    monkeypatch.setattr(StopWatch, "_looked", StopWatch.look, raising=False)
    monkeypatch.setattr(StopWatch, "look", look)


def let_the_limit_win(monkeypatch: pytest.MonkeyPatch) -> None:
    extend = Sequence.extend

    def limited(self: Sequence, drafted: list[int], accepted: int, *rest: Any) -> int:
        full = len(self.tokens) + accepted + 1 >= self.limit
        kept = extend(self, drafted, accepted, *rest)
        self.finish = FinishReason.LENGTH if full else self.finish
        return kept

    monkeypatch.setattr(Sequence, "extend", limited)


def forbid_eos_at_the_first_position_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A minimum length that is forgotten inside a block."""
    forbid = edits._Edit.forbid_end

    def first(self: Any, shortest_B: np.ndarray, eos_E: np.ndarray) -> None:
        before = self.logits_RV.clone()
        forbid(self, shortest_B, eos_E)
        inner = torch.as_tensor(np.append(False, np.diff(self.positions.owner_R) == 0))
        self.logits_RV[inner] = before[inner]

    monkeypatch.setattr(edits._Edit, "forbid_end", first)


def count_what_was_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accepted tokens behind an end count as accepted."""
    completion = Sequence.completion

    def generous(self: Sequence, text: str) -> Completion:
        answer = completion(self, text)
        return replace(answer, stats=replace(answer.stats, accepted=max(answer.stats.accepted, answer.stats.drafted)))

    monkeypatch.setattr(Sequence, "completion", generous)


@pytest.mark.parametrize(
    "plant",
    [
        end_at_the_last_eos,
        look_at_the_last_token_of_a_block,
        begin_anew_with_each_block,
        let_the_limit_win,
        forbid_eos_at_the_first_position_alone,
        count_what_was_cut,
    ],
)
def test_planted_bug_in_the_ends_is_seen(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: Any) -> None:
    case = test_greedy_text_is_plain_decoding_cut_by_a_naive_reading.hypothesis.inner_test
    rng = np.random.default_rng(0)

    def some() -> None:
        for seed in range(60):
            params = [
                SamplingParams(int(rng.integers(4, 14)), stop=stop, min_new_tokens=int(rng.integers(0, 4)))
                for stop in ((), ("ba", "cc"), ("abab",), ("aa", "cab"))
            ]
            prompts = rng.integers(0, END, (4, 3)).tolist()
            case(seed, (0, 1, None)[seed % 3], params, prompts, 1 + seed % 5, RULES[seed % 3])

    some()
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        some()

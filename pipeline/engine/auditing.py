"""Carries out an audit: asks the job's engine, an engine that is wrong on purpose, and the reference.

Holds one model at a time (the draft apart): first the engine answers, then the reference scores what it answered. All
requests, prefixes and draws are functions of the job's seed.
"""

from __future__ import annotations

import gc
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from pipeline.audit import END, NOISE, TIES, Audit, Difference, Drawn, GreedyAudit, GreedyText, LawAudit, compare
from pipeline.decode import Verifier
from pipeline.engine import Engine
from pipeline.engine.assembly import agree, drafting
from pipeline.engine.checkpoint import resolve_dtype
from pipeline.engine.reference import Reference
from pipeline.messages import Verdict, VerifyReply, VerifyRequest
from pipeline.records import Completion, FinishReason, Request, SamplingParams

if TYPE_CHECKING:
    from pipeline.config import JobConfig

LENGTH = 3  # tokens of a sampled text: a block of two drafted ones and the one behind it
QUOTED = 8  # tokens of its prompt that a candidate ends with
WRONG_TEMPERATURE = 1.5  # times the right one


@dataclass(frozen=True)
class Effort:
    """How much is compared; it decides how long an audit takes, and how small a mistake it finds."""

    greedy_tokens: int = 64  # of an answer that are compared, at most
    prefixes: int = 6  # whose continuations are counted
    pilot: int = 8  # samples of every candidate that prefixes are chosen by
    samples: int = 256  # per prefix
    most_samples: int = 2048  # the same, doubled up to this where the wrong engine is not found out


EFFORT = Effort()


@dataclass(frozen=True)
class Question:
    """One document's prompt for one task."""

    document: str
    task: str
    prompt: list[int]
    params: SamplingParams


@dataclass(frozen=True)
class Prefix:
    """Tokens whose continuations are sampled."""

    name: str
    task: str
    tokens: list[int]
    params: SamplingParams


class KeepsOneMore:
    """A verifier that is wrong on purpose, under every rule: it keeps one drafted token more than its verdict says."""

    def __init__(self, right: Verifier) -> None:
        self.right = right

    def verify(self, request: VerifyRequest) -> VerifyReply:
        """See `decode.Verifier`."""
        reply = self.right.verify(request)
        accepted, next_token = np.asarray(reply.verdict.accepted), np.asarray(reply.verdict.next_token)
        drafted = np.where(request.final & (next_token >= 0), np.asarray(request.proposal.lengths), 0)
        return replace(reply, verdict=Verdict(np.minimum(accepted + 1, drafted), next_token))


def audit(
    config: JobConfig, questions: Sequence[Question], say: Callable[[str], None], effort: Effort | None = None
) -> Audit:
    """Audit a job on some of its own questions; `say` is told, now and then, what comes next."""
    return _Audit(config, questions, say, effort or EFFORT).run()


def law_params(params: SamplingParams) -> SamplingParams:
    """A task's parameters for short sampled texts. One that never draws does so at temperature 1."""
    draws = params.temperature > 0 and params.top_k != 1
    plain = _plain(replace(params, max_new_tokens=LENGTH))
    return plain if draws else replace(plain, temperature=1.0, top_k=0 if params.top_k == 1 else params.top_k)


class _Audit:
    def __init__(
        self, config: JobConfig, questions: Sequence[Question], say: Callable[[str], None], effort: Effort
    ) -> None:
        self.config = config
        self.questions = questions
        self.say = say
        self.effort = effort
        self.setup = agree(config)
        self.draft = drafting(config)
        dtype = resolve_dtype(config.target.dtype, self.setup.device)
        self.dtype = str(dtype).removeprefix("torch.")
        self.engine: Engine | None = None

    def run(self) -> Audit:
        started, effort = time.monotonic(), self.effort
        self.say(f"greedy texts of {len(self.questions)} prompts")
        answers = self._generate([self._greedy(i, q) for i, q in enumerate(self.questions)])
        self.say("choosing prefixes")
        prefixes = self._chosen(answers)
        right, wrong = (self._draw(prefixes, 0, effort.samples, w) for w in (False, True))
        self._release()

        self.say("the same through transformers")
        reference = Reference.load(self.setup.target, self.dtype, self.setup.device, NOISE[self.dtype])
        greedy = self._greedy_audit(reference, answers)
        laws = [reference.law(prefix.tokens, prefix.params, LENGTH) for prefix in prefixes]
        del reference
        gc.collect()

        looks, samples = (effort.most_samples // effort.samples).bit_length(), effort.samples
        while True:
            names, noise = [prefix.name for prefix in prefixes], NOISE[self.dtype]
            sampled, deviant = (compare(names, laws, drawn, noise, looks) for drawn in (right, wrong))
            if sampled.rejected or deviant.rejected or samples >= effort.most_samples:
                break
            self.say(f"the wrong engine passes with {samples} samples per prefix: doubling them")
            right = self._more(right, prefixes, samples, False)
            wrong = self._more(wrong, prefixes, samples, True)
            samples *= 2
        self._release()
        return self._result(greedy, sampled, deviant, time.monotonic() - started)

    def _result(self, greedy: GreedyAudit, sampled: LawAudit, wrong: LawAudit, seconds: float) -> Audit:
        return Audit(
            rule=self.config.decoding.rule,
            draft="none" if self.draft is None else self.draft.kind,
            dtype=self.dtype,
            greedy=greedy,
            sampled=sampled,
            wrong=wrong,
            wrong_engine=self._wrongness,
            notes=tuple(self._notes(sampled)),
            seconds=round(seconds, 3),
        )

    @property
    def _wrongness(self) -> str:
        if self.draft is None:
            return f"samples at {WRONG_TEMPERATURE:g} times the temperature"
        return "keeps one drafted token more than the verdict says"

    def _notes(self, sampled: LawAudit) -> Iterator[str]:
        if self.draft is None:
            yield "the job has no draft: nothing is speculative, and the plain law was tested"
        elif not sampled.together.drafted:
            yield "the drafter proposed nothing behind any of the prefixes"
        elif not sampled.together.accepted:
            yield "no drafted token was kept behind any of the prefixes: what follows a kept one was not tested"
        if sampled.together.doubtful:
            yield f"{sampled.together.doubtful} samples on the border of a filter were left out: rounding decides there"
        greedy = sorted({q.task for q in self.questions if q.params.temperature == 0 or q.params.top_k == 1})
        if greedy:
            yield f"greedy tasks ({', '.join(greedy)}) were sampled at temperature 1"
        if any(q.params.stop for q in self.questions):
            yield "stop strings were left out: they cut texts and change no law"

    # greedy texts

    def _greedy(self, number: int, question: Question) -> Request:
        tokens = min(question.params.max_new_tokens, self.effort.greedy_tokens)
        params = replace(question.params, max_new_tokens=tokens, temperature=0.0)
        return Request(f"audit/greedy/{number}", question.prompt, _plain(params))

    def _greedy_audit(self, reference: Reference, answers: Sequence[Completion]) -> GreedyAudit:
        texts = []
        for i, (question, answer) in enumerate(zip(self.questions, answers, strict=True)):
            ended = answer.finish_reason is FinishReason.STOP
            found: tuple[Difference, ...] = ()
            if answer.error is None:
                params = self._greedy(i, question).params
                found = reference.differences(question.prompt, answer.token_ids, ended, params)
            compared = len(answer.token_ids) + ended
            texts.append(GreedyText(question.document, question.task, compared, found, answer.error))
        drafted, accepted = (sum(getattr(a.stats, f) for a in answers) for f in ("drafted", "accepted"))
        return GreedyAudit(tuple(texts), TIES[self.dtype], drafted, accepted)

    # sampled texts

    def _chosen(self, answers: Sequence[Completion]) -> list[Prefix]:
        """Those candidates behind which a few samples had drafts both kept and rejected; one per task at least.

        Chosen by samples that take no part in the test.
        """
        candidates = list(self._candidates(answers))
        drawn = self._draw(candidates, -self.effort.pilot, 0, False)
        ranks = [
            (min(d.accepted, d.drafted - d.accepted), d.drafted - d.accepted, d.drafted, len(d.outcomes)) for d in drawn
        ]
        order = sorted(range(len(candidates)), key=lambda i: ranks[i], reverse=True)
        best = {candidates[i].task: i for i in reversed(order)}
        chosen = list(dict.fromkeys([*best.values(), *order]))
        return [candidates[i] for i in sorted(chosen[: max(self.effort.prefixes, len(best))])]

    def _candidates(self, answers: Sequence[Completion]) -> Iterator[Prefix]:
        """Prompts; prompts with some of the answer; prompts with a few of their own tokens again, as a quotation.

        Behind the last an n-gram drafter has something to propose.
        """
        dice = random.Random(f"audit,{self.config.seed}")
        for question, answer in zip(self.questions, answers, strict=True):
            prompt, text = question.prompt, answer.token_ids
            ends = {"": [], **{f" +{n}": text[:n] for n in (len(text) // 4, len(text) // 2) if n}}
            for _ in range(2):
                start = dice.randrange(max(len(prompt) - QUOTED, 1))
                ends[f" quoting {start}"] = prompt[start : start + QUOTED]
            for how, end in ends.items():
                if len(prompt) + len(end) + LENGTH <= self.setup.limits.context:
                    name = f"{question.document}/{question.task}{how}"
                    yield Prefix(name, question.task, prompt + end, law_params(question.params))

    def _draw(self, prefixes: Sequence[Prefix], first: int, last: int, wrong: bool) -> list[Drawn]:
        """Samples `first` to `last` of every prefix; right and wrong engine draw with the same numbers."""
        warmer = WRONG_TEMPERATURE if wrong and self.draft is None else 1.0
        requests = [
            Request(
                f"audit/{prefix.name}/{sample}",
                prefix.tokens,
                replace(prefix.params, temperature=prefix.params.temperature * warmer),
            )
            for prefix in prefixes
            for sample in range(first, last)
        ]
        answers = iter(self._generate(requests, wrong))
        drawn = []
        for _ in prefixes:
            mine = [next(answers) for _ in range(first, last)]
            outcomes = Counter(map(_outcome, mine))
            drawn.append(Drawn(outcomes, sum(a.stats.drafted for a in mine), sum(a.stats.accepted for a in mine)))
        return drawn

    def _more(self, drawn: Sequence[Drawn], prefixes: Sequence[Prefix], samples: int, wrong: bool) -> list[Drawn]:
        more = self._draw(prefixes, samples, 2 * samples, wrong)
        return [a + b for a, b in zip(drawn, more, strict=True)]

    # the engine

    def _generate(self, requests: list[Request], wrong: bool = False) -> list[Completion]:
        if self.engine is None:
            self.engine = Engine.from_config(self.config)
        decoder = self.engine.decoder
        right = decoder.verifier
        if wrong and self.draft is not None:
            decoder.verifier = KeepsOneMore(right)
        try:
            return self.engine.generate(requests)
        finally:
            decoder.verifier = right

    def _release(self) -> None:
        self.engine = None
        gc.collect()


def _plain(params: SamplingParams) -> SamplingParams:
    """Without what changes no law: samples side by side, stop strings, log probabilities."""
    return replace(params, n=1, stop=(), logprobs="none", top_logprobs=0)


def _outcome(answer: Completion) -> tuple[int, ...]:
    if answer.error is not None:
        return ()
    return (*answer.token_ids, END) if answer.finish_reason is FinishReason.STOP else tuple(answer.token_ids)

"""Workers without models, whose caches are lists of the tokens that were really written into each slot.

They answer as a deterministic model would, so every text is known beforehand; they lose their memory, refuse and
fail where they are told to; and they assert what a worker relies on: that the part of a slot which a request
calls cached holds exactly the beginning of that sequence.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pipeline.cohorts import Cohorts
from pipeline.decode import Answer, Decoder
from pipeline.errors import CacheMiss, WorkerLost
from pipeline.flight import Flight, Outcome
from pipeline.messages import DraftRequest, Feed, Opening, PrefixCopy, Proposal, Verdict, VerifyReply, VerifyRequest
from pipeline.records import Request, SamplingParams
from pipeline.scheduler import Limits, Scheduler
from pipeline.step import empty_proposal

VOCABULARY = 5
MOST_STEPS = 1200  # more than any simulation needs: a loop without progress fails here
TROUBLED_CALLS = 150  # trouble ends after so many calls, so that every simulation does


def continuation(tokens: Sequence[int]) -> int:
    """The one token that follows a text."""
    return zlib.crc32(bytes(tokens)) % VOCABULARY


def plain_text(request: Request, context: int, eos: Iterable[int]) -> list[int]:
    """What decoding a request alone, token by token, gives."""
    tokens = list(request.prompt_token_ids)
    limit = min(len(tokens) + request.params.max_new_tokens, context)
    while len(tokens) < limit:
        token = continuation(tokens)
        if token in eos and not request.params.ignore_eos:
            break
        tokens.append(token)
    return tokens[len(request.prompt_token_ids) :]


@dataclass(frozen=True)
class Trouble:
    """How often a worker, asked for something, … (probabilities, of which one applies per call)."""

    emptied: float = 0.0  # has been replaced by an empty one
    refuses: float = 0.0  # calls some rows missing, having made the copies or not
    loses_answer: float = 0.0  # does all its work and then calls every row missing, being replaced
    lost: float = 0.0  # is gone (drafters alone), having done part of the work
    scrubbed: float = 0.0  # forgets one slot after it has answered


QUIET = Trouble()


class SlotCache:
    """The slots of one model."""

    def __init__(self, scheduler: Scheduler, trouble: Trouble, rng: np.random.Generator) -> None:
        self.scheduler, self.trouble, self.rng = scheduler, trouble, rng
        self.written: list[list[int]] = []
        self.owners: list[int] = []
        self.forgot = False  # only a worker that forgot something may call rows missing
        self.calls = 0
        self.empty()

    def empty(self) -> None:
        self.written = [[] for _ in range(self.scheduler.limits.slots)]
        self.owners = [-1] * self.scheduler.limits.slots

    def happens(self, what: str) -> bool:
        return self.calls <= TROUBLED_CALLS and bool(self.rng.random() < getattr(self.trouble, what))

    def open(self, openings: Iterable[Opening], copies: Iterable[PrefixCopy], feed: Feed) -> None:
        self.calls += 1
        assert self.calls < MOST_STEPS, "no progress"
        if self.happens("emptied"):
            self.forgot = True
            self.empty()
        refused = self.happens("refuses")
        if refused and self.rng.random() < 0.5:
            self._refuse(feed)
        for copy in copies:
            if len(self.written[copy.source]) < copy.length:
                self._miss(feed.sequences[feed.slots == copy.target])
            self.written[copy.target] = self.written[copy.source][: copy.length]
        slot_of = dict(zip(feed.sequences.tolist(), feed.slots.tolist(), strict=True))
        for opening in openings:
            self.owners[slot_of[opening.sequence]] = opening.sequence
        if refused:
            self._refuse(feed)
        missing = [
            sequence
            for sequence, slot, cached in zip(feed.sequences, feed.slots, feed.cached, strict=True)
            if self.owners[slot] != sequence or len(self.written[slot]) < cached
        ]
        if missing:
            self._miss(missing)

    def write(self, feed: Feed, extra: Sequence[Sequence[int]]) -> None:
        """Check every row against its sequence and write its tokens, and the extra ones behind them."""
        sequences = {s.handle: s for s in self.scheduler.running}
        assert len(set(feed.slots.tolist())) == len(feed.slots), feed.slots
        assert (feed.lengths >= 1).all(), feed.lengths
        for b, fed in enumerate(np.split(feed.tokens, np.cumsum(feed.lengths)[:-1])):
            sequence, slot, cached = sequences[int(feed.sequences[b])], int(feed.slots[b]), int(feed.cached[b])
            assert slot == sequence.slot
            assert self.written[slot][:cached] == sequence.tokens[:cached], "a slot does not hold what is said"
            assert fed.tolist() == sequence.tokens[cached : cached + len(fed)]
            self.written[slot][cached:] = [*fed.tolist(), *extra[b]]
            assert len(self.written[slot]) <= self.scheduler.limits.context

    def scrub_some(self, feed: Feed) -> None:
        if self.happens("scrubbed"):
            self.forgot = True
            self.written[int(self.rng.choice(feed.slots))] = []

    def _refuse(self, feed: Feed) -> None:
        self.forgot = True
        some = self.rng.random(len(feed.sequences)) < 0.5
        self._miss(feed.sequences[some] if some.any() else feed.sequences[:1])

    def _miss(self, sequences: Iterable[int]) -> None:
        assert self.forgot, "a prefix is missing, though nothing was ever forgotten"
        raise CacheMiss(sequences)


class SimulatedVerifier:
    """A target that continues every text by `continuation`; writes down what it was asked."""

    def __init__(self, scheduler: Scheduler, trouble: Trouble = QUIET, seed: int = 0) -> None:
        self.scheduler = scheduler
        self.cache = SlotCache(scheduler, trouble, np.random.default_rng([seed, 1]))
        self.started: list[int] = []  # handles, in the order of their first pass
        self.orderly = True  # sequences begin in the order of their requests
        self.requests: list[VerifyRequest] = []

    def verify(self, request: VerifyRequest) -> VerifyReply:
        self.requests.append(request)
        feed, proposal = request.feed, request.proposal
        self.cache.open(request.openings, request.copies, feed)
        drafted = [
            np.asarray(proposal.tokens[b][: proposal.lengths[b]]).tolist() if final else []
            for b, final in enumerate(request.final)
        ]
        self.cache.write(feed, drafted)
        self._check(request)
        if self.cache.happens("loses_answer"):
            self.cache.forgot = True
            self.cache.empty()
            raise CacheMiss(feed.sequences)
        judged = [self._judge(int(feed.sequences[b]), drafted[b]) for b in range(len(drafted))]
        accepted, following = (np.array(x) for x in zip(*judged, strict=True))
        return VerifyReply(Verdict(np.where(request.final, accepted, 0), np.where(request.final, following, -1)))

    def _judge(self, handle: int, drafted: list[int]) -> tuple[int, int]:
        [sequence] = [s for s in self.scheduler.running if s.handle == handle]
        accepted, tokens = 0, list(sequence.tokens)
        while accepted < len(drafted) and continuation(tokens) == drafted[accepted]:
            tokens.append(drafted[accepted])
            accepted += 1
        return accepted, continuation(tokens)

    def _check(self, request: VerifyRequest) -> None:
        """Budget, order of starting, lengths of blocks, and what a step says about each row."""
        limits, feed = self.scheduler.limits, request.feed
        sequences = {s.handle: s for s in self.scheduler.running}
        prefilled = 0
        for b, handle in enumerate(feed.sequences.tolist()):
            sequence = sequences[handle]
            sequence.check()
            ends = feed.cached[b] + feed.lengths[b] == len(sequence.tokens)
            assert bool(request.final[b]) == ends
            assert request.starts[b] == sequence.generated
            assert request.proposal.lengths[b] <= max(0, min(limits.draft_tokens, sequence.room - 1))
            assert ends or request.proposal.lengths[b] == 0
            if sequence.generated == 0 or feed.lengths[b] > limits.draft_tokens + 2:
                prefilled += int(feed.lengths[b])
        assert prefilled <= limits.prefill_chunk
        self.started += sorted(set(feed.sequences.tolist()) - set(self.started))
        if self.orderly:
            assert self.started == list(range(1, len(self.started) + 1)), "a later request began first"


class SimulatedDrafter:
    """Drafts the right token mostly, and fewer than wanted now and then."""

    def __init__(
        self,
        scheduler: Scheduler,
        trouble: Trouble = QUIET,
        seed: int = 0,
        skill: float = 0.8,
        rests: float = 0.0,
    ) -> None:
        """`skill`: share of right tokens. `rests`: share of steps in which it cannot be asked."""
        self.scheduler, self.skill, self.rests = scheduler, skill, rests
        self.keeps_proposals, self.chunk = scheduler.drafter_keeps_proposals, scheduler.draft_chunk
        self.rng = np.random.default_rng([seed, 2])
        self.cache = SlotCache(scheduler, trouble, self.rng)
        self.requests: list[DraftRequest] = []

    def ready(self) -> bool:
        return bool(self.rng.random() >= self.rests)

    def propose(self, request: DraftRequest) -> Proposal:
        self._check(request)
        return self.draft(request)

    def draft(self, request: DraftRequest) -> Proposal:
        self.requests.append(request)
        feed = request.feed
        lost = self.cache.happens("lost")
        if lost and self.rng.random() < 0.5:
            self._vanish()
        self.cache.open(request.openings, request.copies, feed)
        drafts = [self._draft(int(feed.sequences[b]), int(w)) for b, w in enumerate(request.wanted)]
        self.cache.write(feed, [d[:-1] if self.keeps_proposals else [] for d in drafts])
        if lost:
            self._vanish()
        self.cache.scrub_some(feed)
        return certain(drafts)

    def _vanish(self) -> None:
        self.cache.forgot = True
        self.cache.empty()
        raise WorkerLost("the simulated drafter is gone")

    def _draft(self, handle: int, wanted: int) -> list[int]:
        [sequence] = [s for s in self.scheduler.running if s.handle == handle]
        drafted: list[int] = []
        for _ in range(wanted if self.rng.random() < 0.7 else int(self.rng.integers(wanted + 1))):
            right = continuation([*sequence.tokens, *drafted])
            drafted.append(right if self.rng.random() < self.skill else int(self.rng.integers(VOCABULARY)))
        return drafted

    def _check(self, request: DraftRequest) -> None:
        limits, feed = self.scheduler.limits, request.feed
        ends = feed.cached + feed.lengths + request.wanted
        assert limits.draft_context is None or ends.max() <= limits.draft_context
        caught_up = feed.lengths[feed.lengths > limits.draft_tokens + 2].sum()
        assert self.chunk is None or caught_up <= self.chunk, "the drafter is fed more than its chunk"


class SimulatedPool:
    """Several drafters, one of which drafts for a sequence at a time; they change their minds about who."""

    def __init__(self, drafters: Sequence[SimulatedDrafter], restless: float, seed: int) -> None:
        """`restless`: share of plans at which a sequence is given to another one, or to nobody."""
        self.drafters, self.restless = drafters, restless
        self.keeps_proposals, self.chunk = drafters[0].keeps_proposals, drafters[0].chunk
        self.rng = np.random.default_rng([seed, 3])
        self.chosen: dict[int, int] = {}  # by handle

    def ready(self) -> bool:
        return self.drafters[0].ready()

    def homes(self, handle: int, slot: int) -> int | None:
        if self.rng.random() < self.restless / 2:
            return None
        if handle not in self.chosen or self.rng.random() < self.restless:
            self.chosen[handle] = int(self.rng.integers(len(self.drafters)))
        return self.chosen[handle]

    def propose(self, request: DraftRequest) -> Proposal:
        self.drafters[0]._check(request)
        feed = request.feed
        homes = np.array([self.chosen[handle] for handle in feed.sequences.tolist()])
        bounds = np.cumsum(feed.lengths)[:-1]
        drafts: list[list[int]] = [[] for _ in homes]
        for home in np.unique(homes):
            rows = np.flatnonzero(homes == home)
            slots = set(feed.slots[rows].tolist())
            part = DraftRequest(
                Feed(
                    *(getattr(feed, name)[rows] for name in ("sequences", "slots", "cached", "lengths")),
                    np.concatenate([np.split(feed.tokens, bounds)[b] for b in rows]),
                ),
                tuple(o for o in request.openings if o.sequence in feed.sequences[rows]),
                tuple(c for c in request.copies if c.target in slots),
                *(getattr(request, name)[rows] for name in ("wanted", "starts", "greedy")),
            )
            proposal = self.drafters[home].draft(part)
            for i, b in enumerate(rows):
                drafts[b] = proposal.tokens[i, : proposal.lengths[i]].tolist()
        return certain(drafts)


class ShuffledFlight(Flight):
    """Steps of several cohorts without threads: each is carried out at some time between its plan and its end."""

    def __init__(self, carry_out: Any) -> None:
        super().__init__(carry_out)
        self.rng = np.random.default_rng(7)
        self.waiting: dict[int, Any] = {}  # plans, or outcomes that nobody has asked for yet

    @property
    def empty(self) -> bool:
        return not self.waiting

    def has(self, cohort: int) -> bool:
        return cohort in self.waiting

    def start(self, cohort: int, plan: Any) -> None:
        assert cohort not in self.waiting
        self.waiting[cohort] = self.carry_out(plan) if self.rng.random() < 0.3 else plan

    def landed(self) -> list[Outcome]:
        order = self.rng.permutation(sorted(self.waiting)).tolist()
        for cohort in order[: int(self.rng.integers(1, len(order) + 1))]:
            if not isinstance(self.waiting[cohort], Outcome):
                self.waiting[cohort] = self.carry_out(self.waiting[cohort])
        ended = [cohort for cohort in order if isinstance(self.waiting[cohort], Outcome)]
        return [self.waiting.pop(cohort) for cohort in ended[: int(self.rng.integers(1, len(ended) + 1))]]


class Restless(Cohorts):
    """Another number of cohorts every few steps."""

    def __init__(self, slots: int, limit: int = 4, seed: int = 0) -> None:
        super().__init__(slots, limit)
        self.most = min(limit, slots)
        self.rng = np.random.default_rng(seed)

    def observe(self, now: float, rows: int, full: bool) -> None:
        if self.rng.random() < 0.1:
            self.count = int(self.rng.integers(1, self.most + 1))


def certain(drafts: Sequence[list[int]]) -> Proposal:
    """A proposal of given tokens, each with all the mass of its law."""
    proposal = empty_proposal(len(drafts), max((len(d) for d in drafts), default=0))
    for b, draft in enumerate(drafts):
        proposal.tokens[b, : len(draft)] = draft
        proposal.lengths[b] = len(draft)
    proposal.support_ids[..., 0] = proposal.tokens
    proposal.support_probs[..., 0] = proposal.tokens >= 0
    return proposal


@dataclass
class Simulation:
    """A decoder over simulated workers."""

    limits: Limits
    eos: tuple[int, ...] = ()
    keeps_proposals: bool = True
    draft_chunk: int | None = None
    target_trouble: Trouble = QUIET
    draft_trouble: Trouble = QUIET
    rests: float = 0.0
    skill: float = 0.8
    seed: int = 0
    cohorts: int = 1  # at most
    pool: int = 1  # draft workers
    scheduler: Scheduler = field(init=False)
    verifier: SimulatedVerifier = field(init=False)
    drafter: SimulatedDrafter = field(init=False)  # the first
    decoder: Decoder = field(init=False)

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(
            self.limits,
            self.eos,
            self.seed,
            drafter_keeps_proposals=self.keeps_proposals,
            draft_chunk=self.draft_chunk,
        )
        self.verifier = SimulatedVerifier(self.scheduler, self.target_trouble, self.seed)
        self.drafter = SimulatedDrafter(self.scheduler, self.draft_trouble, self.seed, self.skill, self.rests)
        self.verifier.orderly = self.cohorts == 1
        others = [
            SimulatedDrafter(self.scheduler, self.draft_trouble, self.seed + i, self.skill, self.rests)
            for i in range(1, self.pool)
        ]
        pool = SimulatedPool([self.drafter, *others], 0.1, self.seed)
        self.decoder = Decoder(
            self.scheduler,
            self.verifier,
            pool if others else self.drafter,
            lambda ids: " ".join(map(str, ids)),
            pool.homes if others else lambda handle, slot: 0,
            Restless(self.limits.slots, self.cohorts, self.seed) if self.cohorts > 1 else None,
        )

    def answers(self, requests: Iterable[Request | None]) -> Iterator[Answer]:
        return self.decoder.answers(requests)

    def begin_anew(self) -> None:
        """Requests that were dropped will not begin."""
        self.verifier.started = list(range(1, self.scheduler._handles + 1))

    def run(self, requests: Sequence[Request]) -> None:
        """Decode everything, and check that each request is answered once, as decoding it alone would."""
        answered: list[str] = []
        for request, _, completion in self.answers(requests):
            answered.append(request.key)
            assert completion.error is None
            assert completion.token_ids == plain_text(request, self.limits.context, self.eos)
            assert completion.stats.accepted <= min(completion.stats.drafted, len(completion.token_ids))
        assert sorted(answered) == sorted(r.key for r in requests)
        assert self.scheduler.idle
        assert self.scheduler.free == list(range(self.scheduler.limits.slots))


def related_requests(rng: np.random.Generator, count: int, context: int, **params: Any) -> list[Request]:
    """Prompts of which many begin alike, with parts of each other's texts behind."""
    stems = [rng.integers(0, VOCABULARY, context).tolist() for _ in range(2)]
    requests = []
    for i in range(count):
        stem = stems[int(rng.integers(len(stems)))][: int(rng.integers(1, context - 2))]
        tail = rng.integers(0, VOCABULARY, int(rng.integers(0, 4))).tolist()
        prompt = (stem + tail)[: context - 1]
        requests.append(Request(str(i), prompt, SamplingParams(int(rng.integers(1, 16)), **params)))
    return requests

"""Draft workers without Ray or models, in a time that passes only while somebody waits; and texts to draft for."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from actors.roster import Member, Roster, Traits
from actors.shared_drafter import Drafted
from pipeline.errors import CacheMiss
from pipeline.messages import DraftRequest, Feed, Opening, PrefixCopy, Proposal
from pipeline.records import SamplingParams
from pipeline.step import empty_proposal

TRAITS = Traits(True, 100)
HANG = math.inf
REFUSAL = CacheMiss([])  # among a desk's failures: it does nothing and calls its first row missing


def continuation(tokens: Sequence[int]) -> int:
    """The one token that a fake worker drafts after a text."""
    return zlib.crc32(bytes(tokens)) % 50


@dataclass
class Slots:
    """What a worker holds: by slot, whose tokens and which."""

    held: dict[int, tuple[int, list[int]]] = field(default_factory=dict)

    def draft(self, request: DraftRequest) -> Proposal:
        """The right continuation of every row; `CacheMiss` as a worker raises it."""
        feed = request.feed
        for copy in request.copies:
            tokens = self.held.get(copy.source, (0, []))[1]
            if len(tokens) < copy.length:
                raise CacheMiss(feed.sequences[feed.slots == copy.target])
            self.held[copy.target] = (0, tokens[: copy.length])
        slot_of = dict(zip(feed.sequences.tolist(), feed.slots.tolist(), strict=True))
        for opening in request.openings:
            slot = slot_of[opening.sequence]
            self.held[slot] = (opening.sequence, self.held.get(slot, (0, []))[1])
        rows = list(zip(feed.sequences.tolist(), feed.slots.tolist(), feed.cached.tolist(), strict=True))
        missing = [
            sequence
            for sequence, slot, cached in rows
            if self.held.get(slot, (0, []))[0] != sequence or len(self.held[slot][1]) < cached
        ]
        if missing:
            raise CacheMiss(missing)
        proposal = empty_proposal(len(rows), int(request.wanted.max()))
        for b, fed in enumerate(np.split(feed.tokens, np.cumsum(feed.lengths)[:-1])):
            sequence, slot, cached = rows[b]
            tokens = self.held[slot][1][:cached] + fed.tolist()
            for k in range(int(request.wanted[b])):
                proposal.tokens[b, k] = continuation(tokens)
                proposal.lengths[b] = k + 1
                if k + 1 < request.wanted[b]:
                    tokens = [*tokens, int(proposal.tokens[b, k])]
            self.held[slot] = (sequence, tokens)
        proposal.support_ids[..., 0] = proposal.tokens
        proposal.support_probs[..., 0] = proposal.tokens >= 0
        return proposal


@dataclass
class Desk:
    """One worker: how long it takes, and what happens to its next answers."""

    seconds: float = 0.01
    failures: list[Exception | None] = field(default_factory=list)
    others: int = 0
    slots: Slots = field(default_factory=Slots)
    requests: list[DraftRequest] = field(default_factory=list)
    owed: int = 0
    most_owed: int = 0


class Exchange:
    """`Lines` to desks, by home."""

    def __init__(self, *homes: int) -> None:
        self.now = 0.0
        self.desks = {home: Desk() for home in homes}
        self.calls: list[tuple[int, float, float, DraftRequest]] = []  # home, when it is sent and answered, the request
        self.waits: list[float] = []

    def clock(self) -> float:
        return self.now

    def roster(self, *homes: int, version: int = 1) -> Roster:
        return Roster(version, tuple(Member(home, f"draft worker {home}", home, TRAITS) for home in homes))

    def send(self, member: Member, request: DraftRequest) -> Any:
        desk = self.desks.setdefault(member.home, Desk())
        desk.requests.append(request)
        desk.owed += 1
        desk.most_owed = max(desk.owed, desk.most_owed)
        self.calls.append((member.home, self.now, self.now + desk.seconds, request))
        return len(self.calls) - 1

    def wait(self, calls: Sequence[Any], seconds: float) -> Sequence[Any]:
        self.waits.append(seconds)
        first = min(self.calls[call][2] for call in calls)
        if first > self.now:
            self.now = min(first, self.now + seconds)
        return [call for call in calls if self.calls[call][2] <= self.now][:1]

    def answer(self, call: Any, member: Member) -> Drafted:
        home, sent_at, at, request = self.calls[call]
        assert at <= self.now, "an answer is fetched before it is there"
        desk = self.desks[home]
        desk.owed -= 1
        failure = desk.failures.pop(0) if desk.failures else None
        if failure is REFUSAL:
            raise CacheMiss(request.feed.sequences[:1])
        if failure is not None:
            raise failure
        return Drafted(desk.slots.draft(request), desk.others, at - sent_at)


@dataclass
class Text:
    """A sequence as a scheduler sees it."""

    handle: int
    slot: int
    tokens: list[int]
    home: int | None = None
    cached: int = 0
    opened: bool = False


class Replica:
    """Plans draft requests as the scheduler does, and grows its texts by what was drafted."""

    def __init__(self, drafter: Any, number: int, lengths: Iterable[int], wanted: int = 2) -> None:
        self.drafter = drafter
        self.wanted = wanted
        self.next = number << 40
        self.texts = [self.new(slot, length) for slot, length in enumerate(lengths)]
        self.drafted: list[int] = []  # the lengths of the last step

    def new(self, slot: int, length: int) -> Text:
        self.next += 1
        return Text(self.next, slot, [self.next % 50] * length)

    def renew(self, slot: int, length: int = 3, shared: int = 0) -> None:
        """Another sequence takes the slot; `shared` of its first tokens are those of the old one, as far as drafted."""
        old, new = self.texts[slot], self.new(slot, length)
        new.cached = min(shared, old.cached)
        new.home, new.tokens = old.home, old.tokens[: new.cached] + new.tokens
        self.texts[slot] = new

    def homes(self) -> list[int | None]:
        return [self.drafter.homes(text.handle, text.slot) for text in self.texts]

    def step(self, meanwhile: Callable[[], object] = lambda: None) -> list[int]:
        """One step; returns how many tokens each text was drafted. `meanwhile` happens between plan and proposal."""
        homes = self.homes() if self.drafter.ready() else [None] * len(self.texts)
        rows = [(text, home) for text, home in zip(self.texts, homes, strict=True) if home is not None]
        lengths = dict.fromkeys((text.slot for text in self.texts), 0)
        if rows:
            meanwhile()
            self._draft(rows, lengths)
        for text in self.texts:
            text.tokens.append(len(text.tokens) % 50)  # the target's own token
        self.drafted = list(lengths.values())
        return self.drafted

    def _draft(self, rows: list[tuple[Text, int]], lengths: dict[int, int]) -> None:
        starts = [text.cached if text.home == home else 0 for text, home in rows]
        request = DraftRequest(
            feed=Feed(
                sequences=np.array([text.handle for text, _ in rows]),
                slots=np.array([text.slot for text, _ in rows]),
                cached=np.array(starts),
                lengths=np.array([len(text.tokens) - start for (text, _), start in zip(rows, starts, strict=True)]),
                tokens=np.concatenate([text.tokens[start:] for (text, _), start in zip(rows, starts, strict=True)]),
            ),
            openings=tuple(
                Opening(text.handle, (1, 2, 3), SamplingParams(9))
                for text, home in rows
                if not text.opened or text.home != home
            ),
            copies=(),
            wanted=np.full(len(rows), self.wanted),
            starts=np.zeros(len(rows), dtype=np.int64),
            greedy=np.ones(len(rows), dtype=bool),
        )
        try:
            proposal = self.drafter.propose(request)
        except CacheMiss as miss:
            for text in self.texts:
                if text.handle in miss.sequences or not text.opened:
                    text.cached, text.opened = 0, False
            return
        for b, (text, home) in enumerate(rows):
            text.cached, text.opened, text.home = len(text.tokens), True, home
            lengths[text.slot] = int(proposal.lengths[b])
            tokens = list(text.tokens)
            for k in range(lengths[text.slot]):
                assert proposal.tokens[b, k] == continuation(tokens), "drafted for another text"
                tokens.append(int(proposal.tokens[b, k]))
            text.tokens += tokens[len(text.tokens) :][:1]  # of what was drafted one is kept


def request_of(
    replica: int,
    rows: Sequence[tuple[int, int, Sequence[int]]],
    copies: Sequence[PrefixCopy] = (),
    opened: bool = True,
    wanted: int = 2,
) -> DraftRequest:
    """A replica's request: rows of (slot, cached, tokens), sequence i being the one in slot i."""
    sequences = [(replica << 40) + slot + 1 for slot, _, _ in rows]
    return DraftRequest(
        feed=Feed(
            sequences=np.array(sequences),
            slots=np.array([slot for slot, _, _ in rows]),
            cached=np.array([cached for _, cached, _ in rows]),
            lengths=np.array([len(tokens) for _, _, tokens in rows]),
            tokens=np.concatenate([np.array(tokens) for _, _, tokens in rows]),
        ),
        openings=tuple(Opening(s, (s % 97, 2, 3), SamplingParams(9, temperature=1.0)) for s in sequences if opened),
        copies=tuple(copies),
        wanted=np.full(len(rows), wanted),
        starts=np.zeros(len(rows), dtype=np.int64),
        greedy=np.zeros(len(rows), dtype=bool),
    )

"""A request being decoded: its tokens, and how many of them each model has cached.

Rollback is a number here: whatever a model computed beyond `cached` is simply not read again. Knows nothing
of models, slots' contents or schedules.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pipeline.messages import Opening
from pipeline.records import Completion, CompletionStats, FinishReason, Request
from pipeline.stopping import StopWatch

DRAWN = -1  # a token that the target drew itself
ENOUGH_COMPARED = 16  # judged positions after which a drafter that may choose is told how to pick its tokens
Alternatives = list[tuple[int, float]]  # (token id, log probability), likeliest first


@dataclass(slots=True)
class Sequence:
    """Tokens of one request; all of `tokens` are final, drafted ones never enter before they are accepted.

    `limit` is the length at which it must end: prompt and generated tokens together never exceed it.
    """

    handle: int
    request: Request
    opening: Opening
    limit: int
    watch: StopWatch | None = None  # looks for stop strings, where there are any
    sample: int = 0  # which of the request's samples this is
    tokens: list[int] = field(init=False)
    slot: int = -1
    target_cached: int = 0
    draft_cached: int = 0
    target_opened: bool = False  # the target has been told the opening
    draft_opened: bool = False
    draft_home: int | None = None  # the draft worker that all of this is about
    finish: FinishReason | None = None
    text: str | None = None  # the answer's text, where a stop string cut it
    logprobs: list[float] = field(default_factory=list)  # of generated tokens, where they are asked for
    top_logprobs: list[Alternatives] = field(default_factory=list)
    compared: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])  # sums of `VerifyReply.overlap`
    steps: int = 0
    drafted_at: list[int] = field(default_factory=list)  # drafted tokens by position in their block
    origins: list[int] = field(default_factory=list)  # per generated token: its place in a draft, or DRAWN

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt_token_ids)
        assert 0 < len(self.tokens) < self.limit, (len(self.tokens), self.limit)

    @property
    def generated(self) -> int:
        """Tokens generated so far: the position of the next one."""
        return len(self.tokens) - len(self.request.prompt_token_ids)

    @property
    def room(self) -> int:
        """Tokens that may still be generated."""
        return self.limit - len(self.tokens)

    @property
    def accepted_at(self) -> list[int]:
        """Drafted tokens that are kept, by position in their block."""
        return [self.origins.count(i) for i in range(max(self.origins, default=DRAWN) + 1)]

    @property
    def drafts_greedily(self) -> bool:
        """Likeliest tokens of the draft would have been accepted more than drawn ones. Depends on this text alone."""
        count, drawn, likeliest = self.compared
        return count >= ENOUGH_COMPARED and likeliest > drawn

    def evict(self) -> None:
        """It has lost its slot, and no model holds anything of it."""
        self.slot = -1
        self.target_cached = self.draft_cached = 0
        self.target_opened = self.draft_opened = False

    def check(self) -> None:
        """The invariant of DESIGN section 4: there is always a token to feed."""
        last = len(self.tokens) - 1
        assert 0 <= self.target_cached <= last, (self.handle, self.target_cached, len(self.tokens))
        assert 0 <= self.draft_cached <= last, (self.handle, self.draft_cached, len(self.tokens))

    def extend(self, drafted: list[int], accepted: int, next_token: int, eos: frozenset[int]) -> int:
        """Append the accepted drafted tokens and the token drawn after them, up to an EOS token or a stop string.

        Sets `finish` where the sequence ends: at the first EOS or stop string (which is not kept), or at `limit`.
        Returns how many drafted tokens were kept.
        """
        before = len(self.tokens)
        new = [*drafted[:accepted], next_token]
        stop = next((i for i, token in enumerate(new) if token in eos), None)
        if stop is not None:
            new = new[:stop]
            self.finish = FinishReason.STOP
        self.tokens.extend(new)
        self.origins.extend([*range(accepted), DRAWN][: len(new)])
        self._look_for_stop_strings(len(new))
        assert len(self.tokens) <= self.limit, (len(self.tokens), self.limit)
        if self.finish is None and len(self.tokens) == self.limit:
            self.finish = FinishReason.LENGTH
        kept = max(0, min(accepted, len(self.tokens) - before))  # a stop string may begin in an earlier block
        self.steps += 1
        _count(self.drafted_at, len(drafted))
        return kept

    def _look_for_stop_strings(self, new: int) -> None:
        prompt = len(self.request.prompt_token_ids)
        cut = None if self.watch is None or not new else self.watch.look(self.tokens[prompt:], new)
        if cut is not None:
            del self.tokens[prompt + cut.tokens :]
            del self.origins[cut.tokens :]
            self.text = cut.text
            self.finish = FinishReason.STOP

    def score(self, logprobs: list[float], alternatives: list[Alternatives]) -> None:
        """Log probabilities of the tokens that a verdict adds; asked before `extend`, which may keep fewer of them."""
        self.logprobs.extend(logprobs)
        self.top_logprobs.extend(alternatives)

    def completion(self, text: str) -> Completion:
        """The finished sequence as an answer; `text` is that of its tokens, unless a stop string cut it."""
        assert self.finish is not None
        prompt, params = len(self.request.prompt_token_ids), self.request.params
        token_ids = self.tokens[prompt:]
        scored = params.logprobs != "none"
        assert not scored or len(self.logprobs) >= len(token_ids), (len(self.logprobs), len(token_ids))
        stats = CompletionStats(
            drafted=sum(self.drafted_at),
            accepted=len(self.origins) - self.origins.count(DRAWN),
            steps=self.steps,
            prompt_tokens=prompt,
            drafted_at=tuple(self.drafted_at),
            accepted_at=tuple(self.accepted_at),
        )
        return Completion(
            key=self.request.key,
            token_ids=token_ids,
            text=text if self.text is None else self.text,
            finish_reason=self.finish,
            logprobs=self.logprobs[: len(token_ids)] if scored else None,
            stats=stats,
            top_logprobs=self.top_logprobs[: len(token_ids)] if scored and params.top_logprobs else None,
        )


def _count(positions: list[int], block: int) -> None:
    """Add one to each of the first `block` positions."""
    positions.extend([0] * (block - len(positions)))
    for i in range(block):
        positions[i] += 1

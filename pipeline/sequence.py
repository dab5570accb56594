"""A request being decoded: its tokens, and how many of them each model has cached.

Rollback is a number here: whatever a model computed beyond `cached` is simply not read again. Knows nothing
of models, slots' contents or schedules.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pipeline.messages import Opening
from pipeline.records import Completion, CompletionStats, FinishReason, Request


@dataclass(slots=True)
class Sequence:
    """Tokens of one request; all of `tokens` are final, drafted ones never enter before they are accepted.

    `limit` is the length at which it must end: prompt and generated tokens together never exceed it.
    """

    handle: int
    request: Request
    opening: Opening
    limit: int
    tokens: list[int] = field(init=False)
    slot: int = -1
    target_cached: int = 0
    draft_cached: int = 0
    target_opened: bool = False  # the target has been told the opening
    draft_opened: bool = False
    finish: FinishReason | None = None
    steps: int = 0
    drafted_at: list[int] = field(default_factory=list)  # drafted tokens by position in their block
    accepted_at: list[int] = field(default_factory=list)  # those kept

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

    def check(self) -> None:
        """The invariant of DESIGN section 4: there is always a token to feed."""
        last = len(self.tokens) - 1
        assert 0 <= self.target_cached <= last, (self.handle, self.target_cached, len(self.tokens))
        assert 0 <= self.draft_cached <= last, (self.handle, self.draft_cached, len(self.tokens))

    def extend(self, drafted: list[int], accepted: int, next_token: int, eos: frozenset[int]) -> int:
        """Append the accepted drafted tokens and the token drawn after them, up to an EOS token.

        Sets `finish` where the sequence ends: at the first EOS (which is not kept), or at `limit`. Returns how
        many drafted tokens were kept.
        """
        new = [*drafted[:accepted], next_token]
        stop = next((i for i, token in enumerate(new) if token in eos), None)
        if stop is not None:
            new = new[:stop]
            self.finish = FinishReason.STOP
        self.tokens.extend(new)
        assert len(self.tokens) <= self.limit, (len(self.tokens), self.limit)
        if self.finish is None and len(self.tokens) == self.limit:
            self.finish = FinishReason.LENGTH
        kept = min(accepted, len(new))
        self.steps += 1
        _count(self.drafted_at, len(drafted))
        _count(self.accepted_at, kept)
        return kept

    def completion(self, text: str) -> Completion:
        """The finished sequence as an answer."""
        assert self.finish is not None
        prompt = len(self.request.prompt_token_ids)
        stats = CompletionStats(
            drafted=sum(self.drafted_at),
            accepted=sum(self.accepted_at),
            steps=self.steps,
            prompt_tokens=prompt,
            drafted_at=tuple(self.drafted_at),
            accepted_at=tuple(self.accepted_at),
        )
        return Completion(
            key=self.request.key,
            token_ids=self.tokens[prompt:],
            text=text,
            finish_reason=self.finish,
            logprobs=None,
            stats=stats,
        )


def _count(positions: list[int], block: int) -> None:
    """Add one to each of the first `block` positions."""
    positions.extend([0] * (block - len(positions)))
    for i in range(block):
        positions[i] += 1

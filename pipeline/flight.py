"""Steps under way: a plan per cohort, each carried out in a thread of its own while others are.

Knows nothing of what a step does or how it ends.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from pipeline.messages import VerifyReply, VerifyRequest
from pipeline.step import Plan


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a plan: a reply, or why there is none."""

    plan: Plan
    request: VerifyRequest | None = None
    reply: VerifyReply | None = None
    draft_failure: Exception | None = None  # the step came no further than the drafter
    failure: Exception | None = None


class Flight:
    """Plans that are being carried out, by cohort."""

    def __init__(self, carry_out: Callable[[Plan], Outcome]) -> None:
        """`carry_out` is called in several threads at once and never raises."""
        self.carry_out = carry_out
        self._threads = ThreadPoolExecutor(thread_name_prefix="cohort")
        self._under_way: dict[int, Future[Outcome]] = {}

    @property
    def empty(self) -> bool:
        """Nothing is under way."""
        return not self._under_way

    def has(self, cohort: int) -> bool:
        """A plan of this cohort is under way."""
        return cohort in self._under_way

    def start(self, cohort: int, plan: Plan) -> None:
        """Begin; returns at once."""
        self._under_way[cohort] = self._threads.submit(self.carry_out, plan)

    def landed(self) -> list[Outcome]:
        """Wait until at least one has ended; all that have."""
        done, _ = wait(self._under_way.values(), return_when=FIRST_COMPLETED)
        ended = [cohort for cohort, future in self._under_way.items() if future in done]
        return [self._under_way.pop(cohort).result() for cohort in ended]

    def close(self) -> None:
        """Wait for all that is under way, and forget it."""
        self._threads.shutdown(wait=True)
        self._under_way.clear()

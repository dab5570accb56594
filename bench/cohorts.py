"""Tokens per second with the cohorts that the decoder chooses, against one cohort and against what is possible.

    python bench/cohorts.py [--slots 16] [--requests 160] [--tokens 48] [--json FILE]

Target and draft worker are Ray actors that compute nothing: a verification of n rows takes `verify` + n × `row`, a
drafted token `draft` milliseconds, and every message `message` milliseconds each way, during which its worker can serve
others. Scheduling, Ray calls and serialisation are real. `bound` is what no schedule can exceed: all verifications of
one cohort after another, or all drafts, whichever is longer, and nothing else.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import ray

from actors.draft import RemoteDrafter
from actors.roster import Member, Roster, Traits
from actors.session import ray_session
from actors.shared_drafter import Drafted
from actors.target import RemoteVerifier
from actors.worker import Worker
from pipeline.cohorts import Cohorts
from pipeline.decode import Decoder
from pipeline.messages import DraftRequest, Verdict, VerifyReply, VerifyRequest
from pipeline.records import Request, SamplingParams
from pipeline.scheduler import Limits, Scheduler
from pipeline.step import empty_proposal

DRAFT_TOKENS, ACCEPTANCE, VOCABULARY = 4, 0.8, 1000
VERIFY, ROW = 10.0, 2.0  # milliseconds
CASES = [(0.5, 0.0), (5.0, 1.0), (10.0, 1.0), (5.0, 10.0), (10.0, 30.0), (20.0, 5.0)]


class SlowTarget:
    """Accepts a share of what is proposed, after a while."""

    def __init__(self, verify: float, row: float, message: float) -> None:
        self.verify_seconds, self.row_seconds, self.message = verify / 1e3, row / 1e3, message / 1e3
        self.busy = threading.Lock()
        self.rng = np.random.default_rng(0)

    def ready(self) -> bool:
        return True

    def verify(self, request: VerifyRequest) -> VerifyReply:
        time.sleep(self.message)
        with self.busy:
            rows = len(request.final)
            time.sleep(self.verify_seconds + rows * self.row_seconds)
            lengths = np.asarray(request.proposal.lengths)
            kept = self.rng.random((rows, DRAFT_TOKENS + 1)) < ACCEPTANCE
            accepted = np.minimum(kept.cumprod(1).sum(1), lengths)
            following = np.where(request.final, self.rng.integers(0, VOCABULARY, rows), -1)
        time.sleep(self.message)
        return VerifyReply(Verdict(np.where(request.final, accepted, 0), following))


class SlowDraft:
    """Proposes anything, after a while."""

    def __init__(self, draft: float, message: float) -> None:
        self.draft_seconds, self.message = draft / 1e3, message / 1e3
        self.busy = threading.Lock()

    def ready(self) -> bool:
        return True

    def propose(self, request: DraftRequest) -> Drafted:
        time.sleep(self.message)
        wanted = np.asarray(request.wanted)
        proposal = empty_proposal(len(wanted), int(wanted.max()))
        with self.busy:
            time.sleep(self.draft_seconds * int(wanted.max()))
            proposal.tokens[:] = np.where(np.arange(proposal.tokens.shape[1]) < wanted[:, None], 7, -1)
            proposal.lengths[:] = wanted
            proposal.support_ids[..., 0] = proposal.tokens
            proposal.support_probs[..., 0] = proposal.tokens >= 0
        time.sleep(self.message)
        return Drafted(proposal, 0, self.draft_seconds * int(wanted.max()))


class Fixed(Cohorts):
    """Always the same number."""

    def __init__(self, slots: int, count: int) -> None:
        super().__init__(slots)
        self.count = count

    def observe(self, now: float, rows: int, full: bool) -> None:
        return None


def run(args: argparse.Namespace, draft: float, message: float, cohorts: Cohorts) -> tuple[float, int]:
    """Tokens per second, and the number of cohorts at the end."""
    target = ray.remote(SlowTarget).options(num_cpus=0, max_concurrency=8).remote(VERIFY, ROW, message)
    drafter = ray.remote(SlowDraft).options(num_cpus=0, max_concurrency=8).remote(draft, message)
    traits = Traits(keeps_proposals=True, chunk=256)
    ray.get([target.ready.remote(), drafter.ready.remote()])
    remote = RemoteDrafter(traits, 60.0)
    remote.enroll(Roster(1, (Member(1, "the draft worker", drafter, traits),)))
    verifier = RemoteVerifier(lambda: Worker(target, "the target"), 60.0, print)
    limits = Limits(args.slots, 512, DRAFT_TOKENS)
    scheduler = Scheduler(limits, (), 0, 0, traits.keeps_proposals, traits.chunk)
    decoder = Decoder(scheduler, verifier, remote, str, remote.homes, cohorts)
    params = SamplingParams(args.tokens)
    tokens, accepted, steps, began = 0, 0, 0, time.perf_counter()
    for completion in decoder.stream([Request(str(i), [1, 2, i % 7], params) for i in range(args.requests)]):
        assert completion.error is None
        tokens += len(completion.token_ids)
        accepted, steps = accepted + completion.stats.accepted, steps + completion.stats.steps
    assert accepted > steps, "drafts are being used"
    seconds = time.perf_counter() - began
    for actor in (target, drafter):
        ray.kill(actor)
    return tokens / seconds, cohorts.count


def bound(slots: int, draft: float, per_step: float) -> float:
    """Tokens per second, if either target or drafter never waited; `per_step` tokens for each row and step."""
    best = 0.0
    for count in range(1, 5):
        rows = slots / count
        best = max(best, slots * per_step / max(count * (VERIFY + ROW * rows), count * draft * DRAFT_TOKENS) * 1e3)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--requests", type=int, default=160)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    per_step = sum(ACCEPTANCE**i for i in range(DRAFT_TOKENS + 1))
    found: list[dict[str, Any]] = []
    with ray_session():
        for draft, message in CASES:
            rates = {count: run(args, draft, message, Fixed(args.slots, count))[0] for count in (1, 2, 3)}
            chosen, count = run(args, draft, message, Cohorts(args.slots))
            most = bound(args.slots, draft, per_step)
            line = {"draft_ms": draft, "message_ms": message, "cohorts": count, "chosen_to_one": chosen / rates[1]}
            line |= {"chosen_to_best_fixed": chosen / max(rates.values()), "chosen_to_bound": chosen / most}
            line |= {f"tokens_per_s_{n}": rate for n, rate in rates.items()} | {"tokens_per_s_chosen": chosen}
            found.append({name: round(value, 3) for name, value in line.items()})
            print(json.dumps(found[-1]), flush=True)
    if args.json:
        about = {"verify_ms": VERIFY, "row_ms": ROW, **vars(args), "json": None}
        args.json.write_text(json.dumps({**about, "found": found}, indent=1))


if __name__ == "__main__":
    main()

"""What laws and verification cost beside the model: their share of a step, per kind of decoding parameters.

    python bench/laws.py --target MODEL [--dtype auto] [--threads 2] [--batch 16] [--draft-tokens 4] [--steps 6]
                         [--rule ratio] [--json FILE]

Every sequence has a block of drafted tokens in every step: the target's own greedy continuation, with a law over 64
tokens that is a little flatter than the target's. Measured is `TargetVerifier.verify` without its forward pass, over
the whole of it; the cost of drafting is not part of the step. Medians over steps; the first two of each kind are left
out. Each step has random numbers of its own.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import numpy as np
import torch

from bench.decode import prompts
from pipeline.engine.checkpoint import resolve, resolve_dtype
from pipeline.engine.runner import Runner
from pipeline.engine.verifier import TargetVerifier
from pipeline.messages import Feed, Opening, Proposal, VerifyRequest
from pipeline.randomness import philox_key
from pipeline.records import SamplingParams
from pipeline.step import empty_proposal

SUPPORT = 64
KINDS = {
    "greedy": SamplingParams(64),
    "T=1": SamplingParams(64, temperature=1.0),
    "T=1 top-p 0.9": SamplingParams(64, temperature=1.0, top_p=0.9),
    "T=1 top-k 50 top-p 0.95": SamplingParams(64, temperature=1.0, top_k=50, top_p=0.95),
    "T=1 min-p 0.05": SamplingParams(64, temperature=1.0, min_p=0.05),
    "T=1.5 top-p 0.98": SamplingParams(64, temperature=1.5, top_p=0.98),
    "greedy, penalties": SamplingParams(64, repetition_penalty=1.1, presence_penalty=0.2),
    "T=1 top-p 0.9, log probabilities": SamplingParams(64, temperature=1.0, top_p=0.9, logprobs="raw"),
}


class Timed:
    """A runner's forward pass, with the seconds that it took last."""

    def __init__(self, runner: Runner) -> None:
        self.inner = runner.forward
        self.seconds = 0.0
        self.logits: torch.Tensor | None = None

    def __call__(self, *args) -> torch.Tensor:  # type: ignore[no-untyped-def]
        started = time.perf_counter()
        logits = self.inner(*args)
        self.seconds = time.perf_counter() - started
        self.logits = logits
        return logits


def request(texts: list[list[int]], cached: int, proposal: Proposal, openings: tuple[Opening, ...]) -> VerifyRequest:
    """Feed every text from its cached length on, and judge the proposal behind it."""
    rows = len(texts)
    feed = Feed(
        np.arange(1, rows + 1),
        np.arange(rows),
        np.full(rows, cached),
        np.array([len(t) - cached for t in texts]),
        np.concatenate([np.array(t[cached:]) for t in texts]),
    )
    zeros = np.zeros(rows, dtype=np.int64)
    return VerifyRequest(feed, openings, (), np.ones(rows, dtype=bool), zeros, proposal)


def plain(texts: list[list[int]], places: int) -> Proposal:
    """Nothing proposed, in an array of so many places."""
    return empty_proposal(len(texts), places)


def continued(runner: Runner, texts: list[list[int]], places: int) -> Proposal:
    """The greedy continuation of every text, with laws that are close to the target's."""
    verifier, forward = TargetVerifier(runner), Timed(runner)
    runner.forward = forward  # type: ignore[method-assign]
    grown, laws = [list(t) for t in texts], []
    for place in range(places):
        params = SamplingParams(places)
        openings = tuple(Opening(b + 1, philox_key(0, 0, str(b), 0), params) for b in range(len(texts)))
        cached = 0 if place == 0 else len(grown[0]) - 1
        reply = verifier.verify(request(grown, cached, plain(grown, 0), openings if place == 0 else ()))
        assert forward.logits is not None
        laws.append((forward.logits.float() / 1.1).softmax(-1).topk(SUPPORT))
        grown = [[*t, int(n)] for t, n in zip(grown, reply.verdict.next_token, strict=True)]
    runner.forward = forward.inner  # type: ignore[method-assign]
    tokens = np.array([t[-places:] for t in grown])
    ids = torch.stack([law.indices for law in laws], 1).numpy()
    probs = torch.stack([law.values for law in laws], 1).numpy()
    return Proposal(tokens, np.full(len(texts), places), ids, probs)


def measure(
    runner: Runner, texts: list[list[int]], proposal: Proposal, params: SamplingParams, args: argparse.Namespace
) -> dict:
    forward = Timed(runner)
    runner.forward = forward  # type: ignore[method-assign]
    verifier = TargetVerifier(runner, args.rule)
    shares, outside, inside, kept = [], [], [], []
    for step in range(args.steps + 2):
        openings = tuple(Opening(b + 1, philox_key(step, 0, str(b), 0), params) for b in range(len(texts)))
        started = time.perf_counter()
        reply = verifier.verify(request(texts, len(texts[0]) - 1, proposal, openings))
        seconds = time.perf_counter() - started
        if step >= 2:
            shares.append(1 - forward.seconds / seconds)
            outside.append(1000 * (seconds - forward.seconds))
            inside.append(1000 * forward.seconds)
            kept.append(float(np.mean(reply.verdict.accepted)))
    runner.forward = forward.inner  # type: ignore[method-assign]
    return {
        "share_of_step": round(statistics.median(shares), 4),
        "laws_ms": round(statistics.median(outside), 2),
        "forward_ms": round(statistics.median(inside), 1),
        "kept_of_block": round(statistics.mean(kept), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--draft-tokens", type=int, default=4)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--length", type=int, default=128, help="tokens of each sequence before the block")
    parser.add_argument("--rule", default="ratio", choices=("ratio", "block", "coupled"))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    checkpoint = resolve(args.target)
    vocabulary = len(checkpoint.tokenizer())
    texts = [ids[-args.length :] for ids in prompts(checkpoint, args.batch, 450)]
    texts = [t for t in texts if len(t) == args.length]
    dtype = str(resolve_dtype(args.dtype, "cpu")).removeprefix("torch.")
    runner = Runner.load(checkpoint, dtype, "cpu", len(texts), args.length + 16, vocabulary)
    results = {}
    proposal = continued(runner, texts, args.draft_tokens)
    for kind, params in KINDS.items():
        results[kind] = measure(runner, texts, proposal, params, args)
        print(json.dumps({kind: results[kind]}), flush=True)
    if args.json:
        head = {"target": args.target, "dtype": dtype, "threads": args.threads, "batch": len(texts), "rule": args.rule}
        args.json.write_text(json.dumps({**head, "vocabulary": vocabulary, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""What laws and verification cost beside the model: their share of a step, per kind of decoding parameters.

    python bench/laws.py --target MODEL [--dtype auto] [--threads 2] [--batch 16] [--draft-tokens 4] [--steps 6]
                         [--rule ratio] [--json FILE]

Every sequence has a block of drafted tokens in every step: the target's likeliest tokens of a first pass over the
same text, with a law over 64 of them, so that about two in three are kept. Measured is `TargetVerifier.verify`
without its forward pass, over the whole of it; the cost of drafting is not part of the step. Medians over steps;
the first two of each kind are left out.
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


def likely(logits: torch.Tensor, rows: int, places: int) -> Proposal:
    """What a good draft would have proposed, given the target's logits [rows × (places + 1), V] over random blocks."""
    laws = logits.float().view(rows, places + 1, -1)[:, :-1].softmax(-1)
    probs, ids = laws.topk(SUPPORT)
    chosen = torch.distributions.Categorical(probs.double() ** 0.8).sample()[..., None]
    tokens = ids.gather(-1, chosen)[..., 0]
    return Proposal(tokens.numpy(), np.full(rows, places), ids.numpy(), (probs.double() ** 0.8).numpy())


def measure(runner: Runner, texts: list[list[int]], params: SamplingParams, args: argparse.Namespace) -> dict:
    forward = Timed(runner)
    runner.forward = forward  # type: ignore[method-assign]
    verifier = TargetVerifier(runner, args.rule)
    rows, places = len(texts), args.draft_tokens
    shares, outside, inside, kept = [], [], [], []
    for step in range(args.steps + 2):
        openings = tuple(Opening(b + 1, philox_key(step, 0, str(b), 0), params) for b in range(rows))
        first = Proposal(
            np.zeros((rows, places), dtype=np.int64),
            np.full(rows, places),
            np.zeros((rows, places, 1), dtype=np.int64),
            np.ones((rows, places, 1)),
        )
        cached = 0 if step == 0 else min(map(len, texts)) - 1
        ends = [t[: min(map(len, texts))] for t in texts]
        verifier.verify(request(ends, cached, first, openings))
        assert forward.logits is not None
        proposal = likely(forward.logits, rows, places)
        started = time.perf_counter()
        reply = verifier.verify(request(ends, len(ends[0]) - 1, proposal, ()))
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
    texts = [(ids * 2)[: args.length] for ids in prompts(checkpoint, args.batch, 450)]
    dtype = str(resolve_dtype(args.dtype, "cpu")).removeprefix("torch.")
    runner = Runner.load(checkpoint, dtype, "cpu", len(texts), args.length + 16, vocabulary)
    results = {}
    for kind, params in KINDS.items():
        results[kind] = measure(runner, texts, params, args)
        print(json.dumps({kind: results[kind]}), flush=True)
    if args.json:
        head = {"target": args.target, "dtype": dtype, "threads": args.threads, "batch": len(texts), "rule": args.rule}
        args.json.write_text(json.dumps({**head, "vocabulary": vocabulary, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Blocks of the oracle, laid out as the tensors of pipeline.speculation, with junk wherever the contract allows it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from pipeline.messages import Proposal
from pipeline.speculation import acceptance, residual
from tests.oracle import Block, Judge, Judgement

JUNK_IDS = (-1, 0, 10**12)
JUNK_NUMBERS = (np.nan, np.inf, -1.0, 0.5)


def lay_out(blocks: Sequence[Block], seed: int = 0, extra: int = 1) -> tuple[torch.Tensor, Proposal]:
    """Target laws [B, K+1, V] and a proposal of numpy arrays, K being the longest block and `extra` more.

    Supports come in random order with pads between and positive weights of any sum, target laws unnormalised;
    everything beyond a row's length is junk.
    """
    rng = np.random.default_rng(seed)
    lengths = np.array([len(block.tokens) for block in blocks], dtype=np.int64)
    rows, places, vocabulary = len(blocks), int(lengths.max(initial=0)) + extra, len(blocks[0].targets[0])
    size = vocabulary + 1
    target = rng.choice(JUNK_NUMBERS, (rows, places + 1, vocabulary))
    tokens = rng.choice(JUNK_IDS, (rows, places))
    ids = rng.choice(JUNK_IDS, (rows, places, size))
    probs = rng.choice(JUNK_NUMBERS, (rows, places, size))
    for b, block in enumerate(blocks):
        target[b, : lengths[b] + 1] = np.array(block.targets) * rng.uniform(0.5, 2.0)
        tokens[b, : lengths[b]] = block.tokens
        for i, law in enumerate(block.drafts):
            order, scale = rng.permutation(size), rng.uniform(0.5, 2.0)
            ids[b, i] = [token if token < vocabulary and law[token] > 0 else -1 for token in order]
            kept = ids[b, i] >= 0
            probs[b, i, kept] = law[ids[b, i, kept]] * scale
    return torch.from_numpy(target), Proposal(tokens, lengths, ids, probs)


def judge_with(
    acceptance: Callable[..., torch.Tensor], residual: Callable[..., torch.Tensor], rule: str
) -> Judge:
    """A judge made of functions with the contract's signatures."""

    def judge(blocks: Sequence[Block]) -> list[Judgement]:
        target, proposal = lay_out(blocks)
        lengths = torch.as_tensor(proposal.lengths)
        accepted = acceptance(target, proposal, rule).tolist()
        laws: list[Any] = [
            residual(target, proposal, lengths.clamp(max=kept), rule).numpy()
            for kept in range(int(lengths.max()) + 1)
        ]
        return [
            Judgement(accepted[b][: int(n)], [laws[kept][b] for kept in range(int(n) + 1)])
            for b, n in enumerate(lengths)
        ]

    return judge


def ours(rule: str) -> Judge:
    """The judge under test."""
    return judge_with(acceptance, residual, rule)

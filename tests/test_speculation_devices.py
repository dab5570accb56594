"""The mathematics is the same on every device, and its results stay there."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pipeline.speculation import acceptance, draw, match, residual, verify
from tests.oracle import Block, Prefix, Tabular
from tests.proposals import lay_out

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def blocks(count: int, vocabulary: int) -> list[Block]:
    """Blocks of 0 to 3 tokens that their draft has drawn."""
    rng, found = np.random.default_rng(0), []
    for b in range(count):
        target, draft = Tabular(b, vocabulary, 0.3), Tabular(b + count, vocabulary, 0.3)
        tokens: Prefix = ()
        for _ in range(b % 4):
            tokens = (*tokens, int(rng.choice(vocabulary, p=draft(tokens))))
        heads = [tokens[:i] for i in range(len(tokens) + 1)]
        found.append(Block(tokens, [draft(h) for h in heads[:-1]], [target(h) for h in heads]))
    return found


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rule", ["ratio", "block"])
@pytest.mark.parametrize("vocabulary", [6, 700])
def test_verdicts_are_those_of_the_cpu_and_stay_on_the_device(
    device: str, rule: str, vocabulary: int
) -> None:
    target, proposal = lay_out(blocks(40, vocabulary))
    uniforms = np.random.default_rng(1).random((40, target.shape[1], 2))
    expected, there = verify(target, proposal, uniforms, rule), target.to(device)
    verdict = verify(there, proposal, uniforms, rule)
    assert verdict.accepted.device == verdict.next_token.device == there.device
    assert verdict.accepted.tolist() == expected.accepted.tolist()
    assert verdict.next_token.tolist() == expected.next_token.tolist()
    for got, wanted in (
        (acceptance(there, proposal, rule), acceptance(target, proposal, rule)),
        (
            residual(there, proposal, verdict.accepted, rule),
            residual(target, proposal, expected.accepted, rule),
        ),
    ):
        assert got.device == there.device
        np.testing.assert_allclose(got.cpu(), wanted, atol=1e-12)
    assert match(there[..., 0].long(), proposal).accepted.device == there.device


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("width", [100, 50_000, 151_936])
def test_drawing_never_lands_on_probability_zero_on_any_device(device: str, width: int) -> None:
    """A parallel running sum need not be monotone: a token of probability 0 may seem to hold some."""
    rng = np.random.default_rng(width)
    law = torch.from_numpy(rng.random((64, width)) * (rng.random((64, width)) < 0.3))
    ends = torch.tensor([0.0, float(np.nextafter(1.0, 0.0))], dtype=torch.float64).repeat(8)
    points = torch.cat([torch.from_numpy(rng.random(48)), ends])
    tokens = draw(law.to(device), points.to(device)).cpu()
    assert (law[torch.arange(64), tokens] > 0).all()
    before = law.cumsum(-1)[torch.arange(64), tokens] / law.sum(-1)
    share = law[torch.arange(64), tokens] / law.sum(-1)
    assert ((before - share - 1e-12 <= points) & (points <= before + 1e-12)).all()

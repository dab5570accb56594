"""Packed decoding on every device: the processor always, CUDA under the mark `gpu`."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pipeline.engine.drafters.model import ModelDrafter
from pipeline.engine.drafters.ngram import NgramDrafter
from pipeline.engine.runner import Runner
from pipeline.engine.verifier import TargetVerifier
from pipeline.records import Request, SamplingParams
from tests.decoding import decoded, decoder, packed, ragged_requests
from tests.models import ARCHITECTURES, VOCABULARY, tiny_model

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


def runner_on(device: torch.device, model_type: str, seed: int = 0) -> Runner:
    return Runner(packed(model_type, seed).to(device), 4, 200, VOCABULARY)


def alone(model: torch.nn.Module, request: Request) -> list[int]:
    """Greedy decoding by whole forward passes, no cache."""
    tokens = list(request.prompt_token_ids)
    for _ in range(request.params.max_new_tokens):
        with torch.no_grad():
            logits = model(torch.tensor([tokens], device=next(model.parameters()).device)).logits[0, -1]
        tokens.append(int(logits.argmax()))
    return tokens[len(request.prompt_token_ids) :]


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_greedy_texts_are_those_of_plain_passes(device: torch.device, model_type: str) -> None:
    requests = ragged_requests(6, VOCABULARY, seed=21, longest=10)
    model = tiny_model(model_type).to(device)
    expected = [alone(model, r) for r in requests]
    for drafter in (None, NgramDrafter(4), ModelDrafter(runner_on(device, model_type, 5), 16, "sample", 24)):
        answers = decoded(decoder(TargetVerifier(runner_on(device, model_type)), drafter), requests)
        assert [a.token_ids for a in answers] == expected


def test_sampled_texts_do_not_depend_on_neighbours_or_slots(device: torch.device) -> None:
    rng = np.random.default_rng(5)
    params = [SamplingParams(8, temperature=t, top_p=p, top_k=k) for t, p, k in [(1, 1, 0), (0.7, 0.8, 0), (1.3, 1, 9)]]
    requests = [Request(str(i), rng.integers(0, VOCABULARY, 5 + i).tolist(), params[i % 3]) for i in range(6)]

    def answers(batch: list[Request]) -> list[list[int]]:
        drafter = ModelDrafter(runner_on(device, "llama", 5), 16, "sample", 24)
        return [a.token_ids for a in decoded(decoder(TargetVerifier(runner_on(device, "llama")), drafter), batch)]

    together = answers(requests)
    assert [answers([r])[0] for r in requests] == together
    assert answers(requests[::-1])[::-1] == together

"""Two ranks over gloo against one process: the same passes, fed to both, must give the same logits and verdicts."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import multiprocessing

from pipeline.config import parse_config
from pipeline.engine import Engine
from pipeline.engine.assembly import agree
from pipeline.engine.checkpoint import resolve
from pipeline.engine.linear import PackedLinear
from pipeline.engine.parallel import PRETEND, Group, device_of, host, join, require_device, require_divisible, visit
from pipeline.engine.runner import Runner
from pipeline.engine.verifier import TargetVerifier
from pipeline.errors import CacheMiss, ConfigError
from pipeline.messages import Feed, Opening, PrefixCopy, VerifyRequest
from pipeline.records import SamplingParams
from pipeline.step import empty_proposal
from tests.engine.conftest import FolderOf
from tests.models import TOKENS, VOCABULARY, tiny_folder, tiny_model

RANKS = 2
SECONDS = 10.0  # deadline of a collective
POISON = VOCABULARY // RANKS  # a token whose embedding is not a number: the second rank's first, a stand-in for others
# Every architecture; odd sizes leave the ranks shards of different widths.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2 with biases": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "gemma3": ("gemma3_text", {}),
    "mistral": ("mistral", {}),
    "odd sizes": ("llama", {"vocab": 271, "intermediate_size": 47, "attention_bias": True, "mlp_bias": True}),
    "tied and odd": ("qwen2", {"vocab": 273}),
}
Row = tuple[int, int, int, list[int], list[int], bool]  # sequence, slot, cached, fed, drafted, final


def words(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 70, count).tolist()


A, B, C = words(1, 40), words(2, 5), words(3, 12)
# Prefill in chunks beside a running row, drafted blocks, rollbacks of different lengths, a copied prefix, a slot used
# again, and rows on both sides of what attention computes in one class.
STEPS: list[tuple[list[Row], list[PrefixCopy]]] = [
    ([(0, 0, 0, A[:20], [], False), (1, 1, 0, B, [], True)], []),
    ([(0, 0, 20, A[20:], words(4, 3), True), (1, 1, 5, words(5, 1), words(6, 3), True)], []),
    ([(0, 0, 41, words(7, 1), words(8, 2), True), (1, 1, 6, words(9, 1), [], True)], []),
    ([(2, 3, 32, A[32:36], words(10, 1), True), (1, 1, 7, words(11, 1), words(12, 4), True)], [PrefixCopy(0, 3, 32)]),
    ([(3, 1, 0, C, [], True), (0, 0, 40, words(13, 2), [], True), (2, 3, 36, words(14, 1), [], True)], []),
]
POISONED: list[tuple[list[Row], list[PrefixCopy]]] = [
    ([(0, 0, 0, B, [], True), (1, 1, 0, [*C, POISON, *C], [], True)], []),
    ([(0, 0, 5, words(5, 1), [8, POISON, 9], True)], []),  # a poisoned draft costs no answer
    ([(2, 1, 0, words(6, 4), [], True), (0, 0, 0, B, [], True)], []),
    ([(2, 1, 4, words(7, 1), words(8, 2), True), (0, 0, 5, words(9, 1), [], True)], []),
]


def request(rows: list[Row], copies: list[PrefixCopy], known: set[int]) -> VerifyRequest:
    sequences, slots, cached, fed, drafted, final = zip(*rows, strict=True)
    feed = Feed(*map(np.array, (sequences, slots, cached)), np.array([len(f) for f in fed]), np.concatenate(fed))
    proposal = empty_proposal(len(rows), max(map(len, drafted)), 1)
    for b, tokens in enumerate(drafted):
        proposal.lengths[b] = len(tokens)
        proposal.tokens[b, : len(tokens)] = proposal.support_ids[b, : len(tokens), 0] = tokens
        proposal.support_probs[b, : len(tokens)] = 1.0
    params = SamplingParams(9, temperature=0.8)
    openings = tuple(Opening(s, (s, 1, 2), params) for s in sequences if s not in known)
    known |= set(sequences)
    return VerifyRequest(feed, openings, tuple(copies), np.array(final), np.full(len(rows), 3), proposal)


def carried_out(folder: Path, steps: list[tuple[list[Row], list[PrefixCopy]]], group: Group | None) -> dict[str, Any]:
    """What one rank, or one process, makes of the steps."""
    runner = Runner.load(resolve(str(folder)), "float32", "cpu", 4, 200, TOKENS, group)
    logits: list[torch.Tensor] = []
    forward = runner.forward

    def recorded(*arguments: Any) -> torch.Tensor:
        logits.append(forward(*arguments).clone())
        return logits[-1]

    runner.forward = recorded  # type: ignore[method-assign]
    verifier, known = TargetVerifier(runner), set[int]()
    replies = [verifier.verify(request(rows, copies, known)) for rows, copies in steps]
    forgotten: tuple[int, ...] = ()
    try:
        verifier.verify(request([(0, 0, 150, [1], [], True)], [], known))
    except CacheMiss as miss:
        forgotten = miss.sequences
    return {
        "logits": logits,
        "verdicts": [(r.verdict.accepted.tolist(), r.verdict.next_token.tolist()) for r in replies],
        "heads": runner.cache.keys[0].shape[1],
        "finite": all(bool(b.isfinite().all()) for b in (*runner.cache.keys, *runner.cache.values)),
        "packed": sum(isinstance(module, PackedLinear) for module in runner.model.modules()),
        "parameters": sum(p.numel() for p in runner.model.parameters()),
        "forgotten": forgotten,
    }


def rank_process(rank: int, folders: dict[str, Path], ports: Any, out: Path) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.set_num_threads(1)
    if rank == 0:
        store = host("127.0.0.1")
        ports.put(store.port)
    else:
        store = visit("127.0.0.1", ports.get())
    group = join(store, rank, RANKS, "cpu", SECONDS)
    found: dict[str, Any] = {
        name: carried_out(folder, POISONED if name == "poisoned" else STEPS, group) for name, folder in folders.items()
    }
    torch.save(found, out / f"{rank}.pt")
    if rank == 1:
        os._exit(0)  # and rank 0 goes on without it
    began = time.monotonic()
    try:
        carried_out(folders["llama"], STEPS, group)
        ended = "no error"
    except RuntimeError as error:
        ended = str(error)
    torch.save((ended, time.monotonic() - began), out / "left.pt")
    os._exit(0)  # taking a broken group down in good order is not to be had


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("parallel")
    made = {name: tiny_folder(root / name, kind, 3, **changes) for name, (kind, changes) in CASES.items()}
    poisoned = tiny_model("llama", 3)
    poisoned.model.embed_tokens.weight[POISON] = torch.nan
    made["poisoned"] = tiny_folder(root / "poisoned", "llama", 3)
    poisoned.save_pretrained(made["poisoned"])
    return made


@pytest.fixture(scope="module")
def ranks(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which both ranks have left what they found."""
    out = tmp_path_factory.mktemp("found")
    ports = multiprocessing.get_context("spawn").SimpleQueue()
    context = multiprocessing.spawn(rank_process, (folders, ports, out), nprocs=RANKS, join=False)
    deadline = time.monotonic() + 240
    while not context.join(timeout=1.0):
        if time.monotonic() > deadline:
            for process in context.processes:
                process.kill()
            pytest.fail("the ranks hang")
    return out


@pytest.fixture(scope="module")
def found(ranks: Path) -> list[dict[str, Any]]:
    return [torch.load(ranks / f"{rank}.pt", weights_only=False) for rank in range(RANKS)]


@pytest.fixture(scope="module")
def alone(folders: dict[str, Path]) -> Callable[[str], dict[str, Any]]:
    return lambda name: carried_out(folders[name], POISONED if name == "poisoned" else STEPS, None)


@pytest.mark.parametrize("name", [*CASES, "poisoned"])
def test_two_ranks_compute_what_one_process_computes(
    name: str, found: list[dict[str, Any]], alone: Callable[[str], dict[str, Any]]
) -> None:
    expected = alone(name)
    first, second = (rank[name] for rank in found)
    assert len(first["logits"]) == len(expected["logits"])
    for ours, theirs, whole in zip(first["logits"], second["logits"], expected["logits"], strict=True):
        assert torch.equal(ours.nan_to_num(), theirs.nan_to_num())  # bit for bit: verdicts hang on it
        assert torch.equal(ours.isnan(), whole.isnan())
        torch.testing.assert_close(ours, whole, atol=1e-4, rtol=0, equal_nan=True)
    assert first["verdicts"] == second["verdicts"] == expected["verdicts"]
    assert first["forgotten"] == second["forgotten"] == expected["forgotten"] == (0,)


def test_logits_of_the_cases_are_not_close_by_nature(alone: Callable[[str], dict[str, Any]]) -> None:
    logits = alone("llama")["logits"]
    assert max(float(step.std()) for step in logits if len(step)) > 0.5


def test_every_rank_holds_its_part_of_weights_and_heads(
    found: list[dict[str, Any]], alone: Callable[[str], dict[str, Any]]
) -> None:
    whole = alone("llama")
    for rank in found:
        assert rank["llama"]["heads"] == whole["heads"] // RANKS
        assert rank["llama"]["packed"] == whole["packed"] > 0  # laid out for the processor, as in one process
        assert rank["llama"]["parameters"] < 0.55 * whole["parameters"]


def test_a_row_that_is_not_finite_is_scrubbed_on_all_ranks(found: list[dict[str, Any]]) -> None:
    for rank in found:
        verdicts = rank["poisoned"]["verdicts"]
        assert verdicts[0][1][0] >= 0
        assert verdicts[0][1][1] == -1
        assert all(token >= 0 for _, tokens in verdicts[1:] for token in tokens)
        assert rank["poisoned"]["finite"]


def test_a_rank_that_is_gone_does_not_leave_the_other_waiting(ranks: Path) -> None:
    ended, seconds = torch.load(ranks / "left.pt", weights_only=False)
    assert ended != "no error"
    assert seconds < 2 * SECONDS + 5


@pytest.mark.parametrize(
    ("shape", "gpus", "message"),
    [
        (
            {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 48},
            4,
            "has 6 attention heads, and 6 = 4 × 1 + 2 cannot be divided among 4 ranks: use one of 1, 2",
        ),
        (
            {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48},
            2,
            "has 3 key-value heads, and 3 = 2 × 1 + 1 cannot be divided among 2 ranks: use one of 1, 3",
        ),
    ],
)
def test_heads_that_do_not_divide_are_refused_with_the_arithmetic(
    folder_of: FolderOf, shape: dict[str, int], gpus: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as refusal:
        require_divisible(resolve(str(folder_of("llama", **shape))), gpus)
    assert str(refusal.value).startswith("target.gpus: ")


def test_heads_that_divide_pass(folder_of: FolderOf) -> None:
    checkpoint = resolve(str(folder_of("llama")))
    for ranks in (0, 1, 2):
        require_divisible(checkpoint, ranks)


def job(model: Path, gpus: int) -> Any:
    mapping = {
        "name": "parallel",
        "input": {"path": "nowhere.jsonl", "text": "body"},
        "output": {"path": "nowhere"},
        "target": {"model": str(model), "gpus": gpus},
        "tasks": [{"name": "answer", "prompt": "{body}"}],
    }
    return parse_config(mapping, "test")


def test_refusals_come_before_any_weights_are_loaded(folder_of: FolderOf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PRETEND, "1")
    with pytest.raises(ConfigError, match="cannot be divided among 3 ranks"):
        agree(job(folder_of("llama"), 3))


def test_one_process_is_no_place_for_several_ranks(folder_of: FolderOf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PRETEND, "1")
    with pytest.raises(ConfigError, match=r"target\.gpus: 2 ranks need a worker each"):
        Engine.from_config(job(folder_of("llama"), 2))


def test_gpus_are_pretended_only_where_the_environment_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PRETEND, raising=False)
    assert device_of(0) == "cpu"
    assert device_of(2) == "cuda"
    monkeypatch.setenv(PRETEND, "1")
    assert device_of(2) == "cpu"


def test_a_process_without_gpus_may_schedule_for_those_who_have_some(
    folder_of: FolderOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver, and a replica whose target has workers of its own; but load the model it cannot."""
    monkeypatch.delenv(PRETEND, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = job(folder_of("llama"), 1)
    assert agree(config).device == "cuda"
    with pytest.raises(ConfigError, match=r"target\.gpus: no CUDA device here"):
        Engine.from_config(config)
    require_device("cpu", "target.gpus")

"""What laying out weights (pipeline/engine/linear.py) gains on this machine, for the demo's model.

    python bench/linear.py [--dtype float32] [--threads 1] [--rounds 9] [--tokens 1,4,16,64,256] [MODEL]

One pass over N tokens without a cache; the variants take turns, so that a busy machine disturbs them alike,
and with one thread it is processor time that counts. Prints the median of each in milliseconds, and what part
of `plain` it is (median of the rounds' ratios).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

from pipeline.engine.checkpoint import Checkpoint, load_model, resolve, resolve_dtype
from pipeline.engine.linear import fuse_norms, pack_linears


def build(checkpoint: Checkpoint, dtype: torch.dtype, changes: tuple[Callable[[nn.Module], None], ...]) -> nn.Module:
    model = load_model(checkpoint, dtype)
    for change in changes:
        change(model)
    return model


def seconds(model: nn.Module, tokens: torch.Tensor) -> float:
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    started = clock()
    model(input_ids=tokens, use_cache=False, logits_to_keep=min(16, tokens.shape[1]))
    return clock() - started


@torch.inference_mode()
def measure(models: dict[str, nn.Module], count: int, rounds: int) -> dict[str, tuple[float, float]]:
    """Median seconds per variant, and the median over rounds of its time over plain's."""
    tokens = torch.randint(0, 1000, (1, count))
    for model in models.values():
        seconds(model, tokens)
    taken = [{name: seconds(model, tokens) for name, model in models.items()} for _ in range(rounds)]
    return {
        name: (
            statistics.median(one[name] for one in taken),
            statistics.median(one[name] / one["plain"] for one in taken),
        )
        for name in models
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default=".cache/models/smollm2-135m-instruct.gguf")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", default="1,2,4,8,16,64,256")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    checkpoint, dtype = resolve(options.model), resolve_dtype(options.dtype, "cpu")
    models = {
        "plain": build(checkpoint, dtype, ()),
        "packed": build(checkpoint, dtype, (pack_linears,)),
        "packed, norms": build(checkpoint, dtype, (pack_linears, fuse_norms)),
    }
    print(f"{options.model}, {dtype}, {options.threads} thread(s): milliseconds, and the part of plain")
    print("tokens".rjust(6), *(name.rjust(20) for name in models))
    for count in (int(part) for part in options.tokens.split(",")):
        found = measure(models, count, options.rounds)
        cells = (f"{1000 * time_:.1f}  {ratio:.2f}".rjust(20) for time_, ratio in found.values())
        print(str(count).rjust(6), *cells, flush=True)


if __name__ == "__main__":
    main()

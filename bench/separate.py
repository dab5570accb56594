"""What workers of their own cost beside one process: milliseconds per step, at several batch sizes.

    python bench/separate.py [--target MODEL --draft MODEL] [--drafter model|none] [--batches 1,16,64] [--rounds 3]
                             [--tokens 32] [--threads 1] [--dtype float32] [--json FILE]

Both decode the same prompts, taking turns; one cohort, so that nothing hides behind anything. Without --target a random
model of 1 million parameters is made, whose passes take next to nothing: what is left is messages. The workers get as
many threads as the one process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from actors.draft import Draft, RemoteDrafter
from actors.roster import Member, Roster, Traits
from actors.session import ray_session
from actors.target import RemoteVerifier, Target
from actors.worker import Worker
from pipeline.config import JobConfig, parse_config
from pipeline.decode import Decoder
from pipeline.engine.assembly import agree, load_drafter, load_verifier, make_decoder, set_threads
from pipeline.records import Request, SamplingParams


def random_model(folder: Path, tokenizer: str) -> str:
    """A small model with the tokenizer of another."""
    made = AutoTokenizer.from_pretrained(tokenizer)
    made.save_pretrained(folder)
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = AutoConfig.for_model("llama", **shape, num_key_value_heads=2, vocab_size=len(made))
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return str(folder)


def job(args: argparse.Namespace, target: str, draft: str, batch: int) -> JobConfig:
    drafts = {"kind": "model", "model": draft, "dtype": args.dtype} if args.drafter == "model" else {"kind": "none"}
    return parse_config(
        {
            "name": "separate",
            "input": {"path": "nowhere", "text": "text"},
            "output": {"path": "nowhere"},
            "target": {"model": target, "dtype": args.dtype, "threads": args.threads},
            "draft": drafts,
            "decoding": {"batch": batch, "context": 1024},
            "tasks": [{"name": "answer", "prompt": "{text}", "max_new_tokens": args.tokens}],
        },
        "bench",
    )


def in_one_process(config: JobConfig) -> tuple[Decoder, Callable[[], None]]:
    setup = agree(config)
    return make_decoder(config, setup, load_verifier(config, setup), load_drafter(config, setup)), lambda: None


def in_workers(config: JobConfig) -> tuple[Decoder, Callable[[], None]]:
    setup, threads = agree(config), config.target.threads
    options = {"num_cpus": 0, "max_concurrency": 4}
    target = ray.remote(Target).options(num_cpus=0).remote(config, setup, threads)
    verifier = RemoteVerifier(lambda: Worker(target, "the target"), 600.0, print)
    verifier.wait_ready()
    drafter, actors = None, [target]
    if config.draft[0].kind == "model":
        traits = Traits.of_workers(setup)
        actor = ray.remote(Draft).options(**options).remote(config, setup, threads)
        ray.get(actor.ready.remote())
        drafter = RemoteDrafter(traits, 600.0)
        drafter.enroll(Roster(1, (Member(1, "the draft worker", actor, traits),)))
        actors.append(actor)
    homes = None if drafter is None else drafter.homes
    return make_decoder(config, setup, verifier, drafter, homes=homes), lambda: [ray.kill(a) for a in actors] and None


def decode(decoder: Decoder, prompts: list[list[int]], tokens: int) -> tuple[float, int]:
    """(milliseconds per step, steps of the target)."""
    steps = 0
    verify = decoder.verifier.verify

    def counted(request: Any) -> Any:
        nonlocal steps
        steps += 1
        return verify(request)

    decoder.verifier.verify = counted  # type: ignore[method-assign]
    began = time.perf_counter()
    for completion in decoder.stream(
        [Request(str(i), ids, SamplingParams(tokens, ignore_eos=True)) for i, ids in enumerate(prompts)]
    ):
        assert completion.error is None
    seconds = time.perf_counter() - began
    decoder.verifier.verify = verify  # type: ignore[method-assign]
    return 1e3 * seconds / steps, steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target")
    parser.add_argument("--draft")
    parser.add_argument("--tokenizer", default=".cache/models/smollm2-135m-instruct.gguf")
    parser.add_argument("--drafter", choices=["model", "none"], default="model")
    parser.add_argument("--batches", default="1,16,64")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    set_threads(args.threads)
    found = []
    with tempfile.TemporaryDirectory() as folder, ray_session():
        target, draft = args.target, args.draft
        if target is None:
            from pipeline.engine.checkpoint import resolve

            tokenizer = str(resolve(args.tokenizer).folder)
            target, draft = (random_model(Path(folder) / name, tokenizer) for name in ("target", "draft"))
        for batch in map(int, args.batches.split(",")):
            config = job(args, target, draft, batch)
            tokenizer = agree(config).target.tokenizer()
            text = "Ministers met in Harrow on Tuesday to discuss the price of grain. "
            prompts = [tokenizer(f"{i}. {text}")["input_ids"] for i in range(2 * batch)]
            contenders = {"colocated": in_one_process(config), "separate": in_workers(config)}
            taken: dict[str, list[float]] = {name: [] for name in contenders}
            for turn in range(args.rounds + 1):
                for name in sorted(contenders, reverse=bool(turn % 2)):
                    milliseconds, _ = decode(contenders[name][0], prompts, args.tokens)
                    if turn:
                        taken[name].append(milliseconds)
            for _, end in contenders.values():
                end()
            together, apart = (statistics.median(taken[name]) for name in ("colocated", "separate"))
            line = {"batch": batch, "colocated_ms": together, "separate_ms": apart, "overhead_ms": apart - together}
            line |= {"ratio": apart / together}
            found.append({name: round(value, 4) for name, value in line.items()})
            print(json.dumps(found[-1]), flush=True)
    if args.json:
        args.json.write_text(json.dumps({**vars(args), "json": None, "found": found}, indent=1))


if __name__ == "__main__":
    main()

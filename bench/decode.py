"""Tokens per second of the engine against transformers' `generate`, in one process, taking turns.

    python bench/decode.py [--target MODEL] [--draft MODEL] [--dtype float32] [--threads 2] [--stories 16]
                           [--words 450] [--new-tokens 32] [--batches 1,4,16] [--rounds 3] [--drafters none,ngram]
                           [--json FILE]

Every round decodes the same stories (the bundled sample, greedy, end-of-text ignored, prompt pass included) with
each contender, in turning order. Printed are medians, and medians of the rounds' ratios: of `none` to transformers
at the same batch size, and of each drafter to `none`. transformers gets left-padded batches of the same size.
`outside` is the share of a step between two forward passes, for `none`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import torch

from pipeline.decode import Decoder
from pipeline.engine.checkpoint import Checkpoint, load_model, resolve, resolve_dtype
from pipeline.engine.drafters.model import ModelDrafter
from pipeline.engine.drafters.ngram import NgramDrafter
from pipeline.engine.runner import Runner
from pipeline.engine.verifier import TargetVerifier
from pipeline.records import Request, SamplingParams
from pipeline.scheduler import Limits, Scheduler
from pipeline.wording import Wording

SAMPLE = Path(__file__).resolve().parents[1] / "configs/sample/stories.parquet"
FEW = 12  # stories that are decoded one by one too
INSTRUCTION = "Summarise the article in one or two sentences.\n\n"


def prompts(checkpoint: Checkpoint, count: int, words: int) -> list[list[int]]:
    """Chat prompts over bundled stories of at most so many words, lengths mixed."""
    tokenizer = checkpoint.tokenizer()
    bodies = [b for b in pq.read_table(SAMPLE, columns=["body"])["body"].to_pylist() if len(b.split()) <= words]
    rendered = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": INSTRUCTION + body}], tokenize=False, add_generation_prompt=True
        )
        for body in bodies[:count]
    ]
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in rendered]


class Ours:
    """The engine with one drafter; parts are kept between runs, sequences are not."""

    def __init__(self, args: argparse.Namespace, kind: str, batch: int, models: dict[str, Runner]) -> None:
        self.kind, self.batch, self.args, self.models = kind, batch, args, models
        self.forward_seconds = 0.0
        self.drafted = self.accepted = self.steps = 0

    def __call__(self, inputs: list[list[int]]) -> int:
        target, args = self.models["target"], self.args
        drafter = {
            "none": lambda: None,
            "ngram": lambda: NgramDrafter(self.batch),
            "model": lambda: ModelDrafter(self.models["draft"], 64, "sample", 256),
        }[self.kind]()
        limits = Limits(self.batch, target.cache.limit, 0 if drafter is None else args.draft_tokens, 256)
        keeps, chunk = (False, None) if drafter is None else (drafter.keeps_proposals, drafter.chunk)
        scheduler = Scheduler(limits, (), 0, 0, keeps, chunk)
        decoder = Decoder(scheduler, _Timed(TargetVerifier(target), self), drafter, Wording(args.tokenizer))
        params = SamplingParams(args.new_tokens, ignore_eos=True)
        self.forward_seconds, self.drafted, self.accepted, self.steps = 0.0, 0, 0, 0
        tokens = 0
        for answer in decoder.stream([Request(str(i), ids, params) for i, ids in enumerate(inputs)]):
            tokens += len(answer.token_ids)
            self.drafted += answer.stats.drafted
            self.accepted += answer.stats.accepted
            self.steps += answer.stats.steps
        return tokens


class _Timed:
    """Counts the seconds that the target's forward passes take."""

    def __init__(self, verifier: TargetVerifier, ours: Ours) -> None:
        self.verifier, self.ours = verifier, ours

    def verify(self, request):  # type: ignore[no-untyped-def]
        runner = self.verifier.runner
        inner = type(runner).forward.__get__(runner)

        def forward(*args):  # type: ignore[no-untyped-def]
            started = time.perf_counter()
            logits = inner(*args)
            self.ours.forward_seconds += time.perf_counter() - started
            return logits

        runner.forward = forward  # type: ignore[method-assign]
        return self.verifier.verify(request)


class Theirs:
    """transformers' generate over left-padded batches."""

    def __init__(self, model: torch.nn.Module, batch: int, new_tokens: int) -> None:
        self.model, self.batch, self.new_tokens = model, batch, new_tokens

    @torch.inference_mode()
    def __call__(self, inputs: list[list[int]]) -> int:
        tokens = 0
        for first in range(0, len(inputs), self.batch):
            group = inputs[first : first + self.batch]
            longest = max(map(len, group))
            ids = torch.tensor([[0] * (longest - len(g)) + g for g in group])
            mask = torch.tensor([[0] * (longest - len(g)) + [1] * len(g) for g in group])
            out = self.model.generate(  # type: ignore[operator]
                ids, attention_mask=mask, max_new_tokens=self.new_tokens, min_new_tokens=self.new_tokens,
                do_sample=False, pad_token_id=0, temperature=None, top_p=None, top_k=None,
            )  # fmt: skip
            tokens += out[:, longest:].numel()
        return tokens




def measure(args: argparse.Namespace, batch: int, models: dict[str, Runner], reference: torch.nn.Module) -> dict:
    inputs = prompts(args.checkpoint, args.stories, args.words)
    if batch == 1 and args.stories > FEW:
        inputs = inputs[: max(4, args.stories // 4)]
    contenders: dict[str, Callable[[list[list[int]]], int]] = {}
    contenders["transformers"] = Theirs(reference, batch, args.new_tokens)
    contenders |= {kind: Ours(args, kind, batch, models) for kind in args.drafters}
    rounds: list[dict[str, float]] = []
    outside = []
    for turn in range(args.warmup + args.rounds):
        names = list(contenders)
        names = names[turn % len(names) :] + names[: turn % len(names)]
        taken = {}
        for name in names:
            started = time.perf_counter()
            tokens = contenders[name](inputs)
            seconds = time.perf_counter() - started
            taken[name] = tokens / seconds
            if name == "none":
                none = contenders["none"]
                assert isinstance(none, Ours)
                outside.append(1 - none.forward_seconds / seconds)
        if turn >= args.warmup:
            rounds.append(taken)
    found = {"batch": batch, "stories": len(inputs), "prompt_tokens": sum(map(len, inputs))}
    for name, contender in contenders.items():
        base = "none" if isinstance(contender, Ours) and name != "none" else "transformers"
        found[name] = {
            "tokens_per_s": round(statistics.median(r[name] for r in rounds), 2),
            f"to_{base}": round(statistics.median(r[name] / r[base] for r in rounds), 2),
        }
        if isinstance(contender, Ours) and contender.drafted:
            found[name]["acceptance"] = round(contender.accepted / contender.drafted, 2)
            found[name]["tokens_per_step"] = round(1 + contender.accepted / contender.steps, 2)
    found["outside_share_of_none"] = round(statistics.median(outside[args.warmup :]), 4)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default=".cache/models/smollm2-135m-instruct.gguf")
    parser.add_argument("--draft")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--stories", type=int, default=16)
    parser.add_argument("--words", type=int, default=450, help="longest story")
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--draft-tokens", type=int, default=4)
    parser.add_argument("--batches", default="1,4,16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=1, help="rounds before those that count")
    parser.add_argument("--drafters", default="none,ngram")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.drafters = args.drafters.split(",")
    torch.set_num_threads(args.threads)
    args.checkpoint = resolve(args.target)
    args.tokenizer = args.checkpoint.tokenizer()
    dtype = str(resolve_dtype(args.dtype, "cpu")).removeprefix("torch.")
    reference = load_model(args.checkpoint, dtype)
    results = []
    for batch in map(int, args.batches.split(",")):
        longest = max(map(len, prompts(args.checkpoint, args.stories, args.words))) + args.new_tokens
        vocabulary = len(args.tokenizer)
        models = {"target": Runner.load(args.checkpoint, dtype, "cpu", batch, longest, vocabulary)}
        if args.draft:
            models["draft"] = Runner.load(resolve(args.draft), dtype, "cpu", batch, longest, vocabulary)
        found = measure(args, batch, models, reference)
        print(json.dumps(found), flush=True)
        results.append(found)
    if args.json:
        args.json.write_text(json.dumps({"target": args.target, "draft": args.draft, "dtype": dtype,
                                         "threads": args.threads, "new_tokens": args.new_tokens,
                                         "results": results}, indent=1))  # fmt: skip


if __name__ == "__main__":
    main()

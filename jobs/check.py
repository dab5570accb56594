"""`nightdesk check`: everything that can be found out about a job without running it, and what a run would do.

Raises what a run would raise, so that a job that passes does not fail on its configuration, models, tokenizers,
columns or memory. Writes nothing, and loads no weights unless asked to time them.
"""

from __future__ import annotations

import json
import sys
import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from jobs.estimate import (
    Memory,
    Work,
    available_memory,
    gigabytes,
    is_elsewhere,
    memory_of,
    require_memory,
    seconds_from_probe,
)
from jobs.progress import duration
from jobs.prospect import foresee
from pipeline.config import JobConfig
from pipeline.corpus.listing import list_files, refuse_overlap
from pipeline.corpus.readers import Corpus, RowRange
from pipeline.counting import counted
from pipeline.engine.assembly import Setup, agree, drafting
from pipeline.errors import PromptError
from pipeline.fingerprint import answer_values
from pipeline.output.folder import Output
from pipeline.planning import Ask, prompt_fields, refuse_foreign_tokens
from pipeline.prompts.templates import Prompter
from pipeline.records import Document, Request

if TYPE_CHECKING:
    from jobs.cluster import ClusterPlan
    from pipeline.engine import Engine

SAMPLE = 2000  # documents whose prompts are counted
TIMED_PROMPTS = 3
TIMED_TOKENS = 8
BAR = 30  # characters of the longest bar of the histogram


@dataclass(frozen=True)
class Prompts:
    """The prompts of the sampled documents, all tasks together."""

    documents: int
    errors: int  # documents without a prompt for every task
    first_error: str | None
    tokens: tuple[int, ...]  # length of every prompt
    longest: int  # tokens of prompt and answer together, at most
    examples: tuple[Request, ...]

    def histogram(self) -> list[tuple[int, int]]:
        """(upper bound in tokens, prompts up to it and above the one before), bounds in powers of two."""
        if not self.tokens:
            return []
        bounds = [1 << power for power in range(max(self.tokens).bit_length() + 1)]
        counts = [0] * len(bounds)
        for length in self.tokens:
            counts[bisect_left(bounds, length)] += 1
        used = [i for i, count in enumerate(counts) if count]
        return list(zip(bounds, counts, strict=True))[used[0] : used[-1] + 1]


@dataclass(frozen=True)
class Findings:
    """What a run would do."""

    job: str
    files: int
    rows: int  # documents that the job asks about
    answered: int  # of the input's documents, those that the output holds already
    shards: int  # that a run would publish as new parts
    run: str  # what a run would do, in words
    model: str
    draft: str
    prompts: Prompts
    slots: int
    context: int
    memory: Memory
    seconds: float | None
    seconds_from: str
    warnings: tuple[str, ...]
    cluster: ClusterPlan | None = None  # where it was asked for

    def as_json(self) -> dict[str, Any]:
        return {
            "job": self.job,
            "files": self.files,
            "rows": self.rows,
            "answered": self.answered,
            "shards": self.shards,
            "run": self.run,
            "target": self.model,
            "draft": self.draft,
            "sampled": self.prompts.documents,
            "sample_errors": self.prompts.errors,
            "prompt_tokens": {
                "median": median(self.prompts.tokens) if self.prompts.tokens else None,
                "max": max(self.prompts.tokens, default=None),
                "histogram": [{"up_to": bound, "prompts": count} for bound, count in self.prompts.histogram()],
            },
            "batch": self.slots,
            "context": self.context,
            "memory_bytes": {
                "weights": self.memory.weights,
                "cache": self.memory.cache,
                "available": self.memory.available,
            },
            "seconds": self.seconds,
            "seconds_from": self.seconds_from,
            "warnings": list(self.warnings),
            "cluster": None if self.cluster is None else self.cluster.as_json(),
        }


def check_job(config: JobConfig, as_json: bool = False, timed: bool = False, cluster: bool = False) -> int:
    """Print what was found; returns the exit code. Raises a NightdeskError for what would stop a run."""
    findings = examine(config, timed, cluster)
    show(findings, Console(highlight=False))
    if as_json:
        print(json.dumps(findings.as_json(), ensure_ascii=False))
    return 0


def examine(config: JobConfig, timed: bool = False, cluster: bool = False) -> Findings:
    """Look at models, corpus and machine, the cheapest and likeliest to be wrong first; at the cluster if asked to."""
    refuse_overlap(config.input, config.output.path)
    files = list_files(config.input)
    plan = None
    if cluster:
        from jobs.cluster import plan_on_cluster

        plan = plan_on_cluster(config)
    setup = agree(config)
    prompters = make_prompters(config, setup)
    refuse_foreign_tokens(config.tasks, setup.vocabulary)
    corpus = Corpus(config.source, prompt_fields(config), files)
    require_columns(corpus)
    prospect = foresee(config, Output.of(config.output), files, wanted(config, setup))
    rows_of = rows_asked(corpus, config.input.limit, prospect.rows_of)
    rows = sum(rows_of)
    prompts = read_prompts(config, prompters, sample(corpus, rows_of))
    context = cache_context(config, setup, prompts)
    memory = memory_for(config, setup, context)
    require_memory(memory, setup.limits.slots, context)
    seconds, seconds_from = estimate(config, setup, prospect.rows, prompts, timed)
    return Findings(
        job=config.name,
        files=len(files),
        rows=rows,
        answered=prospect.answered(files, rows_of),
        shards=prospect.parts,
        run=prospect.said(),
        model=config.target.model,
        draft=draft_name(config),
        prompts=prompts,
        slots=setup.limits.slots,
        context=context,
        memory=memory,
        seconds=seconds,
        seconds_from=seconds_from,
        warnings=tuple(warnings(config, rows, prompters, prompts)),
        cluster=plan,
    )


def wanted(config: JobConfig, setup: Setup) -> Ask:
    """What `run` asks for when it is called without options."""
    answers = answer_values(config, setup.target.fingerprint(), setup.limits.context)
    return Ask(answers, setup.limits.context, config.input.limit, fresh=False, retry_failed=config.retry_failed)


def draft_name(config: JobConfig) -> str:
    draft = drafting(config)
    if draft is None:
        return "none"
    return draft.model if draft.kind == "model" and draft.model else draft.kind


# --- the corpus ---------------------------------------------------------------------------------------------


def make_prompters(config: JobConfig, setup: Setup) -> dict[str, Prompter]:
    tokenizer = setup.target.tokenizer()
    return {t.name: Prompter(t, tokenizer, config.input.text, setup.limits.context) for t in config.tasks}


def require_columns(corpus: Corpus) -> None:
    """CorpusError for a column that the job names and no input file has."""
    _ = corpus.kept_schema  # fixed from the beginnings of all files, which is where a missing column shows


def rows_asked(corpus: Corpus, limit: int | None, known: Mapping[str, int] = MappingProxyType({})) -> list[int]:
    """Rows of every file that the job asks about: those among the first `limit` of the corpus.

    Files whose rows are `known`, by path, are not read to count them.
    """
    asked: list[int] = []
    room = sys.maxsize if limit is None else limit
    for i, file in enumerate(corpus.files):
        rows = known[file.path] if file.path in known else corpus.count_rows(i).rows if room else 0
        asked.append(min(rows, room))
        room -= asked[-1]
    return asked


def sample(corpus: Corpus, rows_of: Sequence[int]) -> Iterator[Document]:
    """Up to SAMPLE documents: as many from the beginning of every file, or of files spread evenly."""
    filled = [i for i, rows in enumerate(rows_of) if rows]
    if not filled:
        return
    chosen = filled[:: -(-len(filled) // SAMPLE)]
    share, more = divmod(SAMPLE, len(chosen))
    ranges = [RowRange(i, 0, min(rows_of[i], share + (place < more))) for place, i in enumerate(chosen)]
    for batch in corpus.read(ranges):
        yield from batch.documents


def read_prompts(config: JobConfig, prompters: dict[str, Prompter], documents: Iterator[Document]) -> Prompts:
    """Render every task's prompt of every document."""
    seen = errors = longest = 0
    first_error: str | None = None
    lengths: list[int] = []
    examples: list[Request] = []
    for document in documents:
        seen += 1
        problem = document.error
        for task in config.tasks:
            try:
                prompt = [] if problem else prompters[task.name].render(document)
            except PromptError as error:
                problem = str(error)
                continue
            if prompt:
                lengths.append(len(prompt))
                longest = max(longest, len(prompt) + task.max_new_tokens)
                if len(examples) < TIMED_PROMPTS:
                    examples.append(Request(f"check-{len(examples)}", prompt, task.sampling()))
        errors += problem is not None
        first_error = first_error or problem
    return Prompts(seen, errors, first_error, tuple(lengths), longest, tuple(examples))


def warnings(config: JobConfig, rows: int, prompters: dict[str, Prompter], prompts: Prompts) -> Iterator[str]:
    """What does not stop a run but may not be meant."""
    if rows == 0:
        yield "there are no documents: a run would publish nothing"
    for name, prompter in prompters.items():
        if config.input.text not in prompter.fields:
            yield f"the prompt of task {name} does not name the text column, {{{config.input.text}}}"
    if prompts.errors:
        share = prompts.errors / prompts.documents
        note = f"{share:.1%} of the sampled documents would be error rows; the first: {prompts.first_error}"
        yield note + (f" (max_error_rate is {config.max_error_rate:g})" if share > config.max_error_rate else "")


# --- memory and time ----------------------------------------------------------------------------------------


def cache_context(config: JobConfig, setup: Setup, prompts: Prompts) -> int:
    """Tokens that a cache slot grows to: a power of two that holds the longest request of the sample."""
    longest = prompts.longest or max(task.max_new_tokens for task in config.tasks)
    return int(min(1 << (longest - 1).bit_length(), setup.limits.context))


def memory_for(config: JobConfig, setup: Setup, context: int) -> Memory:
    """Target and draft in one process; apart, each worker needs less. Of a model on several ranks, one rank's part."""
    models = [(setup.target, config.target.dtype, config.target.gpus)]
    if setup.draft is not None:
        models.append((setup.draft, config.draft[0].dtype, config.draft[0].gpus))
    weights = cache = 0
    for checkpoint, dtype, gpus in models:
        whole = memory_of(checkpoint, dtype, setup.device, setup.limits.slots, context)
        parts = [-(-count // max(gpus, 1)) for count in whole]
        weights, cache = weights + parts[0], cache + parts[1]
    return Memory(weights, cache, available_memory(setup.device))


def estimate(config: JobConfig, setup: Setup, rows: int, prompts: Prompts, timed: bool) -> tuple[float | None, str]:
    """(seconds at most, where the number comes from)."""
    if not prompts.tokens:
        return None, "no prompt in the sample"
    per_document = sum(prompts.tokens) / prompts.documents
    answered = rows * (1 - prompts.errors / prompts.documents)
    new_tokens = sum(task.n * task.max_new_tokens for task in config.tasks)
    work = Work(round(rows * per_document), round(answered * new_tokens))
    if timed:
        return seconds_from_timing(
            config, setup.limits.slots, prompts.examples, work
        ), f"timing {counted(len(prompts.examples), 'prompt')}"
    if is_elsewhere(setup.device):
        return None, "the GPUs are not on this machine"
    seconds = seconds_from_probe(work, setup.target, config.target.dtype, setup.device, setup.limits.slots)
    return seconds, "parameter count and a probe of this machine's memory and arithmetic"


def seconds_from_timing(config: JobConfig, slots: int, examples: Sequence[Request], work: Work) -> float:
    """Time a few prompts by themselves, then steps of a full batch that begins with their ends."""
    from pipeline.engine import Engine

    engine = Engine.from_config(config.model_copy(update={"draft": ()}))
    ends = [request.prompt_token_ids[-TIMED_TOKENS:] for request in examples]
    batch = [Request(f"check-{i}", ends[i % len(ends)], examples[i % len(ends)].params) for i in range(slots)]
    _seconds_for(engine, batch, 1)  # first use is slower
    prompts = _seconds_for(engine, examples, 1)
    steps = max(_seconds_for(engine, batch, 1 + TIMED_TOKENS) - _seconds_for(engine, batch, 1), 0.0)
    per_prompt_token = prompts / sum(len(request.prompt_token_ids) for request in examples)
    return work.prompt_tokens * per_prompt_token + work.new_tokens * steps / (TIMED_TOKENS * slots)


def _seconds_for(engine: Engine, requests: Sequence[Request], new_tokens: int) -> float:
    params = [
        replace(request.params, max_new_tokens=new_tokens, min_new_tokens=0, ignore_eos=True, stop=(), n=1)
        for request in requests
    ]
    start = time.perf_counter()
    engine.generate([replace(request, params=p) for request, p in zip(requests, params, strict=True)])
    return time.perf_counter() - start


# --- what is printed ----------------------------------------------------------------------------------------


def show(findings: Findings, console: Console) -> None:
    """A table of findings, the histogram, and the warnings."""
    prompts, memory = findings.prompts, findings.memory
    table = Table.grid(padding=(0, 2))
    table.add_row("job", findings.job)
    table.add_row("input", f"{counted(findings.rows, 'document')} in {counted(findings.files, 'file')}")
    table.add_row("output", f"{findings.answered:,} answered already; {findings.run}")
    table.add_row("models", f"{findings.model}, draft: {findings.draft}")
    free = "on each GPU" if memory.available is None else f"of {gigabytes(memory.available)} free"
    table.add_row(
        "memory",
        f"{gigabytes(memory.needed)} {free}: weights {gigabytes(memory.weights)}, "
        f"cache {gigabytes(memory.cache)} for {counted(findings.slots, 'sequence')} of "
        f"{counted(findings.context, 'token')}",
    )
    table.add_row("prompts", _prompt_summary(findings))
    histogram = prompts.histogram()
    for bound, count in histogram:
        bar = "█" * max(min(count, 1), round(BAR * count / max(c for _, c in histogram)))
        table.add_row("", f"up to {bound:>7,} token{' ' if bound == 1 else 's'}  {bar}{' ' if bar else ''}{count:,}")
    if findings.seconds is not None:
        time_text = f"about {duration(findings.seconds)} at most, start-up apart (from {findings.seconds_from})"
        table.add_row("time", time_text + "; drafts and short answers take less")
    for label, text in () if findings.cluster is None else findings.cluster.rows():
        table.add_row(label, text)
    for warning in findings.warnings:
        table.add_row("warning", warning)
    console.print(table)


def _prompt_summary(findings: Findings) -> str:
    prompts = findings.prompts
    if prompts.documents != findings.rows:
        where = f"a sample of {counted(prompts.documents, 'document')}"
    else:
        where = "the one document" if prompts.documents == 1 else f"all {prompts.documents:,} documents"
    if not prompts.tokens:
        return f"none in {where}"
    return f"median {median(prompts.tokens):,.0f}, longest {counted(max(prompts.tokens), 'token')}, in {where}"

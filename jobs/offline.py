"""`check --offline`: what can be found out about a job without its models and without a network.

Looks at the job file, at its arithmetic of workers, and at input and output where they are folders of this machine.
What it has not looked at, it names: only `check` where the models are can say that a run would begin.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from actors.placement import Bundle, demand
from jobs.check import draft_name, require_columns, rows_asked, sample
from pipeline.config import JobConfig
from pipeline.corpus.listing import list_files, refuse_overlap
from pipeline.corpus.readers import Corpus
from pipeline.counting import counted
from pipeline.engine.assembly import drafting
from pipeline.output.folder import Output, refuse_foreign_files, refuse_unplanned_parts
from pipeline.planning import prompt_fields
from pipeline.prompts.templates import template_fields


@dataclass(frozen=True)
class Documents:
    """The input, where it is on this machine."""

    files: int
    rows: int  # documents that the job asks about
    sampled: int
    unreadable: int  # of the sampled
    first_error: str | None


@dataclass(frozen=True)
class OfflineFindings:
    """What is known of a job without its models."""

    job: str
    fields: tuple[str, ...]  # columns that prompts name
    documents: Documents | None
    workers: tuple[str, ...]  # the least that a run takes of a cluster, in words
    left_out: tuple[str, ...]
    warnings: tuple[str, ...]


def check_offline(config: JobConfig, as_json: bool = False) -> int:
    """Print what was found; returns the exit code. Raises a NightdeskError for what would stop a run."""
    findings = examine_offline(config)
    show(findings, Console(highlight=False))
    if as_json:
        print(json.dumps(asdict(findings), ensure_ascii=False))
    return 0


def examine_offline(config: JobConfig) -> OfflineFindings:
    """Everything but the models. Opens no connection, and writes nothing."""
    refuse_overlap(config.input, config.output.path)
    workers = tuple(_workers(config))
    here = all(map(_is_here, config.input.paths))
    documents = _documents(config) if here else None
    if os.path.isdir(config.output.path):
        output = Output.of(config.output)
        refuse_foreign_files(output)
        refuse_unplanned_parts(output)
    return OfflineFindings(
        job=config.name,
        fields=prompt_fields(config),
        documents=documents,
        workers=workers,
        left_out=tuple(_left_out(config, here)),
        warnings=tuple(_warnings(config, documents)),
    )


# --- input


def _is_here(path: str) -> bool:
    """Is the file or folder, or for a glob the folder before its first wildcard, on this machine?"""
    if "://" in path:
        return False
    before = re.split(r"[*?\[]", path, maxsplit=1)[0]
    return os.path.exists(path) or (before != path and os.path.isdir(before.rpartition("/")[0]))


def _documents(config: JobConfig) -> Documents:
    files = list_files(config.input)
    corpus = Corpus(config.source, prompt_fields(config), files)
    require_columns(corpus)
    rows_of = rows_asked(corpus, config.input.limit)
    errors = [document.error for document in sample(corpus, rows_of)]
    unreadable = [error for error in errors if error is not None]
    return Documents(len(files), sum(rows_of), len(errors), len(unreadable), next(iter(unreadable), None))


# --- workers


def _workers(config: JobConfig) -> Iterator[str]:
    """The least that a run takes, by what it is for."""
    groups = demand(config)
    auto = config.target.replicas == "auto"
    targets = 1 if isinstance(config.target.replicas, str) else config.target.replicas
    more = ", or as many as fit" if auto else ""
    yield f"{counted(targets, 'target')} {_place(groups[0])}{more}"
    for place, count in Counter(map(_place, groups[targets:])).items():
        yield f"{counted(count, 'draft worker')} {place}"


def _place(group: tuple[Bundle, ...]) -> str:
    gpus = sum(bundle.gpus for bundle in group)
    if not gpus:
        return "on processors"
    return f"with {gpus} {group[0].choice.kind}" + (" on one node" if gpus > 1 else "")


# --- what is said besides


def _left_out(config: JobConfig, here: bool) -> Iterator[str]:
    draft = drafting(config)
    models = [config.target.model, *([draft_name(config)] if draft is not None and draft.kind == "model" else [])]
    yield f"models ({', '.join(models)}): that they are there and fit together, prompts in tokens, memory and time"
    if not here:
        yield f"input ({', '.join(config.input.paths)}): it is not on this machine"
    if "://" in config.output.path:
        yield f"output ({config.output.path}): it is not on this machine"
    elif os.path.isdir(config.output.path):
        yield "output: whether what it holds was made by this job"


def _warnings(config: JobConfig, documents: Documents | None) -> Iterator[str]:
    for task in config.tasks:
        named = {*template_fields(task.prompt), *template_fields(task.system or "")}
        if config.input.text not in named:
            yield f"the prompt of task {task.name} does not name the text column, {{{config.input.text}}}"
    if documents is None:
        return
    if documents.rows == 0:
        yield "there are no documents: a run would publish nothing"
    if documents.unreadable:
        share = documents.unreadable / documents.sampled
        yield f"{share:.1%} of the sampled documents would be error rows; the first: {documents.first_error}"


def show(findings: OfflineFindings, console: Console) -> None:
    """A line for everything that was looked at, and one for everything that was not."""
    table = Table.grid(padding=(0, 2))

    def row(label: str, text: str) -> None:
        table.add_row(Text(label), Text(text))

    row("job", findings.job)
    if findings.documents is not None:
        documents = findings.documents
        row("input", f"{counted(documents.rows, 'document')} in {counted(documents.files, 'file')}")
    row("prompts", f"name {', '.join(findings.fields) or 'no column'}")
    row("workers", "; ".join(findings.workers))
    for text in findings.left_out:
        row("left out", text)
    for text in findings.warnings:
        row("warning", text)
    console.print(table)

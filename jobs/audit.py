"""`audit CONFIG`: proves, on the job's own documents, target and draft, that its output law is the target's.

Chooses the documents and prints what was found; `pipeline/audit` says what that is, `pipeline/engine/auditing` finds
it. Writes nothing.
"""

from __future__ import annotations

import json
import logging
import math
import random
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from jobs.check import make_prompters, require_columns, rows_asked
from pipeline import events
from pipeline.audit import Audit, LawAudit, LawTest
from pipeline.config import JobConfig
from pipeline.corpus.listing import list_files
from pipeline.corpus.readers import Corpus
from pipeline.engine.assembly import agree
from pipeline.engine.auditing import Question, audit
from pipeline.errors import CorpusError, PromptError
from pipeline.planning import prompt_fields
from pipeline.records import Document

PASSED, FAILED = 0, 5
QUESTIONS = 8  # prompts: few, because plain decoding is slow
TRIES = 8  # documents looked at for each that is wanted: some have no prompt


def audit_job(config: JobConfig, as_json: bool = False) -> int:
    """Audit a job in this process; returns the exit code. Raises a NightdeskError for what would stop a run."""
    found = audit(config, choose_questions(config), lambda line: events.tell("audit_step", f"audit: {line}"))
    show(found, Console(highlight=False))
    code = verdict(found)
    if as_json:
        print(json.dumps(found.as_json(), ensure_ascii=False))
    return code


def verdict(found: Audit) -> int:
    """The exit code; a failed audit is one line on standard error."""
    if found.failure is None:
        return PASSED
    line = f"nightdesk: audit failed: {' '.join(found.failure.split())}"
    events.tell("audit_failed", line, logging.ERROR, exit_code=FAILED)
    return FAILED


# --- documents


def choose_questions(config: JobConfig) -> list[Question]:
    """Every task's prompt of a few documents that the seed chooses; CorpusError if none has a prompt."""
    setup = agree(config)
    prompters = make_prompters(config, setup)
    questions: list[Question] = []
    for document in sampled_documents(config, TRIES * QUESTIONS):
        try:
            prompts = {name: prompter.render(document) for name, prompter in prompters.items()}
        except PromptError:
            continue
        questions += [Question(document.id, t.name, prompts[t.name], t.sampling()) for t in config.tasks]
        if len(questions) >= QUESTIONS:
            return questions
    if not questions:
        raise CorpusError("audit: none of the documents has a prompt for every task; `check` says what is wrong")
    return questions


def sampled_documents(config: JobConfig, most: int) -> Iterator[Document]:
    """Up to `most` different documents of those that the job asks about, in an order that the seed decides."""
    files = list_files(config.input)
    corpus = Corpus(config.input, prompt_fields(config), files)
    require_columns(corpus)
    rows_of = rows_asked(corpus, config.input.limit)
    total = sum(rows_of)
    for row in random.Random(f"audit,{config.seed}").sample(range(total), min(most, total)):
        file = 0
        while row >= rows_of[file]:
            row -= rows_of[file]
            file += 1
        for batch in corpus.read([corpus.count_rows(file).range(file, row, row + 1)]):
            yield from batch.documents


# --- what is printed


def show(found: Audit, console: Console) -> None:
    """A table per part, and the notes."""
    greedy = found.greedy
    console.print(
        f"audit of rule {found.rule}, draft {found.draft}, {found.dtype}: "
        f"{'passed' if found.passed else 'FAILED'} in {found.seconds:.0f} s",
        soft_wrap=True,
    )
    console.print(
        f"1. greedy: {greedy.equal} of {len(greedy.texts)} texts are equal to plain decoding; {greedy.rate:.2%} of "
        f"{sum(text.compared for text in greedy.texts)} tokens differ; {_drafts(greedy.drafted, greedy.accepted)}",
        soft_wrap=True,
    )
    if any(text.differences for text in greedy.texts):
        table = Table("document", "task", "token", "here", "plain", f"margin (a tie below {greedy.tie:g})", box=None)
        for text in greedy.texts:
            for d in text.differences:
                cells = (text.document, text.task, d.position, _token(d.got), _token(d.expected), _margin(d.margin))
                table.add_row(*(Text(str(cell)) for cell in cells))
        console.print(table)
    console.print(
        f"2. sampled law: {_said(found.sampled, 'differs from the target’s', 'the target’s')}", soft_wrap=True
    )
    console.print(_table(found.sampled))
    console.print(
        f"3. an engine that {found.wrong_engine}: {_said(found.wrong, 'found out', 'not found out')}", soft_wrap=True
    )
    console.print(_table(found.wrong))
    for note in found.notes:
        console.print(f"note: {note}", soft_wrap=True, markup=False)


def _said(tests: LawAudit, rejected: str, fits: str) -> str:
    return f"{rejected if tests.rejected else fits} (p-values are held against {tests.threshold:.1e})"


def _table(tests: LawAudit) -> Table:
    table = Table("prefix", "samples", "drafted", "kept", "outcomes", "impossible", "G", "p", box=None)
    for test in (*tests.tests, tests.together):
        table.add_row(*map(Text, _cells(test)))
    return table


def _cells(test: LawTest) -> Sequence[str]:
    counts = (test.samples, test.drafted, test.accepted, test.cells, test.impossible)
    return test.name, *map(str, counts), f"{test.statistic:.1f}", f"{test.p_value:.2g}"


def _drafts(drafted: int, accepted: int) -> str:
    return f"{drafted} tokens drafted, {accepted} kept" if drafted else "nothing drafted"


def _token(token: int) -> str:
    return "end" if token < 0 else str(token)


def _margin(margin: float) -> str:
    return f"{margin:.2g}" if math.isfinite(margin) else "ruled out"

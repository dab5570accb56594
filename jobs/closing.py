"""What a run prints at its end: some answers, how fast they came, and how to open the output."""

from __future__ import annotations

import sys

import pyarrow as pa
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pipeline.config import JobConfig
from pipeline.counting import counted
from pipeline.output.folder import Output
from pipeline.output.names import parsed
from pipeline.output.plan import Plan
from pipeline.stats import Progress

SHOWN_ROWS = 5
TITLE_CHARACTERS, ANSWER_CHARACTERS = 40, 100


def print_answers(
    output: Output, plan: Plan, config: JobConfig, done: Progress, seconds: float, truncated: int
) -> None:
    """`done` is what this process answered in `seconds`, `truncated` how many of the run's documents were cut."""
    console = Console(file=sys.stdout, highlight=False)
    kept = [name for name in config.input.keep if name not in plan.partition_by]  # the others are in no part
    title = kept[0] if kept else config.input.id_column
    answer = config.tasks[0].name
    rows = _first_rows(output, plan, [title, answer])
    if rows:
        table = Table(title, answer, box=None, title=None)
        for row in rows:
            shown = shortened(row[title], TITLE_CHARACTERS), shortened(row[answer], ANSWER_CHARACTERS)
            table.add_row(*map(Text, shown))  # as Text, because square brackets would be markup
        console.print(table)
    if done.new_tokens and seconds > 0:
        errors = "an error" if done.error_rows == 1 else "errors"
        console.print(
            f"{counted(done.rows_done, 'row')}, {done.error_rows} with {errors}; "
            f"{done.new_tokens / seconds:.1f} tokens/s, {done.accepted_per_step:.2f} accepted tokens per step",
            soft_wrap=True,
        )
    if truncated:
        documents = "1 document was" if truncated == 1 else f"{truncated} documents were"
        print(f"{documents} cut to fit the model's context (long: truncate)")
    print(opened_with(output, plan))


def opened_with(output: Output, plan: Plan) -> str:
    """What opens the output as a pandas frame."""
    call = "deltalake.DeltaTable({}).to_pandas()" if plan.format == "delta" else "pandas.read_parquet({})"
    return call.format(f'"{output.store.location}"')


def shortened(value: object, characters: int) -> str:
    """One line of at most so many characters."""
    text = "" if value is None else " ".join(str(value).split())
    return text if len(text) <= characters else f"{text[: characters - 1]}…"


def _first_rows(output: Output, plan: Plan, columns: list[str]) -> list[dict[str, object]]:
    parts = [name for name in output.parts() if (part := parsed(name)) is not None and part.run == plan.run]
    parts += [shard.amends.part for shard in plan.shards if shard.amends is not None]
    for name in parts[:1]:
        table: pa.Table = output.part_columns(name, columns)
        rows: list[dict[str, object]] = table.slice(0, SHOWN_ROWS).to_pylist()
        return rows
    return []

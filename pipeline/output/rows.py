"""The rows of a shard while they are being answered: what will be its part. Knows nothing of requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from pipeline.corpus.cleaning import whole
from pipeline.output.plan import Shard
from pipeline.output.schema import task_fields
from pipeline.output.writer import part_table
from pipeline.records import Completion, Document, FinishReason


class ShardRows:
    """Rows in the shard's order; each is complete when every sample of every task has an answer or an error."""

    def __init__(self, shard: Shard, schema: pa.Schema, id_column: str, tasks: Mapping[str, int]) -> None:
        """`tasks`: how many samples each task gives. More than one makes its cells lists of that length."""
        self.shard = shard
        self.schema = schema
        self.id_column = id_column
        self.tasks = dict(tasks)
        self.kept: list[pa.RecordBatch] = []
        self.incomplete = shard.rows
        self.error_rows = 0
        self._columns: dict[str, list[Any]] = {name: [] for name in (id_column, "doc_hash", "error")}
        self._cells = [(f.name, n) for task, n in self.tasks.items() for f in task_fields(task, n)]
        self._columns |= {name: [] for name, _ in self._cells}
        self._unanswered: list[int] = []  # per row

    def add(self, document: Document) -> int:
        """Append a row; returns its number. One that could not be read is complete at once."""
        row = len(self._unanswered)
        self._columns[self.id_column].append(document.id)
        self._columns["doc_hash"].append(document.doc_hash)
        self._columns["error"].append(None if document.error is None else whole(document.error))
        for name, samples in self._cells:
            self._columns[name].append(None if samples == 1 else [None] * samples)
        self._unanswered.append(sum(self.tasks.values()))
        if document.error is not None:
            for task, samples in self.tasks.items():
                for sample in range(samples):
                    self._put(row, task, sample, "_finish", str(FinishReason.ERROR))
                    self._put(row, task, sample, "_tokens", 0)
            self._unanswered[row] = 0
            self._complete(row)
        return row

    def answer(self, row: int, task: str, completion: Completion, sample: int = 0) -> bool:
        """Put an answer in its row; True if that completes the row."""
        if completion.error is not None:
            return self.fail(row, task, completion.error, sample)
        self._put(row, task, sample, "", whole(completion.text))
        self._put(row, task, sample, "_finish", str(completion.finish_reason))
        self._put(row, task, sample, "_tokens", len(completion.token_ids))
        if completion.logprobs is not None:
            self._put(row, task, sample, "_logprob", float(sum(completion.logprobs)))
        return self._answered(row)

    def fail(self, row: int, task: str, reason: str, sample: int = 0) -> bool:
        """Say why a sample of a task has no answer; True if that completes the row."""
        self._put(row, task, sample, "_finish", str(FinishReason.ERROR))
        self._put(row, task, sample, "_tokens", 0)
        self._put(row, task, sample, "_error", whole(reason))
        return self._answered(row)

    def table(self) -> pa.Table:
        assert self.incomplete == 0, f"shard {self.shard.index}: {self.incomplete} rows have no answer"
        return part_table(self.schema, self.kept, self._columns)

    def _put(self, row: int, task: str, sample: int, suffix: str, value: Any) -> None:
        column = self._columns[task + suffix]
        cell, place = (column, row) if self.tasks[task] == 1 else (column[row], sample)
        assert cell[place] is None, f"shard {self.shard.index}, row {row}: {task} is answered twice"
        cell[place] = value

    def _answered(self, row: int) -> bool:
        self._unanswered[row] -= 1
        if self._unanswered[row]:
            return False
        self._complete(row)
        return True

    def _complete(self, row: int) -> None:
        self.incomplete -= 1
        errors = [self._columns["error"][row]]
        for task, samples in self.tasks.items():
            cell = self._columns[f"{task}_error"][row]
            errors += [cell] if samples == 1 else cell
        self.error_rows += any(error is not None for error in errors)

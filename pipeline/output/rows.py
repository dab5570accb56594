"""The rows of a shard while they are being answered: what will be its part. Knows nothing of requests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pyarrow as pa

from pipeline.corpus.cleaning import whole
from pipeline.output.plan import Shard
from pipeline.output.schema import task_fields
from pipeline.output.writer import part_table
from pipeline.records import Completion, Document, FinishReason


class ShardRows:
    """Rows in the shard's order; each is complete when every task has an answer or an error."""

    def __init__(self, shard: Shard, schema: pa.Schema, id_column: str, tasks: Iterable[str]) -> None:
        self.shard = shard
        self.schema = schema
        self.id_column = id_column
        self.tasks = tuple(tasks)
        self.kept: list[pa.RecordBatch] = []
        self.incomplete = shard.rows
        self.error_rows = 0
        names = [id_column, "doc_hash", "error", *(f.name for task in self.tasks for f in task_fields(task))]
        self._columns: dict[str, list[Any]] = {name: [] for name in names}
        self._unanswered: list[int] = []  # per row

    def add(self, document: Document) -> int:
        """Append a row; returns its number. One that could not be read is complete at once."""
        row = len(self._unanswered)
        for column in self._columns.values():
            column.append(None)
        self._columns[self.id_column][row] = document.id
        self._columns["doc_hash"][row] = document.doc_hash
        self._columns["error"][row] = None if document.error is None else whole(document.error)
        self._unanswered.append(len(self.tasks))
        if document.error is not None:
            for task in self.tasks:
                self._put(row, task, "_finish", str(FinishReason.ERROR))
                self._put(row, task, "_tokens", 0)
            self._unanswered[row] = 0
            self._complete(row)
        return row

    def answer(self, row: int, task: str, completion: Completion) -> bool:
        """Put an answer in its row; True if that completes the row."""
        if completion.error is not None:
            return self.fail(row, task, completion.error)
        self._put(row, task, "", whole(completion.text))
        self._put(row, task, "_finish", str(completion.finish_reason))
        self._put(row, task, "_tokens", len(completion.token_ids))
        if completion.logprobs is not None:
            self._put(row, task, "_logprob", float(sum(completion.logprobs)))
        return self._answered(row)

    def fail(self, row: int, task: str, reason: str) -> bool:
        """Say why a task has no answer; True if that completes the row."""
        self._put(row, task, "_finish", str(FinishReason.ERROR))
        self._put(row, task, "_tokens", 0)
        self._put(row, task, "_error", whole(reason))
        return self._answered(row)

    def table(self) -> pa.Table:
        assert self.incomplete == 0, f"shard {self.shard.index}: {self.incomplete} rows have no answer"
        return part_table(self.schema, self.kept, self._columns)

    def _put(self, row: int, task: str, suffix: str, value: Any) -> None:
        column = self._columns[task + suffix]
        assert column[row] is None, f"shard {self.shard.index}, row {row}: {task} is answered twice"
        column[row] = value

    def _answered(self, row: int) -> bool:
        self._unanswered[row] -= 1
        if self._unanswered[row]:
            return False
        self._complete(row)
        return True

    def _complete(self, row: int) -> None:
        self.incomplete -= 1
        errors = ["error", *(f"{task}_error" for task in self.tasks)]
        self.error_rows += any(self._columns[name][row] is not None for name in errors)

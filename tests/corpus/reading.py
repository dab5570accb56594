"""A folder of input files, read whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.config import InputConfig
from pipeline.corpus.listing import list_files
from pipeline.corpus.readers import Corpus
from pipeline.records import Document


def open_corpus(path: Path, fields: tuple[str, ...] = (), **settings: Any) -> Corpus:
    input = InputConfig(**{"path": str(path), "text": "text", **settings})
    return Corpus(input, fields, list_files(input))


def read_corpus(corpus: Corpus, files: int, rows: int = 10**9) -> tuple[list[Document], list[dict[str, Any]]]:
    """Every document and its kept values, in ranges of `rows`; checks that each range gives what it should."""
    documents: list[Document] = []
    kept: list[dict[str, Any]] = []
    for file in range(files):
        index = corpus.count_rows(file)
        for start in range(0, index.rows, rows):
            stop = min(start + rows, index.rows)
            before = len(documents)
            for batch in corpus.read([index.range(file, start, stop)]):
                assert len(batch.documents) == batch.kept.num_rows
                assert batch.kept.schema.equals(corpus.kept_schema)
                documents += batch.documents
                kept += batch.kept.to_pylist()
            assert len(documents) - before == stop - start
    return documents, kept


def read_file(path: Path, content: bytes | None = None, rows: int = 10**9, **settings: Any) -> list[Document]:
    """The documents of one file, written first where content is given."""
    if content is not None:
        path.write_bytes(content)
    fields = settings.pop("fields", ())
    return read_corpus(open_corpus(path, fields, **settings), 1, rows)[0]


def texts(documents: list[Document]) -> list[str]:
    """The texts, with the errors in place of those that have one."""
    return [document.error or document.text for document in documents]

"""Which rows of a changed file the output holds already: multisets of (id, doc_hash), compared in columns."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.corpus.listing import InputFile
from pipeline.corpus.readers import Corpus, RowRange
from pipeline.errors import OutputError
from pipeline.output.coverage import Holding
from pipeline.output.folder import Output
from pipeline.output.plan import Span

REMEDY = "this version answers new documents only: give another output.path, or --fresh to answer all again"
HASH_DIGITS = 32
NAMED = 3  # documents that a message names


def known_rows(
    output: Output, held: Sequence[Holding], corpus: Corpus, rows: RowRange, id_column: str, file: InputFile
) -> list[Span]:
    """The rows of a file that are published; OutputError naming what is published and not in it any more."""
    if not held:
        return []
    published = _published_keys(output, held, id_column)
    current = _current_keys(corpus, rows)
    counted = pc.value_counts(published)
    keys, counts = counted.field("values"), counted.field("counts").to_numpy()
    codes = pc.index_in(current, value_set=keys).fill_null(-1).to_numpy()
    matched = _matched(codes, counts)
    left = counts - np.bincount(codes[matched], minlength=len(counts))
    if left.any():
        _refuse(keys.filter(pa.array(left > 0)), current.filter(pa.array(~matched)), int(left.sum()), file)
    return _spans(matched)


def _matched(codes: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Row by row: is it among the first counts[code] rows with its code? A code of -1 never is."""
    order = np.argsort(codes, kind="stable")
    ordered = codes[order]
    is_first = np.r_[True, ordered[1:] != ordered[:-1]][: len(ordered)]
    starts = np.maximum.accumulate(np.where(is_first, np.arange(len(ordered)), 0))
    matched = np.zeros(len(codes), dtype=bool)
    matched[order] = (ordered >= 0) & (np.arange(len(ordered)) - starts < counts[ordered])
    return matched


def _published_keys(output: Output, held: Sequence[Holding], id_column: str) -> pa.ChunkedArray:
    chunks: list[pa.Array] = []
    for holding in held:
        table = output.part_columns(holding.part, [id_column, "doc_hash"])
        table = table.slice(holding.start, holding.stop - holding.start)
        chunks += _keys(table.column(id_column), table.column("doc_hash")).chunks
    return pa.chunked_array(chunks, type=pa.string())


def _current_keys(corpus: Corpus, rows: RowRange) -> pa.ChunkedArray:
    chunks: list[pa.Array] = []
    for batch in corpus.read([rows]):
        ids = pa.array([document.id for document in batch.documents], type=pa.string())
        hashes = pa.array([document.doc_hash for document in batch.documents], type=pa.string())
        chunks.append(_keys(ids, hashes))
    return pa.chunked_array(chunks, type=pa.string())


def _keys(ids: pa.Array, hashes: pa.Array) -> pa.Array:
    """One string per row: the hash has a fixed length, so that no two rows share one by accident."""
    return pc.binary_join_element_wise(hashes, ids, "")


def _spans(matched: npt.NDArray[np.bool_]) -> list[Span]:
    edges = np.flatnonzero(np.diff(np.r_[False, matched, False]))
    return [(int(start), int(stop)) for start, stop in edges.reshape(-1, 2)]


def _refuse(left: pa.Array, unmatched: pa.Array, count: int, file: InputFile) -> None:
    """OutputError that names some of the documents: changed where their id is still there, else deleted."""
    current = pc.utf8_slice_codeunits(unmatched, start=HASH_DIGITS)
    ids = pc.utf8_slice_codeunits(left, start=HASH_DIGITS)
    still_there = pc.is_in(ids, value_set=pa.array(current.to_pylist(), type=pa.string()))
    first = zip(ids.to_pylist()[:NAMED], still_there.to_pylist()[:NAMED], strict=True)
    named = [f"{identity} ({'changed' if there else 'deleted'})" for identity, there in first]
    more = f" and {count - len(named)} more" if count > len(named) else ""
    raise OutputError(
        f"input: {file.path}: answered documents are not what they were: {', '.join(named)}{more}; {REMEDY}"
    )

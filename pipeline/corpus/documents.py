"""Rows become documents: an id, a cleaned text, the columns that prompts name, a hash, and the kept columns.

Knows nothing of files and formats beyond the name that an id is made of where a row has none.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.types as kinds

from pipeline.corpus.cleaning import clean, whole
from pipeline.corpus.encoding import UTF8
from pipeline.corpus.kept import fit, is_binary, is_textual, plain, plain_value
from pipeline.corpus.rows import Column, Rows
from pipeline.records import Document

EMPTY_TEXT = "text is empty"
_CANONICAL = json.JSONEncoder(sort_keys=True, default=str).encode


@dataclass(frozen=True, slots=True)
class DocumentBatch:
    """Documents and their kept columns, row by row; `kept` has exactly the types of the plan."""

    documents: list[Document]
    kept: pa.RecordBatch


class DocumentBuilder:
    """Makes documents of rows. `id_column` None gives every row the hash of its place.

    `fields` are the columns that prompts name; the text column may be one of them.
    """

    def __init__(self, id_column: str | None, text: str, fields: Sequence[str], kept: pa.Schema) -> None:
        self._id = id_column
        self._text = text
        self._fields = tuple(fields)
        self._kept = kept

    def build(self, rows: Rows, relative: str) -> DocumentBatch:
        """One document per row, in order. `relative` is the file's path below the input root."""
        kept, misfits = self._fit(rows)
        texts, faults = self._texts(rows)
        fields = {name: _as_text(rows.columns.get(name), rows.length) for name in self._fields if name != self._text}
        ids = self._ids(rows, relative)
        values = [plain(column) for column in kept.columns]
        documents = []
        for place in range(rows.length):
            named = {name: column[place] for name, column in fields.items()}
            unfit = self._unfit(rows, place) if place in misfits or place in faults else None
            digest = _hash(texts[place], named, [column[place] for column in values], unfit)
            if place in rows.raw:
                digest = _hash_raw(rows.raw[place])
            error = rows.errors.get(place) or faults.get(place) or "; ".join(misfits.get(place, ()))
            if error:
                documents.append(Document(ids[place], digest, "", {}, error))
                continue
            if self._text in self._fields:
                named[self._text] = texts[place]
            documents.append(Document(ids[place], digest, texts[place], named))
        return DocumentBatch(documents, kept)

    def _fit(self, rows: Rows) -> tuple[pa.RecordBatch, dict[int, list[str]]]:
        columns: list[pa.Array] = []
        misfits: dict[int, list[str]] = {}
        for field in self._kept:
            column = rows.columns.get(field.name)
            if column is None:
                columns.append(pa.nulls(rows.length, field.type))
                continue
            fitted, faults = fit(column, field.type, field.name)
            columns.append(fitted)
            for place, fault in faults.items():
                misfits.setdefault(place, []).append(fault)
        if not columns:  # a batch without columns has a length only if it is made this way
            return pa.RecordBatch.from_struct_array(pa.array([{}] * rows.length, pa.struct([]))), misfits
        return pa.RecordBatch.from_arrays(columns, schema=self._kept), misfits

    def _unfit(self, rows: Rows, place: int) -> list[Any]:
        """The values of a row of which not all can be used, for its hash."""
        names = [self._text, *self._kept.names]
        return [plain_value(rows.columns[name], place) for name in names if name in rows.columns]

    def _texts(self, rows: Rows) -> tuple[list[str], dict[int, str]]:
        """The cleaned texts ("" where there is none), and by row what is wrong with them."""
        column = rows.columns.get(self._text)
        if column is None:
            return [""] * rows.length, dict.fromkeys(range(rows.length), f"there is no column {self._text!r}")
        texts, faults = [], {}
        values = _values(column, UTF8.decode) if _may_be_text(column) else list(column)
        for place, value in enumerate(values):
            text = clean(value) if isinstance(value, str) else ""
            if not text:
                faults[place] = EMPTY_TEXT if _is_absent(value) else _wrong_kind(self._text, value)
            texts.append(text)
        return texts, faults

    def _ids(self, rows: Rows, relative: str) -> list[str]:
        column = rows.columns.get(self._id) if self._id is not None else None
        values = [None] * rows.length if column is None else _values(column, _id_from_bytes)
        return [_id_text(value) or place_id(relative, rows.start + place) for place, value in enumerate(values)]


def place_id(relative: str, row: int) -> str:
    """The id of a row that has none of its own: 32 hex digits over its file and row."""
    return hashlib.blake2b(f"{relative}\0{row}".encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()


def _id_text(value: Any) -> str:
    """An id as a string, exactly; "" if it can't be one. A float that is a whole number is written as one."""
    if isinstance(value, str):
        return whole(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return str(int(value))
    return str(value) if isinstance(value, int | float | Decimal) else ""


def _values(column: Column, decode: Callable[[bytes], str]) -> list[Any]:
    """Python values; times and UUIDs as strings, bytes as `decode` reads them."""
    if isinstance(column, list):
        return column
    if isinstance(column, pa.ExtensionArray):
        return [value if value is None or isinstance(value, str) else str(value) for value in column.to_pylist()]
    if kinds.is_dictionary(column.type):
        return _values(column.dictionary_decode(), decode)
    if kinds.is_temporal(column.type):
        column = column.cast(pa.string())
    if kinds.is_string_view(column.type):
        column = column.cast(pa.large_binary())
    try:
        values = column.to_pylist()
    except UnicodeDecodeError:
        values = column.view(pa.large_binary() if kinds.is_large_string(column.type) else pa.binary()).to_pylist()
    return [decode(value) if isinstance(value, bytes) else value for value in values]


def _id_from_bytes(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.hex()


def _as_text(column: Column | None, length: int) -> list[str]:
    if column is None:
        return [""] * length
    return [_field_text(value) for value in _values(column, UTF8.decode)]


def _field_text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, list | dict):
        return clean(json.dumps(value, ensure_ascii=False, default=str))
    return _id_text(value)


def _may_be_text(column: Column) -> bool:
    if isinstance(column, list):
        return True
    type = column.type.value_type if kinds.is_dictionary(column.type) else column.type
    return is_textual(type) or is_binary(type) or isinstance(column, pa.ExtensionArray)


def _is_absent(value: Any) -> bool:
    return value is None or isinstance(value, str) or (isinstance(value, pa.Scalar) and not value.is_valid)


def _wrong_kind(name: str, value: Any) -> str:
    names = {bool: "true or false", list: "a list", dict: "an object"}
    kind = f"a value of type {value.type}" if isinstance(value, pa.Scalar) else names.get(type(value), "a number")
    return f"column {name!r} holds {kind}, not text"


def _hash(text: str, named: dict[str, str], kept: list[Any], unfit: list[Any] | None) -> str:
    """32 hex digits over what an answer and its row are made of. The text holds no NUL, so the parts can't mix."""
    rest = _CANONICAL([named, kept, unfit])
    return hashlib.blake2b(f"{text}\0{rest}".encode("utf-8", "replace"), digest_size=16).hexdigest()


def _hash_raw(raw: bytes) -> str:
    return hashlib.blake2b(b"\0" + raw, digest_size=16).hexdigest()

"""Types of the kept columns: one for the whole corpus, fixed before any row is read.

`common` joins the types that a column has in two files where no value changes its meaning: wider numbers, finer time
units, missing struct fields. A time without zone beside one with a zone is taken as UTC, so an instant is never lost;
in JSON and CSV times are strings and stay as they are. Otherwise the first file decides, and a value that does not
fit is reported, never bent.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.types as kinds

from pipeline.corpus.cleaning import whole
from pipeline.corpus.plainer import without_extensions, without_views
from pipeline.corpus.rows import Column

_MISFITS = (pa.ArrowException, UnicodeError, OverflowError, TypeError, ValueError)


def infer(values: Sequence[Any]) -> pa.DataType:
    """The type of parsed JSON values; null where there are only nulls."""
    try:
        return pa.array(values).type
    except _MISFITS:
        found = pa.null()
        for value in values:
            found = common(found, _infer_one(value))
        return found


def _infer_one(value: Any) -> pa.DataType:
    try:
        return pa.array([scrub(value)]).type
    except _MISFITS:
        return pa.uint64() if isinstance(value, int) and 0 <= value < 2**64 else pa.null()


def common(first: pa.DataType, second: pa.DataType) -> pa.DataType:
    """The type that holds the values of both, or `first` if there is none."""
    first, second = _values(first), _values(second)
    if first.equals(second) or kinds.is_null(second):
        return first
    if kinds.is_timestamp(first) and kinds.is_timestamp(second):
        return pa.timestamp(_finer(first.unit, second.unit), first.tz or second.tz)
    if is_textual(first) and is_binary(second):
        return first
    fields = [pa.schema([pa.field("kept", type)]) for type in (first, second)]
    try:
        return pa.unify_schemas(fields, promote_options="permissive").field(0).type
    except pa.ArrowException:
        return first


def settled(type: pa.DataType) -> pa.DataType:
    """The type as it is written: dictionaries as their values, views as what they show, text where all was null.

    Of the others there is always a reader that fails: Arrow itself, pandas or polars. Everything may be null, because
    rows that could not be read are.
    """
    type = _values(type)
    if isinstance(type, pa.BaseExtensionType):
        storage = settled(type.storage_type)
        return type if storage.equals(type.storage_type) else storage
    if kinds.is_null(type) or (kinds.is_struct(type) and type.num_fields == 0):
        return pa.string()
    if kinds.is_string_view(type) or kinds.is_binary_view(type):
        return pa.string() if kinds.is_string_view(type) else pa.binary()
    if kinds.is_struct(type):
        return pa.struct([_settled_field(field) for field in type])
    if kinds.is_list(type) or kinds.is_list_view(type):
        return pa.list_(_settled_item(type.value_field))
    if kinds.is_large_list(type) or kinds.is_large_list_view(type):
        return pa.large_list(_settled_item(type.value_field))
    if kinds.is_fixed_size_list(type):
        return pa.list_(_settled_item(type.value_field), type.list_size)
    if kinds.is_map(type):
        return pa.map_(settled(type.key_type), _settled_field(type.item_field), type.keys_sorted)
    return type


def _settled_field(field: pa.Field) -> pa.Field:
    return pa.field(field.name, settled(field.type))


def _settled_item(field: pa.Field) -> pa.Field:
    """What a list holds. pandas reads no lists of bytes of one length, as UUIDs are, nor of short decimals."""
    type = settled(field.type)
    storage = type.storage_type if isinstance(type, pa.BaseExtensionType) else type
    if kinds.is_fixed_size_binary(storage):
        type = pa.binary()
    elif kinds.is_decimal32(storage) or kinds.is_decimal64(storage):
        type = pa.decimal128(storage.precision, storage.scale)
    return pa.field(field.name, type)


def fit(column: Column, type: pa.DataType, name: str) -> tuple[pa.Array, dict[int, str]]:
    """The column in the type of the plan, with null for values that do not fit, and by row why they do not."""
    convert = _fit_array if isinstance(column, pa.Array) else _fit_values
    try:
        return convert(column, type), {}
    except _MISFITS:
        pieces, misfits = [], {}
        for row in range(len(column)):
            try:
                pieces.append(convert(column[row : row + 1], type))
            except _MISFITS:
                pieces.append(pa.nulls(1, type))
                misfits[row] = f"column {name!r}: {_show(plain_value(column, row))} is not a value of type {type}"
        return pa.concat_arrays(pieces), misfits


def scrub(value: Any) -> Any:
    """A parsed JSON value whose strings can be written as UTF-8."""
    if isinstance(value, str):
        return whole(value)
    if isinstance(value, list):
        return [scrub(item) for item in value]
    if isinstance(value, dict):
        return {whole(key): scrub(item) for key, item in value.items()}
    return value


def plain(array: pa.Array) -> list[Any]:
    """The values as JSON knows them, exact and the same for every unit and width: what a hash is made of.

    Times are integers in nanoseconds (dates in days).
    """
    return _plain(without_extensions(without_views(array)))


def _plain(array: pa.Array) -> list[Any]:
    type = array.type
    if kinds.is_dictionary(type):
        return _plain(array.dictionary_decode())
    if kinds.is_map(type):
        entry = pa.struct([type.key_field, type.item_field])
        return _plain(array.cast(pa.list_(entry)))
    if kinds.is_struct(type):
        rows = zip(*(_plain(child) for child in array.flatten()), strict=True) if type.num_fields else ()
        names = [field.name for field in type]
        valid = array.is_valid().to_pylist()
        filled = [dict(zip(names, row, strict=True)) for row in rows] or [{} for _ in valid]
        return [row if ok else None for row, ok in zip(filled, valid, strict=True)]
    if kinds.is_nested(type):
        return _plain_lists(array)
    if kinds.is_temporal(type):
        return _plain_times(array)
    if kinds.is_decimal(type):
        return [None if value is None else str(value.normalize()) for value in array.to_pylist()]
    if is_binary(type):
        return [None if value is None else value.hex() for value in array.to_pylist()]
    try:
        return array.to_pylist()
    except UnicodeDecodeError:  # strings that are none
        return _plain(array.cast(pa.large_binary()))


def plain_value(column: Column, row: int) -> Any:
    """One value as JSON knows it, whether it fits or not."""
    return column[row] if isinstance(column, list) else plain(column[row : row + 1])[0]


def _plain_lists(array: pa.Array) -> list[Any]:
    lists: list[Any] = []
    items, taken = _plain(array.flatten()), 0
    for scalar in array:
        if not scalar.is_valid:
            lists.append(None)
            continue
        lists.append(items[taken : taken + len(scalar)])
        taken += len(scalar)
    return lists


def _plain_times(array: pa.Array) -> list[Any]:
    type = array.type
    if kinds.is_interval(type):
        return [None if value is None else list(value) for value in array.to_pylist()]
    bits = pa.int32() if type.bit_width == 32 else pa.int64()
    factor = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}.get(getattr(type, "unit", "days"), 1)
    if kinds.is_date64(type):
        return [None if value is None else value // 86_400_000 for value in array.view(bits).to_pylist()]
    return [None if value is None else value * factor for value in array.view(bits).to_pylist()]


def _fit_array(array: pa.Array, type: pa.DataType) -> pa.Array:
    if kinds.is_dictionary(array.type):
        array = array.dictionary_decode()
    if isinstance(array, pa.ExtensionArray) and not isinstance(type, pa.BaseExtensionType):
        array = array.storage
    array = without_views(array)
    if not array.type.equals(type):
        if not _convertible(array.type, type):
            raise TypeError(f"{array.type} is not {type}")
        array = array.cast(type)
    array.validate(full=True)
    return array


def _fit_values(values: list[Any], type: pa.DataType) -> pa.Array:
    if all(_holds(type, value) for value in values):
        try:
            return pa.array(values, type)
        except UnicodeEncodeError:
            return pa.array([scrub(value) for value in values], type)
    if kinds.is_temporal(type) and all(value is None or isinstance(value, str) for value in values):
        return pa.array(values, pa.string()).cast(type)
    raise TypeError(f"not {type}")


def _holds(type: pa.DataType, value: Any) -> bool:
    """Whether the type has this kind of value; Arrow itself sees to ranges."""
    if value is None:
        return True
    if is_textual(type):
        return isinstance(value, str)
    if kinds.is_boolean(type):
        return isinstance(value, bool)
    if kinds.is_integer(type) and isinstance(value, float):
        return value.is_integer()  # Arrow would cut off the fraction
    if kinds.is_integer(type) or kinds.is_floating(type):
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kinds.is_decimal(type):
        return isinstance(value, int | Decimal) and not isinstance(value, bool)
    if kinds.is_struct(type):
        fields: Mapping[str, pa.DataType] = {field.name: field.type for field in type}
        return isinstance(value, dict) and all(
            name in fields and _holds(fields[name], item) for name, item in value.items()
        )
    if kinds.is_list(type) or kinds.is_large_list(type):
        return isinstance(value, list) and all(_holds(type.value_type, item) for item in value)
    return False


def _convertible(source: pa.DataType, target: pa.DataType) -> bool:
    """Whether Arrow's checked cast keeps the meaning (a number as text, or text as a number, would not)."""
    for family in (_numeric, kinds.is_temporal, kinds.is_nested):
        if family(source) and family(target):
            return True
    if is_textual(source):
        return kinds.is_temporal(target) or is_textual(target)
    if is_binary(source):
        return is_textual(target) or is_binary(target)
    return kinds.is_null(source)


def _numeric(type: pa.DataType) -> bool:
    return kinds.is_integer(type) or kinds.is_floating(type) or kinds.is_decimal(type)


def is_textual(type: pa.DataType) -> bool:
    """Whether values are strings."""
    return kinds.is_string(type) or kinds.is_large_string(type) or kinds.is_string_view(type)


def is_binary(type: pa.DataType) -> bool:
    """Whether values are bytes."""
    return (
        kinds.is_binary(type)
        or kinds.is_large_binary(type)
        or kinds.is_binary_view(type)
        or kinds.is_fixed_size_binary(type)
    )


def _values(type: pa.DataType) -> pa.DataType:
    return type.value_type if kinds.is_dictionary(type) else type


def _finer(first: str, second: str) -> str:
    return max(first, second, key=("s", "ms", "us", "ns").index)


def _show(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."

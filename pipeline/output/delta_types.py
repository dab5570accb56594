"""Which columns a Delta table can hold, and under which of its types. Knows nothing of tables."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.types as kinds

from pipeline.corpus.kept import is_binary, is_textual
from pipeline.errors import OutputError


def refuse_undeltable(schema: pa.Schema) -> None:
    """OutputError, naming the column, if Delta has no type for what it holds, or no room for its name."""
    seen: dict[str, str] = {}
    for field in schema:
        try:
            declared(field.type)
        except _NoSuchType as error:
            raise OutputError(
                f"output.format: column {field.name!r} is of type {field.type}, and Delta has no {error}; leave it out "
                "of input.keep, convert it in the input, or use output.format: parquet"
            ) from None
        twin = seen.setdefault(field.name.lower(), field.name)
        if twin != field.name:
            raise OutputError(
                f"output.format: columns {twin!r} and {field.name!r} are one name to Delta, which ignores case; leave "
                "one out of input.keep, or use output.format: parquet"
            )


class _NoSuchType(Exception):
    """What Delta does not have."""


def declared(type: pa.DataType) -> pa.DataType:
    """The type that the log gives to a column whose parts hold `type`: one that readers convert without loss.

    A time with a zone is an instant in UTC there; the zone's name stays in the parts.
    """
    if isinstance(type, pa.BaseExtensionType):
        raise _NoSuchType("extension types")
    if kinds.is_dictionary(type):
        return declared(type.value_type)
    if kinds.is_timestamp(type):
        if type.unit == "ns":
            raise _NoSuchType("nanoseconds that all its readers know")
        return pa.timestamp("us", None if type.tz is None else "UTC")
    if kinds.is_decimal(type):
        if type.precision > 38 or type.scale < 0:
            raise _NoSuchType("decimals of more than 38 digits, or of a negative scale")
        return pa.decimal128(type.precision, type.scale)
    if kinds.is_struct(type):
        return pa.struct([field.with_type(declared(field.type)) for field in type])
    if kinds.is_map(type):
        return pa.map_(declared(type.key_type), declared(type.item_type))
    if _is_list(type):
        return pa.list_(declared(type.value_type))
    if kinds.is_unsigned_integer(type):
        raise _NoSuchType("unsigned integers")
    if kinds.is_float16(type):
        raise _NoSuchType("half-precision numbers")
    if kinds.is_date(type):
        return pa.date32()
    if is_textual(type):
        return pa.string()
    if is_binary(type):
        return pa.binary()
    if type in _SAME:
        return type
    raise _NoSuchType("such type")


_SAME = {pa.bool_(), pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.float32(), pa.float64()}


def _is_list(type: pa.DataType) -> bool:
    large = kinds.is_large_list(type) or kinds.is_large_list_view(type)
    return large or kinds.is_list(type) or kinds.is_list_view(type) or kinds.is_fixed_size_list(type)

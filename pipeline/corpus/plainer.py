"""Arrays of simpler types with the same values, where Arrow's own functions fail or give broken arrays (pyarrow 26)."""

from __future__ import annotations

from itertools import accumulate

import pyarrow as pa
import pyarrow.types as kinds


def without_views(array: pa.Array) -> pa.Array:
    """Plain lists instead of views into items, however deep they are; `array` itself if there are none.

    Arrow's cast to plain lists gives arrays that are not valid.
    """
    type = array.type
    if not _has_views(type):
        return array
    if isinstance(array, pa.ExtensionArray):
        return without_views(array.storage)
    missing = array.is_null()
    if kinds.is_struct(type):
        children = [without_views(child) for child in array.flatten()]
        fields = [pa.field(field.name, child.type) for field, child in zip(type, children, strict=True)]
        return pa.StructArray.from_arrays(children, fields=fields, mask=missing)
    if kinds.is_fixed_size_list(type):
        size = type.list_size
        items = without_views(array.values.slice(array.offset * size, len(array) * size))
        return pa.FixedSizeListArray.from_arrays(items, type=pa.list_(items.type, size), mask=missing)
    if kinds.is_map(type):
        keys, items = without_views(array.keys), without_views(array.items)
        plain = pa.map_(keys.type, items.type, type.keys_sorted)
        return pa.MapArray.from_arrays(_copy(array.offsets), keys, items, type=plain, mask=missing)
    items = without_extensions(without_views(array.values))
    if kinds.is_list(type):
        return pa.ListArray.from_arrays(_copy(array.offsets), items, mask=missing)
    if kinds.is_large_list(type):
        return pa.LargeListArray.from_arrays(_copy(array.offsets), items, mask=missing)
    number = array.offsets.type
    sizes = [size or 0 for size in array.value_lengths().to_pylist()]
    ends = pa.array(accumulate(sizes, initial=0), number)
    views, lists = (pa.ListViewArray, pa.ListArray)
    if kinds.is_large_list_view(type):
        views, lists = (pa.LargeListViewArray, pa.LargeListArray)
    ordered = views.from_arrays(_copy(array.offsets), pa.array(sizes, number), items, mask=missing).flatten()
    return lists.from_arrays(ends, ordered, mask=missing)


def without_extensions(array: pa.Array) -> pa.Array:
    """What extension types are made of, however deep they are: Arrow can't take lists of them apart."""
    plain = _storage(array.type)
    return array if plain.equals(array.type) else array.cast(plain)


def _storage(type: pa.DataType) -> pa.DataType:
    if isinstance(type, pa.BaseExtensionType):
        return _storage(type.storage_type)
    if kinds.is_struct(type):
        return pa.struct([_storage_field(field) for field in type])
    if kinds.is_map(type):
        return pa.map_(_storage(type.key_type), _storage_field(type.item_field), type.keys_sorted)
    if kinds.is_list(type):
        return pa.list_(_storage_field(type.value_field))
    if kinds.is_large_list(type):
        return pa.large_list(_storage_field(type.value_field))
    if kinds.is_fixed_size_list(type):
        return pa.list_(_storage_field(type.value_field), type.list_size)
    return type


def _storage_field(field: pa.Field) -> pa.Field:
    return field.with_type(_storage(field.type))


def _has_views(type: pa.DataType) -> bool:
    if isinstance(type, pa.BaseExtensionType):
        return _has_views(type.storage_type)
    if kinds.is_list_view(type) or kinds.is_large_list_view(type):
        return True
    return any(_has_views(type.field(i).type) for i in range(type.num_fields))


def _copy(numbers: pa.Array) -> pa.Array:
    """The same numbers from the beginning of a buffer: offsets of a slice are not taken together with a mask."""
    return pa.array(numbers.to_numpy(), numbers.type)

"""Views and extension types made plain, where Arrow's own functions fail."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from pipeline.corpus.kept import fit, plain, settled
from pipeline.corpus.plainer import without_extensions, without_views

INT, TEXT = pa.int32(), pa.string_view()
PAIR = pa.struct([("a", pa.list_view(INT)), ("b", INT)])
UUIDS = pa.ExtensionArray.from_storage(pa.uuid(), pa.array([b"a" * 16, None, b"b" * 16], pa.binary(16)))
OFFSETS = pa.array([0, 2, 2, 3])
VIEWS: list[tuple[pa.DataType, list[Any]]] = [
    (pa.list_view(INT), [[1, None], None, [], [2]]),
    (pa.large_list_view(TEXT), [["a", None], None, [], ["b"]]),
    (pa.list_view(pa.list_view(INT)), [[[1], None], None, [], [[], [2, 3]]]),
    (pa.list_(pa.list_view(INT)), [[[1], None], None, [], [[2, 3]]]),
    (pa.large_list(pa.list_view(TEXT)), [[["a"], None], None, [], [["b"]]]),
    (pa.list_(pa.list_view(INT), 2), [[[1], None], None, [[], [2]], [[3], [4]]]),
    (PAIR, [{"a": [1], "b": 1}, None, {"a": None, "b": 2}, {"a": [], "b": 3}]),
    (pa.map_(pa.string(), pa.list_view(INT)), [[("a", [1]), ("b", None)], None, [], [("c", [2])]]),
]


@pytest.mark.parametrize(("kind", "values"), VIEWS, ids=str)
@pytest.mark.parametrize("part", [slice(0, 4), slice(1, 4), slice(1, 3), slice(3, 4), slice(2, 2)], ids=str)
def test_views_become_plain_lists_of_the_same_values(kind: pa.DataType, values: list[Any], part: slice) -> None:
    array = without_views(pa.array(values, kind)[part])
    array.validate(full=True)
    assert array.to_pylist() == values[part]
    assert "view" not in str(array.type).replace("string_view", "")


def test_views_out_of_order_and_into_the_same_items_become_plain_lists() -> None:
    items = pa.array([1, 2, 3, 4])
    offsets, sizes = pa.array([2, 0, 1, 0], pa.int32()), pa.array([2, 0, 3, 1], pa.int32())
    views = pa.ListViewArray.from_arrays(offsets, sizes, items)
    assert without_views(views).to_pylist() == [[3, 4], [], [2, 3, 4], [1]]
    assert without_views(views[2:]).to_pylist() == [[2, 3, 4], [1]]


def test_what_has_no_views_and_no_extensions_is_left_alone() -> None:
    array = pa.array([[{"a": 1}]])
    assert without_views(array) is array
    assert without_extensions(array) is array


@pytest.mark.parametrize(
    "array",
    [
        UUIDS,
        pa.StructArray.from_arrays([UUIDS], names=["a"]),
        pa.ListArray.from_arrays(OFFSETS, UUIDS),
        pa.LargeListArray.from_arrays(OFFSETS.cast(pa.int64()), UUIDS),
        pa.FixedSizeListArray.from_arrays(UUIDS, 1),
        pa.ListArray.from_arrays(OFFSETS, pa.StructArray.from_arrays([UUIDS], names=["a"])),
        pa.MapArray.from_arrays(OFFSETS, pa.array(["a", "b", "c"]), UUIDS),
        pa.ListViewArray.from_arrays(pa.array([0, 2, 2], INT), pa.array([2, 0, 1], INT), UUIDS),
    ],
    ids=lambda array: str(array.type),
)
def test_uuids_have_plain_values_however_deep_and_beside_nulls(array: pa.Array) -> None:
    assert repr(plain(array)).count("61" * 16) == 1
    assert plain(pa.nulls(2, array.type)) == [None, None]
    for part in (array, array[1:], pa.nulls(2, array.type)):
        fitted, misfits = fit(part, settled(array.type), "c")
        assert misfits == {}
        assert plain(fitted) == plain(part)
        assert len(pa.concat_arrays([fitted, pa.nulls(1, fitted.type)])) == len(part) + 1

"""One explicit schema that pandas reads well from any file on."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from pipeline.output.schema import output_schema
from tests.stub_engine import job


def test_columns_come_in_the_order_of_the_contract(tmp_path: Path) -> None:
    config = job(tmp_path, input__keep=["source", "when"], tasks=[{"name": "t", "prompt": "{body}"}])
    kept = pa.schema([("source", pa.string()), ("when", pa.timestamp("ns", "+02:00"))])
    assert output_schema(config, kept) == pa.schema(
        [
            ("doc_id", pa.string()),
            ("doc_hash", pa.string()),
            ("source", pa.string()),
            ("when", pa.timestamp("ns", "+02:00")),
            ("t", pa.string()),
            ("t_finish", pa.string()),
            ("t_tokens", pa.int32()),
            ("t_logprob", pa.float64()),
            ("t_error", pa.string()),
            ("error", pa.string()),
        ]
    )


def test_no_column_is_a_dictionary_or_without_a_type(tmp_path: Path) -> None:
    kept = pa.schema(
        [("a", pa.dictionary(pa.int8(), pa.large_string())), ("b", pa.null()), ("c", pa.string_view())]
    )
    schema = output_schema(job(tmp_path, input__keep=["a", "b", "c"]), kept)
    assert [schema.field(name).type for name in "abc"] == [pa.string()] * 3


def test_metadata_of_the_input_is_left_behind(tmp_path: Path) -> None:
    kept = pa.schema([pa.field("a", pa.string(), metadata={"k": "v"})], metadata={"pandas": "{}"})
    schema = output_schema(job(tmp_path, input__keep=["a"]), kept)
    assert schema.metadata is None
    assert schema.field("a").metadata is None

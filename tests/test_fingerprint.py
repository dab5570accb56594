"""What decides an answer is in the fingerprint, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.fingerprint import answer_values, differences, digest, request_key
from tests.stub_engine import job


def values(folder: Path, target: str = "weights", context: int = 128, **changes: Any) -> dict[str, Any]:
    return answer_values(job(folder, **changes), target, context)


def task(**changes: Any) -> list[dict[str, Any]]:
    return [{"name": "summary", "prompt": "Say: {body}", "max_new_tokens": 64, **changes}]


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"target": "other weights"}, "target.model"),
        ({"context": 64}, "decoding.context"),
        ({"seed": 1}, "seed"),
        ({"input__text": "title"}, "input.text"),
        ({"tasks": task(prompt="Tell: {body}")}, "tasks.summary.prompt"),
        ({"tasks": task(system="Be brief.")}, "tasks.summary.system"),
        ({"tasks": task(temperature=0.7)}, "tasks.summary.temperature"),
        ({"tasks": task(top_k=5)}, "tasks.summary.top_k"),
        ({"tasks": task(top_p=0.9)}, "tasks.summary.top_p"),
        ({"tasks": task(max_new_tokens=65)}, "tasks.summary.max_new_tokens"),
        ({"tasks": task(long="error")}, "tasks.summary.long"),
    ],
)
def test_what_decides_an_answer_changes_the_fingerprint(tmp_path: Path, changes: dict[str, Any], key: str) -> None:
    before, after = values(tmp_path), values(tmp_path, **changes)
    assert digest(before) != digest(after)
    assert [line.split(" ")[0] for line in differences(before, after)] == [key]


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "another"},
        {"target": {"model": "moved/elsewhere", "dtype": "float32", "threads": 1}},
        {"draft": {"kind": "ngram"}},
        {"decoding__draft_tokens": 7},
        {"decoding__batch": 2},
        {"decoding__placement": "separate"},
        {"output__rows_per_shard": 9},
        {"max_error_rate": 0.5},
        {"input__limit": 3},
    ],
)
def test_what_only_decides_speed_or_place_does_not(tmp_path: Path, changes: dict[str, Any]) -> None:
    config = job(tmp_path, **changes)
    assert digest(answer_values(config, "weights", 128)) == digest(values(tmp_path))


def test_differences_show_both_values_and_keys_that_only_one_side_has() -> None:
    assert differences({"a": 1, "b": "x" * 90, "c": 0}, {"a": 2, "b": "y", "d": None}) == [
        "a (was 1, is 2)",
        f'b (was "{"x" * 40}…", is "y")',
        "d (was absent, is null)",
        "c (was 0, is absent)",
    ]


def test_long_texts_are_shown_where_they_begin_to_differ() -> None:
    head = "Summarise the article in one sentence.\n\n"
    longer = head + "Be very brief, and do not guess.\n\n{body}"
    (line,) = differences({"p": head + "Be brief.\n\n{body}"}, {"p": longer})
    was, new = line.removeprefix("p (was ").removesuffix(")").split(", is ")
    assert json.loads(was) == "…e sentence.\n\nBe brief.\n\n{body}"
    assert json.loads(new) == "…e sentence.\n\nBe very brief, and do not g…"


@pytest.mark.parametrize("length", range(60))
def test_a_cut_breaks_no_escape_and_leaves_quotes_in_pairs(length: int) -> None:
    (line,) = differences({"p": "\n\"" * 50}, {"p": ("\n\"" * 50)[:length] + "x" * 60})
    was, new = line.removeprefix("p (was ").removesuffix(")").split(", is ")
    assert json.loads(was) != json.loads(new)


def test_a_difference_inside_a_long_value_is_named_by_its_place() -> None:
    stop = ["a long text that ends an answer", "and another one of them"]
    assert differences({"stop": stop}, {"stop": [*stop[:1], "x"]}) == ['stop.1 (was "and another one of them", is "x")']
    assert differences({"s": {"a": stop, "b": 1}}, {"s": {"a": stop}}) == ["s.b (was 1, is absent)"]
    assert differences({"s": stop}, {"s": None}) == ["s (was […], is null)"]


def test_request_keys_tell_apart_all_that_they_are_made_of() -> None:
    keys = {
        request_key("f", "t", [1, 2]),
        request_key("g", "t", [1, 2]),
        request_key("f", "u", [1, 2]),
        request_key("f", "t", [1, 2, 3]),
        request_key("f", "t", [258]),
        request_key("f", "t", [1, 2], sample=1),
    }
    assert len(keys) == 6
    assert request_key("f", "t", [1, 2]) in keys

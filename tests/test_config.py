"""The job file: the contract's keys and defaults, strictness, overrides, and errors that name the key."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline import config as module
from pipeline.config import JobConfig, TaskConfig, json_schema, load_config, parse_config
from pipeline.errors import ConfigError
from pipeline.jobfile import dotted_keys, parse_yaml
from pipeline.records import SamplingParams

ROOT = Path(__file__).resolve().parents[1]

# The job file of DESIGN section 9, as it stands there.
CONTRACT = r"""
name: wire-summaries                  # required
seed: 0
input:
  path: s3://archive/2024/**/*.parquet   # required; or a list
  format: auto                        # auto | parquet | jsonl | json | csv | tsv | text | warc
  id: doc_id                          # absent: a hash of file and row
  text: body                          # required
  keep: [published_at, source]        # default none
  encoding: auto
  where: null                         # a filter expression on columns
  since: null                         # with date_column, a window
  date_column: null
  limit: null
output:
  path: s3://archive-out/summaries    # required
  format: parquet                     # parquet | delta
  partition_by: []
  rows_per_shard: 2000
  single_writer: false
target:
  model: Qwen/Qwen2.5-72B-Instruct    # required; hub id, folder, or .gguf file
  dtype: auto                         # auto | float32 | bfloat16 | float16
  gpus: 0                             # tensor-parallel ranks; 0 = CPU
  accelerator: null                   # H100 …, or
  label_selector: {}                  # {ray.io/accelerator-type: H100}
  replicas: auto
  threads: auto                       # torch threads per CPU worker
draft:                                # absent: none; one, or a list to choose from
  kind: model                         # model | ngram | suffix | none
  model: Qwen/Qwen2.5-0.5B-Instruct
  dtype: auto
  sampling: auto                      # sample | greedy | auto
  support: 64                         # m
  vocabulary: same                    # same | intersect (another tokenizer)
  gpus: 0
  accelerator: null
  label_selector: {}
  replicas: 1
decoding:
  rule: ratio                         # ratio | block | coupled
  draft_tokens: auto                  # or a number
  batch: auto                         # sequences at once per replica
  placement: auto                     # auto | colocated | separate
  placement_timeout: 300              # seconds
  context: auto                       # slot capacity in tokens
  step_timeout: 120                   # seconds
tasks:
  - name: summary                     # required, an identifier
    prompt: "Summarise the article in two sentences.\n\n{body}"    # required
    system: null
    max_new_tokens: 128
    temperature: 0.0                  # also top_k, top_p, min_p, repetition_penalty, presence_penalty,
                                      # frequency_penalty, logit_bias, bad_words, min_new_tokens, stop, n, logprobs
    long: truncate                    # truncate | chunk | map_reduce | error
    schema: null                      # or choices: […], regex, grammar
max_error_rate: 0.01
audit: false
"""

# Only what is required, in one line per section.
SMALL = r"""
name: small
input: {path: stories, text: body}
output: {path: out}
target: {model: org/model}
tasks:
  - {name: summary, prompt: "Summarise.\n\n{body}"}
"""

REQUIRED = {"name", "input.path", "input.text", "output.path", "target.model", "tasks.name", "tasks.prompt"}
GIVEN = {"input.id", "input.keep", "draft.model"}  # shown with an example value; they default to none
ADDED_KEYS = {  # beside the contract
    "output.compression", "retry_failed", "hooks.on_success", "hooks.on_failure", "hooks.webhook", "hooks.timeout",
}  # fmt: skip
MORE_TASK_KEYS = {
    "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "bad_words",
    "min_new_tokens", "stop", "n", "logprobs", "choices", "regex", "grammar",
}  # fmt: skip


def mapping(text: str = SMALL) -> dict[str, Any]:
    return parse_yaml(text)  # type: ignore[no-any-return]


def with_value(key: str, value: Any, text: str = SMALL) -> dict[str, Any]:
    """The small job file with one dotted key set."""
    result = mapping(text)
    at: Any = result
    *sections, last = key.split(".")
    for section in sections:
        at = at[int(section)] if isinstance(at, list) else at.setdefault(section, {})
    at[last] = value
    return result


def problem(given: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config(given, "job.yaml")
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith("job.yaml: ")
    return message.removeprefix("job.yaml: ")


def flat(value: Any, above: str = "") -> dict[str, Any]:
    """Dotted key → value, without the numbers of list entries; {} and scalars are values."""
    if isinstance(value, dict) and value:
        return {k: v for key, below in value.items() for k, v in flat(below, f"{above}{key}.").items()}
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return flat(value[0], above)
    return {above.removesuffix("."): value}


def dumped(config: JobConfig) -> dict[str, Any]:
    return flat(config.model_dump(mode="json", by_alias=True))


class TestContract:
    def test_the_contract_job_file_is_valid(self) -> None:
        config = JobConfig.model_validate(mapping(CONTRACT))
        assert config.name == "wire-summaries"
        assert config.input.keep == ("published_at", "source")
        assert config.draft[0].model == "Qwen/Qwen2.5-0.5B-Instruct"
        assert config.tasks[0].prompt == "Summarise the article in two sentences.\n\n{body}"

    def test_every_default_is_the_contracts(self) -> None:
        lines = SMALL + "draft: {kind: ngram}\n"
        defaults = dumped(JobConfig.model_validate(mapping(lines)))
        for key, value in flat(mapping(CONTRACT)).items():
            if key not in REQUIRED | GIVEN | {"draft.kind"}:
                assert defaults[key] == value, key
                assert type(defaults[key]) in (type(value), float), key

    def test_there_are_no_other_keys(self) -> None:
        expected = set(flat(mapping(CONTRACT))) | {f"tasks.{key}" for key in MORE_TASK_KEYS} | ADDED_KEYS
        sections = {"input", "output", "target", "draft", "decoding", "tasks", "hooks"}
        assert set(dotted_keys(JobConfig)) - sections == expected

    def test_required_keys_are_required(self) -> None:
        for key in sorted(REQUIRED):
            numbered = key.replace("tasks.", "tasks.0.")
            given = mapping()
            at: Any = given
            *sections, last = numbered.split(".")
            for section in sections:
                at = at[int(section)] if isinstance(at, list) else at[section]
            del at[last]
            assert problem(given) == f"{numbered}: this key is required"

    def test_a_draft_is_of_kind_model_unless_it_says_otherwise(self) -> None:
        assert parse_config(with_value("draft", {"model": "org/tiny"}), "x").draft[0].kind == "model"

    def test_parts_are_compressed_with_zstd_unless_the_job_says_otherwise(self) -> None:
        assert parse_config(mapping(), "x").output.compression == "zstd"
        for compression in ("snappy", "gzip", "lz4", "none"):
            assert parse_config(with_value("output.compression", compression), "x").output.compression == compression

    def test_every_key_says_what_it_is_for(self) -> None:
        def undescribed(schema: Any) -> list[str]:
            return [
                name
                for part in (schema, *schema["$defs"].values())
                for name, field in part.get("properties", {}).items()
                if len(field.get("description", "")) < 10
            ]

        assert undescribed(json_schema()) == []

    def test_defaults_of_a_task_are_those_of_sampling_params(self) -> None:
        params = parse_config(mapping(), "x").tasks[0].sampling()
        assert params == SamplingParams(max_new_tokens=128)

    def test_sampling_carries_every_decoding_key_of_a_task(self) -> None:
        given = {
            "max_new_tokens": 9, "temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.1,
            "presence_penalty": 0.2, "frequency_penalty": 0.3, "logit_bias": {5: -1.0}, "stop": ("x",), "n": 2,
            "logprobs": "raw", "bad_words": ("y",), "min_new_tokens": 4,
        }  # fmt: skip
        params = TaskConfig(name="t", prompt="p", **given).sampling()  # type: ignore[arg-type]
        assert dataclasses.asdict(params) == given | {"ignore_eos": False, "top_logprobs": 0}

    def test_the_json_schema_knows_aliases_and_the_three_forms_of_a_draft(self) -> None:
        schema = json_schema()
        assert "schema" in schema["$defs"]["TaskConfig"]["properties"]
        assert {"array", "null"} <= {form.get("type") for form in schema["properties"]["draft"]["anyOf"]}
        assert schema["additionalProperties"] is False
        assert json.loads(json.dumps(schema)) == schema


class TestModels:
    def test_a_config_is_frozen_and_pickles(self) -> None:
        config = parse_config(mapping(), "x")
        with pytest.raises(ValueError, match="frozen"):
            config.seed = 1
        assert pickle.loads(pickle.dumps(config)) == config

    def test_a_dumped_config_parses_to_the_same(self) -> None:
        config = parse_config(mapping(SMALL + "draft: {kind: ngram}\n"), "x")
        assert parse_config(config.model_dump(mode="json", by_alias=True), "x") == config

    @pytest.mark.parametrize(
        ("draft", "kinds"),
        [
            (None, ()),
            ([], ()),
            ({"kind": "ngram"}, ("ngram",)),
            ([{"kind": "none"}], ("none",)),
            ([{"kind": "ngram"}, {"kind": "model", "model": "m"}], ("ngram", "model")),
        ],
    )
    def test_a_draft_is_absent_one_or_a_list(self, draft: Any, kinds: tuple[str, ...]) -> None:
        config = JobConfig.model_validate(with_value("draft", draft))
        assert tuple(d.kind for d in config.draft) == kinds
        assert JobConfig.model_validate(mapping()).draft == ()

    def test_input_paths_is_a_tuple_either_way(self) -> None:
        assert parse_config(with_value("input.path", "/a"), "x").input.paths == ("/a",)
        assert parse_config(with_value("input.path", ["/a", "/b"]), "x").input.paths == ("/a", "/b")

    def test_string_keys_of_logit_bias_are_token_ids(self) -> None:
        task = TaskConfig.model_validate({"name": "t", "prompt": "p", "logit_bias": {"15": -100, 7: 0.5}})
        assert task.logit_bias == {15: -100.0, 7: 0.5}

    def test_the_answer_schema_stays_as_it_is_written(self) -> None:
        schema = {"type": "object", "enum": [1, [2, None]], "x": {"y": 1.5}}
        task = TaskConfig.model_validate({"name": "t", "prompt": "p", "schema": schema})
        assert task.answer_schema == schema

    def test_importing_loads_neither_torch_nor_ray(self) -> None:
        heavy = {"torch", "ray", "transformers", "pyarrow"}
        code = f"import sys, pipeline.config; print(sorted({heavy!r} & set(sys.modules)))"
        out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
        assert out.stdout.strip() == "[]"


class TestStrictness:
    @pytest.mark.parametrize(
        ("key", "value", "expected"),
        [
            ("seed", "5", "must be a whole number, not '5'"),
            ("seed", 1.0, "must be a whole number, not 1.0"),
            ("seed", True, "must be a whole number, not true"),
            ("seed", None, "must be a whole number, not null"),
            ("seed", -1, "must be at least 0, not -1"),
            ("name", 2024, "must be a string, not 2024"),
            ("name", "", "must be a string that is not empty, not ''"),
            ("input", 3, "must be a mapping, not 3"),
            ("input.text", 7, "must be a string, not 7"),
            ("input.keep", "a", "must be a list, not 'a'"),
            ("input.keep", ["a", "b", "a"], "'a' is listed twice"),
            ("input.path", 3, "must be a string or a list, not 3"),
            ("input.limit", 0, "must be at least 1, not 0"),
            ("input.encoding", "utf-9", "unknown encoding 'utf-9'; use auto, utf-8, cp1252, …"),
            ("output.rows_per_shard", 0, "must be at least 1, not 0"),
            ("output.single_writer", "no", "must be true or false, not 'no'"),
            ("output.compression", "zst", "did you mean zstd?"),
            ("output.compression", None, "must be"),
            ("target.gpus", -1, "must be at least 0, not -1"),
            ("target.dtype", "float23", "did you mean float32?"),
            ("target.replicas", 0, "must be auto or at least 1, not 0"),
            ("target.replicas", "many", "must be auto or a whole number, not 'many'"),
            ("target.label_selector", {"zone": 3}, "must be a string, not 3"),
            ("decoding.draft_tokens", -1, "must be auto or at least 0, not -1"),
            ("decoding.placement_timeout", 0, "must be more than 0, not 0"),
            ("decoding.rule", "Ratio", "did you mean ratio?"),
            ("tasks", [], "must be a list that is not empty, not a list"),
            ("tasks.0.max_new_tokens", 0, "must be at least 1, not 0"),
            ("tasks.0.temperature", -0.1, "must be at least 0, not -0.1"),
            ("tasks.0.temperature", float("nan"), "must be a finite number, not nan"),
            ("tasks.0.temperature", float("inf"), "must be a finite number, not inf"),
            ("tasks.0.top_k", -1, "must be at least 0, not -1"),
            ("tasks.0.top_p", 0, "must be more than 0, not 0"),
            ("tasks.0.top_p", 1.1, "must be at most 1, not 1.1"),
            ("tasks.0.stop", "\n", "must be a list, not '\\n'"),
            ("tasks.0.name", "two words", "'two words' is not an identifier"),
            ("tasks.0.name", "1st", "'1st' is not an identifier"),
            ("max_error_rate", 1.5, "must be at most 1, not 1.5"),
        ],
    )
    def test_a_value_of_the_wrong_kind_is_named(self, key: str, value: Any, expected: str) -> None:
        message = problem(with_value(key, value))
        assert message.startswith(key)
        assert expected in message

    @pytest.mark.parametrize(
        ("key", "expected"),
        [
            ("decoding.draft_tokns", "decoding.draft_tokns: unknown key; did you mean draft_tokens?"),
            ("tasks.0.promt", "tasks.0.promt: unknown key; did you mean prompt?"),
            ("ouput", "ouput: unknown key; did you mean output?"),
            ("temperature", "temperature: unknown key; did you mean tasks.temperature?"),
            (
                "output.xyz",
                "output.xyz: unknown key; valid here: path, format, partition_by, rows_per_shard, ",
            ),
            ("tasks.0.answer_schema", "tasks.0.answer_schema: unknown key; did you mean schema?"),
        ],
    )
    def test_an_unknown_key_comes_with_the_nearest_valid_one(self, key: str, expected: str) -> None:
        assert problem(with_value(key, 1)).startswith(expected)

    def test_an_unknown_key_is_named_before_the_key_that_it_should_have_been(self) -> None:
        given = mapping()
        given["tasks"][0]["promt"] = given["tasks"][0].pop("prompt")
        assert problem(given) == "tasks.0.promt: unknown key; did you mean prompt?"

    def test_a_key_that_is_a_number_is_unknown(self) -> None:
        assert problem(mapping() | {5: 1}).startswith("5: unknown key")  # type: ignore[dict-item]

    def test_an_error_in_a_lone_draft_has_no_index_and_one_in_a_list_has(self) -> None:
        assert problem(with_value("draft", {"kind": "ngam"})).startswith("draft.kind: ")
        assert problem(with_value("draft", [{"kind": "ngam"}])).startswith("draft.0.kind: ")
        assert problem(with_value("draft", {})).startswith("draft.model: this key is required")
        assert problem(with_value("draft", [{}])).startswith("draft.0.model: this key is required")
        assert problem(with_value("draft", {"kind": "suffix"})).startswith("draft.kind: ")

    def test_the_entry_of_a_list_that_is_wrong_is_numbered(self) -> None:
        assert problem(with_value("input.path", ["a", 3])) == "input.path.1: must be a string, not 3"

    def test_a_long_value_stays_short_in_the_message(self) -> None:
        assert len(problem(with_value("seed", "x\n" * 500))) < 150


class TestKeysThatDependOnOthers:
    @pytest.mark.parametrize(
        "column", ["id", "doc_hash", "error", "summary", "summary_finish", "summary_tokens", "summary_logprob",
                   "summary_error", "summary_raw"],
    )  # fmt: skip
    def test_a_kept_column_may_not_have_a_name_that_nightdesk_writes(self, column: str) -> None:
        assert problem(with_value("input.keep", ["ok", column])).startswith(f"input.keep: column '{column}'")
        assert problem(with_value("output.partition_by", [column])).startswith("output.partition_by: ")

    def test_the_id_column_takes_its_own_name_and_frees_the_usual_one(self) -> None:
        given = with_value("input.id", "doc_id")
        given["input"]["keep"] = ["id"]
        assert parse_config(given, "x").input.id_column == "doc_id"
        given["input"]["keep"] = ["doc_id"]
        assert "input.keep" in problem(given)

    @pytest.mark.parametrize("column", ["doc_hash", "error"])
    def test_the_id_may_not_be_called_like_a_column_of_nightdesk(self, column: str) -> None:
        assert problem(with_value("input.id", column)).startswith("input.id: ")

    @pytest.mark.parametrize("name", ["summary", "summary_error", "error", "doc_hash", "id"])
    def test_task_names_do_not_clash_with_anything_written(self, name: str) -> None:
        given = mapping()
        given["tasks"].append({"name": name, "prompt": "{body}"})
        assert problem(given).startswith("tasks.1.name: its column ")

    def test_a_task_whose_suffix_meets_an_earlier_task_clashes_too(self) -> None:
        given = mapping()
        given["tasks"].insert(0, {"name": "summary_raw", "prompt": "{body}"})
        assert problem(given).startswith("tasks.1.name: its column 'summary_raw' is taken by the task")

    @pytest.mark.parametrize(
        ("key", "more", "blamed"),
        [
            ("input.since", {"since": "2024-01-01"}, "input.since"),
            (
                "target.label_selector",
                {"accelerator": "H100", "label_selector": {"a": "b"}},
                "target.label_selector",
            ),
            ("tasks.0.min_new_tokens", {"min_new_tokens": 129}, "tasks.0.min_new_tokens"),
            ("tasks.0.choices", {"schema": {}, "choices": ["a"]}, "tasks.0.choices"),
            ("tasks.0.n", {"n": 2, "long": "chunk"}, "tasks.0.n"),
        ],
    )
    def test_keys_that_disagree_are_named(self, key: str, more: dict[str, Any], blamed: str) -> None:
        given = mapping()
        at: Any = given
        for section in key.split(".")[:-1]:
            at = at[int(section)] if isinstance(at, list) else at[section]
        at.update(more)
        assert problem(given).startswith(f"{blamed}: ")


class TestPrompts:
    @pytest.mark.parametrize(
        "template", ["no field", "{body}", "{{literal}} {body}", "{{}} {body}", "{body} {title} {body}", "{größe}",
                     "{two words}"],
    )  # fmt: skip
    def test_fields_are_column_names_in_braces(self, template: str) -> None:
        assert parse_config(with_value("tasks.0.prompt", template), "x").tasks[0].prompt == template

    @pytest.mark.parametrize("template", ["{", "}", "{body", "a } b", "{}", "{a{b}}"])
    @pytest.mark.parametrize("key", ["tasks.0.prompt", "tasks.0.system"])
    def test_a_brace_that_belongs_to_nothing_is_refused(self, key: str, template: str) -> None:
        assert problem(with_value(key, template)).startswith(f"{key}: ")


class TestStorage:
    def test_urls_have_one_spelling_and_local_paths_are_absolute(self) -> None:
        given = with_value("input.path", ["s3a://bucket/a/*.csv", "s3://b/c@d", "e"])
        given["output"]["path"] = "s3a://bucket/out"
        config = parse_config(given, "x")
        assert config.input.paths == ("s3://bucket/a/*.csv", "s3://b/c@d", os.path.abspath("e"))
        assert config.output.path == "s3://bucket/out"

    @pytest.mark.parametrize("key", ["input.path", "output.path"])
    @pytest.mark.parametrize("url", ["s3://AKIA:se/cret@bucket/x", "s3://cret@bucket", "gs://:cret@b/x"])
    def test_credentials_in_a_url_are_refused_and_not_told(self, key: str, url: str) -> None:
        for value in (url, [url]) if key == "input.path" else (url,):
            message = problem(with_value(key, value))
            assert message.startswith(key)
            assert "in the environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY)" in message
            assert "cret" not in message

    @pytest.mark.parametrize(
        ("url", "expected"),
        [
            ("ftp://host/x", "use a local path or s3://"),
            ("memory://x", "use a local path or s3://"),
            ("simplecache::s3://bucket/x", "use a local path or s3://"),
            ("az://box/x", "pip install adlfs"),
            ("s3://", "names no bucket"),
        ],
    )
    def test_what_cannot_be_reached_is_refused_with_what_can(self, url: str, expected: str) -> None:
        for key in ("input.path", "output.path"):
            message = problem(with_value(key, url))
            assert message.startswith(key)
            assert expected in message


WITHHELD = [
    ("input.format", "warc", "WARC"),
    ("input.encoding", "cp1252", "use auto or utf-8"),
    ("input.where", "source == 'wire'", "row filters"),
    ("input.date_column", "day", "date windows"),
    ("draft", [{"kind": "ngram"}, {"kind": "none"}], "keep one"),
    ("draft.kind", "suffix", "use model, ngram or none"),
    ("tasks.0.long", "chunk", "use truncate or error"),
    ("tasks.0.long", "map_reduce", "use truncate or error"),
    ("tasks.0.schema", {"type": "object"}, "typed answers"),
    ("tasks.0.choices", ["a", "b"], "typed answers"),
    ("tasks.0.regex", "a+", "typed answers"),
    ("tasks.0.grammar", "root ::= 'a'", "typed answers"),
]  # fmt: skip


class TestKeysWithoutTheirFeature:
    @pytest.mark.parametrize(("key", "value", "expected"), WITHHELD)
    def test_they_are_refused_by_name_but_valid_in_the_model(self, key: str, value: Any, expected: str) -> None:
        given = with_value(key, value)
        JobConfig.model_validate(given)
        message = problem(given)
        assert message.startswith(key)
        assert "not available in this version" in message
        assert expected in message

    def test_the_message_of_the_contract(self) -> None:
        message = problem(with_value("tasks.0.regex", "a+"))
        assert message == "tasks.0.regex: typed answers are not available in this version; remove the key"

    def test_a_window_is_refused_too(self) -> None:
        given = with_value("input.date_column", "day")
        given["input"]["since"] = "2024-01-01"
        assert problem(given).startswith("input.since: date windows are not available")

    def test_every_row_of_the_table_is_tried_here(self) -> None:
        tried = {key.replace(".0.", ".*.").replace("draft.", "draft.*.") for key, _, _ in WITHHELD}
        tried |= {f"draft.*.{name}" for key, value, _ in WITHHELD if key == "draft" for name in dict(_entries(value))}
        assert {row.key for row in module.WITHHELD} <= tried | {"input.since"}

    def test_their_defaults_may_be_written_out(self) -> None:
        given = mapping(CONTRACT)
        given["input"]["path"] = given["output"]["path"] = "/somewhere"
        assert parse_config(given, "job.yaml").tasks[0].name == "summary"

    @pytest.mark.parametrize(
        ("key", "value"),
        [("input.path", "s3://bucket/in/*.jsonl"), ("output.path", "s3://bucket/out"), ("output.single_writer", True),
         ("input.encoding", "UTF8"),
         ("target.gpus", 1), ("target.replicas", 2), ("decoding.placement", "separate"),
         ("tasks.0.top_p", 0.8), ("tasks.0.top_k", 5), ("tasks.0.temperature", 1), ("tasks.0.long", "error"),
         ("draft", {"model": "m", "sampling": "greedy"}), ("draft", {"model": "m", "sampling": "sample"}),
         ("draft", {"model": "m", "accelerator": "T4"}), ("draft", {"model": "m", "label_selector": {"a": "!b"}}),
         ("target.accelerator", "H100"), ("target.label_selector", {"ray.io/accelerator-type": "in(H100,H200)"}),
         ("draft", {"model": "m", "replicas": 3}),
         ("draft", {"kind": "none"}), ("decoding.draft_tokens", 7), ("seed", 2**64 - 1), ("input.limit", 3)],
    )  # fmt: skip
    def test_what_is_there_is_accepted(self, key: str, value: Any) -> None:
        parse_config(with_value(key, value), "x")


def _entries(draft: Any) -> list[tuple[str, Any]]:
    return list(draft.items()) if isinstance(draft, dict) else []


class TestFile:
    def write(self, folder: Path, text: str | bytes) -> Path:
        path = folder / "job.yaml"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return path

    def error(self, path: Path, *overrides: str) -> str:
        with pytest.raises(ConfigError) as caught:
            load_config(path, overrides)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    def test_numbers_are_those_of_yaml_1_2_and_dates_are_strings(self, tmp_path: Path) -> None:
        text = SMALL.replace("name: small", "name: 2024-05-01\nmax_error_rate: 1e-5")
        text = text.replace("stories", "2024-05-01T10:00:00Z")
        config = load_config(self.write(tmp_path, text))
        assert config.max_error_rate == 1e-5
        assert config.name == "2024-05-01"
        assert config.input.paths[0].endswith("/2024-05-01T10:00:00Z")

    def test_yes_and_no_are_words(self, tmp_path: Path) -> None:
        assert load_config(self.write(tmp_path, SMALL.replace("name: small", "name: no"))).name == "no"

    def test_a_byte_order_mark_is_ignored(self, tmp_path: Path) -> None:
        assert load_config(self.write(tmp_path, "\ufeff" + SMALL)).name == "small"

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("", "the job file is empty"),
            ("# only a comment\n", "the job file is empty"),
            ("- a\n- b\n", "must be a mapping of keys, not a list"),
            ("just words", "must be a mapping of keys, not 'just words'"),
            (SMALL + "name: again\n", 'line 8: found duplicate key "name"'),
            (SMALL.replace("text: body", "text: body, text: b"), 'found duplicate key "text"'),
            ("name: [1\n", "line 2: "),
            ("name: a\n---\nname: b\n", "but found another document"),
            ("name: !!python/object:os.system x", "line 1: could not determine a constructor"),
            (b"name: \xff\xfe", "not UTF-8 (byte 6)"),
            (b"name: \x00", "not YAML: unacceptable character"),
        ],
    )
    def test_a_file_that_is_no_job_file_is_one_line(self, tmp_path: Path, text: str | bytes, expected: str) -> None:
        path = self.write(tmp_path, text)
        message = self.error(path)
        assert message.startswith(f"{path}: ")
        assert expected in message

    def test_a_missing_file_and_a_folder_are_named(self, tmp_path: Path) -> None:
        assert self.error(tmp_path / "no.yaml").endswith("cannot read the job file: No such file or directory")
        assert "cannot read the job file" in self.error(tmp_path)

    def test_the_file_is_named_with_the_key(self, tmp_path: Path) -> None:
        path = self.write(tmp_path, SMALL + "decoding: {draft_tokns: 4}\n")
        assert self.error(path) == f"{path}: decoding.draft_tokns: unknown key; did you mean draft_tokens?"

    def test_local_paths_become_absolute_and_hub_ids_stay(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "there").mkdir()
        here = os.getcwd()
        path = self.write(tmp_path, SMALL)

        def model(name: str) -> str:
            return load_config(path, [f"target.model={name}", "draft.kind=model", f"draft.model={name}"]).target.model

        assert load_config(path).input.path == f"{here}/stories"
        assert load_config(path).output.path == f"{here}/out"
        assert load_config(path, ["input.path=[a/**/*.parquet, /b]"]).input.path == (
            f"{here}/a/**/*.parquet",
            "/b",
        )
        assert load_config(path, ["output.path=file:///x/y"]).output.path == "/x/y"
        assert model("org/model") == "org/model"
        assert model("there") == f"{here}/there"
        assert model("./not-yet") == f"{here}/not-yet"
        assert model("x/weights.gguf") == f"{here}/x/weights.gguf"
        draft = load_config(path, ["draft.model=./d"]).draft[0]
        assert draft.model == f"{here}/d"


class TestOverrides:
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        path = tmp_path / "job.yaml"
        path.write_text(SMALL)
        return path

    def error(self, path: Path, *overrides: str) -> str:
        with pytest.raises(ConfigError) as caught:
            load_config(path, overrides)
        return str(caught.value)

    def test_values_are_yaml(self, path: Path) -> None:
        config = load_config(path, ["seed=7", "max_error_rate=1e-5", "input.keep=[a, b]", "decoding.draft_tokens=3"])
        assert (config.seed, config.max_error_rate, config.input.keep) == (7, 1e-5, ("a", "b"))
        assert config.decoding.draft_tokens == 3

    def test_later_overrides_win_and_sections_are_made(self, path: Path) -> None:
        config = load_config(path, ["draft.kind=ngram", "draft.support=8", "draft.support=9"])
        assert (config.draft[0].kind, config.draft[0].support) == ("ngram", 9)

    def test_entries_of_a_list_are_numbered(self, path: Path) -> None:
        assert load_config(path, ["tasks.0.max_new_tokens=5"]).tasks[0].max_new_tokens == 5

    @pytest.mark.parametrize(
        "text", ["{body} in: three # words", "[{body}]", "2024", "a=b", "- {body}", "null hypothesis: {body}"]
    )
    def test_a_text_key_takes_what_is_written(self, path: Path, text: str) -> None:
        assert load_config(path, [f"tasks.0.prompt={text}"]).tasks[0].prompt == text

    def test_quotes_around_a_text_are_yamls(self, path: Path) -> None:
        assert load_config(path, ['tasks.0.prompt="a\\n{body}"']).tasks[0].prompt == "a\n{body}"

    @pytest.mark.parametrize("nothing", ["null", "~", ""])
    def test_null_takes_an_optional_text_away(self, path: Path, nothing: str) -> None:
        assert load_config(path, ["tasks.0.system=x", f"tasks.0.system={nothing}"]).tasks[0].system is None
        assert load_config(path, ["draft.kind=ngram", f"draft={nothing}"]).draft == ()

    @pytest.mark.parametrize(
        ("assignment", "expected"),
        [
            (
                "decoding.draft_tokns=4",
                "--set: decoding.draft_tokns: unknown key; did you mean draft_tokens?",
            ),
            ("decodng.batch=4", "--set: decodng: unknown key; did you mean decoding?"),
            ("tasks.0.regex=a+", "--set: tasks.0.regex: typed answers are not available"),
            ("seed=x", "--set: seed: must be a whole number, not 'x'"),
            ("seed", "--set: seed: write key=value"),
            ("=4", "--set: =4: write key=value"),
            ("a..b=4", "--set: a..b=4: write key=value"),
            ("tasks.1.n=1", "--set: tasks.1: tasks is a list of 1"),
            ("tasks.summary.n=1", "--set: tasks.summary: tasks is a list of 1"),
            ("name.first=x", "--set: name.first: name is not a section but 'small'"),
            ("seed=[1", "--set: seed: line 1: "),
            ("input={path: a, path: b}", '--set: input: line 1: found duplicate key "path"'),
        ],
    )
    def test_a_wrong_override_is_one_line_that_says_so(self, path: Path, assignment: str, expected: str) -> None:
        message = self.error(path, assignment)
        assert message.startswith(expected)
        assert "\n" not in message

    def test_an_error_elsewhere_is_still_the_files(self, path: Path) -> None:
        path.write_text(SMALL.replace("text: body", "text: 3"))
        assert self.error(path, "seed=1").startswith(f"{path}: input.text: ")


@pytest.mark.parametrize("key", [None, 1.5, True])
def test_a_key_that_is_no_string_is_an_unknown_key(key: Any) -> None:
    assert "unknown key" in problem({**mapping(), key: 1})


def test_a_job_file_that_is_nested_without_end_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("name: " + "[" * 2000)
    with pytest.raises(ConfigError, match="nested too deeply"):
        load_config(path)


@pytest.mark.parametrize("key", ["input.path", "output.path"])
def test_a_path_with_nul_is_refused(key: str) -> None:
    assert "NUL" in problem(with_value(key, "a\0b"))

"""The job file: what a run is told, as frozen and strict models (DESIGN section 9, contract).

Every key is here with its type, default, unit and reason. A key that this version cannot honour yet is
refused by name (`WITHHELD`), never ignored. Knows nothing of models, corpora or Ray beyond their names.
"""

from __future__ import annotations

import codecs
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    ValidationError,
    field_validator,
    model_validator,
)

from pipeline.errors import ConfigError
from pipeline.jobfile import Misplaced, explain, field_at, override, read_mapping, short
from pipeline.prompts.templates import template_fields
from pipeline.records import SamplingParams
from pipeline.remote.urls import canonical, is_remote, problem


def _without_nul(path: str) -> str:
    if "\0" in path:
        raise ValueError(f"{short(path)} holds a NUL character, which no path can")
    return path


def _reachable(path: str) -> str:
    wrong = problem(path) if is_remote(path) else None
    if wrong is not None:
        raise ValueError(wrong)
    return path


Auto = Literal["auto"]
Text = Annotated[str, Field(min_length=1)]
Path = Annotated[Text, AfterValidator(_without_nul), AfterValidator(_reachable)]
Count = Annotated[int, Field(ge=1)]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Compression = Literal["zstd", "snappy", "gzip", "lz4", "none"]

ROW_COLUMNS = ("doc_hash", "error")
TASK_SUFFIXES = ("", "_finish", "_tokens", "_logprob", "_error", "_raw")


class Section(BaseModel):
    """A mapping of the job file: frozen, no unknown keys, no conversion of types (a YAML list is a tuple)."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _lists_are_tuples(cls, data: Any) -> Any:
        return {key: _as_tuple(value) for key, value in data.items()} if isinstance(data, Mapping) else data


def _as_tuple(value: Any) -> Any:
    return tuple(_as_tuple(entry) for entry in value) if isinstance(value, list) else value


class InputConfig(Section):
    """The documents: where they are, and which columns matter."""

    path: Path | Annotated[tuple[Path, ...], Field(min_length=1)] = Field(
        description="Folder, file or glob, local or s3://, or a list of them. Relative paths start at the current "
        "directory."
    )
    format: Literal["auto", "parquet", "jsonl", "json", "csv", "tsv", "text", "warc"] = Field(
        "auto", description="Format of every file; auto goes by each file's name."
    )
    id: Text | None = Field(
        None, description="Column with the document's id; absent, a hash of file and row stands in for it."
    )
    text: Text = Field(description="Column with the document's text; plain text files call it text.")
    keep: tuple[Text, ...] = Field((), description="Input columns that go into the output unchanged.")
    encoding: Text = Field(
        "auto", description="Character encoding of text formats; auto guesses it per file, UTF-8 first."
    )
    where: Text | None = Field(
        None,
        description="Filter expression on columns; narrows what is answered, removes no row of the output.",
    )
    since: Text | None = Field(
        None, description="Earliest date_column value to answer, as a date or timestamp; a nightly window."
    )
    date_column: Text | None = Field(None, description="Column that since is compared with.")
    limit: Count | None = Field(None, description="Answer at most this many documents; for trying a job out.")

    @property
    def paths(self) -> tuple[str, ...]:
        """`path` as a tuple, whether one was given or several."""
        return (self.path,) if isinstance(self.path, str) else self.path

    @property
    def id_column(self) -> str:
        """The name of the id in the output."""
        return self.id or "id"

    @field_validator("encoding")
    @classmethod
    def _known_encoding(cls, encoding: str) -> str:
        try:
            return encoding if encoding == "auto" else codecs.lookup(encoding).name
        except LookupError:
            raise ValueError(f"unknown encoding {encoding!r}; use auto, utf-8, cp1252, …") from None

    @field_validator("keep")
    @classmethod
    def _kept_once(cls, keep: tuple[str, ...]) -> tuple[str, ...]:
        return _without_repeats(keep)

    @model_validator(mode="after")
    def _since_has_a_column(self) -> Self:
        if self.since is not None and self.date_column is None:
            raise Misplaced("since", "needs date_column, the column to compare with")
        return self


class OutputConfig(Section):
    """The Parquet folder that a run leaves."""

    path: Path = Field(description="Folder of the output, local or s3://; made if it does not exist.")
    format: Literal["parquet", "delta"] = Field("parquet", description="parquet is plain files; delta adds its log.")
    partition_by: tuple[Text, ...] = Field((), description="Input columns that become key=value folders.")
    rows_per_shard: Count = Field(
        2000,
        description="Rows per part: what is committed, retried and lost at once. Smaller commits sooner.",
    )
    compression: Compression = Field(
        "zstd", description="Of the parts; every one of these is read by pandas, polars and DuckDB."
    )
    single_writer: bool = Field(
        False, description="Promise that no second run writes here, for stores without conditional writes."
    )

    @field_validator("partition_by")
    @classmethod
    def _partitioned_once(cls, columns: tuple[str, ...]) -> tuple[str, ...]:
        hidden = [column for column in columns if column.startswith(("_", "."))]
        if hidden:
            raise ValueError(f"{hidden[0]!r} would be a folder that readers skip: names must not begin with _ or a dot")
        return _without_repeats(columns)


class _Placed(Section):
    """What target and draft share: where a model runs."""

    gpus: int = Field(0, ge=0, description="GPUs per replica, one tensor-parallel rank each; 0 runs on the CPU.")
    accelerator: Text | None = Field(None, description="Ray accelerator type that a worker needs, such as H100.")
    label_selector: dict[str, str] = Field(
        default_factory=dict, description="Ray node labels that a worker needs: value, !value, in(a,b) or !in(a,b)."
    )

    @model_validator(mode="after")
    def _one_way_to_choose_nodes(self) -> Self:
        if self.accelerator is not None and self.label_selector:
            raise Misplaced("label_selector", "give accelerator or label_selector, not both")
        return self


class TargetConfig(_Placed):
    """The model whose law the output follows."""

    model: Text = Field(description="Hub id, folder with config.json and safetensors, or .gguf file.")
    dtype: Dtype = Field(
        "auto",
        description="Type of weights and cache; auto is bfloat16 where the hardware has it, else float32.",
    )
    replicas: Auto | Count = Field("auto", description="Targets side by side; auto is what the cluster holds.")
    threads: Auto | Count = Field(
        "auto", description="torch threads per CPU worker; auto shares the cores among the workers."
    )


class DraftConfig(_Placed):
    """What proposes tokens. It decides speed, never what the output's law is."""

    kind: Literal["model", "ngram", "suffix", "none"] = Field(
        "model",
        description="A smaller model, look-up in the text so far, an index of earlier answers, or nothing.",
    )
    model: Text | None = Field(None, description="The draft model, as target.model; only kind model reads it.")
    dtype: Dtype = Field("auto", description="As target.dtype.")
    sampling: Literal["sample", "greedy", "auto"] = Field(
        "auto", description="How the draft picks a token: from its law, or the likeliest one."
    )
    support: Count = Field(64, description="Tokens that the draft's law is cut to: what is sent with each token.")
    vocabulary: Literal["same", "intersect"] = Field(
        "same", description="intersect drafts with another tokenizer, on the tokens that both have."
    )
    replicas: Count = Field(1, description="Draft workers.")

    @model_validator(mode="after")
    def _a_draft_model_is_named(self) -> Self:
        if self.kind == "model" and self.model is None:
            raise Misplaced("model", "this key is required for a draft of kind model (ngram needs none)")
        return self


class DecodingConfig(Section):
    """How tokens are drafted, judged and batched."""

    rule: Literal["ratio", "block", "coupled"] = Field(
        "ratio", description="How proposals are judged; all three keep the target's law."
    )
    draft_tokens: Auto | Annotated[int, Field(ge=0)] = Field(
        "auto",
        description="Tokens drafted per step; auto follows acceptance and measured costs, 0 drafts none.",
    )
    batch: Auto | Count = Field("auto", description="Sequences at once per replica; auto goes by memory.")
    placement: Literal["auto", "colocated", "separate"] = Field(
        "auto",
        description="Draft and target in one process, or in workers of their own; auto: one where they share a node.",
    )
    placement_timeout: float = Field(
        300.0, gt=0, description="Seconds to wait for the cluster to offer the resources; then the run ends."
    )
    context: Auto | Count = Field(
        "auto",
        description="Tokens a cache slot holds, prompt and answer; auto fits the longest request in hand.",
    )
    step_timeout: float = Field(
        120.0, gt=0, description="Seconds a worker may take for one step before it counts as lost."
    )


def _integer_keys(bias: Any) -> Any:
    """JSON and quoted YAML have string keys only; a token id may be written as one."""
    if not isinstance(bias, Mapping):
        return bias
    return {int(key) if isinstance(key, str) and key.isdecimal() else key: value for key, value in bias.items()}


class TaskConfig(Section):
    """One question asked of every document."""

    name: Text = Field(description="Identifier; the answer's column, and the stem of the columns beside it.")
    prompt: Text = Field(description="Template of the user's turn; {column} is filled in, {{ and }} are braces.")
    system: Text | None = Field(None, description="Template of the system turn, where the chat template has one.")
    max_new_tokens: Count = Field(128, description="Tokens of an answer at most; then it ends with length.")
    temperature: float = Field(0.0, ge=0, description="0 always takes the likeliest token; 1 is the model's own law.")
    top_k: int = Field(0, ge=0, lt=2**63, description="Keep this many likeliest tokens; 0 keeps all.")
    top_p: float = Field(1.0, gt=0, le=1, description="Keep the likeliest tokens that reach this mass; 1 keeps all.")
    min_p: float = Field(0.0, ge=0, le=1, description="Drop tokens below this share of the likeliest one's mass.")
    repetition_penalty: float = Field(
        1.0, gt=0, description="Divides the logits of tokens seen in prompt and answer; 1 changes nothing."
    )
    presence_penalty: float = Field(0.0, description="Taken off the logit of every token the answer already has.")
    frequency_penalty: float = Field(0.0, description="Taken off a token's logit once per time the answer has it.")
    logit_bias: Annotated[
        dict[Annotated[int, Field(ge=0)], float],
        BeforeValidator(_integer_keys, json_schema_input_type=dict[str, float]),
    ] = Field(default_factory=dict, description="Token id → what is added to its logit.")
    bad_words: tuple[Text, ...] = Field((), description="Texts that an answer must not hold.")
    min_new_tokens: int = Field(0, ge=0, description="No end of text before this many tokens.")
    stop: tuple[Text, ...] = Field((), description="Texts that end an answer; they are not part of it.")
    n: int = Field(1, ge=1, le=1024, description="Samples per document; more than one makes the answer a list.")
    logprobs: Literal["none", "raw", "law"] = Field(
        "none", description="Log probabilities of the model as it is (raw), or after all filters (law)."
    )
    long: Literal["truncate", "chunk", "map_reduce", "error"] = Field(
        "truncate",
        description="When prompt and answer exceed the context: cut the document, split it, or an error row.",
    )
    answer_schema: dict[str, JsonValue] | None = Field(
        None,
        alias="schema",
        description="JSON schema that every answer follows; typed columns in the output.",
    )
    choices: Annotated[tuple[Text, ...], Field(min_length=1)] | None = Field(
        None, description="The answers to choose from: a classification."
    )
    regex: Text | None = Field(None, description="Regular expression that every answer matches.")
    grammar: Text | None = Field(None, description="Grammar that every answer follows.")

    def sampling(self) -> SamplingParams:
        """What the engine is told about this task."""
        return SamplingParams(
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=dict(self.logit_bias),
            stop=self.stop,
            n=self.n,
            logprobs=self.logprobs,
            bad_words=self.bad_words,
            min_new_tokens=self.min_new_tokens,
        )

    def columns(self) -> tuple[str, ...]:
        """Names that the output may use for this task (DESIGN section 8)."""
        return tuple(self.name + suffix for suffix in TASK_SUFFIXES)

    @field_validator("name")
    @classmethod
    def _name_is_an_identifier(cls, name: str) -> str:
        if not name.isidentifier():
            raise ValueError(f"{short(name)} is not an identifier: letters, digits and _, not a digit first")
        return name

    @field_validator("prompt", "system")
    @classmethod
    def _template_is_readable(cls, template: str | None) -> str | None:
        try:
            template_fields(template or "")
        except ConfigError as error:
            raise ValueError(str(error)) from None
        return template

    @field_validator("stop")
    @classmethod
    def _no_replacement_character(cls, texts: tuple[str, ...]) -> tuple[str, ...]:
        if any("\ufffd" in text for text in texts):
            raise ValueError("U+FFFD stands for bytes that are no character, and is no text to stop at")
        return texts

    @field_validator("bad_words", "stop", "choices")
    @classmethod
    def _no_repeats(cls, texts: tuple[str, ...] | None) -> tuple[str, ...] | None:
        return texts if texts is None else _without_repeats(texts)

    @model_validator(mode="after")
    def _keys_agree(self) -> Self:
        if self.min_new_tokens > self.max_new_tokens:
            raise Misplaced("min_new_tokens", f"must be at most max_new_tokens ({self.max_new_tokens})")
        shapes = [
            ("schema", self.answer_schema),
            ("choices", self.choices),
            ("regex", self.regex),
            ("grammar", self.grammar),
        ]
        given = [key for key, value in shapes if value is not None]
        if len(given) > 1:
            raise Misplaced(given[1], f"give {given[0]} or {given[1]}, not both")
        if self.n > 1 and self.long == "chunk":
            raise Misplaced("n", "more than one sample cannot be combined with long: chunk")
        return self


class HooksConfig(Section):
    """Who is told how a nightly run ended. A hook that fails is a warning, and changes no exit code.

    The summary comes as JSON: on a command's standard input, as the body of the webhook's POST; commands find it in
    NIGHTDESK_JOB, NIGHTDESK_OUTCOME and so on, too.
    """

    on_success: Text | None = Field(None, description="Shell command after exit code 0.")
    on_failure: Text | None = Field(
        None, description="Shell command after every other exit code: a night that was stopped at its deadline, too."
    )
    webhook: Text | None = Field(
        None, description="URL that is posted to however the run ended; $NAME is taken from the environment."
    )
    timeout: float = Field(30.0, gt=0, description="Seconds that each of them may take.")


def _as_drafts(draft: Any) -> Any:
    """Absent: none; one mapping: one; a list: that many to choose from."""
    if draft is None:
        return ()
    return (draft,) if isinstance(draft, Mapping | DraftConfig) else draft


class JobConfig(Section):
    """A whole job file."""

    name: Text = Field(description="Name of the job in logs, in the summary and on the cluster.")
    seed: int = Field(0, ge=0, lt=2**64, description="Where all randomness comes from; the same seed draws the same.")
    input: InputConfig = Field(description="The documents.")
    output: OutputConfig = Field(description="Where the answers go.")
    target: TargetConfig = Field(description="The model that answers.")
    draft: Annotated[
        tuple[DraftConfig, ...],
        BeforeValidator(_as_drafts, json_schema_input_type=DraftConfig | tuple[DraftConfig, ...] | None),
    ] = Field((), description="What proposes tokens: one, a list to choose from, or absent for plain decoding.")
    decoding: DecodingConfig = Field(default_factory=DecodingConfig, description="How tokens are made.")
    tasks: tuple[TaskConfig, ...] = Field(min_length=1, description="The questions asked of every document.")
    max_error_rate: float = Field(
        0.01, ge=0, le=1, description="Share of error rows above which a finished run ends with exit code 3."
    )
    audit: bool = Field(False, description="Check after the run that the output follows the target's law.")
    retry_failed: bool = Field(False, description="Ask again, in every run, about documents whose answer is an error.")
    hooks: HooksConfig = Field(default_factory=HooksConfig, description="Who is told how a nightly run ended.")

    @property
    def source(self) -> InputConfig:
        """The input, with the columns that partition the output among those that are kept of it."""
        extra = [name for name in self.output.partition_by if name not in self.input.keep]
        return self.input.model_copy(update={"keep": (*self.input.keep, *extra)})

    @model_validator(mode="after")
    def _columns_are_distinct(self) -> Self:
        written: dict[str, str] = {self.input.id_column: "the id"}
        for column in ROW_COLUMNS:
            if column in written:
                raise Misplaced("input.id", f"{column!r} is a column that nightdesk writes; rename the input column")
            written[column] = "nightdesk itself"
        for number, task in enumerate(self.tasks):
            for column in task.columns():
                if column in written:
                    owner = written[column]
                    raise Misplaced(
                        f"tasks.{number}.name", f"its column {column!r} is taken by {owner}; rename the task"
                    )
            written |= dict.fromkeys(task.columns(), f"the task {task.name!r}")
        for key, columns in (
            ("input.keep", self.input.keep),
            ("output.partition_by", self.output.partition_by),
        ):
            for column in columns:
                if column in written:
                    raise Misplaced(key, f"column {column!r} has a name that is taken by {written[column]}")
        return self


def _without_repeats(values: tuple[str, ...]) -> tuple[str, ...]:
    repeated = [value for value, count in Counter(values).items() if count > 1]
    if repeated:
        raise ValueError(f"{repeated[0]!r} is listed twice")
    return values


# --- what this version cannot do yet ------------------------------------------------------------------------


@dataclass(frozen=True)
class Withheld:
    """A key (`*` is any list entry) whose feature is missing: values other than `available` are refused."""

    key: str
    feature: str  # with its verb, for the message
    remedy: str = "remove the key"
    available: Callable[[Any], bool] | None = None  # None: only the default


def _among(*values: Any) -> Callable[[Any], bool]:
    return lambda value: value in values


WITHHELD = (
    Withheld("input.format", "WARC input is", "use another format", lambda format: format != "warc"),
    Withheld("input.encoding", "another encoding is", "use auto or utf-8", _among("auto", "utf-8")),
    Withheld("input.where", "row filters are"),
    Withheld("input.since", "date windows are"),
    Withheld("input.date_column", "date windows are"),
    Withheld("draft", "a choice of several drafts is", "keep one", lambda drafts: len(drafts) <= 1),
    Withheld("draft.*.kind", "the suffix drafter is", "use model, ngram or none", lambda kind: kind != "suffix"),
    Withheld("tasks.*.long", "splitting long documents is", "use truncate or error", _among("truncate", "error")),
    Withheld("tasks.*.schema", "typed answers are"),
    Withheld("tasks.*.choices", "typed answers are"),
    Withheld("tasks.*.regex", "typed answers are"),
    Withheld("tasks.*.grammar", "typed answers are"),
)


def _first_withheld(config: JobConfig) -> tuple[str, str] | None:
    """(dotted key, problem) of the first key whose feature is missing, if there is one."""
    for row in WITHHELD:
        available = row.available or _among(_default(row.key))
        for key, value in _values_at(config, row.key.split(".")):
            if not available(value):
                return key, f"{row.feature} not available in this version; {row.remedy}"
    return None


def _values_at(value: Any, keys: Sequence[str], above: str = "") -> list[tuple[str, Any]]:
    if not keys:
        return [(above.removesuffix("."), value)]
    if keys[0] != "*":
        name = "answer_schema" if keys[0] == "schema" else keys[0]
        return _values_at(getattr(value, name), keys[1:], f"{above}{keys[0]}.")
    return [found for i, entry in enumerate(value) for found in _values_at(entry, keys[1:], f"{above}{i}.")]


def _default(key: str) -> Any:
    field = field_at(JobConfig, [part for part in key.split(".") if part != "*"])
    assert field is not None, f"WITHHELD names an unknown key: {key}"
    return field.get_default(call_default_factory=True)


# --- loading ------------------------------------------------------------------------------------------------


def load_config(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> JobConfig:
    """The job file at `path` with `a.b=value` overrides. Raises `ConfigError`: file, key, what is wrong."""
    mapping = read_mapping(path)
    overridden = [override(mapping, assignment, JobConfig) for assignment in overrides]
    return _parse(mapping, os.fspath(path), overridden)


def parse_config(mapping: Mapping[str, Any], where: str) -> JobConfig:
    """A job file's mapping, checked, with local paths made absolute; `where` begins an error's message."""
    return _parse(mapping, where, ())


def json_schema() -> dict[str, Any]:
    """JSON schema of the job file, for editors."""
    schema = JobConfig.model_json_schema(by_alias=True, mode="validation")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": "nightdesk job file",
    }


def _parse(mapping: Mapping[str, Any], where: str, overridden: Sequence[str]) -> JobConfig:
    try:
        config = JobConfig.model_validate(mapping)
    except ValidationError as error:
        key, problem = explain(error, mapping, JobConfig)
        raise ConfigError(f"{_origin(key, where, overridden)}: {key}: {problem}") from None
    config = _with_absolute_paths(config)
    withheld = _first_withheld(config)
    if withheld is not None:
        key = (
            withheld[0] if not isinstance(mapping.get("draft"), Mapping) else withheld[0].replace("draft.0.", "draft.")
        )
        raise ConfigError(f"{_origin(key, where, overridden)}: {key}: {withheld[1]}")
    return config


def _origin(key: str, where: str, overridden: Sequence[str]) -> str:
    related = any(f"{key}.".startswith(f"{o}.") or o.startswith(f"{key}.") for o in overridden)
    return "--set" if related else where


def _with_absolute_paths(config: JobConfig) -> JobConfig:
    path = config.input.path
    absolute = absolute_path(path) if isinstance(path, str) else tuple(map(absolute_path, path))
    drafts = (d.model_copy(update={"model": d.model and _absolute_model(d.model)}) for d in config.draft)
    return config.model_copy(
        update={
            "input": config.input.model_copy(update={"path": absolute}),
            "output": config.output.model_copy(update={"path": absolute_path(config.output.path)}),
            "target": config.target.model_copy(update={"model": _absolute_model(config.target.model)}),
            "draft": tuple(drafts),
        }
    )


def absolute_path(path: str) -> str:
    """A local path from the root, where file:// is only a long way to write a path; a URL in its one spelling."""
    if is_remote(path):
        return canonical(path)
    return os.path.abspath(os.path.expanduser(path.removeprefix("file://")))


def _absolute_model(model: str) -> str:
    looks_local = model.startswith(("./", "../", "~/", "/")) or model in (".", "..") or model.lower().endswith(".gguf")
    return absolute_path(model) if looks_local or os.path.exists(model) else model

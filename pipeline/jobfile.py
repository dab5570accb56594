"""The text of a job file: YAML in, a plain mapping out, and errors that name the key.

Knows YAML, dotted keys and how pydantic reports what is wrong; knows none of the keys (`config.py`).
"""

from __future__ import annotations

import difflib
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from ruamel.yaml import YAML
from ruamel.yaml.constructor import SafeConstructor
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from pipeline.errors import ConfigError

# What pydantic calls a misfit → what the value must be.
EXPECTED = {
    "string_type": "a string",
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "greater_than": "more than {gt:g}",
    "greater_than_equal": "at least {ge:g}",
    "less_than": "less than {lt:g}",
    "less_than_equal": "at most {le:g}",
    "finite_number": "a finite number",
    "string_too_short": "a string that is not empty",
    "too_short": "a list that is not empty",
}


class Misplaced(ValueError):
    """Raised by a check over several keys: `key`, below the section that is checked, is the one to change."""

    def __init__(self, key: str, problem: str) -> None:
        self.key = key
        super().__init__(problem)


class _Constructor(SafeConstructor):
    """YAML 1.2 without dates: a date is a string, as it is in JSON."""


for _tag in ("timestamp", "value"):
    _Constructor.add_constructor(f"tag:yaml.org,2002:{_tag}", SafeConstructor.construct_yaml_str)


def parse_yaml(text: str) -> Any:
    """The value of one YAML document. Raises ruamel's `YAMLError`, for a duplicate key too."""
    yaml = YAML(typ="safe", pure=True)
    yaml.Constructor = _Constructor
    try:
        return yaml.load(io.StringIO(text))
    except RecursionError:
        raise YAMLError("nested too deeply") from None


def read_mapping(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The mapping in a job file; whatever is wrong with the file as a whole is one `ConfigError`."""
    where = os.fspath(path)
    try:
        with open(where, encoding="utf-8-sig") as file:
            content = parse_yaml(file.read())
    except OSError as error:
        raise ConfigError(f"{where}: cannot read the job file: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where}: the job file is not UTF-8 (byte {error.start})") from error
    except YAMLError as error:
        raise ConfigError(f"{where}: {_yaml_problem(error)}") from error
    if content is None:
        raise ConfigError(f"{where}: the job file is empty")
    if not isinstance(content, dict):
        raise ConfigError(f"{where}: the job file must be a mapping of keys, not {short(content)}")
    return content


def _yaml_problem(error: YAMLError) -> str:
    if not isinstance(error, MarkedYAMLError):
        return "not YAML: " + str(error).splitlines()[0]
    problem = " ".join((error.problem or error.context or "not YAML").split())
    return f"line {error.problem_mark.line + 1}: {problem}" if error.problem_mark else problem


# --- overrides: `--set a.b=value` ---------------------------------------------------------------------------


def override(mapping: dict[str, Any], assignment: str, model: type[BaseModel]) -> str:
    """Apply `a.b=value` to the mapping, in place; returns the key. `model` says which keys hold text."""
    key, equals, text = assignment.partition("=")
    keys = key.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError(f"--set: {assignment}: write key=value, for example decoding.draft_tokens=4")
    _place(mapping, keys, _override_value(text, field_at(model, keys), ".".join(keys)))
    return ".".join(keys)


def _override_value(text: str, field: FieldInfo | None, key: str) -> Any:
    """YAML, but a text key takes what is written (a prompt may begin with a brace) unless quoted or null."""
    literal = text.strip() in ("", "null", "~") or text.lstrip()[:1] in ("'", '"')
    if field is not None and _takes_only_text(field) and not literal:
        return text
    try:
        return parse_yaml(text)
    except YAMLError as error:
        raise ConfigError(f"--set: {key}: {_yaml_problem(error)}") from error


def _takes_only_text(field: FieldInfo) -> bool:
    kinds = set(get_args(field.annotation)) or {field.annotation}
    return kinds - {type(None)} == {str}


def _place(container: Any, keys: Sequence[str], value: Any) -> None:
    """Set the value at the keys, making sections on the way; a list is entered by number only."""
    for depth, key in enumerate(keys):
        at = _position(container, key, ".".join(keys[:depth]), ".".join(keys[: depth + 1]))
        if depth == len(keys) - 1:
            container[at] = value
            return
        if isinstance(container, dict) and container.get(key) is None:
            container[at] = {}
        container = container[at]


def _position(container: Any, key: str, parent: str, dotted: str) -> str | int:
    if isinstance(container, dict):
        return key
    if not isinstance(container, list):
        raise ConfigError(f"--set: {dotted}: {parent} is not a section but {short(container)}")
    if not key.isdecimal() or int(key) >= len(container):
        raise ConfigError(f"--set: {dotted}: {parent} is a list of {len(container)}; number its entries from 0")
    return int(key)


# --- keys of a model ----------------------------------------------------------------------------------------


def field_names(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """The fields of a section by the name they have in a job file."""
    return {field.alias or name: field for name, field in model.model_fields.items()}


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    """The model below a field: its own type, or that of the entries of its list."""
    for kind in (field.annotation, *get_args(field.annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def field_at(model: type[BaseModel], keys: Sequence[str | int]) -> FieldInfo | None:
    """The field that a dotted key names (numbers of list entries are stepped over), or None."""
    section: type[BaseModel] | None = model
    field: FieldInfo | None = None
    for key in keys:
        if isinstance(key, int) or key.isdecimal():
            continue
        field = field_names(section).get(key) if section is not None else None
        section = section_of(field) if field is not None else None
    return field


def dotted_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every key of a job file, depth first, without the numbers of list entries."""
    for name, field in field_names(model).items():
        yield prefix + name
        below = section_of(field)
        if below is not None:
            yield from dotted_keys(below, f"{prefix}{name}.")


# --- what was wrong -----------------------------------------------------------------------------------------


def explain(error: ValidationError, mapping: Mapping[str, Any], model: type[BaseModel]) -> tuple[str, str]:
    """(dotted key, problem) of the first thing to fix: an unknown key before what it leaves missing."""
    details = error.errors(include_url=False)
    unknown = [d for d in details if d["type"] in ("extra_forbidden", "invalid_key")]
    if unknown:
        keys = _real_keys(unknown[0], mapping)
        return ".".join(map(str, keys)), _unknown_key(keys, model)
    placed = [(_real_keys(detail, mapping), detail) for detail in details]
    branches = [entry for entry in placed if entry[0][: len(placed[0][0])] == placed[0][0]]
    keys = max((entry[0] for entry in branches), key=len)
    here = [detail for at, detail in branches if at == keys]
    cause = here[0].get("ctx", {}).get("error")
    if isinstance(cause, Misplaced):
        return ".".join(map(str, (*keys, cause.key))), str(cause)
    return ".".join(map(str, keys)), _problem(here)


def _real_keys(detail: Any, mapping: Mapping[str, Any]) -> tuple[str | int, ...]:
    """pydantic's location without what is not in the file: a union's branch, a lone entry's index."""
    keys: list[str | int] = []
    value: Any = mapping
    for key in detail["loc"]:
        if (isinstance(value, Mapping) and key in value) or (isinstance(value, list | tuple) and isinstance(key, int)):
            keys.append(key)
            value = value[key]
    named = detail["type"] in ("missing", "invalid_key")  # a key that is no string is told as text: "None"
    if named and keys[-1:] != [detail["loc"][-1]]:
        keys.append(detail["loc"][-1])
    return tuple(keys)


def _unknown_key(keys: Sequence[str | int], model: type[BaseModel]) -> str:
    field = field_at(model, keys[:-1])
    section = section_of(field) if field is not None else model
    valid = list(field_names(section)) if section is not None else []
    key = str(keys[-1])
    near = difflib.get_close_matches(key, valid, n=1)
    elsewhere = [dotted for dotted in dotted_keys(model) if dotted.split(".")[-1] == key]
    if not near and elsewhere:
        near = elsewhere[:1]
    return f"unknown key; did you mean {near[0]}?" if near else f"unknown key; valid here: {', '.join(valid)}"


def _problem(details: Sequence[Any]) -> str:
    first = details[0]
    if first["type"] == "missing":
        return "this key is required"
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    wanted = list(dict.fromkeys(_expectation(detail) for detail in details))
    problem = f"must be {' or '.join(wanted)}, not {short(first['input'])}"
    near = difflib.get_close_matches(str(first["input"]), _choices(details), n=1)
    return f"{problem}; did you mean {near[0]}?" if near else problem


def _choices(details: Sequence[Any]) -> list[str]:
    expected = [d["ctx"]["expected"] for d in details if d["type"] == "literal_error"]
    return [word.strip("'") for text in expected for word in text.replace(" or ", ", ").split(", ")]


def _expectation(detail: Any) -> str:
    if detail["type"] == "literal_error":
        return str(detail["ctx"]["expected"]).replace("'", "")
    phrase = EXPECTED.get(detail["type"])
    return phrase.format(**detail.get("ctx", {})) if phrase else f"valid ({detail['msg']})"


def short(value: Any) -> str:
    """A value as it fits into one line of an error message."""
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list"
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"

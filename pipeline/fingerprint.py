"""What decides an answer, as named values, and their digest: the answer fingerprint (DESIGN section 8).

Draft, rule, draft length, batch, placement, dtype and salt are not among them: they do not change the law.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from pipeline.config import JobConfig, TaskConfig
from pipeline.corpus.cleaning import CLEANING_VERSION

ABSENT = "absent"
SHOWN = 40  # characters of a value that a message quotes
BEFORE = 16  # of them, those before the first difference
_NOTHING = object()  # the value of a key that is not there


def answer_values(config: JobConfig, target: str, context: int) -> dict[str, Any]:
    """Everything that decides what a document is answered, by the key to look for in the job file.

    `target` is the target's content fingerprint; `context` the tokens that prompts were cut to.
    """
    values: dict[str, Any] = {
        "target.model": target,
        "seed": config.seed,
        "cleaning": CLEANING_VERSION,
        "input.text": config.input.text,
        "decoding.context": context,
    }
    for task in config.tasks:
        for key, value in _task_values(task).items():
            values[f"tasks.{task.name}.{key}"] = value
    plain: dict[str, Any] = json.loads(json.dumps(values))  # as a plan gives it back
    return plain


def _task_values(task: TaskConfig) -> dict[str, Any]:
    return {
        "prompt": task.prompt,
        "system": task.system,
        "long": task.long,
        "schema": task.answer_schema,
        "choices": task.choices,
        "regex": task.regex,
        "grammar": task.grammar,
        **dataclasses.asdict(task.sampling()),
    }


def digest(values: Mapping[str, Any]) -> str:
    """The answer fingerprint: 64 hex digits over the values, whatever their order."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def request_key(fingerprint: str, task: str, prompt: list[int], sample: int = 0) -> str:
    """The identity that a request's randomness hangs on (DESIGN section 5)."""
    head = f"{fingerprint},{sample},{task}\0"  # a task's name is an identifier
    return hashlib.sha256(head.encode() + np.asarray(prompt, dtype="<i8").tobytes()).hexdigest()


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """`key (was old, is new)` for every key whose value differs, in the order of `new`.

    Of long values what is about their first difference; inside lists and mappings, the key leads there.
    """
    keys = [*new, *(key for key in old if key not in new)]
    return [_difference(key, old.get(key, _NOTHING), new.get(key, _NOTHING)) for key in keys if _differ(key, old, new)]


def _differ(key: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    return key not in old or key not in new or bool(old[key] != new[key])


def _difference(key: str, old: Any, new: Any) -> str:
    inner = _first_inside(old, new)
    if inner is not None and max(len(_whole(old)), len(_whole(new))) > SHOWN:
        return _difference(f"{key}.{inner[0]}", *inner[1:])
    start = 0
    if isinstance(old, str) and isinstance(new, str) and max(len(old), len(new)) > SHOWN:
        start = max(_common(old, new) - BEFORE, 0)
    return f"{key} (was {_shown(old, start)}, is {_shown(new, start)})"


def _common(old: str, new: str) -> int:
    """Characters that both begin with."""
    pairs = enumerate(zip(old, new, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(old), len(new)))


def _first_inside(old: Any, new: Any) -> tuple[str, Any, Any] | None:
    """The first element that two lists or two mappings differ in: its place, and both values."""
    if isinstance(old, list) and isinstance(new, list):
        old, new = ({str(i): value for i, value in enumerate(values)} for values in (old, new))
    if not isinstance(old, dict) or not isinstance(new, dict):
        return None
    places = [place for place in [*new, *old] if _differ(place, old, new)]
    return (places[0], old.get(places[0], _NOTHING), new.get(places[0], _NOTHING)) if places else None


def _shown(value: Any, start: int) -> str:
    """A text is cut before it is quoted, so that quotes are pairs and no escape is broken."""
    if not isinstance(value, str):
        whole = _whole(value)
        return whole if len(whole) <= SHOWN or not isinstance(value, list | dict) else f"{whole[0]}…{whole[-1]}"
    end = start + SHOWN
    cut = ("…" if start else "") + value[start:end] + ("…" if len(value) > end else "")
    return json.dumps(cut, ensure_ascii=False)


def _whole(value: Any) -> str:
    return ABSENT if value is _NOTHING else json.dumps(value, ensure_ascii=False)

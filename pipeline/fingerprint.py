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
    """`key (was old, is new)` for every key whose value differs, in the order of `new`."""
    keys = [*new, *(key for key in old if key not in new)]
    return [
        f"{key} (was {_shown(old, key)}, is {_shown(new, key)})"
        for key in keys
        if key not in old or key not in new or old[key] != new[key]
    ]


def _shown(values: Mapping[str, Any], key: str) -> str:
    if key not in values:
        return ABSENT
    text = json.dumps(values[key], ensure_ascii=False)
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 1]}…"

"""What a model's chat template puts around the job's words: fixed text, found once per task.

The template is run on marks instead of documents, so it can't be led astray by what a document says, and no template
engine runs per document. A model without a template has an empty frame.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

from pipeline.errors import ConfigError, ModelError

_SYSTEM_MARK = "NIGHTDESK-SYSTEM-WORDS"
_USER_MARK = "NIGHTDESK-USER-WORDS"
_PROBE = "Two {lines} of <b>words</b> & 'signs'.\n\n- \"1\""
_DATE = "26 Jul 2024"  # for templates that put today's date in: a prompt must not change overnight


@dataclass(frozen=True, slots=True)
class Frame:
    """Text before the system prompt, between it and the user's words, and after these.

    Without a system prompt `before` is empty and `between` stands before the user's words. `trims_…` say that white
    space around the words is taken off. `chat` is False where the model has no chat template.
    """

    before: str = ""
    between: str = ""
    after: str = ""
    trims_system: bool = False
    trims_user: bool = False
    chat: bool = False


def find_frame(tokenizer: Any, system: bool, task: str) -> Frame:
    """The frame of a tokenizer's chat template, with or without a system prompt.

    Raises `ConfigError` where a system prompt is wanted and has no place, `ModelError` for a template that does more
    than put its own text around the messages.
    """
    if not tokenizer.chat_template:
        if system:
            raise _no_place(task, "the model has no chat template")
        return Frame()
    text = _apply(tokenizer, _padded(_SYSTEM_MARK) if system else None, _padded(_USER_MARK), task)
    if system and _SYSTEM_MARK not in text:
        raise _no_place(task, "the model's chat template leaves it out")
    trims_system, trims_user = _padded(_SYSTEM_MARK) not in text, _padded(_USER_MARK) not in text
    before, _, rest = text.partition(_shown(_SYSTEM_MARK, trims_system)) if system else ("", "", text)
    between, _, after = rest.partition(_shown(_USER_MARK, trims_user))
    frame = Frame(before, between, after, system and trims_system, trims_user, chat=True)
    filled = before + (_PROBE if system else "") + between + _PROBE + after
    if _apply(tokenizer, _PROBE if system else None, _PROBE, task) != filled:
        raise ModelError(f"tasks.{task}: the model's chat template rewrites messages, so no prompt can be framed by it")
    return frame


def _shown(mark: str, trimmed: bool) -> str:
    return mark if trimmed else _padded(mark)


def _padded(mark: str) -> str:
    return f"\n {mark} \n"


def _apply(tokenizer: Any, system: str | None, user: str, task: str) -> str:
    messages = [] if system is None else [{"role": "system", "content": system}]
    messages.append({"role": "user", "content": user})
    try:
        text: str = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, date_string=_DATE
        )
    except TemplateError as error:
        if system is not None:
            raise _no_place(task, f"the model's chat template refuses it: {error}") from error
        raise ModelError(f"tasks.{task}: the model's chat template fails: {error}") from error
    return text


def _no_place(task: str, reason: str) -> ConfigError:
    return ConfigError(f"tasks.{task}.system: no place for a system prompt ({reason}); move its words into prompt")

"""Documents become prompts: token ids that end where the model's answer begins.

A prompt is the model's frame around the job's words around the document's fields. Where it is too long, the document
is cut, never the words around it. Knows nothing of models beyond their tokenizer.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from pipeline.errors import ConfigError, PromptError
from pipeline.prompts.encoder import Piece, PromptEncoder
from pipeline.prompts.frame import find_frame
from pipeline.records import Document

_MARKS = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")
_CHARACTERS_PER_TOKEN = 16  # how much of a long text is looked at first; doubled while it is not enough


class PromptTask(Protocol):
    """What of `config.TaskConfig` decides a prompt."""

    @property
    def name(self) -> str: ...
    @property
    def prompt(self) -> str: ...
    @property
    def system(self) -> str | None: ...
    @property
    def max_new_tokens(self) -> int: ...
    @property
    def long(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a template: literal text, or (`column`) the name of a column whose value goes there."""

    text: str
    column: bool = False


def parse_template(text: str) -> tuple[Part, ...]:
    """Literal text and `{column}` fields; `{{` and `}}` are braces. Raises `ConfigError` for a lone brace."""
    parts: list[Part] = []
    literal, end = "", 0
    for mark in _MARKS.finditer(text):
        literal, end = literal + text[end : mark.start()], mark.end()
        if mark[0] in ("{{", "}}"):
            literal += mark[0][0]
        elif mark[1]:
            parts += [Part(literal), Part(mark[1], column=True)]
            literal = ""
        else:
            raise ConfigError(
                f"prompt {text[:40]!r}: {mark[0]!r} at character {mark.start() + 1}; a column is written {{name}}, "
                "a brace is doubled"
            )
    parts.append(Part(literal + text[end:]))
    return tuple(part for part in parts if part.text)


def template_fields(text: str) -> tuple[str, ...]:
    """The columns that a template names, each once, in order."""
    return tuple(dict.fromkeys(part.text for part in parse_template(text) if part.column))


class Prompt(NamedTuple):
    """Token ids that end where the answer begins, and whether the document was cut to fit."""

    token_ids: list[int]
    truncated: bool


class Prompter:
    """Prompts of one task for one tokenizer (a fast one of transformers).

    `context` is the number of tokens that prompt and answer may have together. Raises `ConfigError` where no document
    can have a prompt: a system prompt without a place for it, an answer that fills the context.
    """

    def __init__(self, task: PromptTask, tokenizer: Any, text_column: str, context: int) -> None:
        self._task = task
        self._text_column = text_column
        self._context = context
        self._budget = context - task.max_new_tokens
        if self._budget < 1:
            raise ConfigError(
                f"tasks.{task.name}.max_new_tokens: {task.max_new_tokens} leave no room for a prompt in a context of "
                f"{context} tokens"
            )
        self._system = parse_template(task.system or "")
        self._prompt = parse_template(task.prompt)
        self._frame = find_frame(tokenizer, bool(task.system), task.name)
        self._encoder = PromptEncoder(tokenizer, self._frame.chat)

        self.fields = tuple(dict.fromkeys(part.text for part in self._system + self._prompt if part.column))
        """The columns that the system prompt and the prompt name."""

    def render(self, document: Document) -> list[int]:
        """The token ids of `prompt`."""
        return self.prompt(document).token_ids

    def prompt(self, document: Document) -> Prompt:
        """The prompt of one document, at most `context - max_new_tokens` tokens.

        Raises `PromptError`, which becomes the task's error in the document's row.
        """
        if document.error is not None:
            raise PromptError(document.error)
        if not document.text.strip():
            raise PromptError("text is empty")
        if not self._surely_too_long(document.text):
            prompt = self._encode(document, document.text)
            if len(prompt) <= self._budget:
                return Prompt(prompt, truncated=False)
        if self._task.long != "truncate":
            raise PromptError(f"prompt too long: {self._limits()} (long: {self._task.long})")
        return Prompt(self._truncated(document), truncated=True)

    def _surely_too_long(self, text: str) -> bool:
        """Spares encoding ten megabytes to learn that they are too many."""
        if len(text) <= self._budget * _CHARACTERS_PER_TOKEN or self._text_column not in self.fields:
            return False
        return len(self._cuts(text)) > self._budget

    def _cuts(self, text: str) -> list[int]:
        """Places between tokens of the text, from its beginning on: more than fit in a prompt, or all of them."""
        window = self._budget * _CHARACTERS_PER_TOKEN
        while True:
            cuts = self._encoder.boundaries(text[:window])
            if len(cuts) > self._budget or window >= len(text):
                return cuts
            window *= 2

    def _truncated(self, document: Document) -> list[int]:
        """The prompt with as much of the text, cut between two tokens, as fits."""
        bare = self._length(document, 0)
        if self._text_column not in self.fields or bare >= self._budget:
            raise PromptError(f"the prompt without the text takes {bare} tokens: {self._limits()}")
        cuts = [cut for cut in self._cuts(document.text)[: self._budget] if cut < len(document.text)]
        fitting = bisect_right(cuts, self._budget, key=lambda cut: self._length(document, cut))
        # Tokens at the seams may join, so that lengths rise almost, not quite, with the cut.
        while fitting < len(cuts) and self._length(document, cuts[fitting]) <= self._budget:
            fitting += 1
        while fitting > 0 and self._length(document, cuts[fitting - 1]) > self._budget:
            fitting -= 1
        if fitting == 0 or not document.text[: cuts[fitting - 1]].strip():
            raise PromptError(f"the prompt without the text takes {bare} tokens: {self._limits()}")
        return self._encode(document, document.text[: cuts[fitting - 1]])

    def _limits(self) -> str:
        return f"{self._budget} are left of a context of {self._context} for {self._task.max_new_tokens} new tokens"

    def _length(self, document: Document, cut: int) -> int:
        return len(self._encode(document, document.text[:cut]))

    def _encode(self, document: Document, text: str) -> list[int]:
        values = {**document.fields, self._text_column: text}
        frame = self._frame
        system = _filled(self._system, values, frame.trims_system)
        user = _filled(self._prompt, values, frame.trims_user)
        return self._encoder.encode([Piece(frame.before), *system, Piece(frame.between), *user, Piece(frame.after)])


def _filled(template: tuple[Part, ...], values: Mapping[str, str], trim: bool) -> list[Piece]:
    pieces = [Piece(values.get(part.text, ""), trusted=False) if part.column else Piece(part.text) for part in template]
    return _trimmed(pieces) if trim else pieces


def _trimmed(pieces: list[Piece]) -> list[Piece]:
    """Without white space at the beginning and the end of the whole."""
    while pieces and not pieces[0].text.strip():
        pieces = pieces[1:]
    while pieces and not pieces[-1].text.strip():
        pieces = pieces[:-1]
    if pieces:
        pieces[0] = Piece(pieces[0].text.lstrip(), pieces[0].trusted)
        pieces[-1] = Piece(pieces[-1].text.rstrip(), pieces[-1].trusted)
    return pieces

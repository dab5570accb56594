"""What a job's models resolved to, and what it asks of them: the part of a run that reads no input and no output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from pipeline.config import JobConfig
from pipeline.fingerprint import answer_values
from pipeline.planning import Ask, refuse_foreign_tokens
from pipeline.prompts.templates import Prompter


class Model(Protocol):
    """What a run must know of a model (`engine.checkpoint.Checkpoint`)."""

    def fingerprint(self) -> str: ...

    def context_limit(self) -> int: ...

    def tokenizer(self) -> Any: ...


@dataclass(frozen=True)
class Models:
    """What a job resolved to; `context` is what prompt and answer may have together, in tokens."""

    target: Model
    draft: Model | None
    context: int

    def names(self, config: JobConfig) -> dict[str, dict[str, str]]:
        """What each is called in the job file, and its fingerprint."""
        target = {"model": config.target.model, "fingerprint": self.target.fingerprint()}
        if self.draft is None:
            return {"target": target}
        draft = {"model": str(config.draft[0].model), "fingerprint": self.draft.fingerprint()}
        return {"target": target, "draft": draft}


def models_on_disk(config: JobConfig) -> Models:
    from pipeline.engine.assembly import agree

    setup = agree(config)
    return Models(setup.target, setup.draft, setup.limits.context)


def asked(config: JobConfig, models: Models, limit: int | None, fresh: bool) -> Ask:
    tokenizer = models.target.tokenizer()
    for task in config.tasks:
        Prompter(task, tokenizer, config.input.text, models.context)  # refuses a task that can have no prompt
    refuse_foreign_tokens(config.tasks, len(tokenizer))
    answers = answer_values(config, models.target.fingerprint(), models.context)
    return Ask(answers, models.context, config.input.limit if limit is None else limit, fresh)

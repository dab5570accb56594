"""What an executor is given: a plan to be answered, and all that a worker needs to take part in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from pipeline.answering import Answerer, Report
from pipeline.config import JobConfig
from pipeline.corpus.readers import Corpus
from pipeline.deadline import Deadline
from pipeline.output.folder import Output
from pipeline.output.plan import Plan, Shard
from pipeline.planning import prompt_fields
from pipeline.prompts.templates import Prompter

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from pipeline.decode import RequestStream


@dataclass(frozen=True)
class JobWork:
    """Picklable; paths in it must mean the same on every worker's machine.

    `deadline` is on the clock of whoever began the run, who alone heeds it.
    """

    config: JobConfig
    plan: Plan
    deadline: Deadline | None = None

    def corpus(self) -> Corpus:
        return Corpus(self.config.source, prompt_fields(self.config), self.plan.input_files, self.plan.kept_schema)

    def output(self) -> Output:
        return Output.of(self.config.output)

    def prompters(self, tokenizer: PreTrainedTokenizerFast) -> dict[str, Prompter]:
        """By task. Prompts are cut to the plan's context, not to what the engine happens to hold."""
        text = self.config.input.text
        return {
            task.name: Prompter(task, tokenizer, text, self.plan.context) for task in self.config.tasks
        }

    def answerer(self, engine: RequestStream, tokenizer: PreTrainedTokenizerFast) -> Answerer:
        """Everything joined, around an engine that draws with `config.seed` and `plan.salt`."""
        return Answerer(
            self.config, self.plan, self.corpus(), self.prompters(tokenizer), engine, self.output(), self.deadline
        )


class Executor(Protocol):
    """Whatever gets shards answered: this process, or workers elsewhere."""

    def run(self, work: JobWork, shards: list[Shard], report: Report) -> None:
        """Return when every shard is published (by whomever); raise a `NightdeskError` if that cannot be.

        At the work's deadline it is OutOfTime: what could not be finished until then was not begun, or is given up.

        `report` is told increments; work that is lost and done again may be taken back by a negative one.
        """
        ...

    def describe(self) -> str:
        """Where the work runs, in a few words, for the summary."""
        ...


class LocalExecutor:
    """Answers in this process, with one engine."""

    def __init__(
        self,
        engine: Callable[[JobWork], RequestStream],
        tokenizer: Callable[[JobWork], PreTrainedTokenizerFast],
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer

    def run(self, work: JobWork, shards: list[Shard], report: Report) -> None:
        work.answerer(self.engine(work), self.tokenizer(work)).run(shards, report)

    def describe(self) -> str:
        return "this process"

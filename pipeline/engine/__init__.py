"""Everything that decodes, in one process and without Ray: `Engine`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from pipeline.decode import Decoder
from pipeline.engine.assembly import agree, load_drafter, load_verifier, make_decoder, set_threads
from pipeline.records import Completion, Request

if TYPE_CHECKING:
    from pipeline.config import JobConfig

__all__ = ["Engine"]


class Engine:
    """Decodes requests with the target, draft and decoding settings of a job file."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder

    @classmethod
    def from_config(cls, config: JobConfig, salt: int = 0) -> Engine:
        """Load the models. Reads seed, target, draft and decoding; touches neither input nor output."""
        if config.target.threads != "auto":
            set_threads(config.target.threads)
        setup = agree(config)
        return cls(make_decoder(config, setup, load_verifier(config, setup), load_drafter(config, setup), salt))

    def generate(self, requests: list[Request]) -> list[Completion]:
        """One completion per request and sample, in the order of the requests; a request's samples stand in a row.

        A request that can't be decoded has `error` set.
        """
        requests = list(requests)
        answers: dict[int, dict[int, Completion]] = {}  # by object, since keys may repeat
        for request, sample, completion in self.decoder.answers(requests):
            answers.setdefault(id(request), {})[sample] = completion
        return [answers[id(request)][sample] for request in requests for sample in sorted(answers[id(request)])]

    def stream(self, requests: Iterable[Request | None]) -> Iterator[Completion]:
        """Completions as they finish; see `decode.RequestStream`."""
        return self.decoder.stream(requests)

"""What a replica has published, as it is told to the coordinator."""

from __future__ import annotations

from functools import reduce
from operator import add
from pathlib import Path

from actors.publications import Publications
from actors.report import Publication
from jobs.run import execute
from pipeline.answering import Answerer, Report
from pipeline.output.plan import Shard
from pipeline.stats import Progress
from pipeline.work import JobWork
from tests.stub_engine import ByteTokenizer, StubEngine, job, local, stub_models, write_stories


class Noting:
    """Answers as a replica does; the first shard was published by somebody else."""

    def run(self, work: JobWork, shards: list[Shard], report: Report) -> None:
        local().run(work, shards[:1], report)
        self.publications = Publications.of(work.config.output)
        prompters = work.prompters(ByteTokenizer())  # type: ignore[arg-type]
        answerer = Answerer(work.config, work.plan, work.corpus(), prompters, StubEngine(), self.publications)
        answerer.run(shards, report)

    def describe(self) -> str:
        return "here"


def test_every_shard_is_noted_once_with_its_counts_whoever_published_it(tmp_path: Path) -> None:
    write_stories(tmp_path, "a.parquet", 0, 12)
    noting = Noting()
    assert execute(job(tmp_path), executor=noting, models=stub_models()) == 0
    noted = noting.publications.since(0)
    assert noted[0] == Publication(0, Progress(rows_done=4, shards_done=1), created=False)
    assert [each.created for each in noted] == [False, True, True]
    assert sorted(each.shard for each in noted) == [0, 1, 2]
    assert noting.publications.since(2) == noted[2:]
    tally = reduce(add, (each.counts for each in noted))
    assert tally == Progress(
        rows_done=12, shards_done=3, requests=8, prompt_tokens=tally.prompt_tokens, new_tokens=tally.new_tokens,
        drafted=32, accepted=16, steps=16,
    )  # fmt: skip

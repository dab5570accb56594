"""What writing a row costs, beside datatrove's Parquet writer: the same rows, the same compression, taking turns.

    pip install --no-deps --target FOLDER datatrove dill loguru multiprocess humanize
    PYTHONPATH=. python bench/writing.py --datatrove FOLDER [--rounds 7] [--json FILE]

Ours begins with documents, kept columns as Arrow has them, and answers, and ends with a durable part: `ShardRows`,
Parquet, `LocalStore.create` with its fsyncs. Reading and hashing documents is in neither. Theirs is
`ParquetWriter.write` of ready documents and `close`, without waiting for the disk, and is told the schema. It is
measured twice: as it comes (documents become dictionaries, with page index and content-defined chunks), and lean (ready
dictionaries, neither of these). Both write a part per 2,000 rows.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.corpus.rows import RowRange
from pipeline.output.local_store import LocalStore
from pipeline.output.plan import Shard
from pipeline.output.rows import ShardRows
from pipeline.output.schema import task_fields
from pipeline.output.writer import Footer, part_bytes
from pipeline.records import Completion, CompletionStats, Document, FinishReason
from pipeline.stats import Progress

ROWS = 2000  # per part: the default of `output.rows_per_shard`
KEPT = pa.schema([("title", pa.string()), ("published_at", pa.timestamp("us", "Europe/Paris"))])
SCHEMA = pa.schema(
    [("id", pa.string()), ("doc_hash", pa.string()), *KEPT, *task_fields("text"), ("error", pa.string())]
)


class Rows:
    """Rows of one part, as each of the writers is given them."""

    def __init__(self, texts: list[str], rng: random.Random) -> None:
        first = datetime(2024, 1, 1, tzinfo=UTC)
        self.texts = texts
        self.hashes = [f"{rng.getrandbits(128):032x}" for _ in texts]
        self.titles = [text[:60] for text in texts]
        self.times = [first + timedelta(seconds=rng.randrange(10**7)) for _ in texts]
        self.documents = [
            Document(f"{n:010d}", digest, "", {}, None) for n, digest in enumerate(self.hashes)
        ]
        ids = [[0] * (len(text) // 4) for text in texts]
        self.answers = [
            Completion("key", tokens, text, FinishReason.STOP, None, CompletionStats())
            for tokens, text in zip(ids, texts, strict=True)
        ]
        kept = pa.table({"title": self.titles, "published_at": self.times}, KEPT)
        self.kept = kept.to_batches(max_chunksize=512)  # as readers give them

    def as_dictionaries(self) -> list[dict[str, Any]]:
        return [
            {
                "id": document.id, "text": text, "doc_hash": document.doc_hash, "title": title, "published_at": when,
                "text_finish": "stop", "text_tokens": len(answer.token_ids), "text_logprob": None, "text_error": None,
                "error": None,
            }
            for document, text, title, when, answer in zip(
                self.documents, self.texts, self.titles, self.times, self.answers, strict=True
            )
        ]  # fmt: skip


def write_ours(folder: Path, rows: Rows, compression: str) -> None:
    shard = Shard(0, (RowRange(0, 0, ROWS),))
    part = ShardRows(shard, SCHEMA, "id", {"text": 1})
    part.kept += rows.kept
    for document, answer in zip(rows.documents, rows.answers, strict=True):
        part.answer(part.add(document), "text", answer)
    data = part_bytes(part.table(), Footer(1, 0, "0" * 32, Progress(rows_done=ROWS)), compression)
    assert LocalStore(folder).create("part-000001-000000.parquet", data)


def datatrove_writers(rows: Rows, compression: str) -> dict[str, Callable[[Path], None]]:
    """By name: what writes `rows` into a folder."""
    from datatrove.data import Document as TheirDocument
    from datatrove.pipeline.writers import ParquetWriter
    from datatrove.utils.logging import logger

    logger.remove()
    given = rows.as_dictionaries()
    documents = [
        TheirDocument(row["text"], row["id"], metadata={k: v for k, v in row.items() if k not in ("id", "text")})
        for row in given
    ]
    codec = None if compression == "none" else compression

    def as_it_comes(folder: Path) -> None:
        with ParquetWriter(str(folder), "p-${rank}.parquet", codec, expand_metadata=True, schema=SCHEMA) as writer:
            for document in documents:
                writer.write(document)

    def lean(folder: Path) -> None:
        ready = iter(given)
        options: dict[str, Any] = {"use_content_defined_chunking": False, "write_page_index": False}
        options |= {"adapter": lambda self, document: next(ready), "schema": SCHEMA}
        with ParquetWriter(str(folder), "p-${rank}.parquet", codec, **options) as writer:
            for document in documents:
                writer.write(document)

    return {"datatrove": as_it_comes, "datatrove, lean": lean}


def texts_of(size: int, rng: random.Random) -> list[str]:
    """`ROWS` texts of `size` characters each: sentences of the bundled stories, shuffled."""
    stories = pq.read_table(Path(__file__).parents[1] / "configs" / "sample" / "stories.parquet")["body"].to_pylist()
    sentences = [sentence for story in stories for sentence in story.split(". ") if len(sentence) > 20]
    return [" ".join(rng.choices(sentences, k=1 + size // 20))[:size] for _ in range(ROWS)]


def seconds(write: Callable[[Path], None], parent: Path) -> tuple[float, float]:
    """What writing into a new folder takes: on the clock, and of the processor."""
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        start, busy = time.perf_counter(), time.process_time()
        write(Path(folder))
        took = time.perf_counter() - start, time.process_time() - busy
        written = pq.read_table(next(Path(folder).glob("*.parquet")))
        assert written.num_rows == ROWS
        assert written.column("text").null_count == 0
    return took


def measure(size: int, compression: str, rounds: int, parent: Path) -> dict[str, Any]:
    rows = Rows(texts_of(size, random.Random(size)), random.Random(0))
    writers: dict[str, Callable[[Path], None]] = {"ours": lambda folder: write_ours(folder, rows, compression)}
    writers |= datatrove_writers(rows, compression)
    for write in writers.values():
        seconds(write, parent)
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in writers}
    for turn in range(rounds):
        order = list(writers) if turn % 2 == 0 else list(writers)[::-1]
        for name in order:
            taken[name].append(seconds(writers[name], parent))
    result: dict[str, Any] = {"text_characters": size, "compression": compression, "rows": ROWS, "rounds": rounds}
    for clock, kind in enumerate(("us_per_row", "processor_us_per_row")):
        medians = {name: statistics.median(times[clock] for times in taken[name]) for name in writers}
        result[kind] = {name: round(median / ROWS * 1e6, 1) for name, median in medians.items()}
    for name in writers:
        if name != "ours":
            result[f"ours to {name}"] = {
                kind: _spread([o[clock] / t[clock] for o, t in zip(taken["ours"], taken[name], strict=True)])
                for clock, kind in enumerate(("time", "processor time"))
            }
    return result


def _spread(ratios: list[float]) -> dict[str, float]:
    ends = {"median": statistics.median(ratios), "lowest": min(ratios), "highest": max(ratios)}
    return {name: round(ratio, 3) for name, ratio in ends.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--datatrove", required=True, help="the folder that datatrove was installed into")
    parser.add_argument("--sizes", default="1000,5000", help="characters per text")
    parser.add_argument("--compressions", default="zstd,snappy,none")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", help="where parts are written; a temporary folder by default")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    sys.path.append(options.datatrove)
    results = []
    with tempfile.TemporaryDirectory(dir=options.folder) as parent:
        for size in map(int, options.sizes.split(",")):
            for compression in options.compressions.split(","):
                results.append(measure(size, compression, options.rounds, Path(parent)))
                print(json.dumps(results[-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""An archive that changes from night to night, and what an output over it must hold. No Ray, no model."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from tests.stub_engine import answer_to

Row = tuple[str, str, str, str | None]  # id, answer, title, source


@dataclass(frozen=True)
class Story:
    """One document; two stories may be equal in everything."""

    id: str
    body: str
    title: str = "t"
    source: str | None = "AP"

    @property
    def prompt(self) -> str:
        return f"Say: {self.body}"

    @property
    def row(self) -> Row:
        return self.id, answer_to(self.prompt), self.title, self.source


class Archive:
    """Files of stories below `folder`/in."""

    def __init__(self, folder: Path, rng: random.Random) -> None:
        self.folder = folder / "in"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.rng = rng
        self.files: dict[str, list[Story]] = {}
        self.told = 0

    @property
    def stories(self) -> list[Story]:
        return [story for stories in self.files.values() for story in stories]

    def rows(self) -> Counter[Row]:
        return Counter(story.row for story in self.stories)

    def new_story(self) -> Story:
        self.told += 1
        source = self.rng.choice(["AP", "Reuters", "dpa/AFP", "null", "", None])
        return Story(f"{self.told:05d}", f"story {self.told}", f"Title {self.told % 7}", source)

    def write(self) -> None:
        """Make the folder what `files` says; a file whose stories are the same is not touched."""
        for path in self.folder.iterdir():
            if path.name not in self.files:
                path.unlink()
        for name, stories in self.files.items():
            table = pa.table(
                {
                    "doc_id": pa.array([s.id for s in stories], pa.string()),
                    "body": pa.array([s.body for s in stories], pa.string()),
                    "title": pa.array([s.title for s in stories], pa.string()),
                    "source": pa.array([s.source for s in stories], pa.string()),
                }
            )
            path = self.folder / name
            if not path.exists() or not pq.read_table(path).equals(table):
                pq.write_table(table, path)

    # --- what happens to archives

    def change(self) -> None:
        """One random event."""
        rng = self.rng
        events = [self.add_file, self.grow, self.correct, self.retitle, self.resource, self.delete, self.copy]
        events += [self.move, self.rename, self.shuffle, self.remove_file]
        rng.choice(events)()

    def add_file(self) -> None:
        name = f"{self.rng.randrange(10**6):06d}.parquet"
        self.files[name] = [self.new_story() for _ in range(self.rng.randint(0, 12))]

    def grow(self) -> None:
        stories = self.files[self._some_file()]
        for _ in range(self.rng.randint(1, 5)):
            stories.insert(self.rng.randint(0, len(stories)), self.new_story())

    def correct(self) -> None:
        self._edit(lambda s: replace(s, body=f"{s.body}, corrected {self.rng.randrange(10**6)}"))

    def retitle(self) -> None:
        self._edit(lambda s: replace(s, title=f"{s.title}!"))

    def resource(self) -> None:
        self._edit(lambda s: replace(s, source=self.rng.choice(["AP", "Reuters", None])))

    def delete(self) -> None:
        stories = self.files[self._some_file()]
        if stories:
            stories.pop(self.rng.randrange(len(stories)))

    def copy(self) -> None:
        if self.stories:
            self.files[self._some_file()].append(self.rng.choice(self.stories))

    def move(self) -> None:
        stories = self.files[self._some_file()]
        if stories:
            self.files[self._some_file()].append(stories.pop(self.rng.randrange(len(stories))))

    def rename(self) -> None:
        self.files[f"{self.rng.randrange(10**6):06d}.parquet"] = self.files.pop(self._some_file())

    def shuffle(self) -> None:
        self.rng.shuffle(self.files[self._some_file()])

    def remove_file(self) -> None:
        if len(self.files) > 2:
            del self.files[self._some_file()]

    def _some_file(self) -> str:
        if not self.files:
            self.add_file()
        return self.rng.choice(sorted(self.files))

    def _edit(self, change: Any) -> None:
        stories = self.files[self._some_file()]
        if stories:
            place = self.rng.randrange(len(stories))
            stories[place] = change(stories[place])


def rows_of(frame: pd.DataFrame, layout: str) -> Counter[Row]:
    """What an analyst sees."""
    sources = [_source(None if pd.isna(value) else value, layout) for value in frame["source"]]
    return Counter(zip(frame["doc_id"], frame["summary"], frame["title"], sources, strict=True))


def as_seen(rows: Counter[Row], layout: str) -> Counter[Row]:
    """The same rows as the layout of the output shows them."""
    seen: Counter[Row] = Counter()
    for (identity, answer, title, source), count in rows.items():
        seen[identity, answer, title, _source(source, layout)] += count
    return seen


def _source(value: str | None, layout: str) -> str | None:
    """A folder says "null" for nothing, as it does for the word; to Delta an empty partition value is nothing."""
    blank = {"partitioned": "null", "partitioned delta": ""}.get(layout)
    return None if value == blank else value

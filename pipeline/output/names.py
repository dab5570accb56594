"""What files of an output are called: parts by run and shard, in folders by partition value (DESIGN section 8).

Knows nothing of what is in them.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple
from urllib.parse import quote, unquote

RUNS = "_nightdesk/runs"
SUCCESS = "_SUCCESS"
SCHEMA_PART = "part-000000-schema.parquet"
NULL = "null"  # a plain word: with Hive's own, pandas fails to read a folder of which one value is null
LONGEST = 200  # bytes of an encoded value; file systems take names of 255
_PART = re.compile(r"(?:(?P<folder>.+)/)?part-(?P<run>\d{6,})-(?P<shard>\d{6,})\.parquet")


class PartName(NamedTuple):
    """A part's name, taken apart; `folder` is "" or `key=value/…`."""

    folder: str
    run: int
    shard: int


def run_name(run: int) -> str:
    return f"{run:06d}"


def run_folder(run: int) -> str:
    return f"{RUNS}/{run_name(run)}"


def part_name(run: int, shard: int, folder: str = "") -> str:
    name = f"part-{run:06d}-{shard:06d}.parquet"
    return f"{folder}/{name}" if folder else name


def parsed(name: str) -> PartName | None:
    """None for a name that is no part's."""
    match = _PART.fullmatch(name)
    if match is None or not all("=" in step for step in (match["folder"] or "=").split("/")):
        return None
    return PartName(match["folder"] or "", int(match["run"]), int(match["shard"]))


def partition_folder(columns: Sequence[str], values: Sequence[str | None]) -> str:
    """`key=value/…` as Hive writes it: whatever is not a letter, a digit or one of `_.-` is percent-encoded.

    No value is `null`; a text that says so is encoded to keep a folder of its own, and so are the end of a text that is
    longer than a file name may be (its digest stands for it).
    """
    pairs = zip(columns, values, strict=True)
    return "/".join(f"{quote(column, safe='')}={_encoded(value)}" for column, value in pairs)


def partition_values(folder: str) -> Mapping[str, str | None]:
    """The values that a folder stands for, by column."""
    steps = (step.partition("=") for step in folder.split("/") if step)
    return {unquote(column): None if value == NULL else unquote(value) for column, _, value in steps}


def _encoded(value: str | None) -> str:
    if value is None:
        return NULL
    encoded = quote(value, safe="")
    if encoded == NULL:
        return "nul%6C"
    if encoded in (".", ".."):
        return encoded.replace(".", "%2E")
    if len(encoded) > LONGEST:
        kept = value.encode()[: LONGEST // 4].decode(errors="ignore")
        return f"{quote(kept, safe='')}-{hashlib.sha256(value.encode()).hexdigest()[:16]}"
    return encoded

"""ARCHITECTURE.md has one line for every file of code."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_the_page_names_every_file_once() -> None:
    lines = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").splitlines()
    named = Counter(found[1] for line in lines if (found := re.match(r"\| `(\w+/[\w/]+\.py)` \|", line)))
    files = {
        str(path.relative_to(ROOT))
        for folder in ("pipeline", "actors", "jobs")
        for path in (ROOT / folder).rglob("*.py")
        if path.name != "__init__.py" or "import" in path.read_text(encoding="utf-8")
    }
    assert named == Counter(files)

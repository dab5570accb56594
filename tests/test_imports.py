"""Dependencies go one way: jobs → actors → pipeline; ray stays out of pipeline, torch stays in the engine."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TORCH_ALLOWED = ("pipeline/engine/", "pipeline/speculation.py")


def imported(path: Path) -> set[str]:
    """Top-level names of every import statement in a file, nested ones included."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.split(".")[0])
    return names


def sources(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def test_there_is_something_to_check() -> None:
    assert len(sources("pipeline")) > 5


def test_pipeline_imports_neither_ray_nor_the_layers_above() -> None:
    for path in sources("pipeline"):
        assert not imported(path) & {"ray", "actors", "jobs"}, path


def test_actors_do_not_import_jobs() -> None:
    for path in sources("actors"):
        assert "jobs" not in imported(path), path


def test_only_the_engine_and_speculation_import_torch() -> None:
    for path in sources("pipeline"):
        if not str(path.relative_to(ROOT)).startswith(TORCH_ALLOWED):
            assert "torch" not in imported(path), path


@pytest.mark.parametrize("module", ["pipeline.messages", "pipeline.records"])
def test_importing_loads_neither_torch_nor_ray(module: str) -> None:
    heavy = {"torch", "ray", "transformers", "pyarrow"}
    code = f"import sys, {module}; print(sorted({heavy!r} & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"

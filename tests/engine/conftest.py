"""Folders of tiny models, made once per session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.models import tiny_folder

FolderOf = Callable[..., Path]


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> FolderOf:
    """`folder_of("llama", seed=1)`: a saved tiny model; the same arguments give the same folder."""
    made: dict[str, Path] = {}
    root = tmp_path_factory.mktemp("models")

    def make(model_type: str = "llama", seed: int = 0, **options: object) -> Path:
        key = f"{model_type}-{seed}-" + "-".join(f"{k}={options[k]}" for k in sorted(options))
        if key not in made:
            made[key] = tiny_folder(root / f"{model_type}-{len(made)}", model_type, seed, **options)  # type: ignore[arg-type]
        return made[key]

    return make


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, for tests that look at what is kept in it."""
    monkeypatch.setenv("NIGHTDESK_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"

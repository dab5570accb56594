"""The files of infra/ as the tests of this folder read them."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
INFRA, CONFIGS = ROOT / "infra", ROOT / "configs"
KUBERAY = ROOT.parent / "shared" / "data" / "kuberay"  # custom resource definitions; not part of the project
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the same, and many times faster
PLACEHOLDER = re.compile(r"\bREPLACE_[A-Z_]+\b")

Keys = tuple[str | int, ...]


def documents(name: str) -> list[Any]:
    """All YAML documents of a file below infra/."""
    return list(yaml.load_all((INFRA / name).read_text(), Loader=LOADER))


def kind(name: str, wanted: str) -> Any:
    """The one document of this kind in a file below infra/."""
    (found,) = (document for document in documents(name) if document["kind"] == wanted)
    return found


def text_files() -> list[Path]:
    """Everything in infra/ that a person may have to change: not the programs beside it."""
    return sorted(
        path
        for path in INFRA.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.name != "fetch_demo_model.py"
    )


@cache
def project() -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return found


def pinned(package: str) -> str:
    """The version of a dependency that pyproject.toml pins."""
    (version,) = (
        dependency.partition("==")[2]
        for dependency in project()["dependencies"]
        if re.match(rf"{package}(\[|==)", dependency)
    )
    return str(version)


# --- custom resources


@cache
def schema_of(wanted: str) -> Any:
    """The schema (v1) that KubeRay's operator installs for a kind; the test is skipped where it is not at hand."""
    path = KUBERAY / f"ray.io_{wanted.lower()}s.yaml"
    if not path.exists():
        pytest.skip(f"no custom resource definitions at {KUBERAY}")
    definition = yaml.load(path.read_text(), Loader=LOADER)
    (version,) = (version for version in definition["spec"]["versions"] if version["name"] == "v1")
    return version["schema"]["openAPIV3Schema"]


def problems(resource: Any, schema: Any) -> list[str]:
    """What a server would refuse (wrong types, missing keys), and what it would silently drop (unknown keys)."""
    validator = jsonschema.Draft202012Validator(schema)
    refused = [f"{'.'.join(map(str, error.path))}: {error.message}" for error in validator.iter_errors(resource)]
    return refused + [f"{'.'.join(map(str, path))}: unknown" for path in _pruned(resource, schema, ())]


def _pruned(value: Any, schema: Any, at: Keys) -> Iterator[Keys]:
    if schema.get("x-kubernetes-preserve-unknown-fields") or at == ("metadata",):
        return
    if isinstance(value, dict):
        known, more = schema.get("properties", {}), schema.get("additionalProperties")
        for key, entry in value.items():
            if key in known:
                yield from _pruned(entry, known[key], (*at, key))
            elif isinstance(more, dict):
                yield from _pruned(entry, more, (*at, key))
            elif not more:
                yield *at, key
    elif isinstance(value, list):
        for number, entry in enumerate(value):
            yield from _pruned(entry, schema.get("items", {}), (*at, number))

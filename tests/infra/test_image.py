"""The image: dependencies as pyproject.toml has them, none of the code, no root; and images named alike everywhere."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.infra.manifests import INFRA, ROOT, documents, pinned, project, text_files

DOCKERFILE = INFRA / "Dockerfile"
BASE = re.compile(r"rayproject/ray:(?P<ray>[\d.]+)-py(?P<python>\d+)")


def instructions() -> list[tuple[str, str]]:
    """(instruction, its text) of the Dockerfile, lines that are continued joined as docker joins them."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n", "", "\n".join(lines))
    return [(words[0], words[2]) for line in joined.splitlines() if line.strip() for words in [line.partition(" ")]]


def test_hadolint_has_nothing_to_say() -> None:
    beside = Path(sys.executable).with_name("hadolint")
    program = str(beside) if beside.exists() else shutil.which("hadolint")
    if program is None:
        pytest.skip("hadolint is not installed: pip install -e '.[dev]'")
    done = subprocess.run([program, "--no-color", str(DOCKERFILE)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_base_is_pinned_to_the_ray_and_the_python_of_the_project() -> None:
    bases = [text for name, text in instructions() if name == "FROM"]
    assert len(bases) == 1
    base = BASE.fullmatch(bases[0])
    assert base is not None, bases
    assert base["ray"] == pinned("ray")
    minor = project()["requires-python"].removeprefix(">=")
    assert base["python"] == minor.replace(".", "")
    assert minor in (ROOT / "Makefile").read_text()


def test_torch_comes_first_in_the_version_of_the_makefile() -> None:
    installed = [text for name, text in instructions() if name == "RUN" and "pip install" in text]
    torch = re.search(r"\btorch==([\d.]+)$", installed[0])
    wanted = re.search(r"\btorch==([\d.]+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert torch is not None
    assert wanted is not None
    assert torch[1] == wanted[1]
    assert "${TORCH_INDEX}" in installed[0]
    assert not any("torch==" in text for text in installed[1:])


def test_nothing_of_the_code_is_copied() -> None:
    copied = [text for name, text in instructions() if name in ("COPY", "ADD")]
    assert copied == ["--chown=1000:100 pyproject.toml ."]
    ignored = (INFRA / "Dockerfile.dockerignore").read_text().splitlines()
    assert [line for line in ignored if not line.startswith("#")] == ["*", "!pyproject.toml"]


def test_it_does_not_run_as_root() -> None:
    assert [text for name, text in instructions() if name == "USER"][-1] == "1000:100"


def test_the_dependencies_are_those_of_the_project(tmp_path: Path) -> None:
    """The command that reads them, as bash runs it in the image."""
    (step,) = (text for name, text in instructions() if name == "RUN" and "tomllib" in text)
    command = step.split("&&")[0]
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "python").symlink_to(sys.executable)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run(["bash", "-o", "pipefail", "-c", command], cwd=tmp_path, env=environment, check=True)
    assert (tmp_path / "requirements.txt").read_text().splitlines() == project()["dependencies"]


def test_every_file_names_the_image_that_is_built() -> None:
    named = {
        f"{path.relative_to(INFRA)}: {image}"
        for path in text_files()
        for image in re.findall(r"REPLACE_REGISTRY/[\w./:-]+", path.read_text())
        if not re.fullmatch(rf"REPLACE_REGISTRY/nightdesk:{re.escape(project()['version'])}-(cuda|cpu)", image)
    }
    assert named == set()


def test_every_image_is_pinned() -> None:
    images = re.findall(r"^\s*(?:- )?image: (\S+)", "\n".join(p.read_text() for p in INFRA.rglob("*.yaml")), re.M)
    assert len(images) >= 5
    assert all(re.search(r":v?\d+\.\d+\.\d+", image) for image in images), images


def test_the_cluster_on_ec2_runs_the_image() -> None:
    (cluster,) = documents("aws-cluster.yaml")
    assert cluster["docker"]["image"].endswith(f"nightdesk:{project()['version']}-cuda")

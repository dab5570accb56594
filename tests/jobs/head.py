"""A Ray head of a test's own, with token authentication: what `ray start --head` starts, on 127.0.0.1, ended by pid."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

START_SECONDS = 180
PORTS = (
    "--port", "--dashboard-port", "--ray-client-server-port", "--dashboard-agent-listen-port",
    "--dashboard-agent-grpc-port", "--runtime-env-agent-port", "--metrics-export-port", "--node-manager-port",
    "--object-manager-port",
)  # fmt: skip


@dataclass(frozen=True)
class Head:
    """`environment` is what a process needs to talk to it; `folder` holds its logs."""

    address: str
    environment: dict[str, str]
    folder: Path


@contextmanager
def ray_head(cpus: int = 2) -> Iterator[Head]:
    """Its driver finds the interpreter of this test as `python`."""
    folder = Path(tempfile.mkdtemp(prefix="nh-", dir="/tmp"))  # socket paths are limited to 107 bytes
    token = folder / "token"
    token.write_text(secrets.token_hex(16))
    auth = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    path = f"{Path(sys.executable).parent}:{inherited['PATH']}"
    ports = dict(zip(PORTS, _free_ports(len(PORTS)), strict=True))
    command = [
        str(Path(sys.executable).parent / "ray"), "start", "--head", "--block", "--node-ip-address", "127.0.0.1",
        "--dashboard-host", "127.0.0.1", "--temp-dir", str(folder), "--num-cpus", str(cpus),
        "--object-store-memory", str(128 * 2**20), "--disable-usage-stats",
        *(f"{option}={port}" for option, port in ports.items()),
    ]  # fmt: skip
    with (folder / "head.log").open("w") as log:
        head = subprocess.Popen(
            command, env={**inherited, **auth, "PATH": path}, stdout=log, stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
    try:
        _await(head, ports["--dashboard-port"], folder)
        yield Head(f"http://127.0.0.1:{ports['--dashboard-port']}", auth, folder)
    finally:
        _end(head)
        shutil.rmtree(folder, ignore_errors=True)


def _free_ports(count: int) -> list[int]:
    with ExitStack() as open_ones:
        found = []
        for _ in range(count):
            one = open_ones.enter_context(socket.socket())
            one.bind(("127.0.0.1", 0))
            found.append(one.getsockname()[1])
        return found


def _await(head: subprocess.Popen[bytes], port: int, folder: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and head.poll() is None:
        with suppress(OSError):
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        time.sleep(0.3)
    raise AssertionError((folder / "head.log").read_text())


def _end(head: subprocess.Popen[bytes]) -> None:
    """It and all that it started, its workers' watchers too, which are in sessions of their own."""
    with suppress(psutil.NoSuchProcess):
        family = psutil.Process(head.pid).children(recursive=True)
        for process in [psutil.Process(head.pid), *family]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(family, 10)
    head.wait()

"""A Ray to work with: the one that is there already, the one at RAY_ADDRESS, or a local one of our own.

The local one is quiet, lives in a temporary folder of its own, and leaves neither processes nor files.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import tempfile
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import ray
import ray._private.worker
from ray._private.runtime_env.constants import RAY_JOB_CONFIG_JSON_ENV_VAR
from ray._private.state import state
from ray.exceptions import AuthenticationError

from actors.node import ACCELERATOR_LABEL, Node
from pipeline import events
from pipeline.errors import ConfigError, WorkerLost

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("pipeline", "actors")  # what workers import
TEMPORARY = "/tmp"  # not TMPDIR: the paths of Ray's sockets are limited to 107 bytes
OBJECT_STORE_BYTES = 256 * 2**20  # messages are small, and no results are kept
EXIT_SECONDS = 5.0
CONNECT_SECONDS = 10.0
ACCELERATOR, HEAD = "accelerator_type:", "node:__internal_head__"  # resources that say what a node is


@contextmanager
def ray_session() -> Iterator[None]:
    """Ray is connected inside. A connection that was there before stays; one made here is closed."""
    if ray.is_initialized():
        yield
        return
    with _without_chatter():
        if os.environ.get("RAY_ADDRESS"):
            _refuse_silence(os.environ["RAY_ADDRESS"])
            with _connected(runtime_env=_code()):
                yield
        else:
            with (
                _temporary_folder() as folder,
                _connected(
                    address="local", include_dashboard=False, object_store_memory=OBJECT_STORE_BYTES, _temp_dir=folder
                ),
            ):
                yield


def _refuse_silence(address: str) -> None:
    """WorkerLost if nothing listens at a host and port: Ray itself would go on trying for minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdecimal():
        return  # "auto" and the like, which Ray looks up
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
    except OSError as error:
        raise WorkerLost(f"RAY_ADDRESS: nothing answers at {address} ({error}); start Ray or unset it") from error


def log_here(**known: str) -> None:
    """In a process that Ray has started for an actor, events go to its log, which Ray keeps, with what is known."""
    if ray.is_initialized() and ray.get_runtime_context().worker.mode == ray.WORKER_MODE:
        events.write_here(**known)


def nodes() -> list[Node]:
    """What the cluster has, whether it is in use or not. A node that is being drained is lost already."""
    going = draining()
    alive = sorted((node for node in ray.nodes() if node["Alive"]), key=lambda node: str(node["NodeID"]))
    hosts = Counter(node["NodeManagerHostname"] for node in alive)
    named = [_node(node, alone=hosts[node["NodeManagerHostname"]] == 1) for node in alive]
    return [node for node in named if node.id not in going]


def draining() -> dict[str, float | None]:
    """Nodes that are about to be taken away, by Ray's ids: the Unix time of their end, None where nobody has said."""
    ends: dict[str, int] = state.get_draining_nodes()  # in milliseconds; 0: no saying
    return {identity: end / 1000 if end else None for identity, end in ends.items()}


def living() -> frozenset[str]:
    """Ray's ids of the nodes that are there, drained or not."""
    return frozenset(str(node["NodeID"]) for node in ray.nodes() if node["Alive"])


def _node(found: dict[str, Any], alone: bool) -> Node:
    """`alone`: no other node has its host name."""
    resources, labels, identity = found["Resources"], found["Labels"], found["NodeID"]
    kinds = {name.removeprefix(ACCELERATOR) for name in resources if name.startswith(ACCELERATOR)}
    kinds |= {labels[ACCELERATOR_LABEL]} if ACCELERATOR_LABEL in labels else set()
    return Node(
        name=found["NodeManagerHostname"] + ("" if alone else f"-{identity[:6]}"),
        cpus=int(resources.get("CPU", 0)),
        gpus=int(resources.get("GPU", 0)),
        accelerators=frozenset(kinds),
        labels=dict(labels),
        head=HEAD in resources,
        id=identity,
    )


@contextmanager
def _connected(**settings: Any) -> Iterator[None]:
    on_terminate = signal.getsignal(signal.SIGTERM)
    before = set(psutil.Process().children())
    try:
        with failures_to_begin():
            ray.init(log_to_driver=False, logging_level=logging.ERROR, **settings)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, on_terminate)  # Ray has put its own there, which exits
        yield
    finally:
        started = _family(set(psutil.Process().children()) - before)
        ray.shutdown()
        _, hanging = psutil.wait_procs(started, EXIT_SECONDS)
        for process in hanging:
            process.kill()


@contextmanager
def failures_to_begin() -> Iterator[None]:
    """Ray's failures to begin as ours. It raises bare exceptions where its processes do not come up in time."""
    address = os.environ.get("RAY_ADDRESS")
    try:
        yield
    except AuthenticationError as error:
        said = _first_line(error)
        raise ConfigError(f"RAY_ADDRESS: {address} refuses the token, or asks for one ({said})") from error
    except Exception as error:
        what = f"RAY_ADDRESS: no connection to Ray at {address}" if address else "Ray could not be started here"
        raise WorkerLost(
            f"{what} ({_first_line(error)}); the machine may be too busy or short of memory: the same command continues"
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].partition(". ")[0].rstrip(".")


def _family(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """The processes with all that they started."""
    family = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            family += [process, *process.children(recursive=True)]
    return family


def _code() -> dict[str, Any] | None:
    """The code in this folder, for workers on other machines; None where a job submission has sent it."""
    if RAY_JOB_CONFIG_JSON_ENV_VAR in os.environ:
        return None
    return {"py_modules": [str(ROOT / package) for package in PACKAGES], "excludes": ["__pycache__"]}


@contextmanager
def _temporary_folder() -> Iterator[str]:
    """Removed afterwards; so are those of processes that were killed before they could do so."""
    for stale in Path(TEMPORARY).glob("nd-*-*"):
        if stale.owner() == Path.home().owner() and not psutil.pid_exists(int(stale.name.split("-")[1])):
            shutil.rmtree(stale, ignore_errors=True)
    folder = tempfile.mkdtemp(prefix=f"nd-{os.getpid()}-", dir=TEMPORARY)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _without_chatter() -> Iterator[None]:
    """Ray prints the death of a worker to standard output, whatever its settings; we say it in our own words."""
    module = ray._private.worker
    before = module.print_to_stdstream
    module.print_to_stdstream = _print_nothing
    try:
        yield
    finally:
        module.print_to_stdstream = before


def _print_nothing(data: object, ignore_prefix: bool) -> None:
    return None

"""`submit CONFIG`: `run` or `nightly` as a Ray job, with the code that is in this folder.

The folder and the job file are sent, whatever is checked here is checked before that, and paths must mean the same on
the cluster's machines as they do here.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jobs.ending import COMMITTED, Failure
from jobs.following import Log, ServedJob
from jobs.following import follow as follow_job
from jobs.job_server import ClusterNode, JobServer
from jobs.package import SENT_BYTES, collect, pack, refuse_oversize, too_large
from pipeline.config import JobConfig, load_config
from pipeline.corpus.listing import list_files
from pipeline.errors import ConfigError, CorpusError, WorkerLost
from pipeline.jobfile import override, read_mapping
from pipeline.remote.urls import is_remote

ROOT = Path(__file__).resolve().parents[1]
JOB_FOLDER = "submitted-job"  # where the job file is in the package
FORWARDED = ("NIGHTDESK_", "HF_")
SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|CREDENTIAL|KEY|AUTH", re.IGNORECASE)
STOP_SECONDS = 60  # for a driver that is asked to end, before it is killed: replicas go, and the claim
STOP_LOOK_SECONDS = 0.5
NODE_ID = "ray.io/node-id"


@dataclass(frozen=True)
class DriverWish:
    """What the command line says about the driver's machine."""

    cpus: float = 0.0
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Request:
    """What is to run, and how."""

    config: Path
    overrides: tuple[str, ...] = ()
    command: str = "run"
    options: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    job_id: str | None = None
    driver: DriverWish = DriverWish()
    python: str = "python"


def submit(request: Request, address: str | None, follow: bool) -> int:
    """Returns 0 once it is submitted or, where it is followed, the job's own exit code."""
    config = checked(request)
    files = collect(ROOT, own_data(config))
    refuse_oversize(ROOT, files)
    server = JobServer(address)
    driver = driver_place(server.nodes(), request.driver)
    _say(driver.reason)
    environment = _environment(request)
    with tempfile.TemporaryDirectory(prefix="nightdesk-") as folder:
        package = Path(folder) / "nightdesk.zip"
        pack(files, {f"{JOB_FOLDER}/{request.config.name}": request.config.read_bytes()}, package)
        if package.stat().st_size >= SENT_BYTES:
            raise too_large(ROOT, {name: path.stat().st_size for name, path in files.items()}, SENT_BYTES)
        runtime: dict[str, object] = {"working_dir": str(package), "env_vars": environment}
        job_id = server.submit(entrypoint(request), runtime, request.job_id, driver.cpus, dict(driver.labels))
    _say(f"job {job_id}: {len(files)} files of {ROOT} and {request.config.name} were sent to {server.address}")
    if not follow:
        _say(f"to follow it: python -m jobs submit --attach {job_id} --address {server.address}")
        _say(f"to stop it:   python -m jobs submit --cancel {job_id} --address {server.address}")
        print(job_id)
        return COMMITTED
    return _follow(server, job_id)


def attach(address: str | None, job_id: str) -> int:
    """Follow a job to its end; returns its exit code."""
    server = JobServer(address)
    server.job(job_id)  # is there one?
    return _follow(server, job_id)


def cancel(address: str | None, job_id: str) -> int:
    """Stop a job and wait until it has ended; its output stays resumable."""
    server = JobServer(address)
    if server.job(job_id).status.is_terminal():
        _say(f"job {job_id} had ended: {server.job(job_id).status.value.lower()}")
        return COMMITTED
    server.stop(job_id)
    until = time.monotonic() + 2 * STOP_SECONDS
    while not (status := server.job(job_id).status).is_terminal():
        if time.monotonic() > until:
            raise WorkerLost(f"job {job_id} has not ended within {2 * STOP_SECONDS} s of being told to")
        time.sleep(STOP_LOOK_SECONDS)
    _say(f"job {job_id} has ended: {status.value.lower()}; submitting the same job again continues it")
    return COMMITTED


def _follow(server: JobServer, job_id: str) -> int:
    try:
        end: Failure = follow_job(ServedJob(server, job_id), Log(sys.stdout), _say)
    except KeyboardInterrupt:
        _say(f"no longer following job {job_id}, which goes on")
        _say(f"to follow it: python -m jobs submit --attach {job_id} --address {server.address}")
        _say(f"to stop it:   python -m jobs submit --cancel {job_id} --address {server.address}")
        raise Detached(f"job {job_id} has not ended yet") from None
    if end.message:
        _say(end.message)
    return end.code


class Detached(WorkerLost):
    """Whoever followed a job has gone before its end. It goes on, and not everything is committed yet."""


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# --- what is checked before anything is sent


def checked(request: Request) -> JobConfig:
    """The job, if it can mean on the cluster what it means here. ConfigError otherwise."""
    if not (ROOT / "pipeline").is_dir() or ROOT.name == "site-packages":
        raise ConfigError(f"submit: {ROOT} is no working folder to send; run python -m jobs submit in one")
    mapping = read_mapping(request.config)
    for assignment in request.overrides:
        override(mapping, assignment, JobConfig)
    config = load_config(request.config, request.overrides)
    relative = [f"{key}: {path}" for key, path in _paths(mapping) if not _is_absolute(path)]
    if relative:
        raise ConfigError(
            f"{request.config}: {', '.join(relative)}: relative, and the job runs in another folder and elsewhere: "
            "give paths from the root that mean the same on all of them, or URLs"
        )
    here = [f"{key}: {model}" for key, model in _models(mapping) if _is_relative_model(model)]
    if here:
        raise ConfigError(
            f"{request.config}: {', '.join(here)}: in this folder, and models are not sent: give hub ids, or paths "
            "from the root that mean the same on all machines"
        )
    return config


def _paths(mapping: Mapping[str, Any]) -> list[tuple[str, str]]:
    given = mapping["input"]["path"]
    inputs = [given] if isinstance(given, str) else given
    return [("output.path", mapping["output"]["path"]), *(("input.path", path) for path in inputs)]


def _models(mapping: Mapping[str, Any]) -> list[tuple[str, str]]:
    drafts = mapping.get("draft") or []
    drafts = [drafts] if isinstance(drafts, Mapping) else drafts
    found = [("target.model", mapping["target"]["model"])]
    return found + [("draft.model", draft["model"]) for draft in drafts if draft.get("model")]


def _is_absolute(path: str) -> bool:
    return is_remote(path) or path.removeprefix("file://").startswith("/")


def _is_relative_model(model: str) -> bool:
    if _is_absolute(model):
        return False
    return model.startswith((".", "~")) or model.lower().endswith(".gguf") or os.path.exists(model)


def own_data(config: JobConfig) -> set[Path]:
    """What the job reads and writes in the working folder itself: data, not code."""
    paths = [config.output.path, config.target.model, *(draft.model for draft in config.draft if draft.model)]
    paths += [path for path in config.input.paths if os.path.exists(path)]
    with suppress(CorpusError):  # what is only on the cluster is not in this folder
        paths += [file.path for file in list_files(config.input)] if _looks_into(config.input.paths) else []
    inside = {Path(os.path.realpath(path)) for path in paths if not is_remote(path) and path.startswith("/")}
    return {path for path in inside if ROOT in path.parents}


def _looks_into(paths: Sequence[str]) -> bool:
    """Could one of these patterns name a file of the working folder? Listing an archive elsewhere takes long."""
    fixed = [re.split(r"[*?\[]", path)[0] for path in paths if not is_remote(path)]
    return any(f"{ROOT}/".startswith(start) or start.startswith(f"{ROOT}/") for start in fixed)


# --- what is sent


def entrypoint(request: Request) -> str:
    """The driver's command. `exec`: signals and exit code are its own, not a shell's."""
    arguments = [request.python, "-m", "jobs", request.command, f"{JOB_FOLDER}/{request.config.name}"]
    for assignment in request.overrides:
        arguments += ["--set", assignment]
    return f"exec {shlex.join([*arguments, *request.options])}"


def _environment(request: Request) -> dict[str, str]:
    sent, withheld = forwarded(os.environ)
    if withheld:
        _say(
            f"not sent: {', '.join(withheld)} (a secret or a folder of this machine): set it on the cluster, or give "
            "--env; credentials of storage are the cluster's machines' own"
        )
    return {"RAY_JOB_STOP_WAIT_TIME_S": str(STOP_SECONDS), **sent, **request.environment}


def forwarded(environment: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """(variables of ours and of the model hub that the job gets, names of those that it does not get)."""
    ours = {name: value for name, value in environment.items() if name.startswith(FORWARDED)}
    withheld = sorted(n for n, value in ours.items() if SECRET.search(n) or value.startswith(("/", "~")))
    return {name: value for name, value in ours.items() if name not in withheld}, withheld


def assignments(option: str, given: Iterable[str]) -> dict[str, str]:
    """KEY=VALUE, several times."""
    found = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise ConfigError(f"{option}: write KEY=VALUE")
        found[key] = value
    return found


# --- where the driver runs


@dataclass(frozen=True)
class DriverPlace:
    """`labels` empty and `cpus` 0: Ray puts the driver on the head node."""

    cpus: float
    labels: Mapping[str, str]
    reason: str


def driver_place(nodes: Sequence[ClusterNode], wish: DriverWish) -> DriverPlace:
    """Not on a machine with GPUs if there is another: the driver computes nothing, and theirs is dear.

    As soon as anything is reserved for a driver, Ray puts it on any machine that has room; that is why the ones without
    GPUs are then named.
    """
    if wish.labels:
        return DriverPlace(wish.cpus, wish.labels, "the driver goes where its labels say")
    plain = [node for node in nodes if not node.gpus]
    head_is_plain = any(node.head for node in plain)
    if not wish.cpus and (head_is_plain or not plain):
        why = "" if head_is_plain else ", although it has GPUs: so has every machine; the driver reserves none"
        return DriverPlace(0.0, {}, f"the driver goes to the head node{why}")
    cpus = wish.cpus or 1.0
    roomy = [node.id for node in (plain or nodes) if node.cpus >= cpus]
    if not roomy:
        raise ConfigError(
            f"--driver-cpus: no machine {'without GPUs ' if plain else ''}has {cpus:g} cores for the driver; give "
            "fewer, or --driver-label for machines that an autoscaler adds"
        )
    kind = "without" if plain else "with"
    labels = {NODE_ID: f"in({','.join(sorted(roomy))})"}
    return DriverPlace(cpus, labels, f"the driver goes to one of {len(roomy)} machines {kind} GPUs")

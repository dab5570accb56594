"""A cluster's job server (Ray Jobs API): connected to, asked, and its failures as ours, in one line each."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

import requests
from ray.dashboard.modules import dashboard_sdk
from ray.dashboard.modules.job import sdk
from ray.exceptions import AuthenticationError
from ray.job_submission import JobDetails, JobSubmissionClient

from pipeline.errors import ConfigError, WorkerLost

ADDRESSES = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")  # in this order
CONNECT_SECONDS = 10.0
TOKEN, TOKEN_PATH = "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"


@dataclass(frozen=True)
class ClusterNode:
    """What a place for a driver depends on."""

    id: str
    head: bool
    gpus: float
    cpus: float


class JobServer:
    """The one at an address. Every call raises ConfigError for what the caller got wrong, WorkerLost for silence."""

    def __init__(self, address: str | None) -> None:
        self.address = address_of(address)
        for module in (dashboard_sdk, sdk):
            logging.getLogger(module.__name__).setLevel(logging.ERROR)
        _refuse_silence(self.address)
        with self._failures(), _without_addresses():
            self.client = JobSubmissionClient(self.address)

    def submit(
        self, entrypoint: str, runtime_env: dict[str, object], job_id: str | None, cpus: float, labels: dict[str, str]
    ) -> str:
        """Send the working folder, if it is not there, and start the job; returns its id."""
        with self._failures():
            return str(
                self.client.submit_job(
                    entrypoint=entrypoint,
                    runtime_env=runtime_env,
                    submission_id=job_id,
                    entrypoint_num_cpus=cpus or None,
                    entrypoint_label_selector=labels or None,
                )
            )

    def job(self, job_id: str) -> JobDetails:
        """How it stands."""
        with self._failures(job_id):
            return self.client.get_job_info(job_id)

    def stop(self, job_id: str) -> bool:
        """Ask it to end; False if it has ended."""
        with self._failures(job_id):
            return bool(self.client.stop_job(job_id))

    def nodes(self) -> list[ClusterNode]:
        """Those that are alive."""
        from ray.util.state import list_nodes

        with self._failures(), _without_addresses():
            found = list_nodes(address=self.client.get_address(), limit=10_000, raise_on_missing_output=False)
        return [
            ClusterNode(
                node.node_id, bool(node.is_head_node), node.resources_total.get("GPU", 0.0),
                node.resources_total.get("CPU", 0.0),
            )
            for node in found
            if node.state == "ALIVE"
        ]  # fmt: skip

    @contextmanager
    def _failures(self, job_id: str | None = None) -> Iterator[None]:
        try:
            yield
        except AuthenticationError as error:
            raise ConfigError(f"--address: {self.address} {token_trouble(_first_line(error))}") from error
        except (ConnectionError, requests.exceptions.RequestException) as error:
            raise WorkerLost(
                f"--address: no answer from {self.address} ({type(error).__name__}); is it the address of the "
                "cluster's dashboard (port 8265, if nobody chose another)?"
            ) from error
        except (RuntimeError, ValueError) as error:
            if job_id is not None and "status code 404" in str(error):
                raise ConfigError(f"there is no job {job_id} at {self.address}") from error
            if job_id is not None and "status code 5" in str(error):  # it is being started, or what is behind it
                raise WorkerLost(f"--address: {self.address} cannot answer now: {_last_line(error)}") from error
            raise ConfigError(f"--address: {self.address} refuses: {_last_line(error)}") from error


def token_trouble(said: str) -> str:
    """What is wrong with the environment's token for a cluster that `said` it does not take it."""
    file = os.environ.get(TOKEN_PATH)
    if os.environ.get("RAY_AUTH_MODE") == "token":
        if os.environ.get(TOKEN):  # Ray looks there first
            return f"refuses the token in {TOKEN} ({said}): it is not this cluster's"
        if file and not os.path.exists(os.path.expanduser(file)):
            return f"asks for a token, and {TOKEN_PATH} names a file that is not there: {file}"
        if file:
            return f"refuses the token in {file} ({TOKEN_PATH}; {said}): it is not this cluster's"
    return f"asks for a token ({said}): set RAY_AUTH_MODE=token, and {TOKEN} or {TOKEN_PATH} to the cluster's token"


def address_of(given: str | None) -> str:
    """What was given on the command line goes before the environment (for Ray itself it is the other way round)."""
    for address in (given, *(os.environ.get(name) for name in ADDRESSES)):
        if address:
            return address.rstrip("/")
    raise ConfigError("--address: give the URL of the cluster's dashboard, http://HOST:8265, or set RAY_ADDRESS")


@contextmanager
def _without_addresses() -> Iterator[None]:
    """Ray takes the environment's addresses before the one it is given."""
    kept = {name: os.environ.pop(name) for name in ADDRESSES if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(kept)


def _refuse_silence(address: str) -> None:
    """WorkerLost if nothing listens there; Ray's own attempts can take minutes."""
    try:
        parts = urlsplit(address if "://" in address else f"//{address}")
        host, port = parts.hostname, parts.port or (443 if parts.scheme == "https" else 8265)
    except ValueError:
        host, port = None, 0
    if not host:
        raise ConfigError(f"--address: {address} is no address: write http://HOST:8265")
    try:
        socket.create_connection((host, port), CONNECT_SECONDS).close()
    except OSError as error:
        raise WorkerLost(f"--address: nothing answers at {address} ({error}); nothing was sent") from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].partition(". ")[0].rstrip(".")


def _last_line(error: Exception) -> str:
    """Of a traceback that the server has sent, what it comes to."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]

"""Tells others how a run ended: a command, a webhook. Whatever goes wrong with them is a warning.

Knows nothing of runs: a summary is names and values. Says nothing of a webhook's address but its host, for the rest
of it often is a password.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from http.client import HTTPException
from urllib.parse import urlsplit

from pipeline.config import HooksConfig

LOG = logging.getLogger(__name__)
SHOWN_CHARACTERS = 200  # of what a command said last
Summary = Mapping[str, str | int | float | None]


def tell(hooks: HooksConfig, summary: Summary, succeeded: bool) -> None:
    """Run the command for this outcome, if there is one, and post to the webhook, if there is one."""
    command = hooks.on_success if succeeded else hooks.on_failure
    body = json.dumps(dict(summary), ensure_ascii=False).encode()
    if command is not None:
        problem = _run(command, body, _environment(summary), hooks.timeout)
        if problem is not None:
            LOG.warning("hooks.%s: %s", "on_success" if succeeded else "on_failure", problem)
    if hooks.webhook is not None:
        problem = _post(os.path.expandvars(hooks.webhook), body, hooks.timeout)
        if problem is not None:
            LOG.warning("hooks.webhook: %s", problem)


def _environment(summary: Summary) -> dict[str, str]:
    """`outcome` as NIGHTDESK_OUTCOME; what is not known is empty."""
    told = {f"NIGHTDESK_{name.upper()}": "" if value is None else str(value) for name, value in summary.items()}
    return {**os.environ, **told}


def _run(command: str, body: bytes, environment: dict[str, str], timeout: float) -> str | None:
    """What went wrong. The command's output is kept from our own, whose last line is the summary."""
    with tempfile.TemporaryFile() as said:
        try:
            process = subprocess.Popen(
                command, shell=True, stdin=subprocess.PIPE, stdout=said, stderr=subprocess.STDOUT, env=environment,
                start_new_session=True,
            )  # fmt: skip
        except (OSError, ValueError) as error:
            return f"cannot be started: {error}"
        try:
            process.communicate(body, timeout)
        except subprocess.TimeoutExpired:
            _kill(process)
            return f"ended after {timeout:g} s (hooks.timeout)"
        except KeyboardInterrupt:
            _kill(process)
            raise
        if process.returncode == 0:
            return None
        said.seek(0)
        last = said.read().decode(errors="replace").strip()[-SHOWN_CHARACTERS:]
        return f"exit code {process.returncode}{f': {last}' if last else ''}"


def _kill(process: subprocess.Popen[bytes]) -> None:
    """With all that it started in its session."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _post(url: str, body: bytes, timeout: float) -> str | None:
    """What went wrong. In a thread of its own: a timeout of a connection does not bound an answer that trickles."""
    problem: list[str | None] = [f"no answer from {_host(url)} within {timeout:g} s"]

    def post() -> None:
        problem[0] = _posted(url, body, timeout)

    thread = threading.Thread(target=post, name="webhook", daemon=True)
    thread.start()
    thread.join(timeout)
    return problem[0]


def _posted(url: str, body: bytes, timeout: float) -> str | None:
    if not url.lower().startswith(("http://", "https://")):
        return "is no http:// or https:// address"
    try:
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"}, method="POST")
        with urllib.request.urlopen(request, timeout=timeout):
            return None
    except urllib.error.HTTPError as error:
        error.close()
        return f"{_host(url)} answers {error.code}"
    except urllib.error.URLError as error:
        return f"{_host(url)} cannot be reached: {type(error.reason).__name__}"
    except (OSError, ValueError, HTTPException) as error:  # their words may hold the address
        return f"{_host(url)} cannot be posted to: {type(error).__name__}"


def _host(url: str) -> str:
    try:
        return urlsplit(url).hostname or "its host"
    except ValueError:
        return "its host"

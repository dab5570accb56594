"""Starts drivers that can be killed for real, without paying for imports each time.

A process that has imported everything and forks a driver per request. Requests and replies are lines of JSON:
`{"folder", "die_at", "seconds", "job", …}` → `{"pid"}`, and `{"wait": pid}` → `{"code"}` (negative: a signal). What
else a request holds are options of a run; `job` is what the job has other than usual, `environment` what the process
has; with `compact` parts are merged.
With `die_at` k a driver kills itself with SIGKILL right before its k-th call that changes the file system; how
many there were is left in `folder`/calls.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

ROOT = Path(__file__).resolve().parents[2]
CHANGES = ("fsync", "link", "replace", "unlink", "mkdir")


class Zygote:
    """The test's side."""

    def __enter__(self) -> Self:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.crash.zygote"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()

    def start(self, folder: Path, die_at: int = 0, seconds: float = 0.0, **options: Any) -> int:
        """The pid of a new driver."""
        return int(self._ask({"folder": str(folder), "die_at": die_at, "seconds": seconds, **options})["pid"])

    def wait(self, pid: int) -> int:
        """Its exit code; minus the signal that killed it."""
        return int(self._ask({"wait": pid})["code"])

    def run(self, folder: Path, die_at: int = 0, seconds: float = 0.0, **options: Any) -> int:
        return self.wait(self.start(folder, die_at, seconds, **options))

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps(request), file=self.process.stdin, flush=True)
        reply: dict[str, Any] = json.loads(self.process.stdout.readline())
        return reply


def serve() -> None:
    """The zygote's side: single-threaded, so that forking is safe."""
    from jobs.compact import compact_output  # noqa: F401  paid for once
    from jobs.run import execute  # noqa: F401
    from tests.stub_engine import StubEngine  # noqa: F401

    know_s3()
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            _, status = os.waitpid(request["wait"], 0)
            reply = {"code": os.waitstatus_to_exitcode(status)}
        else:
            pid = os.fork()
            if pid == 0:
                os._exit(drive(request))
            reply = {"pid": pid}
        print(json.dumps(reply), flush=True)


def know_s3() -> None:
    """Read once what every client of S3 reads when it is made, and probe less: both take longer than a run.

    And lose patience late: on a machine that is busy enough, a server on it looks like one that is gone.
    """
    import botocore.session
    import s3fs  # noqa: F401
    from botocore.loaders import JSONFileLoader

    import pipeline.remote.s3  # noqa: F401
    from pipeline.output import object_store
    from pipeline.remote import files

    files.PATIENCE_SECONDS = 600.0
    object_store.WRITERS, object_store.ROUNDS = 2, 1
    load = JSONFileLoader.load_file
    known: dict[str, Any] = {}

    def load_once(self: Any, path: str) -> Any:
        if path not in known:
            known[path] = load(self, path)
        return known[path]

    JSONFileLoader.load_file = load_once
    botocore.session.Session().create_client("s3", region_name="us-east-1")


def drive(request: dict[str, Any]) -> int:
    """One run of the command, as a process of its own."""
    from jobs.compact import compact_output
    from jobs.run import execute
    from pipeline.errors import NightdeskError
    from tests.stub_engine import StubEngine, job, local, stub_models

    os.environ.update(request.pop("environment", {}))
    folder = Path(request.pop("folder"))
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    calls = count_changes(request.pop("die_at"))
    engine = StubEngine(seconds=request.pop("seconds"))
    config = job(folder, **request.pop("job", {}))
    try:
        if request.pop("compact", False):
            code = compact_output(config.output.path, 1)
        else:
            code = execute(config, executor=local(engine), models=stub_models(), **request)
    except NightdeskError as error:
        print(error, file=sys.stderr)
        code = error.exit_code
    sys.stdout.flush()
    (folder / "calls").write_text(str(next(calls) - 1))
    return code


def count_changes(die_at: int) -> itertools.count[int]:
    """Count calls that change the file system, and die right before number `die_at` (never: 0)."""
    calls = itertools.count(1)

    def wrapped(call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            if next(calls) == die_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return counted

    for name in CHANGES:
        setattr(os, name, wrapped(getattr(os, name)))
    return calls


if __name__ == "__main__":
    serve()

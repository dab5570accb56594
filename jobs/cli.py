"""The command line: commands and their options, and what a failure ends with (DESIGN section 9, contract).

Knows nothing of what a command does: each is a module that is imported when it is called, so that `schema`
and `--help` start without torch and ray. Exit codes: 0 all committed, 1 a bug, 2 configuration or command line,
3 too many error rows, 4 stopped and resumable, 5 a failed audit.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from typer.exceptions import TyperException

from pipeline.config import load_config
from pipeline.errors import ConfigError, NightdeskError
from pipeline.remote.secrets import scrub

INTERNAL_ERROR, USAGE_ERROR, STOPPED = 1, 2, 4
Work = Callable[[], int]  # does what a command line asked for; returns the exit code

app = typer.Typer(
    name="nightdesk",
    help="Ask a language model about every document of an archive; leaves Parquet.",
    add_completion=False,
    pretty_exceptions_enable=False,
)

Config = Annotated[Path, typer.Argument(metavar="CONFIG", help="The job file (YAML).")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key: decoding.draft_tokens=4, tasks.0.prompt=…"),
]


@app.callback()
def _options(
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of a failure (also NIGHTDESK_DEBUG=1).")
    ] = False,
) -> None:
    if debug:
        os.environ["NIGHTDESK_DEBUG"] = "1"


@app.command()
def run(
    config: Config,
    overrides: Overrides = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Answer at most this many documents.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Remove what the output holds and start over.")] = False,
    reanswer: Annotated[
        bool, typer.Option("--reanswer", help="Replace answers that another prompt, model or parameter gave.")
    ] = False,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Ask again about documents whose answer is an error.")
    ] = False,
    allow_deletions: Annotated[
        bool, typer.Option("--allow-deletions", help="Remove rows even if over a tenth of the documents are gone.")
    ] = False,
) -> Work:
    """Answer every document that has no answer yet; the same command again continues."""

    def work() -> int:
        if fresh and reanswer:
            raise ConfigError("--reanswer: replaces old answers in their place, and --fresh removes them; give one")
        job = load_config(config, overrides or ())
        from jobs.run import execute

        return execute(
            job,
            limit=limit,
            fresh=fresh,
            reanswer=reanswer,
            retry_failed=retry_failed,
            allow_deletions=allow_deletions,
        )

    return work


@app.command()
def check(
    config: Config,
    overrides: Overrides = None,
    json: Annotated[bool, typer.Option("--json", help="End with one line of JSON.")] = False,
    timed: Annotated[
        bool, typer.Option("--time", help="Load the models and time a few prompts, for a better estimate.")
    ] = False,
    cluster: Annotated[
        bool, typer.Option("--cluster", help="Say where workers would sit on the cluster at RAY_ADDRESS, or here.")
    ] = False,
) -> Work:
    """Validate a job without running it, and say what a run would do."""

    def work() -> int:
        job = load_config(config, overrides or ())
        from jobs.check import check_job

        return check_job(job, as_json=json, timed=timed, cluster=cluster)

    return work


@app.command()
def compact(
    output: Annotated[str, typer.Argument(metavar="OUT", help="The output's folder or URL.")],
    target: Annotated[int, typer.Option(min=1, metavar="MIB", help="Size that joined parts are to have.")] = 128,
    single_writer: Annotated[
        bool, typer.Option("--single-writer", help="As output.single_writer: nobody else writes there.")
    ] = False,
) -> Work:
    """Join many small parts of an output into few; readers never see a row twice."""

    def work() -> int:
        from jobs.compact import compact_output

        return compact_output(output, target, single_writer)

    return work


@app.command()
def status(
    output: Annotated[str, typer.Argument(metavar="OUT", help="The output's folder or URL.")],
    json: Annotated[bool, typer.Option("--json", help="End with one line of JSON.")] = False,
) -> Work:
    """Say what an output holds, what is missing or failed and why, and who is at work."""

    def work() -> int:
        from jobs.status import print_status

        return print_status(output, as_json=json)

    return work


@app.command()
def audit(
    config: Config,
    overrides: Overrides = None,
    json: Annotated[bool, typer.Option("--json", help="End with one line of JSON.")] = False,
) -> Work:
    """Prove that the job's answers follow the target's law, on its own documents and models."""

    def work() -> int:
        job = load_config(config, overrides or ())
        from jobs.audit import audit_job

        return audit_job(job, as_json=json)

    return work


@app.command()
def schema() -> Work:
    """Print the JSON schema of the job file, for editors."""
    from jobs.schema import print_schema

    return print_schema


def main(args: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code; every failure is one line on standard error."""
    with _sigterm_interrupts():
        try:
            return _work(args)()
        except KeyboardInterrupt as stop:
            return _fail(stop, "stopped; the same command continues where this one ended", STOPPED)
        except TyperException as usage:
            return _fail(usage, f"{usage.format_message().rstrip('.')} (see nightdesk --help)", USAGE_ERROR)
        except Exception as error:  # noqa: BLE001 - the last frame of the process: everything ends in one line
            known = _named(error)
            if known is not None:
                return _fail(error, str(known), known.exit_code)
            return _fail(error, _internal(error), INTERNAL_ERROR)


def _work(args: Sequence[str] | None) -> Work:
    """What the command line asks for. The caller does it: typer would turn some exceptions into its own."""
    given = None if args is None else list(args)
    work = app(args=given, prog_name="nightdesk", standalone_mode=False)
    return work if callable(work) else lambda: 0  # --help has printed all there is


@contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """A terminated run ends as an interrupted one does: resumable, exit code 4."""

    def interrupt(signum: int, frame: object) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _named(error: Exception) -> NightdeskError | None:
    """The named failure that this is, itself or as the cause that Ray wraps with a trace of its own."""
    cause = getattr(error, "cause", None)
    for candidate in (cause, error):
        if isinstance(candidate, NightdeskError):
            return candidate
    return None


def _fail(error: BaseException, message: str, code: int) -> int:
    if _debugging():
        print(_trace(error), file=sys.stderr, end="")
    print(f"nightdesk: {' '.join(message.split())}", file=sys.stderr)
    return code


def _debugging() -> bool:
    return os.environ.get("NIGHTDESK_DEBUG", "0") not in ("", "0")


def _internal(error: Exception) -> str:
    first = scrub((str(error).strip().splitlines() or [""])[0])
    summary = f"internal error: {type(error).__name__}: {first}"
    return summary if _debugging() else f"{summary} (traceback in {_write_log(error)})"


def _write_log(error: Exception) -> str:
    stamp = time.strftime("%Y%m%d-%H%M%S")
    with tempfile.NamedTemporaryFile(
        "w", prefix=f"nightdesk-{stamp}-", suffix=".log", delete=False, encoding="utf-8"
    ) as log:
        log.write(_trace(error))
    return log.name


def _trace(error: BaseException) -> str:
    """The traceback, without what exceptions of other packages may quote of credentials."""
    return scrub("".join(traceback.format_exception(error)))

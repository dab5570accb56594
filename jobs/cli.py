"""The command line: commands and their options, and what a failure ends with (DESIGN section 9, contract).

Knows nothing of what a command does: each is a module that is imported when it is called, so that `schema`
and `--help` start without torch and ray. Exit codes: 0 all committed, 1 a bug, 2 configuration or command line,
3 too many error rows, 4 stopped and resumable, 5 a failed audit.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from typer.exceptions import TyperException

from jobs.account import Account
from jobs.ending import USAGE_ERROR, Failure, debugging, failure_of, trace, write_log
from pipeline import events
from pipeline.config import JobConfig, load_config
from pipeline.deadline import parse_deadline
from pipeline.errors import ConfigError
from pipeline.remote.secrets import scrub

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


Limit = Annotated[int | None, typer.Option(min=1, help="Answer at most this many documents.")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Remove what the output holds and start over.")]
Reanswer = Annotated[
    bool, typer.Option("--reanswer", help="Replace answers that another prompt, model or parameter gave.")
]
RetryFailed = Annotated[
    bool, typer.Option("--retry-failed", help="Ask again about documents whose answer is an error.")
]
AllowDeletions = Annotated[
    bool, typer.Option("--allow-deletions", help="Remove rows even if over a tenth of the documents are gone.")
]
Until = Annotated[
    str | None,
    typer.Option(
        "--until", metavar="HH:MM", help="Begin nothing that would not be done by then, and stop (exit code 4)."
    ),
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
    limit: Limit = None,
    fresh: Fresh = False,
    reanswer: Reanswer = False,
    retry_failed: RetryFailed = False,
    allow_deletions: AllowDeletions = False,
    until: Until = None,
) -> Work:
    """Answer every document that has no answer yet; the same command again continues."""

    def work() -> int:
        _refuse_contradiction(fresh, reanswer)
        deadline = None if until is None else parse_deadline(until)
        job = load_config(config, overrides or ())
        from jobs.run import execute

        return execute(
            job,
            limit=limit,
            fresh=fresh,
            reanswer=reanswer,
            retry_failed=retry_failed,
            allow_deletions=allow_deletions,
            deadline=deadline,
        )

    return work


def _refuse_contradiction(fresh: bool, reanswer: bool) -> None:
    if fresh and reanswer:
        raise ConfigError("--reanswer: replaces old answers in their place, and --fresh removes them; give one")


@app.command()
def nightly(
    config: Config,
    overrides: Overrides = None,
    limit: Limit = None,
    fresh: Fresh = False,
    reanswer: Reanswer = False,
    retry_failed: RetryFailed = False,
    allow_deletions: AllowDeletions = False,
    until: Until = None,
) -> Work:
    """Run, for a schedule: alone on the output, done by a deadline, one line at the end, and hooks."""

    def work() -> int:
        from jobs.nightly import run_night

        def execute(job: JobConfig, account: Account) -> int:
            _refuse_contradiction(fresh, reanswer)
            deadline = None if until is None else parse_deadline(until)
            from jobs.run import execute

            return execute(
                job,
                limit=limit,
                fresh=fresh,
                reanswer=reanswer,
                retry_failed=retry_failed,
                allow_deletions=allow_deletions,
                deadline=deadline,
                alone=True,
                account=account,
            )

        return run_night(config.stem, lambda: load_config(config, overrides or ()), execute)

    return work


@app.command()
def submit(
    config: Annotated[
        Path | None, typer.Argument(metavar="CONFIG", help="The job file (YAML); it is sent along, wherever it is.")
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(
            "--address", metavar="URL",
            help="The cluster's dashboard, http://HOST:8265; else RAY_API_SERVER_ADDRESS or RAY_ADDRESS.",
        ),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Stay, print the job's log, and end with its exit code.")
    ] = False,
    attach: Annotated[
        str | None, typer.Option("--attach", metavar="ID", help="Follow a job that was submitted before.")
    ] = None,
    cancel: Annotated[
        str | None, typer.Option("--cancel", metavar="ID", help="Stop a job, and wait for that; submit continues it.")
    ] = None,
    as_nightly: Annotated[
        bool, typer.Option("--nightly", help="Run it as nightly does: alone on the output, with line and hooks.")
    ] = False,
    overrides: Overrides = None,
    limit: Limit = None,
    fresh: Fresh = False,
    reanswer: Reanswer = False,
    retry_failed: RetryFailed = False,
    allow_deletions: AllowDeletions = False,
    until: Until = None,
    environment: Annotated[
        list[str] | None,
        typer.Option(
            "--env", metavar="KEY=VALUE", help="Set a variable for the job; whoever sees the dashboard sees it."
        ),
    ] = None,
    job_id: Annotated[
        str | None, typer.Option("--job-id", metavar="ID", help="Name of this submission; Ray makes one up by default.")
    ] = None,
    driver_cpus: Annotated[
        float, typer.Option(min=0, metavar="N", help="Cores to reserve for the driver; 0 on the head node.")
    ] = 0.0,
    driver_labels: Annotated[
        list[str] | None,
        typer.Option("--driver-label", metavar="KEY=VALUE", help="Ray node label that the driver's machine must have."),
    ] = None,
    python: Annotated[
        str, typer.Option("--python", metavar="PATH", help="The interpreter, on the cluster's machines.")
    ] = "python",
) -> Work:
    """Run a job on a Ray cluster, with the code that is in this folder."""

    def work() -> int:
        from jobs import submit as jobs

        if cancel is not None or attach is not None:
            if config is not None or (cancel is not None and attach is not None):
                raise ConfigError("submit: give one of CONFIG, --attach and --cancel")
            return jobs.attach(address, attach) if attach is not None else jobs.cancel(address, str(cancel))
        if config is None:
            raise ConfigError("submit: give a job file, or --attach or --cancel with the id of a job")
        _refuse_contradiction(fresh, reanswer)
        flags = {
            "--fresh": fresh, "--reanswer": reanswer, "--retry-failed": retry_failed,
            "--allow-deletions": allow_deletions,
        }  # fmt: skip
        options = [flag for flag, given in flags.items() if given]
        options += [] if limit is None else ["--limit", str(limit)]
        options += [] if until is None else ["--until", str(parse_deadline(until))]  # as it is meant here
        request = jobs.Request(
            config=config,
            overrides=tuple(overrides or ()),
            command="nightly" if as_nightly else "run",
            options=tuple(options),
            environment=jobs.assignments("--env", environment or ()),
            job_id=job_id,
            driver=jobs.DriverWish(driver_cpus, jobs.assignments("--driver-label", driver_labels or ())),
            python=python,
        )
        return jobs.submit(request, address, follow)

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
    offline: Annotated[
        bool, typer.Option("--offline", help="Everything but the models, without a network; says what it left out.")
    ] = False,
) -> Work:
    """Validate a job without running it, and say what a run would do."""

    def work() -> int:
        if offline and (timed or cluster):
            raise ConfigError(f"--offline: {'--time' if timed else '--cluster'} needs what it leaves out; give one")
        job = load_config(config, overrides or ())
        if offline:
            from jobs.offline import check_offline

            return check_offline(job, as_json=json)
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
    with _sigterm_interrupts(), events.written():
        try:
            return _work(args)()
        except TyperException as usage:
            said = f"{usage.format_message().rstrip('.')} (see {_help_for(usage)})"
            return _fail(usage, Failure(USAGE_ERROR, said))
        except (KeyboardInterrupt, Exception) as error:  # noqa: BLE001 - the process's last frame: all end in a line
            return _fail(error, failure_of(error))


def _work(args: Sequence[str] | None) -> Work:
    """What the command line asks for. The caller does it: typer would turn some exceptions into its own."""
    given = None if args is None else list(args)
    work = app(args=given, prog_name="nightdesk", standalone_mode=False)
    return work if callable(work) else lambda: 0  # --help has printed all there is


def _help_for(usage: TyperException) -> str:
    """The command line that explains the command whose use was wrong."""
    context = getattr(usage, "ctx", None)
    command = [] if context is None else context.command_path.split()[1:]
    return " ".join(["python -m jobs", *command, "--help"])


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


def _fail(error: BaseException, failure: Failure) -> int:
    message = failure.message
    if failure.is_bug and not debugging():
        message += f" (traceback in {write_log(error)})"
    line = scrub(" ".join(message.split()))
    if events.are_json():
        traced = {"traceback": trace(error)} if debugging() else {}
        events.tell("failed", line, logging.ERROR, exit_code=failure.code, **traced)
        return failure.code
    if debugging():
        print(trace(error), file=sys.stderr, end="")
    print(f"nightdesk: {line}", file=sys.stderr)
    return failure.code

"""`run CONFIG`: answers every document that has no answer yet, and leaves Parquet (DESIGN section 8).

Decides what is to be done and closes what was done; how answers come about is the executor's affair.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console

from jobs.account import Account
from jobs.closing import print_answers
from jobs.ending import AUDIT_FAILED, COMMITTED, TOO_MANY_ERRORS
from jobs.models import Models, asked, models_on_disk
from jobs.progress import ProgressLine
from jobs.prospect import announced, continued
from jobs.summary import End, Session, equipment, summarised
from pipeline import events
from pipeline.audit import Audit
from pipeline.config import JobConfig
from pipeline.corpus.listing import InputFile, list_files, refuse_overlap
from pipeline.counting import counted
from pipeline.deadline import Deadline
from pipeline.errors import Busy, NightdeskError, OutOfTime, OutputError, Stopped, StoreError
from pipeline.fingerprint import digest
from pipeline.output.claim import Claim
from pipeline.output.compaction import merge
from pipeline.output.folder import Output, refuse_foreign_files, refuse_unplanned_parts
from pipeline.output.ledger import same_content
from pipeline.output.names import parsed, run_name
from pipeline.output.plan import Plan, Shard
from pipeline.planning import Ask, failed_rows, make_plan, refuse_foreign
from pipeline.stats import Progress
from pipeline.work import Executor, JobWork

LOG = logging.getLogger(__name__)
Auditor = Callable[[JobConfig], Audit]


def accounted(execute: Callable[..., int]) -> Callable[..., int]:
    """On a cluster, metrics tell when a job ended, and how."""

    @functools.wraps(execute)
    def executed(config: JobConfig, *, executor: Executor | None = None, **options: Any) -> int:
        code = 1
        try:
            code = execute(config, executor=executor, **options)
            return code
        except NightdeskError as failure:
            code = failure.exit_code
            raise
        except KeyboardInterrupt:
            code = Stopped.exit_code
            raise
        finally:
            if executor is None:
                from actors.telemetry import tell_outcome

                tell_outcome(config.name, code)

    return executed


@accounted
def execute(
    config: JobConfig,
    *,
    limit: int | None = None,
    fresh: bool = False,
    reanswer: bool = False,
    retry_failed: bool = False,
    allow_deletions: bool = False,
    deadline: Deadline | None = None,
    alone: bool = False,
    account: Account | None = None,
    executor: Executor | None = None,
    models: Models | None = None,
    auditor: Auditor | None = None,
) -> int:
    """Run a job to its end; returns the exit code 0, 3 or 5, raises a `NightdeskError` for every other end.

    `limit` overrides `input.limit`, `retry_failed` adds to the job file's. At the `deadline` the run ends with
    OutOfTime; with `alone` it is Busy if somebody else is at work on the output. In the `account` stands what was
    done, whichever way it ends. The executor is Ray by default, and so is
    who audits, where the job asks for that; `models` are found on disk by default.
    """
    account = Account() if account is None else account
    refuse_overlap(config.input, config.output.path)
    models = models or models_on_disk(config)
    ask = dataclasses.replace(
        asked(config, models, limit, fresh),
        reanswer=reanswer,
        retry_failed=retry_failed or config.retry_failed,
        allow_deletions=allow_deletions,
    )
    output = Output.of(config.output)
    refuse_foreign_files(output)
    output.store.probe()
    with events.about(job=config.name), Claim(output.store) as claim:
        if fresh and claim.other is not None:
            raise OutputError(
                f"output.path: process {claim.other.pid} on {claim.other.host} is at work in "
                f"{output.store.location}, and --fresh would remove what it writes; stop it first"
            )
        other = claim.rival() if alone else claim.other
        if alone and other is not None:
            raise Busy(
                f"output.path: process {other.pid} on {other.host} is at work in {output.store.location}; "
                "nothing was done here"
            )
        shared, auditor = other is not None, auditor or _audited_on_ray
        run = Run(config, output, ask, models, executor or _ray(config), shared, auditor, deadline, account)
        return run.execute()


def _ray(config: JobConfig) -> Executor:
    from actors.executor import RayExecutor

    executor: Executor = RayExecutor(config)
    return executor


def _audited_on_ray(config: JobConfig) -> Audit:
    """This process may run where there is no memory for a model: the target has room where Ray puts it."""
    from actors.auditor import audit_on_ray
    from jobs.audit import choose_questions

    return audit_on_ray(config, choose_questions(config))


class Overtaken(Exception):
    """Somebody else has planned since we looked: look again."""


class Run:
    """One call of the command on one output."""

    def __init__(
        self,
        config: JobConfig,
        output: Output,
        ask: Ask,
        models: Models,
        executor: Executor,
        shared: bool,
        auditor: Auditor,
        deadline: Deadline | None,
        account: Account,
    ) -> None:
        self.config = config
        self.output = output
        self.ask = ask
        self.models = models
        self.executor = executor
        self.shared = shared  # somebody else is at work on the same output
        self.auditor = auditor
        self.deadline = deadline
        self.account = account
        self.audited: Audit | None = None
        self.began = False  # to answer
        self.started = time.time()

    def execute(self) -> int:
        """Continue the plan that is open, if any; then plan what came since, or changed under it."""
        code: int | None = None
        self.output.store.sweep()
        while True:
            opened = self._open_plan() if not self.ask.fresh else None
            if opened is not None and opened.merges:
                merge(self.output, opened)
                continue
            if opened is not None:
                done = self._published_rows(opened)
                line = f"continuing run {run_name(opened.run)}: {continued(opened, done)}"
                events.tell("run_continued", line, run=run_name(opened.run), rows_done=done, rows_total=opened.rows)
                code, _ = self._carry_out(opened, continued=True)
                continue
            self.account.left = None
            try:
                planned = self._new_plan()
            except Overtaken:
                continue
            self.account.left = 0 if planned is None else planned.rows
            if planned is None:
                return self._nothing_to_do() if code is None else code
            code, whole = self._carry_out(planned, continued=False)
            if whole or self.ask.fresh:
                return code

    def _carry_out(self, plan: Plan, continued: bool) -> tuple[int, bool]:
        with events.about(run=run_name(plan.run)):
            return self._close(self._answer(plan, continued))

    # --- which plan

    def _open_plan(self) -> Plan | None:
        refuse_unplanned_parts(self.output)
        live = self.output.live_plans()
        if not live:
            return None
        self._refuse_foreign(live[-1])
        if self.output.summary(live[-1].run) is not None:
            return None
        other = live[-1].fingerprint != digest(self.ask.answers)
        if other and not live[-1].merges:  # what is left of it is to be answered otherwise
            self._give_up(live[-1])
            return None
        return live[-1]

    def _refuse_foreign(self, plan: Plan) -> None:
        """As `planning` does. Once this command has begun to answer, nobody else's answers are old ones."""
        reanswer = self.ask.reanswer and not self.began
        refuse_foreign(plan, self.config, self.ask.answers, self.output.store.location, reanswer)

    def _give_up(self, plan: Plan) -> None:
        """Close a run of which nothing more is to be answered."""
        end = self._end(plan)
        dropped = [shard for shard in plan.shards if shard.index in set(end.dropped)]
        session = Session(plan, True, dropped, [], self.started)
        self.output.finish(plan, self._summary(session, end, self.output.counts(plan), None), success=False)

    def _new_plan(self) -> Plan | None:
        """None if there is nothing to do. Overtaken where somebody else has planned since we looked."""
        run = self.output.highest_run() + 1
        live = [] if self.ask.fresh else self.output.live_plans()
        if live and (live[-1].run >= run or self.output.summary(live[-1].run) is None):
            raise Overtaken
        if live:
            self._refuse_foreign(live[-1])
        files = list_files(self.config.input)
        plan = make_plan(self.config, self.output, run, live, files, self.ask)
        if plan is None:
            return None
        self._refuse_moving_input(plan)
        if self.ask.fresh and (rows := sum(map(self._published_rows, self.output.live_plans()))):
            line = f"starting over: {rows} rows in {self.output.store.location} will be removed"
            events.tell("run_restarted", line, rows=rows)
        created = self.output.create_plan(plan)
        if created is plan:
            line = f"run {run_name(plan.run)}: {announced(plan)}"
            events.tell("run_planned", line, run=run_name(plan.run), rows_total=plan.rows)
            return plan
        if self.ask.fresh:
            raise OutputError(
                f"output.path: another run began in {self.output.store.location} at this moment; stop it before --fresh"
            )
        if not created.merges:
            refuse_foreign(created, self.config, self.ask.answers, self.output.store.location)
        raise Overtaken

    def _refuse_moving_input(self, plan: Plan) -> None:
        """Stopped if a file changed while it was compared: what seemed to be gone from it may only not be there yet.

        Files of rows that are to be answered are looked at again by whoever answers them.
        """
        changed = self._changed_files(plan) if plan.cuts else set()
        if changed:
            raise Stopped(f"{min(changed)} changed while it was read; run the same command again to plan it anew")

    # --- the work

    def _answer(self, plan: Plan, continued: bool) -> Session:
        self.began = True
        self.output.begin(plan)
        missing = self.output.missing(plan)
        changed = self._changed_files(plan) if continued else set()
        dropped = [
            shard
            for shard in missing
            if any(plan.files[r.file].file.path in changed for r in shard.ranges)
            or (continued and self._is_overtaken(shard))
        ]
        session = Session(plan, continued, dropped, sorted(changed), self.started)
        before = {shard.index for shard in missing}
        lost = {shard.index for shard in dropped}
        todo = [shard for shard in missing if shard.index not in lost]
        if self.shared:
            todo.reverse()  # begin where the other run will come last
        try:
            self._run_shards(session, todo)
        except KeyboardInterrupt:
            raise Stopped(f"stopped: {self._published_so_far(plan)}") from None
        except OutOfTime:
            raise OutOfTime(f"stopped for the deadline, {self.deadline}: {self._published_so_far(plan)}") from None
        finally:
            self._enter(session, before)
        return session

    def _published_so_far(self, plan: Plan) -> str:
        rows = f"{self._published_rows(plan)} of {counted(plan.rows, 'row')}"
        return f"{rows} are published, and the same command continues"

    def _enter(self, session: Session, before: set[int]) -> None:
        """Into the account: what became of the shards that had not been published `before`."""
        try:
            missing = self.output.missing(session.plan)
        except StoreError:  # which is probably what ended the run
            self.account.left = None
            return
        still = {shard.index for shard in missing}
        done = [shard for shard in session.plan.shards if shard.index in before and shard.index not in still]
        self.account.run = run_name(session.plan.run)
        self.account.replaced += sum(shard.rows for shard in done if shard.amends is not None)
        self.account.new += sum(shard.rows for shard in done if shard.amends is None)
        self.account.failed += session.total.error_rows
        self.account.left = sum(shard.rows for shard in missing)

    def _is_overtaken(self, shard: Shard) -> bool:
        """Is the part that it amends, and has not amended, not what it was when the plan was made?"""
        return shard.amends is not None and self.output.store.version(shard.amends.part) != shard.amends.version

    def _run_shards(self, session: Session, todo: Sequence[Shard]) -> None:
        plan = session.plan
        before = Progress(
            rows_done=self._published_rows(plan),
            rows_total=plan.rows - sum(shard.rows for shard in session.dropped),
            shards_done=len(plan.shards) - len(todo) - len(session.dropped),
            shards_total=len(plan.shards) - len(session.dropped),
        )
        started = time.monotonic()
        with ProgressLine() as line:
            line.report(before)
            try:
                if todo:
                    self._refuse_lateness()
                    self.executor.run(JobWork(self.config, plan, self.deadline), list(todo), line.report)
            finally:
                session.total = line.total - before
        session.answering_seconds = time.monotonic() - started
        unpublished = {shard.index for shard in self.output.missing(plan)} & {shard.index for shard in todo}
        unpublished -= self.output.given_up(plan.run)  # by another driver
        assert not unpublished, f"the executor returned, but shards {sorted(unpublished)} are not published"

    def _refuse_lateness(self) -> None:
        if self.deadline is not None and self.deadline.passed:
            raise OutOfTime(f"the deadline, {self.deadline}, has come")

    def _published_rows(self, plan: Plan) -> int:
        return plan.rows - sum(shard.rows for shard in self.output.missing(plan))

    def _changed_files(self, plan: Plan) -> set[str]:
        """Planned files that are not in the input any more as they were planned."""
        now: dict[str, InputFile] = {file.path: file for file in list_files(self.config.input)}
        return {
            file.path
            for file in plan.input_files
            if file.path not in now or not same_content(file, now[file.path])
        }

    # --- the end

    def _close(self, session: Session) -> tuple[int, bool]:
        """The exit code, and whether all was done that was planned."""
        plan = session.plan
        counts = self.output.counts(plan)
        enough = counts.error_share <= self.config.max_error_rate
        end = self._end(plan)
        self.account.removed += sum(cut.count for cut in plan.cuts if cut.part not in end.dropped_cuts)
        audit = self._audit(counts)
        sound = audit is None or audit.passed
        summary = self._summary(session, end, counts, audit)
        self.output.finish(plan, summary, success=enough and sound and end.whole)
        if not end.whole:
            LOG.warning(
                "%d shards of run %s were given up because their input changed (%s) or parts were changed by another "
                "run; planning them anew",
                len(end.dropped), run_name(plan.run), ", ".join(session.changed_files) or "none",
                extra={"event": "shards_dropped"},
            )  # fmt: skip
        self._tell_closed(session, counts)
        print_answers(self.output, plan, self.config, session.total, session.answering_seconds, counts.truncated)
        return self._exit_code(counts, None if audit is None else audit.failure), end.whole

    def _end(self, plan: Plan) -> End:
        """Agreed with every other driver of the run. Cuts that are not given up are made by now."""
        dropped = self.output.agree_on_end(plan.run, [shard.index for shard in self.output.missing(plan)])
        # A document that moved to another folder has its new row there before the old one goes.
        return End(dropped, [cut.part for cut in (plan.cuts if dropped else self.output.cut(plan))])

    def _summary(self, session: Session, end: End, counts: Progress, audit: Audit | None) -> dict[str, Any]:
        run = session.plan.run
        parts = sum(1 for part in map(parsed, self.output.parts()) if part is not None and part.run == run)
        rows = summarised(session, end, counts, parts, audit)
        return rows | equipment(self.config, self.models, self.executor)

    def _tell_closed(self, session: Session, counts: Progress) -> None:
        line = f"run {run_name(session.plan.run)}: {counted(counts.rows_done, 'row')}, {counts.error_rows} with "
        line += "an error" if counts.error_rows == 1 else "errors"
        told = {"rows": counts.rows_done, "error_rows": counts.error_rows, "new_tokens": counts.new_tokens}
        events.tell("run_closed", line, **told, accepted_per_step=counts.accepted_per_step, seconds=session.seconds)

    def _audit(self, counts: Progress) -> Audit | None:
        """Once per command; None where the job does not ask for it, or no document could be answered."""
        if not self.config.audit or counts.rows_done == counts.error_rows:
            return None
        if self.audited is None:
            if self.deadline is not None and self.deadline.passed:
                raise OutOfTime(f"no time for the audit until {self.deadline}: the same command continues with it")
            events.tell("audit_started", "all rows are published; auditing the answers' law")
            limited = self.config.input.model_copy(update={"limit": self.ask.limit})
            try:
                self.audited = self.auditor(self.config.model_copy(update={"input": limited}))
            except KeyboardInterrupt:
                raise Stopped("stopped before the audit's end: the same command continues with it") from None
            from jobs.audit import show

            show(self.audited, Console(highlight=False))
        return self.audited

    def _nothing_to_do(self) -> int:
        live = self.output.live_plans()
        if self.ask.fresh and (rows := sum(map(self._published_rows, live))):
            raise OutputError(
                f"input.path: the input holds no documents, and --fresh would remove {rows} rows from "
                f"{self.output.store.location}; is it complete? --allow-deletions without --fresh removes them"
            )
        if not live or self.ask.fresh:
            print("nothing to do: the input holds no documents")
            return COMMITTED
        answering = [plan for plan in live if not plan.merges]
        last = answering[-1].run
        self.account.run = run_name(last)
        summary = self.output.summary(last)
        assert summary is not None, f"run {last} is open, but nothing is left to do"
        failure = (summary.get("audit") or {}).get("failure") if self.config.audit else None
        code = self._exit_code(Progress(rows_done=summary["rows"], error_rows=summary["error_rows"]), failure)
        if code == COMMITTED and not self.output.has_success():
            self.output.write_success(last)
        print(_nothing_left(self.output.store.location, failed_rows(self.config, self.output, live)))
        return code

    def _exit_code(self, counts: Progress, audit_failure: str | None) -> int:
        if audit_failure is not None:
            LOG.error("audit failed: %s", audit_failure, extra={"event": "audit_failed"})
            return AUDIT_FAILED
        if counts.error_share <= self.config.max_error_rate:
            return COMMITTED
        LOG.error(
            "%d of %d rows are error rows, more than max_error_rate allows (%g): see the columns error and *_error",
            counts.error_rows, counts.rows_done, self.config.max_error_rate,
            extra={"event": "errors_exceeded"},
        )  # fmt: skip
        return TOO_MANY_ERRORS


def _nothing_left(location: str, failed: int) -> str:
    done = f"nothing to do: every document is answered in {location}"
    have = "has" if failed == 1 else "have"
    why = f"(python -m jobs status {location} says why)"
    return f"{done}, except {failed} that {have} an error instead {why}" if failed else done

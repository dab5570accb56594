"""Follows a job on a cluster to its end: its log as it grows, over lost connections, and its exit code."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, TextIO

import aiohttp
from ray.job_submission import JobDetails, JobStatus

from jobs.ending import COMMITTED, INTERNAL_ERROR, STOPPED, USAGE_ERROR, Failure
from jobs.job_server import JobServer
from pipeline.errors import ConfigError, WorkerLost

PATIENCE_SECONDS = 600.0  # without any answer from the cluster
QUIET_SECONDS = 15.0  # without a line of log, before it is asked whether the job is still there
RETRY_SECONDS = 2.0
OURS = range(6)  # exit codes of the contract


class Followed(Protocol):
    """A job, as far as it is followed."""

    def job(self) -> JobDetails: ...

    async def tail(self, take: Callable[[str], None]) -> None:
        """Hand on the log from its beginning, until the job or the connection ends."""
        ...


class ServedJob:
    """A job of a job server."""

    def __init__(self, server: JobServer, job_id: str) -> None:
        self.server = server
        self.id = job_id

    def job(self) -> JobDetails:
        return self.server.job(self.id)

    async def tail(self, take: Callable[[str], None]) -> None:
        log = aiter(self.server.client.tail_job_logs(self.id))
        chunk = asyncio.ensure_future(anext(log))
        try:
            while True:
                done, _ = await asyncio.wait({chunk}, timeout=QUIET_SECONDS)
                if not done:  # a connection that is gone may look like a job that is silent
                    await asyncio.wait_for(asyncio.to_thread(self.job), QUIET_SECONDS)
                    continue
                try:
                    take(chunk.result())
                except StopAsyncIteration:
                    return
                chunk = asyncio.ensure_future(anext(log))
        finally:
            chunk.cancel()


@dataclass
class Log:
    """Prints what it has not printed yet of a text that is told from its beginning again and again."""

    stream: TextIO
    printed: int = 0
    position: int = field(default=0)

    def begin(self) -> None:
        self.position = 0

    def take(self, text: str) -> None:
        new = text[max(self.printed - self.position, 0) :]
        self.position += len(text)
        self.printed = max(self.printed, self.position)
        if new:
            self.stream.write(new)
            self.stream.flush()


def follow(job: Followed, log: Log, notice: Callable[[str], None], retry: float = RETRY_SECONDS) -> Failure:
    """Return when the job has ended: its exit code as ours, and what there is to say beside its log.

    WorkerLost if the cluster has been silent for too long; the job may go on.
    """
    heard, told = time.monotonic(), False
    while True:
        try:
            log.begin()
            asyncio.run(job.tail(log.take))
            details = job.job()
            heard, told = time.monotonic(), False
            if details.status.is_terminal():
                return ending_of(details)
        except (WorkerLost, ConfigError, aiohttp.ClientError, OSError, RuntimeError) as error:
            if isinstance(error, ConfigError):  # no such job, a wrong token
                raise
            if time.monotonic() - heard > PATIENCE_SECONDS:
                silence = f"the cluster has not answered for {PATIENCE_SECONDS:g} s; the job may go on"
                raise WorkerLost(silence) from error
            if not told:
                notice("the connection is lost; trying again")
                told = True
        time.sleep(retry)


def ending_of(job: JobDetails) -> Failure:
    """What a job that has ended amounts to, with an exit code of the contract."""
    code = job.driver_exit_code
    if job.status == JobStatus.SUCCEEDED:
        return Failure(COMMITTED, "")
    if job.status == JobStatus.STOPPED:
        return Failure(STOPPED, "the job was stopped; the same submit continues")
    if code is None:  # the driver's machine or its environment failed
        said = " ".join((job.message or "no reason was given").split())
        return Failure(STOPPED, f"the job did not run to its end: {said}; the same submit continues")
    if code in (126, 127):
        return Failure(USAGE_ERROR, "the cluster's machines have no such command: give --python the path of theirs")
    if code < 0 or code > 128:
        signal = -code if code < 0 else code - 128
        return Failure(STOPPED, f"the job's driver was killed by signal {signal}; the same submit continues")
    return Failure(code if code in OURS else INTERNAL_ERROR, "")

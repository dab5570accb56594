"""Processes of actors, found as an operator would find them: by what they call themselves."""

from __future__ import annotations

import time

import psutil


def actor_processes(actor: str) -> list[psutil.Process]:
    """The live ones among this process's descendants that host an actor of that class."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            title = (process.cmdline() or [""])[0]
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
        if title.split(".")[0] == f"ray::{actor}":
            found.append(process)
    return found


def only_process(actor: str) -> psutil.Process:
    """The one process of that class."""
    (process,) = actor_processes(actor)
    return process


def wait_gone(process: psutil.Process, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.1)
    return False

"""A real S3 server on this machine: Ceph's RADOS Gateway, from Debian's packages, with its data in memory.

The packages are unpacked into a folder, nothing is installed, and the processes end with whoever started them.
Found by trying: with short `paxos` intervals a start takes two seconds instead of twenty; an OSD that is unknown adds
itself, so that no `ceph` command is needed; now and then a program asks the monitor before it has learned the cluster's
id ("wrong fsid"), and ends or hangs: it is started again.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import glob
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

ROOT = Path(__file__).resolve().parents[2]
CACHE = Path(os.environ.get("NIGHTDESK_CACHE") or ROOT / ".cache") / "s3-server"
PACKAGES = ("radosgw", "ceph-mon", "ceph-osd")
ATTEMPTS = 6
TURN_SECONDS = 20.0
FETCH_SECONDS = 600.0
PR_SET_PDEATHSIG = 1

CONF = """
[global]
fsid = {fsid}
mon host = [v1:127.0.0.1:{monitor}]
mon initial members = a
auth cluster required = none
auth service required = none
auth client required = none
ms bind ipv6 = false
public addr = 127.0.0.1
cluster addr = 127.0.0.1
plugin dir = {library}/ceph
erasure code dir = {library}/ceph/erasure-code
osd class dir = {library}/rados-classes
log file = {run}/$name.log
admin socket = {run}/$name.asok
run dir = {run}
keyring = {run}/keyring
crash dir = {run}/crash
mon data = {run}/mon
osd data = {run}/osd
osd objectstore = memstore
memstore device bytes = 2147483648
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 1
osd pool default pgp num = 1
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
mon allow pool size one = true
mon warn on pool no redundancy = false
mon data avail crit = 1
mon data avail warn = 2
mon max pg per osd = 1000
mon tick interval = 1
mon client hunt interval = 0.2
paxos propose interval = 0.02
paxos min wait = 0.01
[client.rgw]
rgw frontends = beast endpoint=127.0.0.1:{port}
rgw thread pool size = 32
rgw enable usage log = false
rgw dns name = 127.0.0.1
"""


class Unavailable(Exception):
    """There is no S3 server to be had on this machine, and why."""


class S3Server:
    """A context: the server answers at `endpoint` while it is open. Has one user, of whom the keys are."""

    access_key = "testkey"
    secret_key = "testsecret"

    def __init__(self) -> None:
        self.root = unpacked()
        self.run = Path(tempfile.mkdtemp(prefix="ns3-", dir="/tmp"))  # paths of sockets are limited to 107 bytes
        self.port, monitor = free_port(), free_port()
        self.endpoint = f"http://127.0.0.1:{self.port}"
        library = architecture_folder(self.root)
        self.environment = os.environ | {
            "LD_LIBRARY_PATH": ":".join((library, f"{library}/ceph", library.replace("/usr/", "/"))),
            "CEPH_CONF": str(self.run / "ceph.conf"),
        }
        conf = CONF.format(fsid=uuid.uuid4(), monitor=monitor, port=self.port, run=self.run, library=library)
        (self.run / "ceph.conf").write_text(conf)
        self.processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def add_key(self, access_key: str, secret_key: str) -> None:
        """Other keys of the same user."""
        keys = ["--access-key", access_key, "--secret-key", secret_key]
        self._do("radosgw-admin", "key", "create", "--uid", "t", "--key-type", "s3", *keys)

    def add_user(self, name: str, access_key: str, secret_key: str) -> None:
        """Another user, who may do nothing with the buckets of the first one."""
        keys = ["--access-key", access_key, "--secret-key", secret_key]
        self._do("radosgw-admin", "user", "create", "--uid", name, "--display-name", name, *keys)

    def _start(self) -> None:
        for folder in ("mon", "osd"):
            (self.run / folder).mkdir()
        (self.run / "keyring").touch()
        self._do("monmaptool", "--create", "--fsid", self._conf("fsid"), "--addv", "a", self._conf("mon host"), "map")
        self._do("ceph-mon", "-i", "a", "--mkfs", "--monmap", "map")
        self._serve("ceph-mon", "-f", "-i", "a", ready=lambda: self._state("mon.a", "mon_status") == "leader")
        self._do("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", str(uuid.uuid4()))
        self._serve("ceph-osd", "-f", "-i", "0", ready=lambda: self._state("osd.0", "status") == "active")
        keys = ["--access-key", self.access_key, "--secret-key", self.secret_key]
        self._do("radosgw-admin", "user", "create", "--uid", "t", "--display-name", "t", *keys)
        self._serve("radosgw", "-f", "-n", "client.rgw", ready=lambda: answers(self.endpoint))

    def _stop(self) -> None:
        for process in reversed(self.processes):
            process.kill()
            process.wait()
        shutil.rmtree(self.run, ignore_errors=True)

    def _conf(self, key: str) -> str:
        lines = (self.run / "ceph.conf").read_text().splitlines()
        return next(line.partition(" = ")[2] for line in lines if line.startswith(f"{key} = "))

    def _state(self, daemon: str, command: str) -> str | None:
        return asked(self.run / f"{daemon}.asok", command).get("state")

    def _do(self, *command: str) -> None:
        for _ in range(ATTEMPTS):
            process = self._program(*command)
            try:
                if process.wait(TURN_SECONDS) == 0:
                    return
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        raise AssertionError(f"{' '.join(command)}: {self._log()}")

    def _serve(self, *command: str, ready: Callable[[], bool]) -> None:
        for _ in range(ATTEMPTS):
            process = self._program(*command)
            self.processes.append(process)
            until = time.monotonic() + TURN_SECONDS
            while process.poll() is None and time.monotonic() < until:
                if ready():
                    return
                time.sleep(0.02)
            process.kill()
        raise AssertionError(f"{' '.join(command)}: {self._log()}")

    def _program(self, *command: str) -> subprocess.Popen[bytes]:
        with (self.run / "start.log").open("ab") as log:
            return subprocess.Popen(
                [f"{self.root}/usr/bin/{command[0]}", *command[1:]],
                env=self.environment, cwd=self.run, stdout=log, stderr=log, preexec_fn=die_with_the_starter,
            )  # fmt: skip

    def _log(self) -> str:
        return (self.run / "start.log").read_text(errors="replace")[-2000:]


def unpacked() -> Path:
    """The folder that holds the server's programs, fetched if need be: about 70 MB, once."""
    root = CACHE / "root"
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two test runs at once fetch once
        if not root.is_dir():
            fetch(root)
    return root


def fetch(root: Path) -> None:
    for program in ("apt-get", "dpkg"):
        if shutil.which(program) is None:
            raise Unavailable(f"no {program}: the S3 server is unpacked from Debian's packages")
    folder = Path(tempfile.mkdtemp(prefix="fetch-", dir=CACHE))
    try:
        try:
            download(folder)
        except Unavailable:
            if os.geteuid() != 0:
                raise Unavailable("apt knows no packages of the S3 server, and only root can update it") from None
            apt("update", folder=folder)
            download(folder)
        for package in folder.glob("*.deb"):
            subprocess.run(["dpkg", "-x", package, folder / "root"], check=True)
        (folder / "root").rename(root)
    finally:
        shutil.rmtree(folder)


def download(folder: Path) -> None:
    """The packages, and those that they need and this machine does not have, into `folder`."""
    plan = apt("install", "-s", "--no-install-recommends", *PACKAGES, folder=folder)
    names = sorted({line.split()[1] for line in plan.splitlines() if line.startswith("Inst ")})
    if not set(PACKAGES) <= set(names):  # they are installed here, but perhaps not alone
        names = sorted({*names, *PACKAGES})
    apt("download", *names, folder=folder)


def apt(*arguments: str, folder: Path) -> str:
    command = ["apt-get", "-qq", *arguments] if arguments[0] != "install" else ["apt-get", *arguments]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=FETCH_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise Unavailable(f"apt-get {arguments[0]} takes more than {FETCH_SECONDS:.0f} s") from None
    if done.returncode:
        raise Unavailable(f"apt-get {arguments[0]}: {(done.stderr.strip().splitlines() or ['failed'])[-1]}")
    return done.stdout


def architecture_folder(root: Path) -> str:
    return glob.glob(f"{root}/usr/lib/*-linux-gnu")[0]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def asked(admin_socket: Path, command: str) -> dict[str, Any]:
    """What a Ceph daemon says of itself; nothing before it listens."""
    with socket.socket(socket.AF_UNIX) as connection, contextlib.suppress(OSError, ValueError, struct.error):
        connection.settimeout(5)
        connection.connect(str(admin_socket))
        connection.sendall(json.dumps({"prefix": command}).encode() + b"\0")
        with connection.makefile("rb") as reply:
            (length,) = struct.unpack(">I", reply.read(4))
            said: dict[str, Any] = json.loads(reply.read(length))
            return said
    return {}


def answers(endpoint: str) -> bool:
    try:
        with urllib.request.urlopen(endpoint, timeout=5):
            return True
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False


def die_with_the_starter() -> None:
    """In the child: it is killed when the process that started it ends, however that ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

"""A proxy before an S3 server that fails as networks and stores do: on order, so often, for requests of one kind.

It forwards requests as they are, signatures included: a client signs the name of the host that it asks, and the
server takes any. Only where conditions are taken out is a request signed again.
"""

from __future__ import annotations

import http.client
import os
import signal
import socket
import struct
import sys
import threading
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, NamedTuple, Self

from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

CONDITIONS = ("If-None-Match", "If-Match")
HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "expect", "content-length"}


class Seen(NamedTuple):
    """A request that came: `key` is bucket and key, `query` what follows."""

    method: str
    key: str
    query: str
    conditions: tuple[str, ...]


@dataclass
class Fault:
    """What happens to the next `times` requests that `concerns` picks; see the functions that make them."""

    concerns: Callable[[Seen], bool]
    act: Callable[[Handler], None]
    times: int


def of(method: str, key: str = "") -> Callable[[Seen], bool]:
    """Requests with this method whose bucket and key hold `key`."""
    return lambda seen: seen.method == method and key in seen.key


def cut(handler: Handler) -> None:
    """The connection breaks in the middle of the body."""
    handler.forward_half()
    break_connection(handler.connection)
    handler.close_connection = True


def lose_answer(handler: Handler) -> None:
    """The server does what it was asked to, and nobody hears of it."""
    handler.forwarded(handler.body())
    break_connection(handler.connection)
    handler.close_connection = True


def break_off(handler: Handler) -> None:
    """The answer ends in the middle."""
    response, data = handler.forwarded(handler.body())
    handler.send_response(response.status)
    for name, value in response.getheaders():
        if name.lower() not in HOP_BY_HOP:
            handler.send_header(name, value)
    handler.send_header("Content-Length", str(len(data)))
    handler.end_headers()
    handler.wfile.write(data[: len(data) // 2])
    handler.wfile.flush()
    break_connection(handler.connection)
    handler.close_connection = True


class Killer:
    """Kills a process with SIGKILL at its `point`-th request that changes what is stored, counted from 1.

    `moment` says when: before the server hears of the request, in the middle of its body, or after the server has done
    it and before the process hears of that.
    """

    def __init__(self, point: int, moment: str, among: Callable[[Seen], bool] = lambda seen: True) -> None:
        self.point = point
        self.moment = moment
        self.among = among  # the requests that are counted
        self.calls = 0
        self._pid = 0
        self._known = threading.Event()
        self._lock = threading.Lock()

    def aim(self, pid: int) -> None:
        """At the process that was started meanwhile; its requests have waited."""
        self._pid = pid
        self._known.set()

    def concerns(self, seen: Seen) -> bool:
        """Is this the request? Those of the probe, whose order is not certain, are no points but the first."""
        if seen.method not in ("PUT", "POST", "DELETE") or ("_nightdesk/tmp/" in seen.key and self.calls):
            return False
        if not self.among(seen):
            return False
        with self._lock:
            self.calls += 1
            return self.calls == self.point

    def act(self, handler: Handler) -> None:
        self._known.wait()
        if self.moment == "middle" and int(handler.headers.get("Content-Length", 0)):
            handler.forward_half()
        elif self.moment == "after":
            handler.forwarded(handler.body())
        os.kill(self._pid, signal.SIGKILL)
        handler.close_connection = True


def answer(status: int, code: str, message: str = "said by the proxy") -> Callable[[Handler], None]:
    """The server says that something is wrong, and does nothing."""

    def act(handler: Handler) -> None:
        handler.body()
        handler.refuse(status, code, message)

    return act


class Server(ThreadingHTTPServer):
    """Says nothing of clients that are killed."""

    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class Proxy:
    """A context: `endpoint` leads to the server at `target`, by way of `faults`."""

    def __init__(self, target: str, access_key: str, secret_key: str) -> None:
        self.target = urllib.parse.urlsplit(target)
        self.credentials = Credentials(access_key, secret_key)
        self.lock = threading.Lock()
        self.reset()
        self._server = Server(("127.0.0.1", 0), type("Bound", (Handler,), {"proxy": self}))
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def reset(self) -> None:
        """As if it were new."""
        self.faults: list[Fault] = []
        self.seen: list[Seen] = []
        self.expired: set[str] = set()  # access keys that the proxy takes for expired
        self.heeds_conditions = True

    def fail(self, concerns: Callable[[Seen], bool], act: Callable[[Handler], None], times: int = 1) -> None:
        """From now on."""
        with self.lock:
            self.faults.append(Fault(concerns, act, times))

    def count(self, method: str, key: str = "") -> int:
        """How many requests came so far."""
        return sum(map(of(method, key), list(self.seen)))

    def fault_for(self, seen: Seen) -> Fault | None:
        with self.lock:
            for fault in self.faults:
                if fault.times and fault.concerns(seen):
                    fault.times -= 1
                    return fault
        return None


class Handler(BaseHTTPRequestHandler):
    """One connection of a client."""

    proxy: Proxy
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        conditions = tuple(name for name in CONDITIONS if name in self.headers)
        seen = Seen(self.command, urllib.parse.unquote(path).lstrip("/"), query, conditions)
        self.proxy.seen.append(seen)
        fault = self.proxy.fault_for(seen)
        if fault is not None:
            fault.act(self)
            return
        if any(f"Credential={key}/" in self.headers.get("Authorization", "") for key in self.proxy.expired):
            answer(400, "ExpiredToken", "The provided token has expired.")(self)
            return
        response, data = self.forwarded(self.body())
        self.send_response(response.status)
        for name, value in response.getheaders():
            if name.lower() not in HOP_BY_HOP:
                self.send_header(name, value)
        length = response.getheader("Content-Length") if self.command == "HEAD" else None
        self.send_header("Content-Length", length or str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_PUT = do_HEAD = do_DELETE = do_POST = do_GET

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def upstream(self) -> http.client.HTTPConnection:
        assert self.proxy.target.hostname is not None
        connection = http.client.HTTPConnection(self.proxy.target.hostname, self.proxy.target.port, timeout=30)
        connection.connect()
        return connection

    def forwarded(self, body: bytes) -> tuple[http.client.HTTPResponse, bytes]:
        headers = {name: value for name, value in self.headers.items() if name.lower() != "expect"}
        if not self.proxy.heeds_conditions and any(name in self.headers for name in CONDITIONS):
            headers = self._without_conditions(headers, body)
        upstream = self.upstream()
        try:
            upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in headers.items():
                upstream.putheader(name, value)
            upstream.endheaders(body or None)
            response = upstream.getresponse()
            return response, response.read()
        finally:
            upstream.close()

    def forward_half(self) -> None:
        """The server gets half of what it was told to expect."""
        upstream = self.upstream()
        upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            if name.lower() != "expect":
                upstream.putheader(name, value)
        upstream.endheaders()
        upstream.send(self.rfile.read(int(self.headers["Content-Length"]) // 2))
        break_connection(upstream.sock)

    def refuse(self, status: int, code: str, message: str) -> None:
        text = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()
        data = b"" if self.command == "HEAD" else text
        self.send_response(status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _without_conditions(self, headers: dict[str, str], body: bytes) -> dict[str, str]:
        kept = {n: v for n, v in headers.items() if n not in CONDITIONS and n.lower() != "authorization"}
        request = AWSRequest(self.command, f"http://{headers['Host']}{self.path}", headers=kept, data=body)
        S3SigV4Auth(self.proxy.credentials, "s3", "us-east-1").add_auth(request)
        return dict(request.headers.items())


def break_connection(connection: socket.socket) -> None:
    """Close so that the other side sees a broken connection, not an ended one."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()

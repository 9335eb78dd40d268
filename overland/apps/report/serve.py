"""Serves the live report page, on this machine's loopback interface only.

There are two addresses, the page and its newest content, under a path that cannot be guessed, since
other users of a login node can connect too. No request can name a file to read. A request whose
Host header is not a loopback name is refused; otherwise a web page elsewhere could reach the server
through a name that resolves to 127.0.0.1 (DNS rebinding).
"""

from __future__ import annotations

import errno
import json
import secrets
import socket
import sys
import threading
import time
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs

from overland.apps.report.page import build_page, data_of, policy, sections_of
from overland.apps.report.summary import RunReader
from overland.apps.watch.files import finite
from overland.errors import ReportError
from overland.world.launch import free_port

LOOPBACK = "127.0.0.1"
NAMES = ("127.0.0.1", "localhost")
PORT = 8765
LEAST_SECONDS = 1.5  # between two reads of the runs
PATIENCE = 30.0  # timeout for an incomplete request


class ReportServer(ThreadingHTTPServer):
    """Holds the newest content of the page, rebuilt on request if the runs have changed."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, readers: Sequence[RunReader], port: int) -> None:
        self.readers = readers
        self.secret = secrets.token_urlsafe(9)
        self._lock = threading.Lock()
        self._number, self._seen = 0, ""
        self._content: dict[str, Any] = {}
        self._next = 0.0
        self._page = ""
        super().__init__((LOOPBACK, port), Handler)

    @property
    def address(self) -> str:
        return f"http://{LOOPBACK}:{self.server_port}/{self.secret}/"

    def newest(self) -> tuple[str, dict[str, Any]]:
        """Returns the page, and its sections and data with an increasing version number."""
        with self._lock:
            if time.monotonic() >= self._next:
                self._look()
            return self._page, self._content

    def _look(self) -> None:
        begun = time.monotonic()
        for reader in self.readers:
            reader.read_on()
        runs = [reader.report() for reader in self.readers]
        content = {"sections": sections_of(runs), "data": data_of(runs)}
        content["sections"].pop("foot", None)  # the time of day alone is not a change
        seen = json.dumps(finite(content))
        if seen != self._seen:
            self._number += 1
            self._seen, self._page = seen, build_page(runs, live=True)
            self._content = {**finite(content), "version": self._number}
        # Long runs take longer to read: spend at most a fifth of the time on it.
        self._next = time.monotonic() + max(LEAST_SECONDS, 4 * (time.monotonic() - begun))

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores closed connections; anything else prints its traceback."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    server: ReportServer
    timeout = PATIENCE
    server_version, sys_version = "overland", ""

    def do_GET(self) -> None:
        if not self._is_ours():
            self._answer(HTTPStatus.FORBIDDEN, b"this server only answers on 127.0.0.1\n")
            return
        path, _, query = self.path.partition("?")
        if secrets.compare_digest(path.encode(), f"/{self.server.secret}/".encode()):
            page, _ = self.server.newest()
            self._answer(HTTPStatus.OK, page.encode(), "text/html; charset=utf-8")
        elif path == f"/{self.server.secret}/data.json":
            _, content = self.server.newest()
            if parse_qs(query).get("since") == [str(content["version"])]:
                self._answer(HTTPStatus.NO_CONTENT, b"")
                return
            body = json.dumps(content, allow_nan=False).encode()
            self._answer(HTTPStatus.OK, body, "application/json")
        else:
            self._answer(
                HTTPStatus.NOT_FOUND, b"not found: use the full address that was printed\n"
            )

    def _is_ours(self) -> bool:
        hosts = self.headers.get_all("Host") or []
        name, _, port = "".join(hosts).lower().partition(":")
        return len(hosts) == 1 and name in NAMES and (not port or port.isdecimal())

    def _answer(
        self, status: HTTPStatus, body: bytes, kind: str = "text/plain; charset=utf-8"
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.send_header("Content-Security-Policy", f"{policy(live=True)}; frame-ancestors 'none'")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        """Logs nothing."""


def open_server(readers: Sequence[RunReader], port: int) -> ReportServer:
    """Listens on the port, or raises an error that suggests a free one."""
    try:
        return ReportServer(readers, port)
    except OSError as error:
        why = {errno.EACCES: "requires root", errno.EADDRINUSE: "is in use"}.get(error.errno or 0)
        if why is None:
            raise ReportError(f"port {port} of {LOOPBACK}: {error.strerror}") from None
        raise ReportError(
            f"port {port} {why}: use a free port, such as `--serve {free_port()}`"
        ) from None


def tunnel(server: ReportServer) -> str:
    """Returns the ssh command that makes the page available on another machine."""
    port = server.server_port
    return f"ssh -L {port}:{LOOPBACK}:{port} {socket.gethostname()}"

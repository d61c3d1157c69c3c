"""Two plain pages for who watches a service: does it live, is it ready? They say so from the first moment on.

Liveness and readiness are kept apart, since a service that loads a large model lives, but is not ready.
"""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer
from socketserver import ThreadingMixIn
from types import TracebackType
from typing import Any

from .addresses import split_address
from .errors import ConfigError

_MAX_CONNECTIONS = 32
_PATIENCE_S = 2.0
"""For a request to be sent, and its answer to be read."""
READY = "ready"


class HealthPage:
    """Serves /livez and /readyz over HTTP at HOST:PORT, in threads of its own, whatever else the program does.

    /livez is 200. /readyz is 200 while `says` returns "ready", and else 503 with what it returns. Everything else is
    503, too, with Retry-After: a service that has this address later is not there yet.
    """

    def __init__(self, listen: str, state: str, certificate: tuple[str, str] | None = None) -> None:
        """`state`: what is said at first. `certificate`: its file and its key's, for HTTPS. Port 0 takes a free one."""
        self._listen, self._certificate = listen, certificate
        self.says: Callable[[], str] = lambda: state
        self.address = ""
        self.device = ""
        """What the service runs on, said beside its state where that is something to know."""
        self._server: _Server | None = None

    def __enter__(self) -> HealthPage:
        """Serve from now on; ConfigError when the address cannot be taken. Without an address nothing is served."""
        if not self._listen:
            return self
        host, port = split_address(self._listen)
        try:
            self._server = _Server((host, port), self)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {self._listen}: {error.strerror}", hint="another program may use the port"
            ) from error
        if self._certificate:
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            context.load_cert_chain(*self._certificate)
            self._server.tls = context
        self.address = f"{f'[{host}]' if ':' in host else host}:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), name="baru-health", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._server:
            self._server.shutdown()
            self._server.server_close()


class _Server(ThreadingMixIn, HTTPServer):
    daemon_threads = True
    block_on_close = False
    tls: ssl.SSLContext | None = None

    def __init__(self, address: tuple[str, int], page: HealthPage) -> None:
        self.page = page
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._room = threading.BoundedSemaphore(_MAX_CONNECTIONS)
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        """As the base does, but without looking its own name up."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        """Who comes while too many are there is turned away."""
        if self._room.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            request.settimeout(_PATIENCE_S)
            if self.tls:
                request = self.tls.wrap_socket(request, server_side=True)
            super().process_request_thread(request, client_address)
        except OSError:  # no TLS, or gone
            self.shutdown_request(request)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Somebody went away: no matter."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _PATIENCE_S
    server_version, sys_version = "baru", ""

    def do_GET(self) -> None:
        state = self.server.page.says()
        if self.path == "/livez":
            self._answer(HTTPStatus.OK, "alive")
        else:
            is_ready = self.path == "/readyz" and state == READY
            self._answer(HTTPStatus.OK if is_ready else HTTPStatus.SERVICE_UNAVAILABLE, state)

    do_HEAD = do_POST = do_GET  # noqa: N815

    def _answer(self, status: HTTPStatus, text: str) -> None:
        body = b"" if self.command == "HEAD" else f"{text}\n".encode()
        self.send_response(status)
        if status is not HTTPStatus.OK:
            self.send_header("Retry-After", "1")
        self.send_header("Content-Type", "text/plain; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close")
        if self.server.page.device:
            self.send_header("X-Baru-Device", self.server.page.device)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Probes come every few seconds: no log."""

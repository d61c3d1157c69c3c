"""Serves the console beside the hub, in its loop."""

from __future__ import annotations

import asyncio
import socket
import ssl
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import uvicorn
from cryptography import x509
from starlette.requests import Request
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from baru_common import __version__
from baru_common.addresses import is_loopback, split_address
from baru_common.certificates import Certificate
from baru_common.errors import ConfigError
from baru_common.identity import Role
from baru_common.reread import Reread
from baru_common.tls import TlsFiles
from baru_common.web import served
from baru_hub.access import Policy
from baru_hub.config import HubConfig
from baru_hub.guard import policy_of
from baru_hub.posture_keeper import PostureKeeper
from baru_hub.verifier import Verifier

from .alerts import alerts
from .app import make_app
from .state import ConsoleState

if TYPE_CHECKING:
    from baru_hub.server import Hub

MAY_LOOK = (Role.OBSERVER, Role.OPERATOR)
_MAX_CONNECTIONS = 64
_GRACE_S = 1
_UNREAD_BYTES = 32 << 10
"""What may wait for a viewer in this machine's socket: who is slow shall see the latest, not what was minutes ago."""
_GIVE_UP_S = 10
"""A viewer that takes nothing for so long loses its place: tablets go out of reach and say no good-bye."""
_CERTIFICATE = "certificate"


class _Protocol(HttpToolsProtocol):
    """Lets the application know who connected, and little wait for who does not read."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        transport.set_write_buffer_limits(high=1, low=0)  # TLS takes a high of 0 for always full
        connection = transport.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNREAD_BYTES)
        if sys.platform == "linux":
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1e3 * _GIVE_UP_S))
        if tls := transport.get_extra_info("ssl_object"):
            self.app_state = {**self.app_state, _CERTIFICATE: tls.getpeercert(binary_form=True)}
        super().connection_made(transport)


@asynccontextmanager
async def running_console(
    config: HubConfig, hub: Hub, state: ConsoleState, posture: PostureKeeper | None
) -> AsyncIterator[str]:
    """Serve the page while the block runs; yields the URL. Past loopback who looks must show a certificate of the kit,
    as an observer or operator. ConfigError when the address cannot be taken or a file is wrong."""
    host, port = split_address(config.console)
    guarded = not is_loopback(host) and config.tls is not None
    files = TlsFiles.of(config.tls, Role.HUB) if guarded and config.tls else None
    policy = policy_of(files, config.allow, config.allow_file) if files else None
    names = files.load(Role.HUB).own.hosts if files else ()
    app = make_app(lambda: told(hub, state, posture), {host, *names}, _refusal(policy))
    settings = uvicorn.Config(
        app,
        http=_Protocol,
        log_config=None,
        access_log=False,
        lifespan="off",
        limit_concurrency=_MAX_CONNECTIONS,
        timeout_graceful_shutdown=_GRACE_S,
        server_header=False,
    )
    if files:
        settings.load()
        settings.ssl = _context(files)
    async with served(settings, host, port) as url:
        yield f"{url}/"


def told(hub: Hub, state: ConsoleState, posture: PostureKeeper | None) -> dict[str, Any]:
    """Return what the page shows."""
    view = state.told() | {"hub": _hub(hub.address, hub.verifier), "posture": _posture(posture)}
    return view | {"alerts": alerts(view), "at": time.strftime("%H:%M:%S", time.gmtime())}


def _hub(address: str, verifier: Verifier) -> dict[str, Any]:
    pool, census = verifier.pool, verifier.census()
    return {
        "address": address,
        "target": verifier.spec.target_name,
        "engine": verifier.spec.engine,
        "version": __version__,
        "draining": verifier.draining,
        "sessions": {place.value: number for place, number in census.states.items()},
        "max_sessions": verifier.describe().limits.max_sessions,
        "kv_cache_usage": pool.num_held / pool.num_pages if pool else 0.0,
    }


def _posture(keeper: PostureKeeper | None) -> dict[str, Any]:
    if keeper is None:
        return {"name": "", "problem": "", "canary": []}
    records = [
        {"drafter": record.row.drafter, "acceptance": record.figure.acceptance, "ids": record.figure.num_tried}
        | {"standing": admission.standing.value, "reason": admission.reason}
        for record, admission in keeper.judged()
    ]
    return {"name": keeper.name, "problem": keeper.problem, "canary": records}


def _refusal(policy: Reread[Policy] | None) -> Callable[[Request], str]:
    if policy is None:
        return lambda _: ""

    def judge_caller(request: Request) -> str:
        policy.refresh()
        try:
            certificate = Certificate.of(x509.load_der_x509_certificate(getattr(request.state, _CERTIFICATE, b"")))
        except (ConfigError, ValueError) as error:
            return f"the certificate cannot be read: {error}"
        who = certificate.identity
        if who.role not in MAY_LOOK:
            return f"{who} is no {' or '.join(role.value for role in MAY_LOOK)}"
        left_s = certificate.ends.timestamp() - time.time()
        refusal = policy.value.refusal(who, certificate.serial, left_s)
        return refusal.message if refusal else ""

    return judge_caller


def _context(files: TlsFiles) -> ssl.SSLContext:
    """What a browser meets; a renewed certificate is served from the next connection on."""
    watched = files.watched(Role.HUB)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(files.authority))
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(files.certificate, files.key)

    def refreshed(*_: Any) -> None:
        if watched.refresh():
            context.load_cert_chain(files.certificate, files.key)

    context.sni_callback = refreshed
    return context

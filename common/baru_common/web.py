"""Serving an ASGI application in a loop that has other things to do, too."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import uvicorn

from .errors import ConfigError


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the program's business."""
        yield


@asynccontextmanager
async def served(settings: uvicorn.Config, host: str, port: int) -> AsyncIterator[str]:
    """Serve while the block runs; yields the URL, without a path. Port 0 takes a free one; ConfigError when the address
    cannot be taken."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=settings.limit_concurrency or 128)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror}", hint="another program may use the port"
        ) from error
    server = _Server(settings)
    serving = asyncio.create_task(server.serve(sockets=[listener]), name="baru-web")
    try:
        while not (server.started or serving.done()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        name = f"[{host}]" if ":" in host else host
        yield f"{'https' if settings.ssl else 'http'}://{name}:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await serving
        listener.close()

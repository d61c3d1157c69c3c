"""The endpoint as a server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from baru_common.addresses import is_loopback
from baru_common.errors import ConfigError
from baru_common.web import served
from baru_micro.client import MicroNode

from .app import EndpointConfig, make_app

_MAX_CONNECTIONS = 512
_GRACE_S = 5


@dataclass(frozen=True)
class Listen:
    """Where to serve, and with which certificate."""

    host: str
    port: int
    certificate: Path | None = None
    key: Path | None = None

    def check(self, config: EndpointConfig) -> None:
        """ConfigError when strangers could get at it."""
        if (self.certificate is None) != (self.key is None):
            raise ConfigError("--certificate and --key go together")
        if not is_loopback(self.host) and not config.api_keys:
            raise ConfigError(
                f"{self.host} is not a loopback address, and no API key is set",
                hint="set --api-key-file, or listen on 127.0.0.1",
            )


@asynccontextmanager
async def running_endpoint(
    node: MicroNode, config: EndpointConfig, listen: Listen, metrics: Callable[[], bytes] | None = None
) -> AsyncIterator[str]:
    """Serve `node` over HTTP while the block runs; yields the URL. `metrics`: what /metrics shows. ConfigError when the
    address cannot be taken."""
    listen.check(config)
    settings = uvicorn.Config(
        make_app(node, config, metrics),
        log_config=None,
        access_log=False,
        lifespan="off",
        limit_concurrency=_MAX_CONNECTIONS,
        timeout_graceful_shutdown=_GRACE_S,
        ssl_certfile=listen.certificate,
        ssl_keyfile=listen.key,
        server_header=False,
    )
    async with served(settings, listen.host, listen.port) as url:
        yield url

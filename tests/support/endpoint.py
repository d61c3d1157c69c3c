"""A node's HTTP endpoint on loopback with a real hub behind it, and the official client before it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import openai

from baru_common.drafters import Drafter
from baru_common.model_files import LoadedModel
from baru_hub.engines import Engine
from baru_hub.server import Hub
from baru_micro import MicroNode
from baru_micro.endpoint.app import EndpointConfig
from baru_micro.endpoint.server import Listen, running_endpoint

from .hubs import hub_of
from .lockstep import free_running


@dataclass(frozen=True)
class Endpoint:
    """What a test can reach."""

    hub: Hub
    node: MicroNode
    url: str
    openai: openai.AsyncOpenAI
    http: httpx.AsyncClient

    @property
    def model(self) -> str:
        return self.node.hub.target_name


@asynccontextmanager
async def endpoint_of(
    target: LoadedModel | Engine,
    *,
    drafter: Drafter | str | None = "ngram",
    config: EndpointConfig | None = None,
    **settings: Any,
) -> AsyncIterator[Endpoint]:
    """Serve `target` at a hub, and that through a node over HTTP."""
    config = config or EndpointConfig()
    async with (
        hub_of(target, scheduler=free_running(), **settings) as hub,
        MicroNode.connect(hub.address, drafter=drafter) as node,
        running_endpoint(node, config, Listen("127.0.0.1", 0)) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=(config.api_keys or ("none",))[0], max_retries=0) as client,
        httpx.AsyncClient(base_url=url, timeout=30) as http,
    ):
        yield Endpoint(hub, node, url, client, http)

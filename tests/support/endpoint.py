"""A node's HTTP endpoint on loopback with a real hub behind it, and the official client before it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx2
import openai

from baru_common.drafters import Drafter
from baru_common.model_files import LoadedModel
from baru_common.sampling import SamplingParams
from baru_common.telemetry import TelemetryConfig
from baru_hub.engines import Engine
from baru_hub.server import Hub
from baru_micro import Finish, LinkOptions, MicroNode
from baru_micro.client import Prompt
from baru_micro.endpoint.app import EndpointConfig
from baru_micro.endpoint.server import Listen, running_endpoint
from baru_micro.telemetry import observing

from .fault_proxy import FaultProxy
from .hubs import hub_of
from .lockstep import free_running


@dataclass(frozen=True)
class Endpoint:
    """What a test can reach."""

    hub: Hub
    node: MicroNode
    url: str
    openai: openai.AsyncOpenAI
    http: httpx2.AsyncClient
    link: FaultProxy
    """Between node and hub."""

    @property
    def model(self) -> str:
        return self.node.hub.target_name

    async def by_library(self, prompt: Prompt, params: SamplingParams) -> Finish:
        """What the library gives at the same node."""
        events = [event async for event in self.node.generate(prompt, params)]
        assert isinstance(events[-1], Finish)
        return events[-1]


@asynccontextmanager
async def endpoint_of(
    target: LoadedModel | Engine,
    *,
    drafter: Drafter | str | None = "ngram",
    config: EndpointConfig | None = None,
    options: LinkOptions | None = None,
    **settings: Any,
) -> AsyncIterator[Endpoint]:
    """Serve `target` at a hub, and that through a node over HTTP."""
    config = config or EndpointConfig()
    with observing(TelemetryConfig(page=True)) as observed:
        async with (
            hub_of(target, scheduler=free_running(), **settings) as hub,
            FaultProxy.open(hub.address) as link,
            MicroNode.connect(link.address, drafter=drafter, options=options, observers=observed.observers) as node,
            running_endpoint(node, config, Listen("127.0.0.1", 0), observed.page) as url,
            openai.AsyncOpenAI(
                base_url=f"{url}/v1", api_key=(config.api_keys or ("none",))[0], max_retries=0
            ) as client,
            httpx2.AsyncClient(base_url=url, timeout=30) as http,
        ):
            yield Endpoint(hub, node, url, client, http, link)

"""A real hub on loopback, in this process, and a node connected to it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from baru_common.drafters import Drafter
from baru_common.model_files import LoadedModel
from baru_common.sampling import SamplingParams
from baru_hub.config import HubConfig
from baru_hub.engines import Engine
from baru_hub.engines.transformers import TransformersEngine
from baru_hub.server import Hub, running_hub
from baru_micro import Finish, MicroNode, Step
from baru_micro.client import Prompt

# Patience so long that every draft is waited for: what is verified then depends on nothing but the drafter.
PATIENT = HubConfig(listen="127.0.0.1:0", patience_ms=5000)


@asynccontextmanager
async def hub_of(target: LoadedModel | Engine, **settings: object) -> AsyncIterator[Hub]:
    """Serve `target` on a free loopback port."""
    engine = TransformersEngine(target) if isinstance(target, LoadedModel) else target
    async with running_hub(engine, replace(PATIENT, **settings)) as hub:  # type: ignore[arg-type]
        yield hub


async def generate(
    address: str, prompt: Prompt, params: SamplingParams | None = None, drafter: Drafter | str | None = None
) -> tuple[Finish, list[Step]]:
    """Run one generation and return its end and its steps."""
    steps = []
    async with MicroNode.connect(address, drafter=drafter) as node:
        async for event in node.generate(prompt, params):
            if isinstance(event, Step):
                steps.append(event)
            elif isinstance(event, Finish):
                return event, steps
    raise AssertionError("no Finish came")

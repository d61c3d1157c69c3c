"""A real hub on loopback, in this process, and a node connected to it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

from baru_common.drafters import Drafter
from baru_common.model_files import LoadedModel
from baru_common.sampling import SamplingParams
from baru_hub.config import HubConfig
from baru_hub.engines import Engine
from baru_hub.observing import HubObserver
from baru_hub.posture_keeper import PostureKeeper
from baru_hub.scheduler import Scheduler
from baru_hub.server import Hub, running_hub
from baru_micro import Finish, MicroNode, Step
from baru_micro.client import Prompt

from .lockstep import Lockstep

KV_CACHE_MB = 16
"""For a tiny target: 512 pages. Each hub's cache is filled with zeros at its start, and there are hundreds of them."""

LOOPBACK = HubConfig(listen="127.0.0.1:0")


def _engine_of(target: LoadedModel, kv_cache_mb: int) -> Engine:
    from baru_hub.engines.transformers import TransformersEngine  # torch takes seconds to load

    from .tiny import twin

    return TransformersEngine(twin(target), kv_cache_mb=kv_cache_mb)


@asynccontextmanager
async def hub_of(
    target: LoadedModel | Engine,
    *,
    scheduler: Scheduler | None = None,
    posture: PostureKeeper | None = None,
    kv_cache_mb: int = KV_CACHE_MB,
    observers: Sequence[HubObserver] = (),
    **settings: object,
) -> AsyncIterator[Hub]:
    """Serve `target` on a free loopback port, in lockstep unless told otherwise: what is verified then
    depends on nothing but the drafter."""
    engine = _engine_of(target, kv_cache_mb) if isinstance(target, LoadedModel) else target
    scheduler = scheduler or Lockstep()
    try:
        config = replace(LOOPBACK, **settings)  # type: ignore[arg-type]
        async with running_hub(engine, config, scheduler=scheduler, observers=observers, posture=posture) as hub:
            yield hub
    finally:
        await engine.close()


async def generate(
    address: str, prompt: Prompt, params: SamplingParams | None = None, drafter: Drafter | str | None = None
) -> tuple[Finish, list[Step]]:
    """Run one generation and return its end and its steps."""
    async with MicroNode.connect(address, drafter=drafter) as node:
        events = [event async for event in node.generate(prompt, params)]
    assert isinstance(events[-1], Finish)
    return events[-1], [event for event in events if isinstance(event, Step)]

"""Until a hub answers for the first time: a node may be switched on before its hub, or while it loads."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import AsyncExitStack

import tenacity

from baru_common.cli_support import Say
from baru_common.health_page import HealthPage
from baru_common.service_manager import notify
from baru_micro.client import MicroNode
from baru_micro.config import NodeConfig
from baru_micro.observing import NodeObserver
from baru_micro.reach import LINK_ERRORS

_FIRST_WAIT_S, _MOST_WAIT_S = 0.5, 5.0


async def first_hub(
    settings: NodeConfig, observers: Iterable[NodeObserver], stack: AsyncExitStack, say: Say, stop: asyncio.Event
) -> MicroNode | None:
    """Connect for the length of the stack, however long that takes; None when `stop` comes first.

    Meanwhile the node's address says that it lives and is not ready. The BaruError of what no waiting mends.
    """
    certificate = (str(settings.certificate), str(settings.key)) if settings.certificate else None

    def tell(state: tenacity.RetryCallState) -> None:
        if state.attempt_number == 1:
            reason = str(state.outcome.exception()) if state.outcome else ""
            say.event("waiting", reason=reason)
            notify(READY="1", STATUS=f"waiting for a hub: {reason}")

    retrying = tenacity.AsyncRetrying(
        wait=tenacity.wait_random_exponential(multiplier=_FIRST_WAIT_S, max=_MOST_WAIT_S),
        retry=tenacity.retry_if_exception_type(LINK_ERRORS),
        before_sleep=tell,
    )

    async def connect() -> MicroNode:
        return await stack.enter_async_context(settings.connect(observers=observers))

    with HealthPage(settings.listen, "no hub has answered yet", certificate):
        connecting: asyncio.Task[MicroNode] = asyncio.ensure_future(retrying(connect))
        stopping = asyncio.ensure_future(stop.wait())
        await asyncio.wait([connecting, stopping], return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if connecting.done():
            return connecting.result()
        connecting.cancel()
        await asyncio.gather(connecting, return_exceptions=True)
        return None

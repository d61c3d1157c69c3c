"""Every call passes here first, whatever it asks for: bounded by identity, in number and in rate."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc

from baru_common.errors import BaruError

from .interceptors import Context, abort, around
from .quotas import Quotas
from .rates import CallGate

Identify = Callable[[Context], str]

_AMOUNTS = {"/baru.drafting.v1.DraftingService/FetchTokenizer": 10}
"""What counts as more than one call."""
_HELD_S = 1.0
"""A refused call is held so long: one who asks again at once costs little more than one who waits."""


class CallLimits(grpc.aio.ServerInterceptor):
    """Refuses calls with RESOURCE_EXHAUSTED before anything is done for them."""

    def __init__(self, quotas: Quotas, identify: Identify, clock: Callable[[], float] = time.monotonic) -> None:
        self._gate = CallGate(quotas)
        self._identify = identify
        self._clock = clock

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wrap the handler, if there is one."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        amount = _AMOUNTS.get(str(handler_call_details.method), 1)
        return around(handler, lambda context: self._admitted(context, amount))

    @asynccontextmanager
    async def _admitted(self, context: Context, amount: float) -> AsyncIterator[None]:
        identity = self._identify(context)
        try:
            self._gate.enter(identity)
        except BaruError as error:
            await abort(context, error)
        try:
            await self._wait(context, identity, amount)
            yield
        finally:
            self._gate.leave(identity)

    async def _wait(self, context: Context, identity: str, amount: float) -> None:
        try:
            wait_s = self._gate.wait_s(identity, amount, self._clock())
        except BaruError as error:
            await asyncio.sleep(_HELD_S)
            await abort(context, error)
        if wait_s:
            await asyncio.sleep(wait_s)

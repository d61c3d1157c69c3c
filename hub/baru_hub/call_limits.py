"""Every call passes here first, whatever it asks for: bounded by identity, in number and in rate."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc

from baru_common import wire
from baru_common.errors import BaruError

from .quotas import Quotas
from .rates import CallGate

Context = grpc.aio.ServicerContext[Any, Any]
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
        name = ("unary" if not handler.request_streaming else "stream") + (
            "_stream" if handler.response_streaming else "_unary"
        )
        amount = _AMOUNTS.get(str(handler_call_details.method), 1)
        make = getattr(grpc, f"{name}_rpc_method_handler")
        wrapped = self._wrapped(getattr(handler, name), amount)
        return make(wrapped, handler.request_deserializer, handler.response_serializer)

    def _wrapped(self, behaviour: Callable[[Any, Context], Any], amount: float) -> Callable[[Any, Context], Any]:
        async def answer(request: Any, context: Context) -> Any:
            async with self._admitted(context, amount):
                return await behaviour(request, context)

        async def answers(request: Any, context: Context) -> AsyncIterator[Any]:
            async with self._admitted(context, amount):
                async for response in behaviour(request, context):
                    yield response

        return answers if inspect.isasyncgenfunction(behaviour) else answer

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


async def abort(context: Context, error: BaruError) -> None:
    """End a call with an error; it does not return."""
    status = wire.to_status(error)
    await context.abort(status.code, status.details, status.trailing_metadata)

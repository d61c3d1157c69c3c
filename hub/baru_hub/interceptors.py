"""What the interceptors before every call do alike: put something around a method's handler, and refuse."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Any, cast

import grpc

from baru_common import wire
from baru_common.errors import BaruError

Context = grpc.aio.ServicerContext[Any, Any]


def around(
    handler: Any, admitted: Callable[[Context], AbstractAsyncContextManager[None]]
) -> grpc.RpcMethodHandler[Any, Any]:
    """Return the handler that does what `handler` does, within `admitted`, whatever streams it has."""
    arity = (
        "stream" if handler.request_streaming else "unary",
        "stream" if handler.response_streaming else "unary",
    )
    behaviour = getattr(handler, "_".join(arity))

    async def one(request: Any, context: Context) -> Any:
        async with admitted(context):
            return await behaviour(request, context)

    async def many(request: Any, context: Context) -> None:
        async with admitted(context):
            answers = behaviour(request, context)
            if not isinstance(answers, AsyncIterator):
                await answers  # it writes by itself
                return
            async with aclosing(cast("Any", answers)):
                async for answer in answers:
                    await context.write(answer)

    make = getattr(grpc, f"{'_'.join(arity)}_rpc_method_handler")
    wrapped: grpc.RpcMethodHandler[Any, Any] = make(
        many if handler.response_streaming else one,
        request_deserializer=handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )
    return wrapped


async def abort(context: Context, error: BaruError) -> None:
    """End a call with an error; it does not return."""
    status = wire.to_status(error)
    await context.abort(status.code, status.details, status.trailing_metadata)

"""The gRPC face of the verifier: messages in, messages out, errors as statuses."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError

from baru.drafting.v1 import drafting_pb2 as pb
from baru.drafting.v1 import drafting_pb2_grpc
from baru_common import wire
from baru_common.errors import BaruError, EngineFailure, InvalidRequest, NotFound
from baru_common.frames import Cancel, Draft, FinishReason, Heartbeat, Open
from baru_common.trace_context import TRACEPARENT, TraceContext

from .live import LiveSession
from .verifier import Verifier

_CHUNK_BYTES = 1 << 18
_OPEN_TIMEOUT_S = 10.0

_log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]


class DraftingServicer(drafting_pb2_grpc.DraftingServiceServicer):
    """Serves one verifier."""

    def __init__(self, verifier: Verifier) -> None:
        self._verifier = verifier

    async def Describe(self, request: pb.DescribeRequest, context: Context) -> pb.DescribeResponse:  # noqa: ARG002, N802
        """Say what is served."""
        return wire.encode_description(self._verifier.describe())

    async def FetchTokenizer(  # noqa: N802
        self, request: pb.FetchTokenizerRequest, context: Context
    ) -> AsyncIterator[pb.FetchTokenizerResponse]:
        """Stream the tokenizer bundle; NOT_FOUND when another one is asked for."""
        bundle = self._verifier.spec.bundle
        if request.tokenizer_digest != bundle.digest:
            await _abort(
                context,
                NotFound("this hub serves another tokenizer", hint="ask the hub to describe itself again"),
            )
        for start in range(0, len(bundle.data), _CHUNK_BYTES):
            chunk = bundle.data[start : start + _CHUNK_BYTES]
            yield pb.FetchTokenizerResponse(chunk=chunk, total_bytes=len(bundle.data))

    async def Decode(  # noqa: N802
        self, request_iterator: AsyncIterator[pb.DecodeRequest], context: Context
    ) -> AsyncIterator[pb.DecodeResponse]:
        """Run one session; see the contract."""
        try:
            live = await self._verifier.open(await _first_frame(request_iterator), trace=_trace(context))
        except BaruError as error:
            await _abort(context, error)
        reader = asyncio.create_task(_read(request_iterator, live))
        try:
            async for frame in live.frames():
                yield wire.encode_response(frame)
        except BaruError as error:
            reader.cancel()  # before the call is aborted, or reading from it fails with an error of its own
            await _abort(context, error)
        finally:
            reader.cancel()
            live.lose()  # it has ended, or the link broke


def _trace(context: Context) -> TraceContext | None:
    found = (value for key, value in context.invocation_metadata() or () if key == TRACEPARENT)
    header = next(found, "")
    return TraceContext.parse(header) if isinstance(header, str) else None


async def _first_frame(requests: AsyncIterator[pb.DecodeRequest]) -> Open:
    try:
        frame = wire.decode_request(await asyncio.wait_for(anext(requests), _OPEN_TIMEOUT_S))
    except (asyncio.TimeoutError, StopAsyncIteration):
        raise InvalidRequest(f"no Open came within {_OPEN_TIMEOUT_S:.0f} s") from None
    except DecodeError as error:
        raise InvalidRequest(f"the frame is not a DecodeRequest: {error}") from None
    if not isinstance(frame, Open):
        raise InvalidRequest(f"the first frame is {type(frame).__name__}, must be Open")
    return frame


async def _read(requests: AsyncIterator[pb.DecodeRequest], live: LiveSession) -> None:
    """Hand the node's frames to its session until the stream ends; what is wrong with them ends it."""
    try:
        async for message in requests:
            _handle(wire.decode_request(message), live)
        live.said_all()
    except BaruError as error:
        live.fail(error)
    except DecodeError as error:
        live.fail(InvalidRequest(f"the frame is not a DecodeRequest: {error}"))
    except Exception:  # nothing that a node sends may go unanswered
        _log.exception("reading a session failed", extra={"session_id": live.state.session_id})
        live.fail(EngineFailure("the hub failed to read a frame"))


def _handle(frame: Open | Draft | Cancel | Heartbeat, live: LiveSession) -> None:
    if isinstance(frame, Draft):
        live.draft(frame)
    elif isinstance(frame, Heartbeat):
        live.heartbeat(frame)
    elif isinstance(frame, Cancel):
        live.finish(FinishReason.CANCELLED)
    else:
        raise InvalidRequest("a second Open came on one stream", hint="use one stream a session")


async def _abort(context: Context, error: BaruError) -> NoReturn:
    status = wire.to_status(error)
    await context.abort(status.code, status.details, status.trailing_metadata)
    raise AssertionError("abort raises")

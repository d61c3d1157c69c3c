"""The gRPC face of the verifier: messages in, messages out, errors as statuses."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError

from baru.drafting.v1 import drafting_pb2 as pb
from baru.drafting.v1 import drafting_pb2_grpc
from baru_common import wire
from baru_common.channel_options import MAX_MESSAGE_BYTES
from baru_common.errors import BaruError, EngineFailure, Incompatible, InvalidRequest, NotFound
from baru_common.frames import Cancel, Draft, FinishReason, Heartbeat, Open, TrafficShape

from .live import LiveSession
from .shaped import Unshaped, shaped
from .verifier import Verifier

_CHUNK_BYTES = 1 << 18
_OPEN_TIMEOUT_S = 10.0

_log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]


class DraftingServicer(drafting_pb2_grpc.DraftingServiceServicer):
    """Serves one verifier; shaped streams only if `shape` says how they look."""

    def __init__(self, verifier: Verifier, shape: TrafficShape | None = None) -> None:
        self._verifier = verifier
        self._shape = shape

    async def Describe(self, request: pb.DescribeRequest, context: Context) -> pb.DescribeResponse:  # noqa: ARG002, N802
        """Say what is served."""
        return wire.encode_description(replace(self._verifier.describe(), traffic_shape=self._shape))

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
        if self._shape and self._shape.required:
            await _abort(context, Incompatible("this hub takes shaped streams only", hint="allow the node to shape"))
        async with aclosing(self._responses(request_iterator, _OPEN_TIMEOUT_S)) as responses:
            try:
                async for response in responses:
                    yield response
            except BaruError as error:
                await _abort(context, error)

    async def DecodeShaped(  # noqa: N802
        self, request_iterator: AsyncIterator[pb.Cell], context: Context
    ) -> AsyncIterator[pb.Cell]:
        """Run one session within cells; see the contract."""
        if not (shape := self._shape):
            await _abort(context, Incompatible("this hub shapes no traffic", hint="start it with --traffic-shape"))
        unshaped = Unshaped((cell.data async for cell in request_iterator), shape)
        try:
            async with aclosing(shaped(self._messages(unshaped, shape), shape)) as cells:
                async for data in cells:
                    yield pb.Cell(data=data)
        finally:
            unshaped.close()

    async def _messages(self, unshaped: Unshaped, shape: TrafficShape) -> AsyncGenerator[bytes, None]:
        requests = (pb.DecodeRequest.FromString(message) async for message in unshaped.messages())
        open_s = _OPEN_TIMEOUT_S + MAX_MESSAGE_BYTES / shape.cell_bytes * shape.tick_ms / 1000
        try:
            async with aclosing(self._responses(requests, open_s)) as responses:
                async for response in responses:
                    yield response.SerializeToString()
        finally:
            unshaped.ignore()

    async def _responses(
        self, requests: AsyncIterator[pb.DecodeRequest], open_timeout_s: float
    ) -> AsyncGenerator[pb.DecodeResponse, None]:
        """Serve one session; raises the BaruError that ends it."""
        live = await self._verifier.open(await _first_frame(requests, open_timeout_s))
        reader = asyncio.create_task(_read(requests, live))
        try:
            async for frame in live.frames():
                yield wire.encode_response(frame)
        finally:
            reader.cancel()  # before the call is aborted, or reading from it fails with an error of its own
            live.lose()  # it has ended, or the link broke


async def _first_frame(requests: AsyncIterator[pb.DecodeRequest], timeout_s: float) -> Open:
    try:
        frame = wire.decode_request(await asyncio.wait_for(anext(requests), timeout_s))
    except (asyncio.TimeoutError, StopAsyncIteration):
        raise InvalidRequest(f"no Open came within {timeout_s:.0f} s") from None
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
        _log.exception("reading session %s failed", live.state.session_id)
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

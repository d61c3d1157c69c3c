"""The gRPC face of the verifier: messages in, messages out, errors as statuses."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from baru.drafting.v1 import drafting_pb2 as pb
from baru.drafting.v1 import drafting_pb2_grpc
from baru_common import wire
from baru_common.channel_options import MAX_MESSAGE_BYTES
from baru_common.errors import BaruError, EngineFailure, HubTimeout, Incompatible, InvalidRequest, NotFound
from baru_common.frames import Cancel, Draft, FinishReason, Heartbeat, NodeFrame, Open, TrafficShape
from baru_common.trace_context import TRACEPARENT, TraceContext
from baru_common.waiting import within

from .call_limits import Identify
from .guard import caller, hold
from .interceptors import Context, abort
from .live import LiveSession
from .orphans import LinkPolicy
from .quotas import DEFAULT_QUOTAS, Quotas
from .rates import FrameRate
from .shaped import Unshaped, shaped
from .verifier import Verifier

SERVICE = pb.DESCRIPTOR.services_by_name["DraftingService"].full_name
_CHUNK_BYTES = 1 << 18
_OPEN_TIMEOUT_S = 10.0

_log = logging.getLogger(__name__)


def identified(_: Context) -> str:
    """Who calls, as the guard found; everybody is one on a plain loopback connection."""
    return caller()


class DraftingServicer(drafting_pb2_grpc.DraftingServiceServicer):
    """Serves one verifier; shaped streams only if `shape` says how they look."""

    def __init__(
        self,
        verifier: Verifier,
        quotas: Quotas = DEFAULT_QUOTAS,
        *,
        shape: TrafficShape | None = None,
        slow_reader_s: float = LinkPolicy.slow_reader_s,
        identify: Identify = identified,
    ) -> None:
        """`slow_reader_s`: a client whose call takes no frame for twice as long is given up, even when its session has
        ended (while it runs, the loop finds out first). `identify` says who calls."""
        self._verifier = verifier
        self._shape = shape
        self._quotas = quotas
        self._unread_s = 2 * slow_reader_s
        self._identify = identify

    async def Describe(self, request: pb.DescribeRequest, context: Context) -> pb.DescribeResponse:  # noqa: ARG002, N802
        """Say what is served."""
        return wire.encode_description(replace(self._verifier.describe(), traffic_shape=self._shape))

    async def FetchTokenizer(  # noqa: N802
        self, request: pb.FetchTokenizerRequest, context: Context
    ) -> AsyncIterator[pb.FetchTokenizerResponse]:
        """Stream the tokenizer bundle; NOT_FOUND when another one is asked for."""
        bundle = self._verifier.spec.bundle
        if request.tokenizer_digest != bundle.digest:
            await abort(
                context,
                NotFound("this hub serves another tokenizer", hint="ask the hub to describe itself again"),
            )
        for start in range(0, len(bundle.data), _CHUNK_BYTES):
            chunk = bundle.data[start : start + _CHUNK_BYTES]
            yield pb.FetchTokenizerResponse(chunk=chunk, total_bytes=len(bundle.data))

    async def Decode(  # type: ignore[override]  # noqa: N802
        self, request_iterator: AsyncIterator[bytes], context: Context
    ) -> None:
        """Run one session; see the contract. Messages come as bytes: their size is seen before they are read."""
        if self._shape and self._shape.required:
            await abort(context, Incompatible("this hub takes shaped streams only", hint="allow the node to shape"))
        responses = self._responses(request_iterator, context, _OPEN_TIMEOUT_S)
        try:
            await self._write(responses, context)
        except BaruError as error:
            await abort(context, error)

    async def DecodeShaped(  # type: ignore[override]  # noqa: N802
        self, request_iterator: AsyncIterator[pb.Cell], context: Context
    ) -> None:
        """Run one session within cells; see the contract."""
        if not (shape := self._shape):
            return await abort(
                context, Incompatible("this hub shapes no traffic", hint="start it with --traffic-shape")
            )
        unshaped = Unshaped(self._paced(cell.data async for cell in request_iterator), shape)
        messages = self._messages(unshaped, shape, context)
        try:
            await self._write((pb.Cell(data=data) async for data in shaped(messages, shape)), context)
        finally:
            await messages.aclose()
            unshaped.close()

    async def _write(self, answers: AsyncGenerator[Any, None], context: Context) -> None:
        """Write to the last, unless the node reads no more: it goes on to have a call until it does, or leaves."""
        async with aclosing(answers):
            try:
                async for answer in answers:
                    await within(context.write(answer), self._unread_s)
            except asyncio.TimeoutError:
                await answers.aclose()
                with suppress(grpc.aio.BaseError):  # it left
                    await abort(context, _UNREAD)

    async def _messages(self, unshaped: Unshaped, shape: TrafficShape, context: Context) -> AsyncGenerator[bytes, None]:
        open_s = _OPEN_TIMEOUT_S + MAX_MESSAGE_BYTES / shape.cell_bytes * shape.tick_ms / 1000
        try:
            async with aclosing(self._responses(unshaped.messages(), context, open_s)) as responses:
                async for response in responses:
                    yield response.SerializeToString()
        finally:
            unshaped.ignore()

    async def _paced(self, cells: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
        """Cells, no faster than frames may come."""
        rate, clock = FrameRate(self._quotas), asyncio.get_running_loop().time
        async for cell in cells:
            wait_s = rate.admit(len(cell), clock())
            yield cell
            if wait_s:
                await asyncio.sleep(wait_s)

    async def _responses(
        self, requests: AsyncIterator[bytes], context: Context, open_timeout_s: float
    ) -> AsyncGenerator[pb.DecodeResponse, None]:
        """Serve one session; raises the BaruError that ends it."""
        identity, trace = self._identify(context), _trace(context)
        live = await self._verifier.open(await self._first_frame(requests, open_timeout_s), identity, trace)
        hold(live.state.session_id)
        reader = asyncio.create_task(self._read(requests, live))
        try:
            async for frame in live.frames():
                yield wire.encode_response(frame)
        finally:
            reader.cancel()  # before the call is aborted, or reading from it fails with an error of its own
            live.lose()  # it has ended, or the link broke

    async def _first_frame(self, requests: AsyncIterator[bytes], timeout_s: float) -> Open:
        try:
            data = await within(anext(requests), timeout_s)
        except (asyncio.TimeoutError, StopAsyncIteration):
            raise InvalidRequest(f"no Open came within {timeout_s:.0f} s") from None
        frame = _decoded(data, self._verifier.spec.context_limit)
        if not isinstance(frame, Open):
            raise InvalidRequest(f"the first frame is {type(frame).__name__}, must be Open")
        return frame

    async def _read(self, requests: AsyncIterator[bytes], live: LiveSession) -> None:
        """Hand the node's frames to its session until the stream ends; what is wrong with them ends it."""
        rate, clock = FrameRate(self._quotas), asyncio.get_running_loop().time
        try:
            async for data in requests:
                wait_s = rate.admit(len(data), clock())
                _handle(_decoded(data, self._quotas.max_draft_ahead), live)
                if wait_s:  # not read meanwhile: the node's own sending side fills up
                    await asyncio.sleep(wait_s)
            live.said_all()
        except BaruError as error:
            live.fail(error)
        except Exception:  # nothing that a node sends may go unanswered
            _log.exception("reading a session failed", extra={"session_id": live.state.session_id})
            live.fail(EngineFailure("the hub failed to read a frame"))


_UNREAD = HubTimeout(
    "the node leaves its frames unread, so the hub takes it for gone", hint="resume, and read them as they come"
)


def _trace(context: Context) -> TraceContext | None:
    found = (value for key, value in context.invocation_metadata() or () if key == TRACEPARENT)
    header = next(found, "")
    return TraceContext.parse(header) if isinstance(header, str) else None


def _decoded(data: bytes, max_ids: int) -> NodeFrame:
    try:
        return wire.decode_request(pb.DecodeRequest.FromString(data), max_ids)
    except DecodeError as error:
        raise InvalidRequest(f"the frame is not a DecodeRequest: {error}") from None


def _handle(frame: NodeFrame, live: LiveSession) -> None:
    if isinstance(frame, Draft):
        live.draft(frame)
    elif isinstance(frame, Heartbeat):
        live.heartbeat(frame)
    elif isinstance(frame, Cancel):
        live.finish(FinishReason.CANCELLED)
    else:
        raise InvalidRequest("a second Open came on one stream", hint="use one stream a session")


def add_to(server: grpc.aio.Server, servicer: DraftingServicer) -> None:
    """Serve it. Unlike the generated function, this leaves the messages of Decode as bytes."""
    drafting_pb2_grpc.add_DraftingServiceServicer_to_server(servicer, server)
    decode: Any = grpc.stream_stream_rpc_method_handler(
        servicer.Decode, response_serializer=pb.DecodeResponse.SerializeToString
    )
    server.add_registered_method_handlers(SERVICE, {"Decode": decode})

"""The node's end of the gRPC connection: frames out, frames in, errors as our own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baru.drafting.v1 import drafting_pb2 as pb
from baru.drafting.v1 import drafting_pb2_grpc
from baru_common import wire
from baru_common.channel_options import CLIENT_OPTIONS
from baru_common.errors import BaruError, HubTimeout, HubUnavailable, ProtocolViolation
from baru_common.frames import Cancel, HubDescription, HubFrame, NodeFrame
from baru_common.tokens import TokenizerBundle
from baru_common.trace_context import TRACEPARENT, TraceContext

from .link import Link, LinkEvent

MAX_BUNDLE_BYTES = 64 << 20
_MAX_QUEUED = 256
"""Frames that wait for the link; a node drafts no further than the hub asked, so more means that it is stuck."""
_FAREWELL_S = 0.3
"""Time for the hub to take leave of a session that is given up."""


def description_to_bytes(hub: HubDescription) -> bytes:
    """Return what a hub said of itself as it can be kept."""
    return wire.encode_description(hub).SerializeToString()


def description_from_bytes(data: bytes) -> HubDescription:
    """Return what was kept; ProtocolViolation when it is damaged."""
    try:
        hub = wire.decode_description(pb.DescribeResponse.FromString(data))
    except DecodeError as error:
        raise ProtocolViolation(f"this is no description of a hub: {error}") from error
    if not hub.vocabulary_size:
        raise ProtocolViolation("this is no description of a hub")
    return hub


class HubChannel:
    """One connection to one hub, shared by all sessions of the node. Close it."""

    def __init__(self, address: str, *, timeout_s: float, link: Link | None = None) -> None:
        self.address = address
        self.link = link or Link()
        self.streams: set[HubStream] = set()
        """Those that are open."""
        self._timeout_s = timeout_s
        self._connect()

    def _connect(self) -> None:
        self._channel = grpc.aio.insecure_channel(self.address, options=CLIENT_OPTIONS)
        self.stub = drafting_pb2_grpc.DraftingServiceStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)

    async def close(self) -> None:
        """End every session and the connection."""
        await asyncio.gather(*(stream.leave() for stream in list(self.streams)))
        await self._channel.close()

    async def renew(self, silent: grpc.aio.Channel) -> None:
        """Give up a connection that went silent, unless that was done: what it sends again comes late, long after the
        link is back (TCP backs off)."""
        if self._channel is silent:
            self._connect()
            await silent.close()

    async def ready(self, timeout_s: float) -> None:
        """Wait until the connection is there; HubUnavailable when it is not in time."""
        connection = self._channel
        try:
            await asyncio.wait_for(connection.channel_ready(), timeout_s)
        except asyncio.TimeoutError:
            self.link.happen(LinkEvent.BROKE)
            raise HubUnavailable(f"no hub answers at {self.address}", hint="check that it runs, and the link") from None

    async def describe(self) -> HubDescription:
        """Ask the hub what it serves; HubUnavailable or HubTimeout when nobody answers."""
        try:
            answer = await self.stub.Describe(pb.DescribeRequest(), timeout=self._timeout_s)
        except grpc.aio.AioRpcError as error:
            raise self.explain(error) from error
        self.link.happen(LinkEvent.HEARD)
        return wire.decode_description(answer)

    async def health(self) -> str:
        """Return the hub's health status by name, e.g. "SERVING"."""
        try:
            answer = await self._health.Check(health_pb2.HealthCheckRequest(), timeout=self._timeout_s)
        except grpc.aio.AioRpcError as error:
            raise self.explain(error) from error
        self.link.happen(LinkEvent.HEARD)
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))

    async def fetch_tokenizer(self, digest: bytes) -> TokenizerBundle:
        """Fetch the tokenizer bundle with this digest; NotFound, TokenizerMismatch or ProtocolViolation."""
        call = self.stub.FetchTokenizer(pb.FetchTokenizerRequest(tokenizer_digest=digest), timeout=60)
        data = bytearray()
        try:
            async for piece in call:
                if piece.total_bytes > MAX_BUNDLE_BYTES or len(data) + len(piece.chunk) > piece.total_bytes:
                    raise ProtocolViolation(f"the hub's tokenizer is too large ({piece.total_bytes} bytes)")
                data += piece.chunk
        except grpc.aio.AioRpcError as error:
            raise self.explain(error) from error
        finally:
            call.cancel()
        return TokenizerBundle.from_bytes(bytes(data), digest)

    def open_stream(self, trace: TraceContext | None = None) -> HubStream:
        """Start the stream of one session, which serves the request of `trace`."""
        return HubStream(self, self._channel, trace)

    def explain(self, error: grpc.aio.AioRpcError) -> BaruError:
        """Return the error that a call's failure stands for, and let the link know of it."""
        ours = wire.from_rpc_error(error)
        if type(ours) in (HubUnavailable, BaruError) and not ours.hint:
            self.link.happen(LinkEvent.BROKE)
            return HubUnavailable(
                f"no hub answers at {self.address}: {ours.message}",
                hint="check the address, and that `baru-hub serve` runs there",
            )
        return ours


class HubStream:
    """One session's stream. `close` or `leave` it: an abandoned call would live on."""

    def __init__(self, channel: HubChannel, connection: grpc.aio.Channel, trace: TraceContext | None) -> None:
        self.channel = channel
        self._connection = connection
        self._outgoing: asyncio.Queue[pb.DecodeRequest | None] = asyncio.Queue()
        self._incoming: asyncio.Queue[HubFrame | BaruError | None] = asyncio.Queue(_MAX_QUEUED)
        self._call = channel.stub.Decode(self._requests(), metadata=((TRACEPARENT, trace.header),) if trace else None)
        # A task of its own reads: gRPC gives up a call whose reader is cancelled, and the hub would not be told why.
        self._reader = asyncio.create_task(self._read())
        channel.streams.add(self)

    def send(self, frame: NodeFrame) -> None:
        """Queue a frame; it leaves at once when the link is up. The stream is given up when too many wait."""
        if self._outgoing.qsize() >= _MAX_QUEUED:
            self.abort(HubTimeout("the link takes no more frames"))
            return
        self._outgoing.put_nowait(wire.encode_request(frame))

    async def frames(self) -> AsyncIterator[HubFrame]:
        """Yield the hub's frames until it ends the stream; raise its error if it ends with one."""
        while (item := await self._incoming.get()) is not None:
            if isinstance(item, BaruError):
                raise item
            yield item

    def abort(self, error: BaruError) -> None:
        """Give the stream up: `frames` raises `error`, whatever else came."""
        while not self._incoming.empty():
            self._incoming.get_nowait()
        self._incoming.put_nowait(error)
        self.close()

    async def renew(self) -> None:
        """Give up the connection, too."""
        await self.channel.renew(self._connection)

    def close(self) -> None:
        """End the stream, whatever state it is in."""
        self._call.cancel()
        self._reader.cancel()
        self._outgoing.put_nowait(None)  # gRPC cancels the sender of a running call only, not of one that has failed
        self.channel.streams.discard(self)

    async def leave(self) -> None:
        """End the session and the stream: a hub that is not told would keep the session for a while."""
        if self in self.channel.streams and not self._call.done():
            self.send(Cancel())
            self._outgoing.put_nowait(None)
            await asyncio.wait([asyncio.ensure_future(self._call.code())], timeout=_FAREWELL_S)
        self.close()

    async def _read(self) -> None:
        end: BaruError | None = None
        try:
            async for message in self._call:
                self.channel.link.happen(LinkEvent.HEARD)
                await self._incoming.put(wire.decode_response(message))
        except grpc.aio.AioRpcError as error:
            end = self.channel.explain(error)
        except BaruError as error:
            end = error
        await self._incoming.put(end)

    async def _requests(self) -> AsyncIterator[pb.DecodeRequest]:
        while (message := await self._outgoing.get()) is not None:
            yield message

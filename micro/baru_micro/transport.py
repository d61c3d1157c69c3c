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
from baru_common.errors import BaruError, HubTimeout, HubUnavailable, Incompatible, ProtocolViolation
from baru_common.frames import Cancel, HubDescription, HubFrame, NodeFrame, TrafficShape
from baru_common.handshake import explain_handshake
from baru_common.tls import MEMBERS, TlsFiles, channel_credentials
from baru_common.tokens import TokenizerBundle
from baru_common.trace_context import TraceContext
from baru_common.waiting import within

from .calls import Call, PlainCall, ShapedCall
from .fit import Shaping, agreed_shape
from .link import Link, LinkEvent

MAX_BUNDLE_BYTES = 64 << 20
_MAX_QUEUED = 256
"""Frames that wait for the link; a node drafts no further than the hub asked, so more means that it is stuck."""
_RETIRED_S = 86400.0
"""Longest time that sessions go on over a connection whose certificate was replaced."""
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

    def __init__(
        self,
        address: str,
        *,
        timeout_s: float,
        link: Link | None = None,
        tls: TlsFiles | None = None,
        shaping: Shaping = Shaping.AUTO,
    ) -> None:
        """`tls`: what to connect with, taken anew when it changes on disk; None: plainly. ConfigError: it is wrong."""
        self.address = address
        self.link = link or Link()
        self._shaping = shaping
        self._described: HubDescription | None = None
        self.streams: set[HubStream] = set()
        """Those that are open."""
        self._timeout_s = timeout_s
        self._tls = tls.watched(*MEMBERS) if tls else None
        self._retiring: set[asyncio.Task[None]] = set()
        self._connect()

    def _connect(self) -> None:
        if self._tls:
            own = self._tls.value
            options = (*CLIENT_OPTIONS, ("grpc.ssl_target_name_override", own.hub_host))
            self._channel = grpc.aio.secure_channel(self.address, channel_credentials(own), options=options)
        else:
            self._channel = grpc.aio.insecure_channel(self.address, options=CLIENT_OPTIONS)
        self.stub = drafting_pb2_grpc.DraftingServiceStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)

    async def close(self) -> None:
        """End every session and the connection."""
        await asyncio.gather(*(stream.leave() for stream in list(self.streams)))
        await asyncio.gather(*(stream.ended() for stream in list(self.streams)))
        await asyncio.gather(self._channel.close(), *self._retiring)

    def refresh(self) -> None:
        """Take up certificates that have changed on disk: a channel keeps those that it began with. What runs on the
        old connection ends there."""
        if self._tls and self._tls.refresh():
            retiring = asyncio.create_task(self._channel.close(grace=_RETIRED_S))
            self._retiring.add(retiring)
            retiring.add_done_callback(self._retiring.discard)
            self._connect()

    def is_current(self, connection: grpc.aio.Channel) -> bool:
        """Whether it has the certificates that are on disk now."""
        self.refresh()
        return self._channel is connection

    async def renew(self, silent: grpc.aio.Channel) -> None:
        """Give up a connection that went silent, unless that was done: what it sends again comes late, long after the
        link is back (TCP backs off)."""
        if self._channel is silent:
            self._connect()
            await silent.close()

    async def ready(self, timeout_s: float) -> None:
        """Wait until the connection is there; HubUnavailable when it is not in time."""
        self.refresh()
        connection = self._channel
        try:
            await within(connection.channel_ready(), timeout_s)
        except asyncio.TimeoutError:
            self.link.happen(LinkEvent.BROKE)
            why = await explain_handshake(self.address, self._tls.value) if self._tls else None
            raise (
                why or HubUnavailable(f"no hub answers at {self.address}", hint="check that it runs, and the link")
            ) from None

    async def describe(self) -> HubDescription:
        """Ask the hub what it serves; HubUnavailable or HubTimeout when nobody answers, Unauthenticated or ClockError
        when one side does not trust the other."""
        self.refresh()
        try:
            answer = await self.stub.Describe(pb.DescribeRequest(), timeout=self._timeout_s)
        except grpc.aio.AioRpcError as error:
            raise await self.explained(self.explain(error)) from error
        self.link.happen(LinkEvent.HEARD)
        self._described = wire.decode_description(answer)
        return self._described

    async def shape(self) -> TrafficShape | None:
        """Return how streams to this hub are to look; Incompatible when hub and node do not agree."""
        hub = self._described or await self.describe()
        return agreed_shape(self._shaping, hub.traffic_shape)

    async def health(self) -> str:
        """Return the hub's health status by name, e.g. "SERVING"."""
        self.refresh()
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

    def open_stream(self, shape: TrafficShape | None = None, trace: TraceContext | None = None) -> HubStream:
        """Start the stream of one session, which serves the request of `trace`."""
        self.refresh()
        return HubStream(self, self._channel, shape, trace)

    def explain(self, error: grpc.aio.AioRpcError) -> BaruError:
        """Return the error that a call's failure stands for, and let the link know of it."""
        ours = wire.from_rpc_error(error)
        if isinstance(ours, Incompatible):
            self._described = None  # it may be another hub than it was
        if type(ours) in (HubUnavailable, BaruError) and not ours.hint:
            self.link.happen(LinkEvent.BROKE)
            return HubUnavailable(
                f"no hub answers at {self.address}: {ours.message}",
                hint="check the address, and that `baru-hub serve` runs there",
            )
        return ours

    async def explained(self, error: BaruError) -> BaruError:
        """Return the reason why a connection did not come about, if it is one of trust; else the error as it is."""
        if type(error) is not HubUnavailable:
            return error
        return await explain_handshake(self.address, self._tls.value if self._tls else None) or error


class HubStream:
    """One session's stream. `close` or `leave` it: an abandoned call would live on."""

    def __init__(
        self,
        channel: HubChannel,
        connection: grpc.aio.Channel,
        shape: TrafficShape | None,
        trace: TraceContext | None,
    ) -> None:
        self.channel = channel
        self._connection = connection
        self._incoming: asyncio.Queue[HubFrame | BaruError | None] = asyncio.Queue(_MAX_QUEUED)
        self._wanted = True
        self._heard_s = channel.link.clock()
        self._call: Call = (
            ShapedCall(channel.stub, shape, self._hear, trace) if shape else PlainCall(channel.stub, self._hear, trace)
        )
        # A task of its own reads: gRPC gives up a call whose reader is cancelled, and the hub would not be told why.
        self._reader = asyncio.create_task(self._read())
        channel.streams.add(self)

    def send(self, frame: NodeFrame) -> None:
        """Queue a frame; it leaves when the link is up. The stream is given up when too many wait."""
        if self._call.num_queued >= _MAX_QUEUED:
            self.abort(HubTimeout("the link takes no more frames"))
            return
        self._call.put(wire.encode_request(frame))

    @property
    def backlog_s(self) -> float:
        """Time that the frames which wait take to leave, on a link that carries them; 0 when that is no time."""
        return self._call.backlog_s

    @property
    def silence_s(self) -> float:
        """Time since anything came, be it a part of a frame."""
        return self.channel.link.clock() - self._heard_s

    async def frames(self) -> AsyncIterator[HubFrame]:
        """Yield the hub's frames until it ends the stream; raise its error if it ends with one."""
        while (item := await self._incoming.get()) is not None:
            if isinstance(item, BaruError):
                raise item
            yield item

    def abort(self, error: BaruError) -> None:
        """Give the stream up: `frames` raises `error`, whatever else came."""
        self._forget_frames()
        self._incoming.put_nowait(error)
        self._cut()

    @property
    def is_outdated(self) -> bool:
        """There are newer certificates than those of its connection."""
        return not self.channel.is_current(self._connection)

    async def renew(self) -> None:
        """Give up the connection, too."""
        await self.channel.renew(self._connection)

    def close(self) -> None:
        """Be done with the stream, whatever state it is in. A shaped one ends later, in the background."""
        if not self._call.lingers:
            self._cut()
            return
        self._call.put(wire.encode_request(Cancel()))
        self._call.end()
        self._wanted = False
        self._forget_frames()

    async def leave(self) -> None:
        """End the session and the stream: a hub that is not told would keep the session for a while."""
        try:
            if self in self.channel.streams and not self._call.is_over:
                self.send(Cancel())
                self._call.end()
                await self._call.wait(_FAREWELL_S)
        finally:
            self.close()

    async def ended(self) -> None:
        """Wait until a stream that is done with has ended."""
        await asyncio.wait([self._reader])

    def _cut(self) -> None:
        self._call.cut()
        self._reader.cancel()
        self.channel.streams.discard(self)

    def _forget_frames(self) -> None:
        while not self._incoming.empty():
            self._incoming.get_nowait()

    def _hear(self) -> None:
        self._heard_s = self.channel.link.clock()
        self.channel.link.happen(LinkEvent.HEARD)

    async def _read(self) -> None:
        end: BaruError | None = None
        heard = False
        try:
            async for message in self._call.messages():
                heard = True
                await self._pass_on(wire.decode_response(message))
        except grpc.aio.AioRpcError as error:
            end = self.channel.explain(error)
            if not heard:
                end = await self.channel.explained(end)
        except BaruError as error:
            end = error
        await self._pass_on(end)
        try:
            await self._call.linger()
        finally:
            if not self._wanted:
                self.channel.streams.discard(self)

    async def _pass_on(self, item: HubFrame | BaruError | None) -> None:
        if self._wanted:
            await self._incoming.put(item)

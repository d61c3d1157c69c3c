"""The node's end of the gRPC connection: frames out, frames in, errors as our own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baru.drafting.v1 import drafting_pb2 as pb
from baru.drafting.v1 import drafting_pb2_grpc
from baru_common import wire
from baru_common.channel_options import CLIENT_OPTIONS
from baru_common.errors import BaruError, HubUnavailable, ProtocolViolation
from baru_common.frames import HubDescription, HubFrame, NodeFrame
from baru_common.tokens import TokenizerBundle

MAX_BUNDLE_BYTES = 64 << 20


class HubChannel:
    """One channel to one hub, shared by all sessions of the node. Close it."""

    def __init__(self, address: str, *, timeout_s: float) -> None:
        self.address = address
        self._timeout_s = timeout_s
        self._channel = grpc.aio.insecure_channel(address, options=CLIENT_OPTIONS)
        self._stub = drafting_pb2_grpc.DraftingServiceStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)

    async def close(self) -> None:
        """End every call and the connection."""
        await self._channel.close()

    async def describe(self) -> HubDescription:
        """Ask the hub what it serves; HubUnavailable or HubTimeout when nobody answers."""
        try:
            return wire.decode_description(await self._stub.Describe(pb.DescribeRequest(), timeout=self._timeout_s))
        except grpc.aio.AioRpcError as error:
            raise self._explain(error) from error

    async def health(self) -> str:
        """Return the hub's health status by name, e.g. "SERVING"."""
        try:
            answer = await self._health.Check(health_pb2.HealthCheckRequest(), timeout=self._timeout_s)
        except grpc.aio.AioRpcError as error:
            raise self._explain(error) from error
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))

    async def fetch_tokenizer(self, digest: bytes) -> TokenizerBundle:
        """Fetch the tokenizer bundle with this digest; NotFound, TokenizerMismatch or ProtocolViolation."""
        call = self._stub.FetchTokenizer(pb.FetchTokenizerRequest(tokenizer_digest=digest), timeout=60)
        data = bytearray()
        try:
            async for piece in call:
                if piece.total_bytes > MAX_BUNDLE_BYTES or len(data) + len(piece.chunk) > piece.total_bytes:
                    raise ProtocolViolation(f"the hub's tokenizer is too large ({piece.total_bytes} bytes)")
                data += piece.chunk
        except grpc.aio.AioRpcError as error:
            raise self._explain(error) from error
        finally:
            call.cancel()
        return TokenizerBundle.from_bytes(bytes(data), digest)

    def open_stream(self) -> HubStream:
        """Start the stream of one session."""
        return HubStream(self)

    def _explain(self, error: grpc.aio.AioRpcError) -> Exception:
        ours = wire.from_rpc_error(error)
        if type(ours) in (HubUnavailable, BaruError) and not ours.hint:
            return HubUnavailable(
                f"no hub answers at {self.address}: {ours.message}",
                hint="check the address, and that `baru-hub serve` runs there",
            )
        return ours


class HubStream:
    """One session's stream. `close` it: an abandoned call would live on."""

    def __init__(self, channel: HubChannel) -> None:
        self._channel = channel
        self._outgoing: asyncio.Queue[pb.DecodeRequest | None] = asyncio.Queue()
        self._call = channel._stub.Decode(self._requests())  # noqa: SLF001

    def send(self, frame: NodeFrame) -> None:
        """Queue a frame; it leaves at once when the link is up."""
        self._outgoing.put_nowait(wire.encode_request(frame))

    async def frames(self) -> AsyncIterator[HubFrame]:
        """Yield the hub's frames until it ends the stream; raise its error if it ends with one."""
        try:
            async for message in self._call:
                yield wire.decode_response(message)
        except grpc.aio.AioRpcError as error:
            raise self._channel._explain(error) from error  # noqa: SLF001

    def close(self) -> None:
        """End the stream, whatever state it is in."""
        self._call.cancel()
        self._outgoing.put_nowait(None)  # gRPC cancels the sender of a running call only, not of one that has failed

    async def _requests(self) -> AsyncIterator[pb.DecodeRequest]:
        while (message := await self._outgoing.get()) is not None:
            yield message

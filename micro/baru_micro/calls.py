"""How the messages of one stream go over a gRPC call: as they are, or within cells of one size and pace."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Protocol

import grpc
from google.protobuf.message import DecodeError

from baru.drafting.v1 import drafting_pb2 as pb
from baru.drafting.v1 import drafting_pb2_grpc
from baru_common import wire
from baru_common.cells import CellReader, CellWriter
from baru_common.channel_options import MAX_MESSAGE_BYTES
from baru_common.errors import ProtocolViolation
from baru_common.frames import TrafficShape
from baru_common.shaping import last_tick, ticks
from baru_common.trace_context import TRACEPARENT, TraceContext
from baru_common.waiting import within

_SILENCE_S = 1.0
"""A shaped call whose cells stay away for so long is cut."""


class Call(Protocol):
    """One call."""

    @property
    def lingers(self) -> bool:
        """It is to go on after the last message, or somebody on the way would see when that was."""

    def put(self, message: pb.DecodeRequest) -> None:
        """Queue a message; it leaves when it can."""

    def end(self) -> None:
        """Queue the last word: nothing follows."""

    @property
    def num_queued(self) -> int:
        """Messages that have not left."""

    @property
    def backlog_s(self) -> float:
        """Time that what is queued takes to leave, on a link that carries it."""

    @property
    def is_over(self) -> bool:
        """No message comes any more."""

    def messages(self) -> AsyncIterator[pb.DecodeResponse]:
        """Yield what comes; raise what the call ends with."""

    async def wait(self, timeout_s: float) -> None:
        """Wait until the hub has ended the call."""

    async def linger(self) -> None:
        """Let the call go on, after the last message, to where it may end."""

    def cut(self) -> None:
        """End the call at once, whatever state it is in."""


def _metadata(trace: TraceContext | None) -> tuple[tuple[str, str], ...] | None:
    """Which request the call serves, for the hub to know."""
    return ((TRACEPARENT, trace.header),) if trace else None


class PlainCall:
    """Each message is one of gRPC's."""

    def __init__(
        self,
        stub: drafting_pb2_grpc.DraftingServiceAsyncStub,
        heard: Callable[[], None],
        trace: TraceContext | None = None,
    ) -> None:
        self._heard = heard
        self._outgoing: asyncio.Queue[pb.DecodeRequest | None] = asyncio.Queue()
        self._call = stub.Decode(self._requests(), metadata=_metadata(trace))

    def put(self, message: pb.DecodeRequest) -> None:
        self._outgoing.put_nowait(message)

    def end(self) -> None:
        self._outgoing.put_nowait(None)

    @property
    def lingers(self) -> bool:
        return False

    @property
    def backlog_s(self) -> float:
        return 0.0

    @property
    def num_queued(self) -> int:
        return self._outgoing.qsize()

    @property
    def is_over(self) -> bool:
        return self._call.done()

    async def messages(self) -> AsyncIterator[pb.DecodeResponse]:
        async for message in self._call:
            self._heard()
            yield message

    async def wait(self, timeout_s: float) -> None:
        await asyncio.wait([asyncio.ensure_future(self._call.code())], timeout=timeout_s)

    async def linger(self) -> None:
        """There is nothing to hide."""

    def cut(self) -> None:
        self._call.cancel()
        self.end()  # gRPC cancels the sender of a running call only, not of one that has failed

    async def _requests(self) -> AsyncIterator[pb.DecodeRequest]:
        while (message := await self._outgoing.get()) is not None:
            yield message


class ShapedCall:
    """Messages share cells, or take several; one leaves every tick, and one comes, to the end of a round."""

    def __init__(
        self,
        stub: drafting_pb2_grpc.DraftingServiceAsyncStub,
        shape: TrafficShape,
        heard: Callable[[], None],
        trace: TraceContext | None = None,
    ) -> None:
        self._heard = heard
        self._shape = shape
        self._writer = CellWriter(shape.cell_bytes)
        self._reader = CellReader(shape.cell_bytes, MAX_MESSAGE_BYTES, ProtocolViolation)
        self._tick = 0
        self._cut = self._all_read = False
        self._call = stub.DecodeShaped(self._requests(), metadata=_metadata(trace))
        self._cells = self._call.__aiter__()

    @property
    def lingers(self) -> bool:
        return not self._cut and not self._call.done()

    def put(self, message: pb.DecodeRequest) -> None:
        if not self._writer.ended:
            self._writer.put(message.SerializeToString())

    def end(self) -> None:
        if not self._writer.ended:
            self._writer.end()

    @property
    def num_queued(self) -> int:
        return self._writer.num_queued

    @property
    def backlog_s(self) -> float:
        return self._writer.num_cells * self._shape.tick_ms / 1000

    @property
    def is_over(self) -> bool:
        return self._all_read or self._call.done()

    async def messages(self) -> AsyncIterator[pb.DecodeResponse]:
        try:
            async for cell in self._cells:
                self._heard()
                for message in self._reader.take(cell.data):
                    yield pb.DecodeResponse.FromString(message)
                if self._reader.last_word is not None:
                    break
        except DecodeError as error:
            raise ProtocolViolation(f"the hub sent what is no DecodeResponse: {error}") from None
        finally:
            self._all_read = True
        if self._reader.last_word:
            raise wire.decode_error(self._reader.last_word)

    async def wait(self, timeout_s: float) -> None:
        """The hub is told in good time: the call goes on."""

    async def linger(self) -> None:
        end_s = last_tick(self._shape, self._tick) * self._shape.tick_ms / 1000
        with suppress(asyncio.TimeoutError):
            await within(self._drain(), 2 * end_s)  # the hub says when; its clock may be a little ahead
        self.cut()

    async def _drain(self) -> None:
        with suppress(asyncio.TimeoutError, grpc.aio.AioRpcError, StopAsyncIteration):
            while True:
                await within(anext(self._cells), _SILENCE_S + self._shape.tick_ms / 1000)

    def cut(self) -> None:
        self._cut = True
        self._call.cancel()

    async def _requests(self) -> AsyncIterator[pb.Cell]:
        async for tick in ticks(self._shape.tick_ms / 1000):
            self._tick = tick
            if self._cut or self._call.done():  # gRPC cancels the sender of a running call only
                return
            yield pb.Cell(data=self._writer.next_cell())

"""A stream of messages as one of cells, at the hub: whatever is said, and whenever, it looks the same from outside."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator

from baru_common import wire
from baru_common.cells import CellReader, CellWriter
from baru_common.channel_options import MAX_MESSAGE_BYTES
from baru_common.errors import BaruError, EngineFailure, InvalidRequest
from baru_common.frames import TrafficShape
from baru_common.shaping import last_tick, ticks

_MAX_QUEUED = 16
"""Messages that wait for a cell; more wait where they come from, which knows what to make of a slow reader."""

_log = logging.getLogger(__name__)


async def shaped(messages: AsyncIterator[bytes], shape: TrafficShape) -> AsyncGenerator[bytes, None]:
    """Yield a cell a tick, from now to the end of a round after the last message. An error is a message, too."""
    writer, room = CellWriter(shape.cell_bytes), asyncio.Event()
    filling = asyncio.create_task(_fill(writer, room, messages))
    end: int | None = None
    try:
        async for tick in ticks(shape.tick_ms / 1000):
            if end is None and writer.ended and not writer.num_queued:
                end = last_tick(shape, tick)
            if end is not None and tick >= end:
                return
            yield writer.next_cell()
            room.set()
    finally:
        filling.cancel()
        await asyncio.gather(filling, return_exceptions=True)


async def _fill(writer: CellWriter, room: asyncio.Event, messages: AsyncIterator[bytes]) -> None:
    try:
        async for message in messages:
            writer.put(message)
            while writer.num_queued > _MAX_QUEUED:
                room.clear()
                await room.wait()
        writer.end()
    except BaruError as error:
        writer.end(wire.encode_error(error))
    except Exception:  # the node is told in the cells, as of everything
        _log.exception("a shaped stream failed")
        writer.end(wire.encode_error(EngineFailure("the hub failed")))


class Unshaped:
    """The messages within a node's cells. All cells are read, to the end of the call, whoever listens: cells that
    nobody reads would stop the node's ticks, for anybody to see."""

    def __init__(self, cells: AsyncIterator[bytes], shape: TrafficShape) -> None:
        self._reader = CellReader(shape.cell_bytes, MAX_MESSAGE_BYTES, InvalidRequest)
        self._queue: asyncio.Queue[bytes | BaruError | None] = asyncio.Queue(_MAX_QUEUED)
        self._wanted = True
        self._reading = asyncio.create_task(self._read(cells))

    async def messages(self) -> AsyncIterator[bytes]:
        """Yield the messages to the last; raise what is wrong with a cell."""
        while (item := await self._queue.get()) is not None:
            if isinstance(item, BaruError):
                raise item
            yield item

    def ignore(self) -> None:
        """Nobody listens any more."""
        self._wanted = False
        while not self._queue.empty():
            self._queue.get_nowait()

    def close(self) -> None:
        """The call is over."""
        self._reading.cancel()

    async def _read(self, cells: AsyncIterator[bytes]) -> None:
        try:
            async for cell in cells:
                if not self._wanted:
                    continue
                for message in self._reader.take(cell):
                    await self._pass_on(message)
                if self._reader.last_word is not None:
                    await self._pass_on(None)
                    self._wanted = False
            await self._pass_on(None)
        except BaruError as error:
            await self._pass_on(error)
            self._wanted = False
            async for _ in cells:
                pass

    async def _pass_on(self, item: bytes | BaruError | None) -> None:
        if self._wanted:
            await self._queue.put(item)

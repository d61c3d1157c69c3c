"""A way to a hub that can be cut on purpose, without touching the machine's network."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from baru_common.addresses import split_address

_CHUNK = 1 << 16


class Relay:
    """Carries TCP to a hub. While it is cut nothing passes, in either direction, and nobody is told: as when a cable is
    pulled or a radio goes out of range."""

    def __init__(self, hub: str) -> None:
        self._hub = split_address(hub)
        self._open = asyncio.Event()
        self._open.set()
        self._writers = set[asyncio.StreamWriter]()
        self.address = ""

    @classmethod
    @asynccontextmanager
    async def open(cls, hub: str) -> AsyncIterator[Relay]:
        """Carry what comes to `address` on loopback to the hub at HOST:PORT, for the length of the block."""
        relay = cls(hub)
        server = await asyncio.start_server(relay._connected, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        relay.address = f"{host}:{port}"
        try:
            yield relay
        finally:
            server.close()
            relay.heal()
            for writer in relay._writers:
                writer.transport.abort()
            while relay._writers:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    def cut(self) -> None:
        """Let nothing pass from now on."""
        self._open.clear()

    def heal(self) -> None:
        """Let everything pass again, also what was held back."""
        self._open.set()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers = {writer}
        self._writers |= writers
        with suppress(OSError):  # one side broke off: the other sees the same
            far_reader, far_writer = await asyncio.open_connection(*self._hub)
            writers.add(far_writer)
            self._writers |= writers
            ways = (self._carry(reader, far_writer), self._carry(far_reader, writer))
            _, left = await asyncio.wait(map(asyncio.ensure_future, ways), return_when=asyncio.FIRST_COMPLETED)
            for way in left:
                way.cancel()
        for end in writers:
            end.close()
        self._writers -= writers

    async def _carry(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await source.read(_CHUNK):
                await self._open.wait()
                sink.write(data)
                await sink.drain()

"""The lab that runs everywhere: a TCP proxy that can be made to fail."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace

from .faults import CLEAR, REORDER_S, Conditions, Lab, LabKind, Report, TokenBucket, Traffic
from .processes import End, Processes

SEGMENT_BYTES = 1448
RETRANSMIT_S = 0.2
"""Linux waits at least this long before it sends a lost segment again."""

_QUEUED_SEGMENTS = 32
_SOCKET_BUFFER_BYTES = 16 * 1024
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


@dataclass
class _Way:
    """One direction through the proxy: what all its connections share."""

    choose: random.Random
    conditions: Conditions = CLEAR
    open: asyncio.Event = field(default_factory=asyncio.Event)
    bucket: TokenBucket = field(default_factory=TokenBucket)
    traffic: Traffic = field(default_factory=Traffic)

    def shape(self, conditions: Conditions) -> None:
        self.conditions = conditions
        if conditions.cut:
            self.open.clear()
        else:
            self.open.set()

    def due_s(self) -> float:
        """When a segment read now would arrive, if it did not have to wait for those before it."""
        is_ = self.conditions
        self.traffic.num_frames += 1
        wait_s = is_.delay_s + self.choose.random() * is_.jitter_s
        while self.choose.random() < is_.loss:
            self.traffic.num_lost += 1
            wait_s += RETRANSMIT_S
        if self.choose.random() < is_.reorder:
            wait_s += REORDER_S
        return time.monotonic() + wait_s

    async def let_pass(self, num_bytes: int) -> None:
        """Wait until the link is open and its rate allows for so many bytes."""
        await asyncio.sleep(self.bucket.take(num_bytes, self.conditions.rate_bit_s, time.monotonic()))
        await self.open.wait()


_Queue = asyncio.Queue[tuple[float, bytes | None]]
"""Segments and when they are due; then an empty one (the sender ended) or None (it broke off)."""


async def _read(source: socket.socket, queue: _Queue, way: _Way) -> None:
    """Read segments to the end; a full queue stops the sender through its window."""
    loop = asyncio.get_running_loop()
    try:
        while segment := await loop.sock_recv(source, SEGMENT_BYTES):
            await queue.put((way.due_s(), segment))
        await queue.put((0.0, b""))
    except ConnectionError:
        await queue.put((0.0, None))


async def _write(queue: _Queue, sink: socket.socket, way: _Way) -> None:
    loop = asyncio.get_running_loop()
    while True:
        due_s, segment = await queue.get()
        await asyncio.sleep(due_s - time.monotonic())
        await way.let_pass(len(segment or b""))
        if segment is None:
            raise ConnectionResetError
        if not segment:
            sink.shutdown(socket.SHUT_WR)
            return
        await loop.sock_sendall(sink, segment)
        way.traffic.num_delivered += 1
        way.traffic.num_bytes += len(segment)


async def _drain(source: socket.socket) -> None:
    """Read until the peer ends it, too: a socket closed with bytes unread would send RST."""
    with suppress(ConnectionError):
        while await asyncio.get_running_loop().sock_recv(source, SEGMENT_BYTES):
            pass


class _Connection:
    """One connection through the proxy: two sockets, and in each direction a reader, a queue and a writer."""

    def __init__(self, near: socket.socket, far: socket.socket, up: _Way, down: _Way) -> None:
        self.sockets = (near, far)
        self.ways = ((near, up, far), (far, down, near))
        self.tasks: list[asyncio.Task[None]] = []
        self.finishing = False
        self.ended = asyncio.Event()

    async def run(self) -> None:
        """Carry bytes until both directions have ended or one broke; the other end then sees the same."""
        try:
            for source, way, sink in self.ways:
                queue = _Queue(_QUEUED_SEGMENTS)
                self.tasks.append(asyncio.create_task(_read(source, queue, way)))
                self.tasks.append(asyncio.create_task(_write(queue, sink, way)))
            done, _ = await asyncio.wait(self.tasks, return_when=asyncio.FIRST_EXCEPTION)
            if any(task.exception() for task in done if not task.cancelled()):
                self.reset()
            if self.finishing:
                await self._finish()
        finally:
            for task in self.tasks:
                task.cancel()
            await asyncio.gather(*self.tasks, return_exceptions=True)
            for end in self.sockets:
                end.close()
            self.ended.set()

    def reset(self) -> None:
        """Make closing these sockets send RST, and have them closed."""
        for end in self.sockets:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        self._stop()

    def finish(self) -> None:
        self.finishing = True
        self._stop()

    def _stop(self) -> None:
        for task in self.tasks:
            task.cancel()

    async def _finish(self) -> None:
        for end in self.sockets:
            with suppress(OSError):  # it may have gone by itself
                end.shutdown(socket.SHUT_WR)
        await asyncio.gather(*map(_drain, self.sockets))


def _loopback_socket() -> socket.socket:
    made = socket.socket()
    made.setblocking(False)
    for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        made.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BUFFER_BYTES)
    return made


def _reserved_socket(port: int = 0) -> socket.socket:
    """A bound socket that shares its port with others bound so; none but a listening one is connected to."""
    made = _loopback_socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    made.bind(("127.0.0.1", port))
    return made


def _name(bound: socket.socket) -> str:
    host, port = bound.getsockname()
    return f"{host}:{port}"


def free_address() -> str:
    """HOST:PORT on loopback that nobody listens on."""
    with _reserved_socket() as tried:
        return _name(tried)


class FaultProxy(Lab):
    """Carries TCP connections from `address` to `target`, which may change, go away and come back.

    It sits between two TCP connections, so this is what its faults are worth:

    - Its kernel acknowledges what it takes: a black hole looks to the sender like a stalled peer, not a dead link.
      What came during it is held (then the window closes) and delivered after `heal`, as retransmission would.
      A connection made during it is accepted, and reaches the hub after `heal`.
    - Loss and reordering below TCP cannot be seen from here. Both are modelled by what they do to the stream: a lost
      segment, and all behind it, come `RETRANSMIT_S` later; a reordered one `REORDER_S`.
    - With the hub gone a connection is accepted and then reset; `refuse` gives the refusal a dead port gives.
    """

    kind = LabKind.PROXY

    def __init__(self, target: str | None, seed: int) -> None:
        choose = random.Random(seed)
        self.processes = Processes()
        self._reserved = _reserved_socket()
        self.target = target or free_address()
        self._up, self._down = _Way(choose), _Way(choose)
        self._attempts_s: list[float] = []
        self._connections: set[_Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener: socket.socket | None = None
        self._listening: asyncio.Task[None] | None = None

    @classmethod
    @asynccontextmanager
    async def open(cls, target: str | None = None, seed: int = 0) -> AsyncIterator[FaultProxy]:
        """Listen on a free loopback port; without a target, one is chosen for the hub (`hub_listen`)."""
        proxy = cls(target, seed)
        await proxy.shape()
        try:
            yield proxy
        finally:
            await proxy._close()

    @property
    def hub_listen(self) -> str:
        return self.target

    @property
    def address(self) -> str:
        return _name(self._reserved)

    def tcp_socket(self, end: End) -> socket.socket:
        return _loopback_socket()

    async def shape(self, up: Conditions = CLEAR, down: Conditions = CLEAR) -> None:
        self._up.shape(up)
        self._down.shape(down)
        if self._listener is None:
            self._listener = _reserved_socket(self._reserved.getsockname()[1])
            self._listener.listen(512)
            self._listening = asyncio.create_task(self._listen(self._listener))

    async def refuse(self) -> None:
        """Refuse new connections until the next `shape` or `heal`; open ones stay."""
        if self._listener and self._listening:
            await _cancelled(self._listening)
            self._listener.close()
            self._listener = None

    async def reset(self) -> None:
        for connection in self._connections:
            connection.reset()
        await asyncio.gather(*(connection.ended.wait() for connection in self._connections))

    async def finish(self) -> None:
        for connection in self._connections:
            connection.finish()

    async def report(self) -> Report:
        return Report(replace(self._up.traffic), replace(self._down.traffic), tuple(self._attempts_s))

    async def _listen(self, listener: socket.socket) -> None:
        while True:
            near, _ = await asyncio.get_running_loop().sock_accept(listener)
            self._attempts_s.append(time.monotonic())
            self._accept(near)

    def _accept(self, near: socket.socket) -> None:
        task = asyncio.create_task(self._serve(near))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: near.close())  # a task that is cancelled before it starts closes nothing

    async def _serve(self, near: socket.socket) -> None:
        with near, _loopback_socket() as far:
            await self._up.open.wait()
            await self._down.open.wait()
            try:
                host, port = self.target.split(":")
                await asyncio.get_running_loop().sock_connect(far, (host, int(port)))
            except OSError:
                near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
                return
            connection = _Connection(near, far, self._up, self._down)
            self._connections.add(connection)
            try:
                await connection.run()
            finally:
                self._connections.discard(connection)

    async def _close(self) -> None:
        await self.processes.close()
        await self.refuse()
        await _cancelled(*self._tasks)
        self._reserved.close()


async def _cancelled(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

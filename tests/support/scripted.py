"""Hubs that say what they were told to say: for what a node makes of it, with no network and no hub."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from baru_common.frames import HubFrame, NodeFrame, Open
from baru_common.trace_context import TraceContext
from baru_micro.hubs import Hubs
from baru_micro.link import Link, LinkEvent

Line = HubFrame | BaseException | asyncio.Event
"""Said, raised, or waited for."""


@dataclass
class ScriptedStream:
    """Stands in for one stream of a hub."""

    channel: Any
    script: Sequence[Line]
    sent: list[NodeFrame] = field(default_factory=list)
    closed: bool = False
    backlog_s: float = 0.0
    silence_s: float = math.inf
    _aborted: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def send(self, frame: NodeFrame) -> None:
        self.sent.append(frame)

    def abort(self, error: BaseException) -> None:
        if not self._aborted.done():
            self._aborted.set_exception(error)

    def close(self) -> None:
        self.closed = True
        if not self._aborted.done():
            self._aborted.cancel()
        elif not self._aborted.cancelled():
            self._aborted.exception()

    async def leave(self) -> None:
        self.close()

    async def renew(self) -> None:
        self.channel.num_renewed += 1

    async def frames(self) -> AsyncIterator[HubFrame]:
        for line in self.script or self.channel.answer(self.opened_with):
            await asyncio.sleep(0)
            if isinstance(line, asyncio.Event):
                waiting = asyncio.ensure_future(line.wait())
                either: list[asyncio.Future[Any]] = [waiting, self._aborted]
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                waiting.cancel()
                if self._aborted.done():
                    self._aborted.result()
            elif isinstance(line, BaseException):
                raise line
            else:
                yield line

    @property
    def opened_with(self) -> Open:
        """The frame it was opened with."""
        frame = self.sent[0]
        assert isinstance(frame, Open)
        return frame


@dataclass
class ScriptedChannel:
    """Stands in for the channel to a hub; each stream has the next script."""

    scripts: Sequence[Sequence[Line]]
    address: str = "hub"
    link: Link = field(default_factory=Link)
    streams: list[ScriptedStream] = field(default_factory=list)
    num_streams: int = 0
    num_renewed: int = 0
    answer: Callable[[Open], Sequence[Line]] = lambda _request: ()
    """Makes the script of a stream that has none, from what it was opened with."""
    unready: list[BaseException] = field(default_factory=list)
    """Raised by the first attempts."""

    async def ready(self, timeout_s: float) -> None:
        await asyncio.sleep(0)
        if self.unready:
            raise self.unready.pop(0)

    async def shape(self) -> None:
        return None

    def open_stream(self, shape: None, trace: TraceContext) -> ScriptedStream:
        self.link.happen(LinkEvent.HEARD)
        self.streams.append(ScriptedStream(self, self.scripts[len(self.streams)]))
        return self.streams[-1]


def hubs_of(*channels: ScriptedChannel, **options: Any) -> Hubs:
    anything: Any = channels
    return Hubs(anything, **options)

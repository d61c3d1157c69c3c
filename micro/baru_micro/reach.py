"""Getting a session to a hub, and back to one after the link broke: attempts until one is answered."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Protocol

import tenacity

from baru_common.errors import (
    BaruError,
    CapacityExhausted,
    HubTimeout,
    HubUnavailable,
    ProtocolViolation,
    Unauthenticated,
)
from baru_common.frames import Drain, Heartbeat, HubFrame, Open, Opened
from baru_common.trace_context import TraceContext
from baru_common.waiting import within

from .hubs import Hubs
from .link import LinkEvent, LinkState
from .transport import HubChannel, HubStream

LINK_ERRORS = (HubUnavailable, HubTimeout)
"""What ends a stream, and not its session."""
_ELSEWHERE = (*LINK_ERRORS, CapacityExhausted, Unauthenticated)
"""What another hub, or another attempt, may mend."""
_CONNECT_S = 1.0
"""Time for a connection to come about, of which gRPC makes several attempts."""
_SPREAD_S = 0.8
"""Attempts wait up to so long, at random, each time."""
_ANSWER_S = 10.0
"""Time for a hub to admit a session; a large grammar takes some."""


@dataclass(frozen=True)
class Attached:
    """A stream whose session was admitted."""

    stream: HubStream
    opened: Opened
    frames: AsyncIterator[HubFrame]
    request: Open
    """As it was sent."""


class Caller(Protocol):
    """Whose session it is."""

    def request(self) -> Open:
        """Say where the session stands, now that a hub is to be told."""

    def request_failed(self) -> None:
        """The hub did not answer."""

    @property
    def trace(self) -> TraceContext:
        """Which request the session serves, for the hub to know."""

    def attempt(self, hub: str) -> AbstractContextManager[None]:
        """A hub is asked, for the length of the block."""


@dataclass(frozen=True)
class Reach:
    """Attempts to open one session's stream."""

    hubs: Hubs
    budget_s: float
    """Time for all attempts together; it begins anew with each outage."""

    async def first(self, caller: Caller) -> Attached:
        """Open a session for the first time: each hub is tried once, and once more if its connection had been up: it
        may have been cut while nobody used it. Raises the last one's error."""
        return await self._try_each(self.hubs.in_order(), caller)

    async def again(self, caller: Caller, last: HubChannel | None) -> Attached:
        """Go on with a session, at its hub if possible, until the budget is used up; raises the last error then.

        Attempts are spread over time at random from the first on: many nodes lose a hub at the same moment.
        """
        retrying = tenacity.AsyncRetrying(
            stop=tenacity.stop_after_delay(self.budget_s),
            wait=tenacity.wait_random(0, _SPREAD_S),
            retry=tenacity.retry_if_exception_type(_ELSEWHERE),
            reraise=True,
        )
        await asyncio.sleep(random.uniform(0, _SPREAD_S))  # noqa: S311

        async def attempt() -> Attached:
            return await self._try_each(self.hubs.in_order(stay_with=last), caller, patient=True)

        return await retrying(attempt)

    async def _try_each(self, channels: list[HubChannel], caller: Caller, *, patient: bool = False) -> Attached:
        error: BaruError | None = None
        for channel in channels:
            was_up = channel.link.state is LinkState.UP
            try:
                with caller.attempt(channel.address):
                    if patient:
                        await channel.ready(_CONNECT_S)
                    elif was_up:
                        with suppress(HubUnavailable):
                            return await self._open(channel, caller)
                    return await self._open(channel, caller)
            except _ELSEWHERE as caught:
                error = caught
        raise error or HubUnavailable("no hub is named")

    async def _open(self, channel: HubChannel, caller: Caller) -> Attached:
        channel.link.happen(LinkEvent.ATTEMPT)
        stream = channel.open_stream(await channel.shape(), caller.trace)
        try:
            request = caller.request()
            stream.send(request)
            frames = stream.frames()
            opened = await within(_first(frames), _ANSWER_S + stream.backlog_s)
        except BaseException as error:
            caller.request_failed()
            await stream.leave()  # a hub that admits it all the same shall not keep it for somebody who is gone
            if isinstance(error, asyncio.TimeoutError):
                raise HubTimeout(f"the hub at {channel.address} did not admit the session") from None
            raise
        self.hubs.answered(channel)
        return Attached(stream, opened, frames, request)


async def _first(frames: AsyncIterator[HubFrame]) -> Opened:
    async for frame in frames:
        if isinstance(frame, Opened):
            return frame
        if not isinstance(frame, (Heartbeat, Drain)):
            raise ProtocolViolation(f"the hub sent {type(frame).__name__} out of turn")
    raise ProtocolViolation("the hub ended the stream without a word")

"""Answering one request: its generations side by side, as one answer or as a stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any

from baru_common.errors import BaruError, CapacityExhausted, EngineFailure
from baru_common.sampling import SamplingParams
from baru_micro.client import MicroNode
from baru_micro.decoding import Reconcile
from baru_micro.events import Event, Finish
from baru_micro.standing import Standing

from .answers import Answer, Writer, usage
from .requests import Ask

_MAX_QUEUED = 64
"""Events of one request that wait for its client; then its generations wait, too."""


class Room:
    """How many generations run at a time; others wait for their turn, so many and no more."""

    def __init__(self, max_running: int, max_waiting: int) -> None:
        self._free = asyncio.Semaphore(max_running)
        self._max_waiting = max_waiting
        self.num_waiting = 0

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for a turn, and have it; CapacityExhausted when too many wait."""
        if self._free.locked():
            if self.num_waiting >= self._max_waiting:
                raise CapacityExhausted("the node is busy", retry_after_s=2.0, hint="try again later")
            self.num_waiting += 1
            try:
                await self._free.acquire()
            finally:
                self.num_waiting -= 1
        else:
            await self._free.acquire()
        try:
            yield
        finally:
            self._free.release()


class Serving:
    """The generations of one request. An async context manager: leaving it ends those that run."""

    def __init__(self, node: MicroNode, room: Room, ask: Ask, answer: Answer, writer: Writer) -> None:
        self._node, self._room, self._ask, self._answer, self._writer = node, room, ask, answer, writer
        self._events: asyncio.Queue[tuple[int, Event | BaruError]] = asyncio.Queue(_MAX_QUEUED)
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Serving:
        ask = self._ask
        prompts = [prompt for prompt in ask.prompts for _ in range(ask.num_each)]
        tasks = [
            asyncio.create_task(self._generate(index, prompt, _varied(ask.params, index % ask.num_each)))
            for index, prompt in enumerate(prompts)
        ]
        self._stack.push_async_callback(_end, tasks)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._stack.aclose()

    async def whole(self) -> dict[str, Any]:
        """Return the answer when all of it is there."""
        finishes = {index: event async for index, event in self._all() if isinstance(event, Finish)}
        ordered = [finishes[index] for index in sorted(finishes)]
        choices = [self._writer.whole(index, finish) for index, finish in enumerate(ordered)]
        return self._answer.part(self._writer.whole_kind, choices, usage=self._usage(ordered))

    async def chunks(self, *, include_usage: bool) -> AsyncIterator[dict[str, Any]]:
        """Yield the answer as it comes."""
        standing = [Standing(self._ask.reconcile is Reconcile.KEEP) for _ in range(self._ask.num_choices)]
        finishes: dict[int, Finish] = {}
        begun: set[int] = set()
        more: dict[str, Any] = {"usage": None} if include_usage else {}
        async for index, event in self._all():
            if index not in begun:
                begun.add(index)
                if first := self._writer.first(index):
                    yield self._chunk(first, more)
            pieces = standing[index].take(event)
            text = "".join(piece.text for piece in pieces) + (event.tail if isinstance(event, Finish) else "")
            if text or pieces:
                yield self._chunk(self._writer.delta(index, text, pieces), more)
            if isinstance(event, Finish):
                finishes[index] = event
                for last in self._writer.last(index, event):
                    yield self._chunk(last, more)
        if include_usage:
            ordered = [finishes[index] for index in sorted(finishes)]
            yield self._answer.part(self._writer.chunk_kind, [], usage=self._usage(ordered))

    def _usage(self, finishes: list[Finish]) -> dict[str, Any]:
        return usage(finishes, len(self._ask.prompts), with_receipts=self._ask.with_receipts)

    def _chunk(self, choice: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
        return self._answer.part(self._writer.chunk_kind, [choice], **more)

    async def _all(self) -> AsyncIterator[tuple[int, Event]]:
        """Events of all choices, as they come, until each has finished; the first error ends it."""
        num_running = self._ask.num_choices
        while num_running:
            index, event = await self._events.get()
            if isinstance(event, BaruError):
                raise event
            num_running -= isinstance(event, Finish)
            yield index, event

    async def _generate(self, index: int, prompt: Any, params: SamplingParams) -> None:
        try:
            async with self._room.turn():
                events = self._node.generate(
                    prompt, params, reconcile=self._ask.reconcile, tools=self._ask.tools or None
                )
                async with aclosing(events):
                    async for event in events:
                        await self._events.put((index, event))
        except BaruError as error:
            await self._events.put((index, error))
        except Exception as error:  # the client is told, whatever it was
            await self._events.put((index, EngineFailure("the node failed")))
            raise error


def _varied(params: SamplingParams, number: int) -> SamplingParams:
    """Several answers to one prompt differ by their seeds."""
    return params if params.seed is None else replace(params, seed=(params.seed + number) % 2**64)


async def _end(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

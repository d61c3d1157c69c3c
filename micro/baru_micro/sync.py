"""The node library without `async`, for scripts and notebooks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from baru_common.drafters import Drafter, TextDrafter
from baru_common.frames import HubDescription
from baru_common.sampling import SamplingParams
from baru_common.tls import TlsFiles
from baru_common.trace_context import TraceContext

from .client import LinkOptions, MicroNode, Prompt
from .decoding import Reconcile
from .events import Event
from .link import Link
from .observing import NodeObserver

_T = TypeVar("_T")
_LEAVE_S = 5.0
"""Time for what was interrupted to end: it takes leave of its hub."""


class SyncMicroNode:
    """A `MicroNode` whose loop runs in a thread of its own. Made by `connect`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, node: MicroNode) -> None:
        self._loop = loop
        self._node = node

    @classmethod
    @contextmanager
    def connect(
        cls,
        hub: str | Sequence[str],
        *,
        drafter: Drafter | TextDrafter | str | None = "ngram",
        timeout_s: float = 5.0,
        options: LinkOptions | None = None,
        tls: TlsFiles | Path | str | None = None,
        observers: Iterable[NodeObserver] = (),
    ) -> Iterator[SyncMicroNode]:
        """Connect for the length of the block; as `MicroNode.connect`."""
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever, name="baru-micro", daemon=True)
        thread.start()
        connection = MicroNode.connect(
            hub, drafter=drafter, timeout_s=timeout_s, options=options, tls=tls, observers=observers
        )
        try:
            node = _run(loop, connection.__aenter__())
            try:
                yield cls(loop, node)
            finally:
                _run(loop, connection.__aexit__(None, None, None))
        finally:
            _run(loop, _end_all())
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()

    @property
    def hub(self) -> HubDescription:
        """What the hub said of itself."""
        return self._node.hub

    @property
    def link(self) -> Link:
        """The way to the hub that serves this node."""
        return self._node.link

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        reconcile: Reconcile | None = None,
        trace: TraceContext | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> Iterator[Event]:
        """Yield the events of one generation; as `MicroNode.generate`."""
        events = self._node.generate(prompt, params, reconcile=reconcile, trace=trace, tools=tools)
        try:
            while True:
                try:
                    yield _run(self._loop, anext(events))
                except StopAsyncIteration:
                    return
        finally:
            if not self._loop.is_closed():
                _run(self._loop, events.aclose())


def _run(loop: asyncio.AbstractEventLoop, work: Any) -> Any:
    ended = threading.Event()

    async def wrapped() -> Any:
        try:
            return await work
        finally:
            ended.set()

    coroutine: Coroutine[Any, Any, Any] = wrapped()
    future = asyncio.run_coroutine_threadsafe(coroutine, loop)
    try:
        return future.result()
    except BaseException:
        if not future.done():  # interrupted: what was waited for must end before anything else is asked
            future.cancel()
            ended.wait(_LEAVE_S)
        raise


async def _end_all() -> None:
    """End what still runs on this loop, before it is closed."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_asyncgens()

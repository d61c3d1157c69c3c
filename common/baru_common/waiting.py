"""Waiting for so long and no longer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

_T = TypeVar("_T")


async def within(work: Awaitable[_T], timeout_s: float | None) -> _T:
    """Return what `work` returns; asyncio.TimeoutError when it takes longer, and it is cancelled.

    As `asyncio.wait_for`, which before Python 3.12 swallows a cancellation that comes in the very moment in which the
    work ends (bpo-37658): who was cancelled would run on, and whoever waits for its end with it.
    """
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait([task], timeout=timeout_s)
        if not task.done():
            raise asyncio.TimeoutError
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # it was looked at

"""Waiting with a limit: every way in which it can end."""

from __future__ import annotations

import asyncio

import pytest

from baru_common.waiting import within


async def test_results_errors_and_time() -> None:
    ended: list[str] = []

    async def work(wait_s: float, error: Exception | None = None) -> str:
        try:
            await asyncio.sleep(wait_s)
        finally:
            ended.append("ended")
        if error:
            raise error
        return "done"

    assert await within(work(0), 5.0) == "done"
    assert await within(work(0), None) == "done"
    with pytest.raises(KeyError):
        await within(work(0, KeyError()), 5.0)
    with pytest.raises(asyncio.TimeoutError):
        await within(work(60), 0.01)
    assert len(ended) == 4, "it is over when the wait is"


@pytest.mark.parametrize("fails", [False, True])
async def test_a_cancellation_in_the_last_moment_counts(fails: bool) -> None:
    """The work ends, and in the same turn of the loop its waiter is cancelled: it must not run on."""
    work: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    waiting = asyncio.create_task(within(work, 5.0))
    await asyncio.sleep(0)
    if fails:
        work.set_exception(KeyError())
    else:
        work.set_result("done")
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_a_cancellation_ends_the_work() -> None:
    work: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    waiting = asyncio.create_task(within(work, 5.0))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert work.cancelled()

"""The virtual clock and link: repeatable to the last bit, in order, and loud when nothing can happen any more."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from bench.virtual import Cell, SlowExecutor, Stream, run, simulate

from baru_common.frames import Draft, Heartbeat, HubFrame, Open
from baru_common.sampling import SamplingParams
from baru_hub.verifier import LiveSession, Verifier

_CELL = Cell("thor-qwen3-8b-int4", acceptance=0.7, token_ms=0.1, round_trip_ms=5, num_sessions=3, num_tokens=60)


class Echo:
    """Mock of verifier and session: notes when each draft came, and sends a heartbeat back for each."""

    def __init__(self) -> None:
        self.came: list[tuple[float, int]] = []
        self.outbox: asyncio.Queue[HubFrame] = asyncio.Queue()

    async def open(self, request: Open) -> LiveSession:
        return cast("LiveSession", self)

    def draft(self, draft: Draft) -> None:
        self.came.append((asyncio.get_running_loop().time(), draft.chain_id))
        self.outbox.put_nowait(Heartbeat(draft.chain_id, 0))

    async def frames(self) -> Any:
        while True:
            yield await self.outbox.get()


def test_two_runs_are_identical() -> None:
    """Rates, lengths and steps, to the last bit."""
    assert simulate(_CELL) == simulate(_CELL)


def test_with_drafting_off_each_step_makes_one_id() -> None:
    """And it takes the profile's time alone: 20.3 ms for one session, but for the link's at the start and the end."""
    alone = Cell("thor-qwen3-8b-int4", 0.7, 0.1, 0, 1, 50)
    outcome = simulate(alone, drafting=False)
    assert outcome.mean_accepted_length == 1
    assert outcome.num_steps == 50
    assert outcome.tokens_per_s == pytest.approx(1 / 0.0203, rel=0.01)


def test_a_perfect_near_drafter_pays() -> None:
    """More than one id a step, in fewer steps, and faster than without."""
    cell = Cell("thor-qwen3-8b-int4", 1.0, 0.1, 1, 1, 100)
    on, off = simulate(cell), simulate(cell, drafting=False)
    assert on.mean_accepted_length > 3
    assert on.num_steps < off.num_steps / 3
    assert on.tokens_per_s > 2 * off.tokens_per_s


def test_frames_keep_their_order_and_take_half_a_round_trip() -> None:
    """Also those sent at one moment, in both directions."""

    async def send_many() -> tuple[list[tuple[float, int]], list[int], float]:
        echo = Echo()
        link = Stream(cast("Verifier", echo), 0.05)
        link.send(Open((1,), SamplingParams(), b"", b""))
        for i in range(60):
            link.send(Draft(1, i, 1, 0, (3,)))
            if i % 20 == 19:
                await asyncio.sleep(0.001)
        back = []
        async for frame in link.frames():
            back.append(cast("Heartbeat", frame).sequence)
            if len(back) == 60:
                break
        now_s = asyncio.get_running_loop().time()
        if link._pump:
            link._pump.cancel()
        return echo.came, back, now_s

    came, back, end_s = run(send_many())
    assert [chain_id for _, chain_id in came] == back == list(range(60))
    assert [at_s for at_s, _ in came] == pytest.approx([0.025 + 0.001 * (i // 20) for i in range(60)])
    assert end_s == pytest.approx(0.052)


def test_waiting_takes_no_time_and_the_clock_tells_the_truth() -> None:
    """An hour of sleep passes at once; things happen in the order of their times."""

    async def sleep_long() -> tuple[list[int], float]:
        seen: list[int] = []

        async def after(delay_s: float, number: int) -> None:
            await asyncio.sleep(delay_s)
            seen.append(number)

        await asyncio.gather(after(3600, 3), after(0.5, 1), after(1800, 2))
        return seen, asyncio.get_running_loop().time()

    seen, end_s = run(sleep_long())
    assert seen == [1, 2, 3]
    assert end_s == pytest.approx(3600)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::RuntimeWarning")
def test_a_deadlock_raises() -> None:
    """When everything waits for something that will not come, the run ends with an error and does not hang."""

    async def wait_for_ever() -> None:
        await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match="will not come"):
        run(wait_for_ever())


def test_a_slow_call_takes_its_time_by_the_ids_asked_for() -> None:
    """The result is computed when its time has come."""

    async def call() -> tuple[int, float]:
        executor = SlowExecutor(0.02)
        future = executor.submit(lambda a, b, n: a + b + n, 1, 2, 5)
        assert not future.done()
        return await asyncio.wrap_future(future), asyncio.get_running_loop().time()

    result, end_s = run(call())
    assert result == 8
    assert end_s == pytest.approx(0.1)

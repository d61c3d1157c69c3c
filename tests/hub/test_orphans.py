"""Sessions whose node is gone: what keeps them, what ends them, who takes their place. The clock is a test's own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest

from baru_common.errors import CapacityExhausted, HubTimeout, HubUnavailable
from baru_common.frames import (
    Draft,
    DrafterInfo,
    Drain,
    Finished,
    FinishReason,
    Heartbeat,
    HubFrame,
    Limits,
    Open,
    Opened,
    Resume,
    Verdict,
)
from baru_common.sampling import SamplingParams
from baru_hub.cost_model import CostModel
from baru_hub.engines.transformers import TransformersEngine
from baru_hub.live import MAX_OUTBOX, LiveSession
from baru_hub.orphans import LinkPolicy, Orphan, by_age, to_drop
from baru_hub.scheduler import GoodputScheduler, Plan
from baru_hub.session import Session
from baru_hub.verifier import Verifier
from support.lockstep import Lockstep
from support.tiny import plain_greedy, tiny_target, twin

_WAIT_S = 10.0
_TARGET = tiny_target()
_PROMPT = (40, 50, 60)
_DRAFTS = DrafterInfo("test")
_POLICY = LinkPolicy(node_silence_s=3.0, slow_reader_s=10.0, orphan_grace_s=30.0, orphan_tokens=20)


# -- the decisions


def orphans(*told: tuple[float, int]) -> dict[str, Orphan]:
    """By name "0", "1", ...: when each was orphaned, and what it holds."""
    return {str(i): Orphan(since_s, 10, num_bytes) for i, (since_s, num_bytes) in enumerate(told)}


@pytest.mark.parametrize(
    ("told", "now_s", "dropped"),
    [
        ([], 100.0, []),
        ([(0.0, 1)], 29.9, []),
        ([(0.0, 1)], 30.0, ["0"]),
        ([(5.0, 1), (0.0, 1)], 31.0, ["1"]),
        ([(5.0, 1), (0.0, 1)], 35.0, ["1", "0"]),
        ([(0.0, 60), (1.0, 40)], 2.0, []),
        ([(0.0, 60), (1.0, 41)], 2.0, ["0"]),
        ([(1.0, 60), (0.0, 10), (2.0, 50)], 2.0, ["1", "0"]),
        ([(0.0, 101)], 0.0, ["0"]),
        ([(0.0, 10), (25.0, 101)], 30.0, ["0", "1"]),
        ([(0.0, 90), (25.0, 100)], 30.0, ["0"]),
    ],
)
def test_time_and_memory_are_bounded(told: list[tuple[float, int]], now_s: float, dropped: list[str]) -> None:
    """Whose grace is over goes; then the oldest as long as those that are left hold more than 100 bytes."""
    assert to_drop(orphans(*told), replace(_POLICY, orphan_bytes=100), now_s) == dropped


def test_the_oldest_comes_first() -> None:
    """Whatever the order of admission."""
    assert by_age(orphans((3.0, 1), (1.0, 1), (2.0, 1))) == ["1", "2", "0"]


@pytest.mark.parametrize(("num_committed", "may"), [(10, True), (29, True), (30, False), (31, False)])
def test_ids_are_bounded(num_committed: int, may: bool) -> None:
    """Counted from where the node went."""
    assert Orphan(0.0, 10, 1).may_decode(num_committed, _POLICY) is may


# -- at the hub


@dataclass
class Clock:
    now_s: float = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Served:
    """A hub of the tiny target on a clock of ours, and what a node needs to know of it."""

    def __init__(self, verifier: Verifier, engine: TransformersEngine, clock: Clock) -> None:
        self.verifier, self.engine, self.clock = verifier, engine, clock

    async def pass_s(self, seconds: float) -> None:
        """Let time pass, and the loop see it."""
        self.clock.now_s += seconds
        await self.settle()

    async def settle(self) -> None:
        """Let the loop do all that there is to do."""
        for _ in range(5):
            self.verifier._awake.set()
            await asyncio.sleep(0.002)
            async with self.verifier._engine_free:
                pass

    async def open(self, *, drafts: bool = False, resume: Resume | None = None, **params: Any) -> LiveSession:
        asked = SamplingParams(**({"max_tokens": 100, "ignore_eos": True} | params))
        drafter = _DRAFTS if drafts else None
        return await self.verifier.open(
            Open(_PROMPT, asked, _TARGET.fingerprint, _TARGET.bundle.digest, drafter, resume)
        )

    async def read(self, live: LiveSession, num_ids: int) -> tuple[Opened, list[int]]:
        frames = live.frames()
        opened = await asyncio.wait_for(anext(frames), _WAIT_S)
        assert isinstance(opened, Opened)
        ids: list[int] = []
        while len(ids) < num_ids:
            frame = await asyncio.wait_for(anext(frames), _WAIT_S)
            ids += frame.token_ids if isinstance(frame, Verdict) else ()
        return opened, ids

    async def until_idle(self, live: LiveSession) -> int:
        """Wait until a session decodes no more; return how many ids it has."""
        before = -1
        while before != len(live.state.committed):
            before = len(live.state.committed)
            await asyncio.sleep(0.05)
        return before - len(_PROMPT)


@asynccontextmanager
async def served(
    policy: LinkPolicy = _POLICY, *, max_sessions: int = 4, kv_cache_mb: int = 8, scheduler: Any = None
) -> AsyncIterator[Served]:
    """Afterwards every page must be back."""
    engine, clock = TransformersEngine(twin(_TARGET), kv_cache_mb=kv_cache_mb), Clock()
    limits = Limits(max_sessions, max_prompt_tokens=400, max_draft_ahead=8, max_message_bytes=1 << 20)
    scheduler = scheduler or GoodputScheduler(CostModel(), max_patience_s=0.0)
    async with Verifier(engine, scheduler, limits, link=policy, clock=clock) as verifier:
        yield Served(verifier, engine, clock)
    assert (verifier.num_sessions, verifier.num_orphans, engine.pool.num_held) == (0, 0, 0)
    engine.pool.check_integrity()
    await engine.close()


def resume_of(opened: Opened, ids: Sequence[int]) -> Resume:
    return Resume(opened.session_id, opened.session_key, opened.epoch, tuple(ids))


async def all_of(live: LiveSession) -> list[HubFrame]:
    async def read() -> list[HubFrame]:
        return [frame async for frame in live.frames()]

    return await asyncio.wait_for(read(), _WAIT_S)


def ids_of(frames: Sequence[HubFrame]) -> list[int]:
    return [token for frame in frames if isinstance(frame, Verdict) for token in frame.token_ids]


async def test_an_orphan_decodes_so_many_ids_and_keeps_its_place() -> None:
    """20, or what its last step adds; then it waits, and goes on when its node is back."""
    async with served() as hub:
        live = await hub.open()
        opened, ids = await hub.read(live, 3)
        live.lose()
        num_decided = len(live.state.committed) - len(_PROMPT)
        assert hub.verifier.num_orphans == 1
        assert await hub.until_idle(live) == num_decided + 20
        assert live._outbox.qsize() <= MAX_OUTBOX
        frames = await all_of(await hub.open(resume=resume_of(opened, ids)))
        assert isinstance(frames[0], Opened)
        assert frames[0].continued
        assert isinstance(frames[1], Verdict)
        assert len(frames[1].token_ids) >= num_decided + 20 - len(ids)
        assert ids + ids_of(frames) == plain_greedy(_TARGET, list(_PROMPT), 100)


async def test_frames_of_an_orphan_go_nowhere() -> None:
    """Nobody reads them: none is queued, however long it runs."""
    async with served(replace(_POLICY, orphan_tokens=400)) as hub:
        live = await hub.open(max_tokens=300)
        await hub.read(live, 1)
        live.lose()
        queued = live._outbox.qsize()
        await hub.until_idle(live)
        assert live._outbox.qsize() == queued


async def test_an_orphan_that_ends_is_kept_for_its_node() -> None:
    """The rest and `Finished` are ready when it comes back; then it is gone."""
    async with served() as hub:
        live = await hub.open(max_tokens=10)
        opened, ids = await hub.read(live, 2)
        live.lose()
        await hub.until_idle(live)
        assert live.state.finish is FinishReason.LENGTH
        _, verdict, finished = await all_of(await hub.open(max_tokens=10, resume=resume_of(opened, ids)))
        assert ids + ids_of([verdict]) == plain_greedy(_TARGET, list(_PROMPT), 10)
        assert isinstance(finished, Finished)
        assert finished.usage.num_emitted == 10
        await hub.settle()
        assert hub.verifier.num_sessions == 0


@pytest.mark.parametrize(("seconds", "left"), [(29.9, 1), (30.1, 0)])
async def test_an_orphan_is_dropped_when_its_grace_is_over(seconds: float, left: int) -> None:
    """By itself, with nothing else going on."""
    async with served() as hub:
        live = await hub.open()
        live.lose()
        await hub.until_idle(live)
        await hub.pass_s(seconds)
        assert (hub.verifier.num_sessions, hub.verifier.num_orphans) == (left, left)
        assert (hub.engine.pool.num_held > 0) is bool(left)


async def test_the_end_of_the_grace_wakes_the_loop() -> None:
    """In real time: nothing else happens that could."""
    engine = TransformersEngine(twin(_TARGET), kv_cache_mb=8)
    async with Verifier(engine, GoodputScheduler(CostModel()), link=replace(_POLICY, orphan_grace_s=0.2)) as verifier:
        hub = Served(verifier, engine, Clock())
        live = await hub.open()
        live.lose()
        await asyncio.sleep(0.1)
        assert verifier.num_orphans == 1
        await asyncio.sleep(0.2)
        assert verifier.num_sessions == 0
    await engine.close()


async def test_without_grace_a_session_ends_with_its_stream() -> None:
    """All of it is given back."""
    async with served(replace(_POLICY, orphan_grace_s=0.0)) as hub:
        live = await hub.open()
        live.lose()
        await hub.settle()
        assert (hub.verifier.num_sessions, hub.engine.pool.num_held) == (0, 0)


async def test_orphans_hold_so_much_memory() -> None:
    """The oldest goes, whoever was admitted first; the others stay."""
    async with served() as hub:
        lives = [await hub.open() for _ in range(3)]
        num_bytes = hub.verifier.roster.residents[lives[0].state.session_id]._num_bytes
        assert num_bytes == 2 * 64 * 2 * 2 * 2 * 16 * 4  # two pages of 64 ids; layers, keys and values, heads, width
        hub.verifier.roster.link = replace(_POLICY, orphan_bytes=2 * num_bytes)
        for live in (lives[1], lives[0], lives[2]):
            live.lose()
            await hub.pass_s(1.0)
        left = set(hub.verifier.roster.residents)
        assert left == {lives[0].state.session_id, lives[2].state.session_id}


async def test_who_needs_a_place_gets_that_of_the_oldest_orphan() -> None:
    """One of them, no more; where there are no orphans the hub is full."""
    async with served(max_sessions=3) as hub:
        lives = [await hub.open() for _ in range(3)]
        lives[2].lose()
        await hub.pass_s(1.0)
        lives[0].lose()
        await hub.pass_s(1.0)
        await hub.open()
        assert set(hub.verifier.roster.residents) >= {lives[0].state.session_id, lives[1].state.session_id}
        assert (hub.verifier.num_sessions, hub.verifier.num_orphans) == (3, 1)
        await hub.open()
        assert (hub.verifier.num_sessions, hub.verifier.num_orphans) == (3, 0)
        with pytest.raises(CapacityExhausted, match="all 3 sessions"):
            await hub.open()
        assert not lives[1].closed


async def test_who_needs_pages_gets_those_of_the_oldest_orphan() -> None:
    """As many orphans as it takes, while a step of another session is under way; who has a node keeps its own."""
    async with served(kv_cache_mb=1, max_sessions=16) as hub:  # 32 pages
        assert hub.engine.pool.num_pages == 32
        running = await hub.open(max_tokens=500)  # 8 of them
        kept = [await hub.open(max_tokens=250) for _ in range(6)]  # 4 each
        for live in kept:
            live.lose()
            await hub.pass_s(1.0)
        await hub.open(max_tokens=500)
        names = [live.state.session_id for live in kept]
        assert [name in hub.verifier.roster.residents for name in names] == [False] * 2 + [True] * 4
        await hub.open(max_tokens=500)
        assert hub.verifier.num_orphans == 2
        await hub.open(max_tokens=500)
        assert hub.verifier.num_orphans == 0
        with pytest.raises(CapacityExhausted, match="KV cache"):
            await hub.open(max_tokens=500)
        assert not running.closed


async def test_nobody_waits_for_an_orphans_drafts() -> None:
    """A patient schedule waits for each draft as long as there is somebody to send it, and not any longer."""
    async with served(scheduler=Lockstep(patience_s=1e6)) as hub:
        live = await hub.open(drafts=True)
        await hub.settle()
        assert len(live.state.committed) == len(_PROMPT)
        live.lose()
        await hub.settle()
        assert await hub.until_idle(live) == 20
        assert live.state.pace.answers.num_waits == 0


# -- silence


async def test_a_silent_node_is_gone() -> None:
    """3 s after the last it said, heartbeat or draft; its stream is told, and the session is an orphan."""
    async with served() as hub:
        live = await hub.open(drafts=True)
        live.heartbeat(Heartbeat(1, 1))
        await hub.pass_s(2.9)
        live.draft(Draft(1, 1, len(_PROMPT), 0, ()))
        await hub.pass_s(2.9)
        live.heartbeat(Heartbeat(2, 1))
        await hub.pass_s(2.9)
        assert hub.verifier.num_orphans == 0
        await hub.pass_s(0.2)
        assert hub.verifier.num_orphans == 1
        with pytest.raises(HubTimeout, match="nothing comes from the node"):
            await all_of(live)


async def test_silence_means_nothing_without_heartbeats() -> None:
    """From one that has never sent any, and from one that has ended its sending side."""
    async with served() as hub:
        never, ended = await hub.open(), await hub.open()
        ended.heartbeat(Heartbeat(1, 1))
        ended.said_all()
        await hub.pass_s(290.0)  # less than any node may be idle for
        assert hub.verifier.num_orphans == 0
        for live in (never, ended):
            assert ids_of(await all_of(live)) == plain_greedy(_TARGET, list(_PROMPT), 100)


async def test_a_node_that_neither_sends_nor_takes_anything_is_idle() -> None:
    """For so long, and its session becomes an orphan."""
    async with served() as hub:
        live = await hub.open()
        await hub.pass_s(301.0)
        assert hub.verifier.num_orphans == 1
        with pytest.raises(HubTimeout, match="neither sends nor takes"):
            await all_of(live)


# -- a node that does not read


async def test_a_session_whose_frames_nobody_reads_is_paused() -> None:
    """At 64 of them; it goes on as soon as they are read, and nothing is lost. The others never stop."""
    async with served() as hub:
        slow = await hub.open(max_tokens=100)
        assert await hub.until_idle(slow) == MAX_OUTBOX - 1  # the first frame is `Opened`
        assert ids_of(await all_of(await hub.open())) == plain_greedy(_TARGET, list(_PROMPT), 100)
        read = await asyncio.wait_for(all_of(slow), 5.0)  # before anything else could wake the loop
        assert ids_of(read) == plain_greedy(_TARGET, list(_PROMPT), 100)


async def test_heartbeats_do_not_pile_up() -> None:
    """What cannot be sent is not sent back; drafts take no more room than a chain may."""
    async with served(scheduler=Lockstep(patience_s=1e6)) as hub:
        live = await hub.open(drafts=True)
        for sequence in range(1000):
            live.heartbeat(Heartbeat(sequence, 1))
            live.draft(Draft(1, sequence + 1, len(_PROMPT), 0, (99,) * 8))
        assert live._outbox.qsize() == MAX_OUTBOX
        assert len(live.state.mailbox._tail) == 8
        assert live.state.mailbox.num_drafted == 8000


async def test_a_slow_reader_is_taken_for_gone() -> None:
    """After 10 s with a full queue, with an error that says so; its session is an orphan like any other."""
    async with served() as hub:
        slow = await hub.open()
        await hub.until_idle(slow)
        await hub.pass_s(9.9)
        assert hub.verifier.num_orphans == 0
        await hub.pass_s(0.2)
        assert hub.verifier.num_orphans == 1
        assert slow._outbox.qsize() == MAX_OUTBOX + 1
        with pytest.raises(HubTimeout, match="unread"):
            await all_of(slow)


async def test_who_reads_now_and_then_is_no_slow_reader() -> None:
    """The time counts from where the queue became full again."""
    async with served() as hub:
        slow = await hub.open()
        frames = slow.frames()
        for _ in range(5):
            await hub.until_idle(slow)
            await hub.pass_s(6.0)
            await asyncio.wait_for(anext(frames), _WAIT_S)
        assert hub.verifier.num_orphans == 0


# -- the drain


async def test_a_drain_tells_who_runs_and_drops_who_is_gone() -> None:
    """Orphans at once; the others get their time, and an error when it is over."""
    async with served(scheduler=Lockstep(patience_s=1e6)) as hub:
        waiting, gone = await hub.open(drafts=True), await hub.open(drafts=True)
        gone.lose()
        await hub.settle()
        draining = asyncio.create_task(hub.verifier.drain(5.0))
        await hub.settle()
        assert (hub.verifier.num_sessions, hub.verifier.num_orphans) == (1, 0)
        assert not draining.done()
        with pytest.raises(HubUnavailable, match="draining"):
            await hub.open()
        await hub.pass_s(5.1)
        await asyncio.wait_for(draining, _WAIT_S)
        hub.verifier.dismiss()
        frames = waiting.frames()
        assert isinstance(await anext(frames), Opened)
        assert await anext(frames) == Drain(5.0)
        with pytest.raises(HubUnavailable, match="stopping"):
            await anext(frames)


async def test_a_link_that_breaks_in_the_drain_leaves_no_orphan() -> None:
    """There is no hub that it could come back to; the drain does not wait for it."""
    async with served(scheduler=Lockstep(patience_s=1e6)) as hub:
        live = await hub.open(drafts=True)
        draining = asyncio.create_task(hub.verifier.drain(5.0))
        await hub.settle()
        live.lose()
        await hub.settle()
        await asyncio.wait_for(draining, _WAIT_S)
        assert hub.verifier.num_sessions == 0


# -- faults of the engine


class Failing:
    """A scheduler that fails once, when it is told to."""

    def __init__(self) -> None:
        self.fails = False
        self._real = GoodputScheduler(CostModel(), max_patience_s=0.0)

    def plan(self, sessions: Sequence[Session], now_s: float) -> Plan:
        if self.fails:
            self.fails = False
            raise ZeroDivisionError
        return self._real.plan(sessions, now_s)

    def learn(self, plan: Plan, step_s: float, draft_s: float = 0.0) -> None:
        self._real.learn(plan, step_s)


async def test_an_orphan_that_fails_is_dropped() -> None:
    """Its node begins anew with the ids that it has."""
    failing = Failing()
    async with served(scheduler=failing) as hub:
        live = await hub.open()
        opened, ids = await hub.read(live, 3)
        live.lose()
        failing.fails = True
        await hub.settle()
        assert hub.verifier.num_sessions == 0
        frames = await all_of(await hub.open(resume=resume_of(opened, ids)))
        assert isinstance(frames[0], Opened)
        assert not frames[0].continued
        assert ids + ids_of(frames) == plain_greedy(_TARGET, list(_PROMPT), 100)

"""The loop over a mock engine: who pays for a failure, what is freed when, who is admitted.

`MockEngine` is a mock: no model runs. Its own id at a position is a fixed function of the position.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import pytest

from baru_common.errors import BaruError, EngineFailure, HubUnavailable, InvalidRequest
from baru_common.frames import Draft, DrafterInfo, Finished, FinishReason, HubFrame, Limits, Open, Opened, Verdict
from baru_common.sampling import NO_ID, SamplingContext, SamplingParams
from baru_common.tokens import Tokenizer
from baru_hub.acceptance import Decision
from baru_hub.cost_model import CostModel
from baru_hub.engines import Allocation, EngineSpec, Feed, Want
from baru_hub.guesses import Guesses
from baru_hub.scheduler import GoodputScheduler, Plan
from baru_hub.session import Session
from baru_hub.verifier import LiveSession, Verifier
from support.tiny import tiny_bundle

_WAIT_S = 10.0
_EOS, _CONTEXT = 2, 64
_BUNDLE = tiny_bundle()
SPEC = EngineSpec("mock", "mock-target", b"f" * 32, _BUNDLE, Tokenizer(_BUNDLE).vocabulary, (_EOS,), _CONTEXT)
LIMITS = Limits(max_sessions=4, max_prompt_tokens=40, max_draft_ahead=8, max_message_bytes=1 << 20)
DRAFTS = DrafterInfo("test")
Results = list[Decision | BaruError]


def own(position: int) -> int:
    """The mock target's id at a position; at position 30 it is the end of the sequence."""
    return _EOS if position == 30 else 10 + position


@dataclass
class MockEngine:
    """Records what it is asked for, and fails or waits when told to."""

    spec: EngineSpec = SPEC
    taken: dict[int, int] = field(default_factory=dict)
    """Sequence -> its max_length, while allocated."""
    num_allocated: int = 0
    sampling: list[SamplingContext] = field(default_factory=list)
    """What each sequence was allocated with."""
    batches: list[tuple[int, ...]] = field(default_factory=list)
    spoil: Callable[[Sequence[Feed], Results], Results] = lambda _, decided: decided
    """Sees each step's feeds and result last; may raise, or change the result."""
    may_run: threading.Event = field(default_factory=threading.Event)
    entered: threading.Event = field(default_factory=threading.Event)
    _handles: count[int] = field(default_factory=lambda: count(1))

    def __post_init__(self) -> None:
        self.may_run.set()

    def allocate(
        self,
        prompt_ids: Sequence[int],
        max_length: int,
        identity: str | None,
        sampling: SamplingContext | None = None,
    ) -> Allocation:
        handle = next(self._handles)
        self.taken[handle] = max_length
        self.num_allocated += 1
        assert sampling is not None
        self.sampling.append(sampling)
        return Allocation(handle, 0)

    async def calibrate(self) -> CostModel:
        return CostModel()

    async def close(self) -> None:
        pass

    def free(self, sequence: int) -> None:
        assert self.may_run.is_set(), "freed under a running step"
        del self.taken[sequence]

    async def draft(self, wants: Sequence[Want]) -> list[Guesses]:
        raise AssertionError("it has no drafter")

    async def verify(self, feeds: Sequence[Feed]) -> Results:
        return await asyncio.to_thread(self._verify, feeds)

    def _verify(self, feeds: Sequence[Feed]) -> Results:
        self.batches.append(tuple(feed.sequence for feed in feeds))
        self.entered.set()
        assert self.may_run.wait(_WAIT_S)
        decided: Results = []
        for feed in feeds:
            end = feed.num_cached + len(feed.block.pending)
            assert end + len(feed.block.draft) <= self.taken[feed.sequence]
            num_deciding = len(feed.block.draft) + 1 if feed.block.decides else 0
            decided.append(Decision(tuple(own(end + i) for i in range(num_deciding))))
        return self.spoil(feeds, decided)


def a_request(**changes: Any) -> Open:
    request = Open((5, 6, 7), SamplingParams(max_tokens=6), SPEC.fingerprint, _BUNDLE.digest)
    return replace(request, **changes)


class NeverYet:
    """A scheduler that waits for a draft, whatever comes."""

    def plan(self, sessions: Sequence[Session], now_s: float) -> Plan:
        return Plan(wait_s=300.0)

    def learn(self, plan: Plan, step_s: float, draft_s: float = 0.0) -> None:
        raise AssertionError("no step was planned")


@asynccontextmanager
async def verifier_of(engine: MockEngine, limits: Limits = LIMITS) -> AsyncIterator[Verifier]:
    """Serve the mock; afterwards every allocated sequence must have been freed, once."""
    async with Verifier(engine, GoodputScheduler(CostModel(), max_prefill=4, max_patience_s=0.0), limits) as verifier:
        yield verifier
    assert engine.taken == {}
    assert verifier.num_sessions == 0


async def frames_of(live: LiveSession) -> list[HubFrame]:
    async def read() -> list[HubFrame]:
        return [frame async for frame in live.frames()]

    return await asyncio.wait_for(read(), _WAIT_S)


async def ids_of(live: LiveSession) -> list[int]:
    return [token for frame in await frames_of(live) if isinstance(frame, Verdict) for token in frame.token_ids]


async def until(holds: Callable[[], bool]) -> None:
    async def poll() -> None:
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.005)

    await asyncio.wait_for(poll(), _WAIT_S)


# -- what comes out


async def test_a_session_is_opened_verdicts_and_finished() -> None:
    """In this order, with the ids of the target and usage that counts them."""
    async with verifier_of(MockEngine()) as verifier:
        opened, *verdicts, finished = await frames_of(await verifier.open(a_request()))
    assert isinstance(opened, Opened)
    assert (opened.num_committed, opened.max_draft_ahead) == (3, 0)  # no drafter: told not to draft
    assert 16 <= len(opened.session_id) <= 64
    assert all(isinstance(verdict, Verdict) for verdict in verdicts)
    assert isinstance(finished, Finished)
    assert (finished.reason, finished.usage.num_emitted, finished.usage.num_prompt) == (FinishReason.LENGTH, 6, 3)


@pytest.mark.parametrize("num_prompt", [1, 4, 9, 40])
async def test_without_max_tokens_the_context_is_filled(num_prompt: int) -> None:
    """And never overfilled; prompts of every length in pieces give the same continuation."""
    async with verifier_of(MockEngine()) as verifier:
        request = a_request(prompt_ids=(5,) * num_prompt, params=SamplingParams(ignore_eos=True))
        assert await ids_of(await verifier.open(request)) == [own(i) for i in range(num_prompt, _CONTEXT)]


@pytest.mark.parametrize(("stop_ids", "last"), [((), 30), ((own(20),), 20), ((own(29), own(25)), 25)])
async def test_stop_ids_and_eos_end_a_session(stop_ids: tuple[int, ...], last: int) -> None:
    """Whichever comes first; it is the last id."""
    async with verifier_of(MockEngine()) as verifier:
        live = await verifier.open(a_request(params=SamplingParams(stop_ids=stop_ids)))
        assert await ids_of(live) == [own(i) for i in range(3, last + 1)]
        assert live.state.finish is FinishReason.STOP


async def test_drafts_are_checked_and_never_change_the_output() -> None:
    """One right chain, sent before anything was decided; an old epoch's frame is stale and no more."""
    engine = MockEngine()
    engine.may_run.clear()
    async with verifier_of(engine) as verifier:
        live = await verifier.open(a_request(drafter=DRAFTS))
        live.draft(Draft(0, 9, 3, 0, (99,)))
        live.draft(Draft(1, 1, 3, 0, (own(3), own(4), 99)))
        engine.may_run.set()
        *frames, finished = await frames_of(live)
    assert [t for f in frames if isinstance(f, Verdict) for t in f.token_ids] == [own(i) for i in range(3, 9)]
    assert isinstance(finished, Finished)
    usage = finished.usage
    assert (usage.num_drafted, usage.num_stale_frames) == (3, 1)
    assert usage.num_drafted == usage.num_accepted + usage.num_rejected + usage.num_discarded


async def test_the_engine_is_told_how_to_choose_and_usage_with_which_seed() -> None:
    """One and the same, drawn for the request where it has none; none at all where nothing is drawn."""
    engine = MockEngine()
    asked = [SamplingParams(temperature=1, seed=7), SamplingParams(temperature=1), SamplingParams(temperature=1)]
    async with verifier_of(engine) as verifier:
        used = []
        for params in (*asked, SamplingParams(), SamplingParams(seed=7)):
            *_, finished = await frames_of(await verifier.open(a_request(params=params)))
            assert isinstance(finished, Finished)
            used.append(finished.usage.seed)
    assert [sampling.params.seed for sampling in engine.sampling] == [*used[:3], None, 7]
    assert (used[0], used[3:]) == (7, [None, None])
    assert used[1] != used[2]
    assert all(seed is not None and 0 <= seed < 1 << 64 for seed in used[:3])
    assert {sampling.num_prompt for sampling in engine.sampling} == {3}
    assert {sampling.eos_ids for sampling in engine.sampling} == {(_EOS,)}


# -- who pays for a failure


def _raise_baru(feeds: Sequence[Feed], decided: Results) -> Results:
    raise EngineFailure("the mock's memory is gone")


def _raise_other(feeds: Sequence[Feed], decided: Results) -> Results:
    raise ZeroDivisionError


def _an_id_too_few(feeds: Sequence[Feed], decided: Results) -> Results:
    return [Decision() for _ in decided]


def _an_id_too_many(feeds: Sequence[Feed], decided: Results) -> Results:
    return [Decision((*result.ids, 1, 1)) for result in decided if isinstance(result, Decision)]


def _a_result_too_few(feeds: Sequence[Feed], decided: Results) -> Results:
    return decided[1:]


@pytest.mark.parametrize("failure", [_raise_baru, _raise_other, _an_id_too_few, _an_id_too_many, _a_result_too_few])
async def test_a_failing_step_ends_only_its_own_sessions(
    failure: Callable[[Sequence[Feed], Results], Results],
) -> None:
    """Those in the step get EngineFailure; the others end well, and so does whoever comes later."""
    engine = MockEngine()
    failed: list[tuple[int, ...]] = []

    def fail_once(feeds: Sequence[Feed], decided: Results) -> Results:
        if failed or len(engine.batches) < 4:
            return decided
        failed.append(tuple(feed.sequence for feed in feeds))
        return failure(feeds, decided)

    engine.spoil = fail_once
    async with verifier_of(engine) as verifier:
        lives = [await verifier.open(a_request()) for _ in range(3)]
        results = await asyncio.gather(*map(ids_of, lives), return_exceptions=True)
        for live, result in zip(lives, results, strict=True):
            if live.sequence in failed[0]:
                assert isinstance(result, EngineFailure)
            else:
                assert result == [own(i) for i in range(3, 9)]
        assert await ids_of(await verifier.open(a_request())) == [own(i) for i in range(3, 9)]


@pytest.mark.parametrize(
    ("result", "error"),
    [
        (EngineFailure("its numbers are not finite"), EngineFailure),
        (InvalidRequest("it cannot go on"), InvalidRequest),
        (Decision(), EngineFailure),
        (Decision((5, 6, 7)), EngineFailure),
        (Decision((5,), num_accepted=1), EngineFailure),
        (Decision((NO_ID,)), InvalidRequest),
    ],
)
async def test_a_result_that_is_wrong_ends_only_its_own_session(
    result: Decision | BaruError, error: type[BaruError]
) -> None:
    """The others of the same step go on as if nothing had happened."""
    engine = MockEngine()
    spoilt: list[int] = []

    def spoil_once(feeds: Sequence[Feed], decided: Results) -> Results:
        if spoilt or len(feeds) < 3:
            return decided
        spoilt.append(feeds[1].sequence)
        return [decided[0], result, *decided[2:]]

    engine.spoil = spoil_once
    async with verifier_of(engine) as verifier:
        lives = [await verifier.open(a_request()) for _ in range(3)]
        results = await asyncio.gather(*map(ids_of, lives), return_exceptions=True)
    assert len(spoilt) == 1
    for live, ids in zip(lives, results, strict=True):
        if live.sequence in spoilt:
            assert type(ids) is error
        else:
            assert ids == [own(i) for i in range(3, 9)]


# -- what is freed when


async def test_closing_during_a_step_frees_the_sequence_only_after_it() -> None:
    """The step reads and writes that memory; `MockEngine.free` checks that it has ended."""
    engine = MockEngine()
    engine.may_run.clear()
    async with verifier_of(engine) as verifier:
        live = await verifier.open(a_request())
        await until(engine.entered.is_set)
        live.close()
        await asyncio.sleep(0.05)
        assert list(engine.taken) == [live.sequence]
        engine.may_run.set()
        await until(lambda: not engine.taken)
        assert verifier.num_sessions == 0


async def test_stopping_the_hub_during_a_step_waits_for_it() -> None:
    """Then the session is told that the hub stops, and its memory given back."""
    engine = MockEngine()
    engine.may_run.clear()
    async with verifier_of(engine) as verifier:
        live = await verifier.open(a_request())
        await until(engine.entered.is_set)
        threading.Timer(0.05, engine.may_run.set).start()
    with pytest.raises(HubUnavailable, match="stopping"):
        await frames_of(live)


async def test_stopping_the_hub_while_it_waits_for_a_draft_ends_the_wait() -> None:
    """A session that fails wakes the loop in the moment in which the loop is cancelled: both must count."""
    verifier = Verifier(MockEngine(), NeverYet(), LIMITS)
    await verifier.__aenter__()
    live = await verifier.open(a_request(drafter=DRAFTS))
    await asyncio.sleep(0.05)
    await asyncio.wait_for(verifier.__aexit__(None, None, None), _WAIT_S)
    with pytest.raises(HubUnavailable):
        await frames_of(live)


async def test_a_cancelled_session_ends_with_what_it_has() -> None:
    """`Finished` says CANCELLED and is the last frame, also when a step is under way."""
    engine = MockEngine()
    engine.may_run.clear()
    async with verifier_of(engine) as verifier:
        live = await verifier.open(a_request())
        await until(engine.entered.is_set)
        live.finish(FinishReason.CANCELLED)
        live.finish(FinishReason.CANCELLED)  # a second time does nothing
        engine.may_run.set()
        frames = await frames_of(live)
        await until(lambda: not engine.taken)
    assert isinstance(frames[-1], Finished)
    assert (frames[-1].reason, frames[-1].usage.num_emitted) == (FinishReason.CANCELLED, 0)
    assert live._outbox.empty()


async def test_every_allocation_is_freed_whatever_the_end() -> None:
    """Ended, cancelled, closed and failed sessions, several rounds; `verifier_of` looks at what is left."""
    engine = MockEngine()
    async with verifier_of(engine) as verifier:
        for _ in range(5):
            ended, cancelled, closed, failing = [await verifier.open(a_request(drafter=DRAFTS)) for _ in range(4)]
            cancelled.finish(FinishReason.CANCELLED)
            closed.close()
            failing.fail(InvalidRequest("a mistake"))
            assert await ids_of(ended) == [own(i) for i in range(3, 9)]
            with pytest.raises(InvalidRequest, match="a mistake"):
                await frames_of(failing)
            await until(lambda: verifier.num_sessions == 0)
    assert engine.num_allocated == 20


class BrokenOnce:
    """A scheduler with a bug in its first plan."""

    def __init__(self) -> None:
        self._real = GoodputScheduler(CostModel())
        self._broken = True

    def plan(self, sessions: Sequence[Session], now_s: float) -> Plan:
        if sessions and self._broken:
            self._broken = False
            raise ZeroDivisionError
        return self._real.plan(sessions, now_s)

    def learn(self, plan: Plan, step_s: float, draft_s: float = 0.0) -> None:
        self._real.learn(plan, step_s)


async def test_a_fault_of_the_loop_leaves_nobody_waiting() -> None:
    """Its sessions end with an error, and the next one is served."""
    async with Verifier(MockEngine(), BrokenOnce(), LIMITS) as verifier:
        with pytest.raises(EngineFailure, match="the hub failed"):
            await frames_of(await verifier.open(a_request()))
        assert len(await ids_of(await verifier.open(a_request()))) == 6

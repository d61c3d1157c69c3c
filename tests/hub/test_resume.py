"""A link breaks and comes back: the output is that of a run that nothing disturbed, whatever became of the hub's state.

Steps are taken one at a time, when a test allows them, so that each break falls where the test wants it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from baru_common.errors import HubUnavailable, InvalidDraft, InvalidRequest, PermissionDenied, Superseded
from baru_common.frames import (
    Draft,
    DrafterInfo,
    Finished,
    FinishReason,
    Heartbeat,
    HubFrame,
    Limits,
    Open,
    Opened,
    Resume,
    TokenLogprobs,
    Verdict,
)
from baru_common.sampling import Grammar, SamplingParams, SparseProbs
from baru_hub.cost_model import CostModel
from baru_hub.engines.transformers import TransformersEngine
from baru_hub.orphans import LinkPolicy
from baru_hub.scheduler import GoodputScheduler, Plan
from baru_hub.session import Session
from baru_hub.verifier import Verifier
from support.tiny import tiny_target, twin

_WAIT_S = 10.0
_TARGET = tiny_target()
_PROMPT = (40, 50, 60)
_AHEAD, _PREFILL = 8, 32
_LIMITS = Limits(max_sessions=4, max_prompt_tokens=400, max_draft_ahead=_AHEAD, max_message_bytes=1 << 20)
_DRAFTS = DrafterInfo("test")
_LETTERS = tuple(range(68, 94))  # a to z
_NUM_IDS = 12


@dataclass
class Stepped:
    """The real schedule, but a step is taken only when it is allowed."""

    num_allowed: int = 0
    plans: list[Plan] = field(default_factory=list)
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when there is nothing to do, or it is not allowed."""
    real: GoodputScheduler = field(
        default_factory=lambda: GoodputScheduler(CostModel(), max_prefill=_PREFILL, max_patience_s=0.0)
    )

    def plan(self, sessions: Sequence[Session], now_s: float) -> Plan:
        plan = self.real.plan(sessions, now_s) if self.num_allowed else Plan()
        if plan.blocks:
            self.num_allowed -= 1
            self.plans.append(plan)
        else:
            self.idle.set()
        return plan

    def learn(self, plan: Plan, step_s: float, draft_s: float = 0.0) -> None:
        """Nothing: a test repeats."""


class Node:
    """The node's end of streams that break: what it knows is what it has read."""

    def __init__(self, verifier: Verifier, stepped: Stepped, request: Open) -> None:
        self.verifier, self.stepped, self.request = verifier, stepped, request
        self.output: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.verdicts: list[Verdict] = []
        self.finished: Finished | None = None

    async def open(self, resume: Resume | None = None) -> Opened:
        self.live = await self.verifier.open(replace(self.request, resume=resume))
        self._frames = self.live.frames()
        opened = await self._next()
        assert isinstance(opened, Opened)
        assert opened.num_committed == len(self.request.prompt_ids) + len(self.output)
        self.opened = opened
        return opened

    async def resume(self, provisional: Sequence[int] = (), **changes: Any) -> Opened:
        return await self.open(replace(self.ticket(provisional), **changes))

    def ticket(self, provisional: Sequence[int] = ()) -> Resume:
        told = self.opened
        return Resume(told.session_id, told.session_key, told.epoch, tuple(self.output), tuple(provisional))

    async def step(self, num_steps: int = 1) -> None:
        """Let the hub take so many steps, or as many as there are to take; reads nothing."""
        self.stepped.num_allowed = num_steps
        self.stepped.idle.clear()
        self.verifier._awake.set()
        await asyncio.wait_for(self.stepped.idle.wait(), _WAIT_S)
        self.stepped.num_allowed = 0

    @property
    def is_done(self) -> bool:
        return self.live.state.finish is not None

    async def read(self, num_ids: int) -> None:
        """Read until so many ids of the output are there."""
        while len(self.output) < num_ids and not self.finished:
            await self._next()

    async def run(self) -> list[int]:
        """Step and read to the end."""
        while not self.finished:
            await self.step(0 if self.is_done else 40)
            while self.live._outbox.qsize():
                await self._next()
        return self.output

    async def _next(self) -> HubFrame:
        frame = await asyncio.wait_for(anext(self._frames), _WAIT_S)
        if isinstance(frame, Verdict):
            assert frame.base == len(self.request.prompt_ids) + len(self.output)
            assert frame.epoch == self.opened.epoch
            self.verdicts.append(frame)
            self.output += frame.token_ids
            self.logprobs += frame.logprobs
        elif isinstance(frame, Finished):
            self.finished = frame
        return frame


@asynccontextmanager
async def hub(**settings: Any) -> AsyncIterator[tuple[Verifier, Stepped]]:
    """Serve the tiny target; afterwards every page must be back."""
    engine = TransformersEngine(twin(_TARGET), kv_cache_mb=8)
    stepped = Stepped()
    async with Verifier(engine, stepped, _LIMITS, link=LinkPolicy(**settings)) as verifier:
        yield verifier, stepped
    assert (verifier.num_sessions, verifier.num_orphans, engine.pool.num_held) == (0, 0, 0)
    engine.pool.check_integrity()
    await engine.close()


def request_of(**params: Any) -> Open:
    return Open(
        _PROMPT,
        SamplingParams(**({"max_tokens": _NUM_IDS, "ignore_eos": True} | params)),
        _TARGET.fingerprint,
        _TARGET.bundle.digest,
    )


SAMPLED = {"temperature": 0.9, "seed": 7, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4}
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": SAMPLED | {"top_p": 0.95},
    "logprobs": SAMPLED | {"logprobs": 2},
    "forced": SAMPLED | {"forced_ids": (70, 71, 72), "min_tokens": 8, "ignore_eos": False},
    "grammar": {"grammar": Grammar.regex("[a-f]{3}(xy)*[0-9]{3,5}"), "ignore_eos": False, "temperature": 1, "seed": 5},
    "rejection": {"temperature": 1, "seed": 3, "sampling_mode": "rejection"},
    "letters": {"allowed_ids": _LETTERS, "temperature": 1, "seed": 11},
}


async def undisturbed(verifier: Verifier, stepped: Stepped, request: Open) -> Node:
    node = Node(verifier, stepped, request)
    await node.open()
    await node.run()
    return node


async def stopped_request(verifier: Verifier, stepped: Stepped, first: int, last: int) -> Open:
    """A request whose stop string is what the ids `first` to `last` of its output say."""
    free = await undisturbed(verifier, stepped, request_of(**REQUESTS["letters"]))
    text = b"".join(_TARGET.vocabulary.text_bytes(i) for i in free.output[first : last + 1]).decode()
    return request_of(**REQUESTS["letters"], stop_strings=(text,))


# -- every break position


@pytest.mark.parametrize("kind", REQUESTS)
@pytest.mark.parametrize("num_missed", [0, 1, 4, 99, None])
async def test_a_break_at_any_place_changes_nothing(kind: str, num_missed: int | None) -> None:
    """The hub went `num_missed` steps ahead of what the node has read; None: it has lost everything."""
    async with hub() as (verifier, stepped):
        whole = await undisturbed(verifier, stepped, request_of(**REQUESTS[kind]))
        assert whole.finished
        for place in range(len(whole.output)):
            node = Node(verifier, stepped, whole.request)
            first = await node.open()
            await node.step(place)
            await node.read(place)
            if num_missed is None:
                node.live.close()
            else:
                node.live.lose()
                await node.step(num_missed)
            second = await node.resume()
            assert second.continued == (num_missed is not None)
            assert (second.session_id == first.session_id) == second.continued
            assert (second.session_key == first.session_key) == second.continued
            if second.continued:
                assert second.epoch == first.epoch + 1
            assert await node.run() == whole.output
            assert node.logprobs == whole.logprobs
            assert node.finished
            assert node.finished.reason is whole.finished.reason
            assert node.finished.usage.num_emitted == len(whole.output)
            assert node.finished.usage.num_prompt == len(_PROMPT)
            if num_missed and place + num_missed < len(whole.output):
                assert len(node.verdicts[place].token_ids) == num_missed  # all that was missed comes at once
                assert (node.verdicts[place].num_verified, node.verdicts[place].chain_id) == (0, 0)


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("span", [(3, 3), (2, 5), (0, 7)])
async def test_a_stop_string_may_span_the_break(span: tuple[int, int], keeps: bool) -> None:
    """Its first part was sent before the break, its last one comes after it."""
    async with hub() as (verifier, stepped):
        request = await stopped_request(verifier, stepped, *span)
        whole = await undisturbed(verifier, stepped, request)
        assert whole.finished
        assert whole.finished.reason is FinishReason.STOP
        for place in range(len(whole.output)):
            node = Node(verifier, stepped, request)
            await node.open()
            await node.step(place)
            await node.read(place)
            (node.live.lose if keeps else node.live.close)()
            await node.resume()
            assert await node.run() == whole.output
            assert node.finished
            assert node.finished.reason is FinishReason.STOP


@pytest.mark.parametrize("kind", ["greedy", "sampled", "stop string", "stop id"])
async def test_an_output_that_is_whole_is_finished_at_once(kind: str) -> None:
    """Only `Finished` was lost, and the hub has forgotten: it says so again, and computes nothing."""
    async with hub() as (verifier, stepped):
        request = request_of(**REQUESTS.get(kind, {}))
        if kind == "stop string":
            request = await stopped_request(verifier, stepped, 2, 4)
        if kind == "stop id":
            output = (await undisturbed(verifier, stepped, request)).output
            request = request_of(stop_ids=(output[6],))
        whole = await undisturbed(verifier, stepped, request)
        num_steps = len(stepped.plans)
        again = Node(verifier, stepped, request)
        again.opened, again.output = whole.opened, list(whole.output)
        await again.resume()
        frame = await again._next()
        assert isinstance(frame, Finished)
        assert whole.finished
        assert frame.reason is whole.finished.reason
        assert (frame.usage.num_emitted, frame.usage.num_steps) == (len(whole.output), 0)
        assert len(stepped.plans) == num_steps


async def test_breaks_may_follow_each_other() -> None:
    """After each id, in turn with the hub's state and without; also before any id came."""
    async with hub() as (verifier, stepped):
        whole = await undisturbed(verifier, stepped, request_of(**REQUESTS["logprobs"]))
        node = Node(verifier, stepped, whole.request)
        await node.open()
        for place in range(len(whole.output)):
            (node.live.close if place % 3 == 2 else node.live.lose)()
            await node.resume()
            if not node.is_done:
                await node.step()
            await node.read(place + 1)
        assert await node.run() == whole.output
        assert node.logprobs == whole.logprobs


# -- what the node decoded by itself


@pytest.mark.parametrize("kind", ["greedy", "logprobs", "grammar"])
@pytest.mark.parametrize("num_missed", [0, 3, 99, None])
@pytest.mark.parametrize("num_provisional", [1, 5, 20])
async def test_provisional_ids_are_checked_as_one_block(
    kind: str, num_missed: int | None, num_provisional: int
) -> None:
    """Right ones, or wrong at the first places, the last one and where the most that may be drafted ahead ends: the
    output does not change, and one step settles all of them."""
    place = 2
    async with hub() as (verifier, stepped):
        whole = await undisturbed(verifier, stepped, request_of(**REQUESTS[kind] | {"max_tokens": 26}))
        right = whole.output[place : place + num_provisional]
        ends = {0, 1, _AHEAD - 1, _AHEAD, _AHEAD + 1, len(right) - 1, len(right)}
        for wrong_at in sorted(end for end in ends if end <= len(right)):
            told = list(right)
            if wrong_at < len(right):
                told[wrong_at] = 99
            node = Node(verifier, stepped, replace(whole.request, drafter=_DRAFTS))
            await node.open()
            await node.step(place)
            await node.read(place)
            if num_missed is None:
                node.live.close()
            else:
                node.live.lose()
                await node.step(num_missed)
            gains = None if num_missed is None else list(node.live.state.pace.survival.gains())
            await node.resume(told)
            num_known = len(node.live.state.committed) - len(_PROMPT)
            if not node.is_done:
                await node.step()
            assert gains in (None, node.live.state.pace.survival.gains())  # it says nothing of its drafts
            if num_known <= place + wrong_at and num_known < place + len(right) and not node.is_done:
                await node.read(num_known + 1)
                assert node.verdicts[-1].num_verified == place + len(right) - num_known
                assert node.verdicts[-1].num_accepted == place + wrong_at - num_known
                assert node.verdicts[-1].chain_id == 1
            assert await node.run() == whole.output
            assert node.logprobs == whole.logprobs
            usage = node.finished and node.finished.usage
            assert usage
            assert usage.num_drafted == usage.num_accepted + usage.num_rejected + usage.num_discarded >= len(told)


async def test_more_than_fits_in_a_step_is_checked_in_pieces() -> None:
    """Of `max_prefill` ids at most, prompts and provisional ids together, whatever the depth of drafts."""
    async with hub() as (verifier, stepped):
        whole = await undisturbed(verifier, stepped, request_of(max_tokens=90))
        node = Node(verifier, stepped, whole.request)
        await node.open()
        await node.step(2)
        await node.read(2)
        node.live.close()
        await node.resume(whole.output[2:82])
        del stepped.plans[:]
        assert await node.run() == whole.output
    sizes = [len(block.pending) + len(block.draft) for plan in stepped.plans for _, block in plan.blocks]
    assert sizes[:3] == [_PREFILL, _PREFILL, 21]
    assert [v.num_accepted for v in node.verdicts[2:5]] == [27, 31, 20]
    assert sum(len(v.token_ids) for v in node.verdicts[2:5]) == 81


async def test_those_of_several_nodes_share_the_step() -> None:
    """No more of them together than one alone may have."""
    async with hub() as (verifier, stepped):
        whole = await undisturbed(verifier, stepped, request_of(max_tokens=60))
        nodes = [Node(verifier, stepped, whole.request) for _ in range(3)]
        for node in nodes:
            await node.open()
            node.live.lose()
            await node.resume(whole.output[:25])
        del stepped.plans[:]
        for node in nodes:
            assert await node.run() == whole.output
    for plan in stepped.plans:
        told = [block for _, block in plan.blocks if block.provisional or not block.decides]
        assert sum(len(block.pending) + len(block.draft) for block in told) <= _PREFILL


async def test_a_session_changes_hands_between_two_steps() -> None:
    """Who resumes while a step is under way waits for it, and is told what it decided."""
    async with hub() as (verifier, stepped):
        node = Node(verifier, stepped, request_of())
        await node.open()
        await node.step(2)
        await node.read(2)
        async with verifier._engine_free:  # as a step does
            node.live.lose()
            resuming = asyncio.create_task(node.resume())
            await asyncio.sleep(0.05)
            assert not resuming.done()
            assert node.live.state.epoch == 1
        assert (await resuming).continued
        assert node.live.state.epoch == 2


async def test_the_chain_that_they_begin_goes_on() -> None:
    """Chain 1 with an offset of their number, as soon as it is in bounds; then the next chain."""
    async with hub() as (verifier, stepped):
        whole = await undisturbed(verifier, stepped, request_of(max_tokens=30))
        node = Node(verifier, stepped, replace(whole.request, drafter=_DRAFTS))
        await node.open()
        node.live.lose()
        await node.resume(whole.output[:12])
        epoch, base = node.opened.epoch, len(_PROMPT)
        with pytest.raises(InvalidDraft, match="at most"):
            node.live.draft(Draft(epoch, 1, base, 12, (1,)))
        await node.step(2)  # the prompt with all of them, and one more
        assert len(node.live.state.committed) == base + 14
        node.live.draft(Draft(epoch, 1, base, 12, tuple(whole.output[12:19])))
        await node.step()
        node.live.draft(Draft(epoch, 2, base + 14, 0, (99,)))
        assert await node.run() == whole.output
    third = node.verdicts[2]
    assert (third.chain_id, third.num_verified > 0) == (1, True)
    assert third.num_accepted == third.num_verified


async def test_refuted_ids_leave_the_mailbox_to_the_next_chain() -> None:
    """What the node adds to a chain that was refuted, because it does not know yet, is discarded."""
    async with hub() as (verifier, stepped):
        whole = await undisturbed(verifier, stepped, request_of(max_tokens=20))
        node = Node(verifier, stepped, replace(whole.request, drafter=_DRAFTS))
        await node.open()
        await node.step(3)
        node.live.lose()
        node.output = []
        await node.resume([whole.output[0], 99, *whole.output[2:6]])
        node.live.draft(Draft(node.opened.epoch, 1, len(_PROMPT), 6, (98,)))
        assert node.live.state.mailbox.usable(node.live.state.committed) == ()
        assert node.live.state.mailbox.num_provisional == 0
        assert await node.run() == whole.output


@pytest.mark.parametrize("verify_blocks", [False, True])
async def test_under_rejection_sampling_they_are_picked_not_drawn(verify_blocks: bool) -> None:
    """Their block has no distributions; what is drafted after them may have some."""
    params = {"temperature": 0.5, "seed": 3, "sampling_mode": "rejection", "verify_blocks": verify_blocks}
    async with hub() as (verifier, stepped):
        likely = (await undisturbed(verifier, stepped, request_of(max_tokens=6))).output
        node = Node(verifier, stepped, replace(request_of(**params, max_tokens=20), drafter=_DRAFTS))
        await node.open()
        node.live.lose()
        await node.resume(likely)
        probs = SparseProbs.of([(likely[0], 0.5), (7, 0.5)])
        node.live.draft(Draft(node.opened.epoch, 1, len(_PROMPT), 6, (likely[0],), (probs,)))
        del stepped.plans[:]
        await node.run()
    block = stepped.plans[0].blocks[0][1]
    assert (block.draft, block.draft_probs, block.provisional) == (tuple(likely), (), True)
    assert node.verdicts[0].num_verified == 6
    assert len(node.output) == 20


async def test_no_step_waits_while_they_are_there() -> None:
    """Not for a draft of theirs, nor for one of another session."""
    async with hub() as (verifier, stepped):
        stepped.real = GoodputScheduler(CostModel(), max_prefill=_PREFILL, max_patience_s=60.0)
        other = Node(verifier, stepped, replace(request_of(max_tokens=40), drafter=_DRAFTS))
        await other.open()
        await other.step(2)
        node = Node(verifier, stepped, replace(request_of(max_tokens=40), drafter=_DRAFTS))
        await node.open()
        node.live.lose()
        await node.resume([99] * 10)
        assert not stepped.plans, "the other one alone is waited for"
        stepped.num_allowed = 1
        plan = stepped.plan([other.live.state, node.live.state], verifier._clock())
        assert {session for session, _ in plan.blocks} == {other.live.state, node.live.state}
        assert {len(block.draft) for session, block in plan.blocks if session is node.live.state} == {10}
        stepped.num_allowed = 0


# -- who may resume


async def test_a_wrong_key_is_refused() -> None:
    """And changes nothing for the session, which has its stream as before."""
    async with hub() as (verifier, stepped):
        whole = await undisturbed(verifier, stepped, request_of())
        node = Node(verifier, stepped, whole.request)
        told = await node.open()
        for key in (b"", b"x" * 32, told.session_key[:31]):
            thief = replace(whole.request, resume=replace(node.ticket(), session_key=key))
            with pytest.raises(PermissionDenied):
                await verifier.open(thief)
        with pytest.raises(PermissionDenied):
            await verifier.open(replace(whole.request, resume=node.ticket()), identity="somebody else")
        assert await node.run() == whole.output


async def test_keys_and_ids_are_random() -> None:
    """32 bytes, another for each session."""
    async with hub() as (verifier, stepped):
        told = [await Node(verifier, stepped, request_of()).open() for _ in range(3)]
        assert len({t.session_key for t in told}) == len({t.session_id for t in told}) == 3
        assert {len(t.session_key) for t in told} == {32}
        assert not any(t.continued for t in told)


async def test_a_later_stream_fences_the_one_before() -> None:
    """The old one ends with `Superseded`, and nothing that it still says concerns the session."""
    async with hub() as (verifier, stepped):
        whole = await undisturbed(verifier, stepped, request_of(max_tokens=20))
        node = Node(verifier, stepped, replace(whole.request, drafter=_DRAFTS))
        await node.open()
        await node.step(3)
        await node.read(3)
        old = node.live
        await node.resume()
        assert (node.opened.epoch, node.opened.continued) == (2, True)
        with pytest.raises(Superseded):
            async for _ in old.frames():
                pass
        old.draft(Draft(1, 5, len(_PROMPT) + 3, 0, (99,)))
        old.draft(Draft(2, 5, len(_PROMPT) + 3, 0, (99,)))
        old.heartbeat(Heartbeat(1, 1))
        old.finish(FinishReason.CANCELLED)
        old.fail(InvalidRequest("it is confused"))
        old.lose()
        old.close()
        assert old.closed
        assert not node.live.closed
        assert node.live.state.mailbox.num_stale_frames == 2
        assert await node.run() == whole.output


async def test_an_epoch_that_is_over_is_fenced() -> None:
    """Once the node has been heard in a later one; before that its `Opened` may have been lost."""
    async with hub() as (verifier, stepped):
        whole = await undisturbed(verifier, stepped, request_of())
        node = Node(verifier, stepped, whole.request)
        await node.open()
        ticket = node.ticket()
        for epoch in (2, 3):  # the node hears of none of these
            assert (await node.open(ticket)).epoch == epoch
        node.live.heartbeat(Heartbeat(1, 1))
        await node._next()
        with pytest.raises(Superseded):
            await verifier.open(replace(whole.request, resume=ticket))
        node.live.lose()
        with pytest.raises(Superseded):
            await verifier.open(replace(whole.request, resume=ticket))
        assert (await node.resume()).epoch == 4
        assert await node.run() == whole.output


async def test_what_contradicts_the_node_is_made_anew() -> None:
    """The node kept its own ids while the hub decided others; or it asks for something else."""
    async with hub() as (verifier, stepped):
        for change in ("ids", "more", "params", "prompt"):
            node = Node(verifier, stepped, request_of(max_tokens=20))
            first = await node.open()
            await node.step(4)
            await node.read(3)
            node.live.lose()
            if change == "ids":
                node.output[-1] = 99
            elif change == "more":
                node.output += [99] * 4
            elif change == "params":
                node.request = replace(node.request, params=replace(node.request.params, max_tokens=19))
            else:
                node.request = replace(node.request, prompt_ids=(*_PROMPT, node.output[0]))
                node.output = node.output[1:]
            told = await node.resume()
            assert not told.continued
            assert told.session_id != first.session_id
            assert verifier.num_sessions == 1
            begun = list(node.output)
            fresh = Node(verifier, stepped, replace(node.request, prompt_ids=(*node.request.prompt_ids, *begun)))
            fresh.request = replace(
                fresh.request,
                params=replace(node.request.params, max_tokens=(node.request.params.max_tokens or 0) - len(begun)),
            )
            assert (await node.run())[len(begun) :] == (await undisturbed(verifier, stepped, fresh.request)).output


async def test_ids_that_the_node_brought_are_never_decided_afterwards() -> None:
    """A session that began with them cannot go on before them: it would pass them off as the target's own."""
    async with hub() as (verifier, stepped):
        node = Node(verifier, stepped, request_of())
        await node.open()
        await node.step(2)
        await node.read(2)
        node.live.close()
        node.output += [99, 98]
        assert not (await node.resume()).continued
        await node.step(2)
        node.live.lose()
        del node.output[2:]
        assert not (await node.resume()).continued
        assert await node.run() == (await undisturbed(verifier, stepped, request_of())).output


@pytest.mark.parametrize("session_id", ["", "x" * 22])
async def test_a_session_that_is_not_here_is_made_anew(session_id: str) -> None:
    """Whatever its key and epoch: another hub may have made it."""
    async with hub() as (verifier, stepped):
        whole = await undisturbed(verifier, stepped, request_of())
        node = Node(verifier, stepped, whole.request)
        node.output = whole.output[:5]
        told = await node.open(Resume(session_id, b"k" * 32, 77, tuple(whole.output[:5])))
        assert (told.continued, told.epoch) == (False, 1)
        assert await node.run() == whole.output


@pytest.mark.parametrize(
    ("output", "provisional", "params"),
    [
        ((300,), (), {}),
        ((), (300,), {}),
        ((1,) * 13, (), {}),
        ((1,) * 6, (1,) * 7, {}),
        ((1,) * 510, (), {"max_tokens": None}),
        ((1,) * 100, (1,) * 410, {"max_tokens": None}),
        ((5, 6, 7), (), {"stop_ids": (6,)}),
    ],
)
async def test_what_no_session_can_hold_is_refused(
    output: tuple[int, ...], provisional: tuple[int, ...], params: dict[str, Any]
) -> None:
    """Ids of no vocabulary, more than the request or the context allows, and an output past its end."""
    async with hub() as (verifier, _):
        with pytest.raises(InvalidRequest) as refused:
            await verifier.open(replace(request_of(**params), resume=Resume("", b"", 1, output, provisional)))
        assert refused.value.details == {"param": "resume"}


async def test_a_draining_hub_takes_nobody_back() -> None:
    """Its sessions are to end, not to begin again."""
    async with hub() as (verifier, stepped):
        node = Node(verifier, stepped, request_of())
        await node.open()
        await verifier.drain(0.0)
        with pytest.raises(HubUnavailable, match="draining"):
            await node.resume()


async def test_how_fast_a_node_answered_before_the_break_is_forgotten() -> None:
    """The link may be another one; and the time that the node was away is no answer time."""
    async with hub() as (verifier, stepped):
        node = Node(verifier, stepped, replace(request_of(), drafter=_DRAFTS))
        await node.open()
        await node.step(2)
        await node.read(2)
        node.live.state.pace.answers.observe(9.0, 1)
        node.live.lose()
        await node.step(2)
        await node.resume()
        assert node.opened.max_draft_ahead > 0
        answers = node.live.state.pace.answers
        assert answers.num_observed == 0
        node.live.draft(Draft(2, 1, len(_PROMPT) + 2, 0, (99,)))  # begun before it knew what it had missed
        assert answers.num_observed == 0
        node.live.draft(Draft(2, 2, len(_PROMPT) + 4, 0, (99,)))
        assert answers.num_observed == 1
        assert answers.mean_s < 1

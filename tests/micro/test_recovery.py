"""A generation whose hub goes away in the middle: what it tells the next one, and what the caller sees."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import pytest

from baru_common.drafters import NgramDrafter, Proposal
from baru_common.errors import (
    BaruError,
    CapacityExhausted,
    ConfigError,
    HubTimeout,
    HubUnavailable,
    InvalidRequest,
    TargetMismatch,
)
from baru_common.frames import (
    Drain,
    Finished,
    FinishReason,
    Heartbeat,
    Open,
    Opened,
    Usage,
    Verdict,
)
from baru_common.sampling import SamplingContext, SamplingMode, SamplingParams
from baru_micro import (
    Confirmed,
    Event,
    Fallback,
    Finish,
    LinkChanged,
    LinkState,
    Provenance,
    Reconcile,
    Retracted,
    Started,
    Step,
)
from baru_micro.decoding import Generation
from baru_micro.fallback import LocalDecoder, require_model
from baru_micro.hubs import FailBack
from baru_micro.link import LinkEvent, Timers
from baru_micro.reach import Reach
from support.sampling import context, letters
from support.scripted import Line, ScriptedChannel, hubs_of

PROMPT = (1, 2)
TARGET = (10, 11, 12, 13, 14, 15)
"""What the target says."""
_GONE = HubUnavailable("gone")


def opened(num_committed: int = 2, epoch: int = 1, *, continued: bool = True, name: str = "s") -> Opened:
    return Opened(name * 16, epoch, num_committed, 8, name.encode() * 32, continued=continued)


def verdict(base: int, *ids: int, epoch: int = 1) -> Verdict:
    return Verdict(epoch, base, 0, 0, ids, depth_hint=8)


def finished(num_emitted: int = 6, **usage: Any) -> Finished:
    return Finished(FinishReason.LENGTH, replace(Usage(2, num_emitted, 4, 0, 0, 0, 0, 0, 0), **usage))


@dataclass
class Local:
    """Stands in for a node's own model: says what it was given, then nothing."""

    ids: Sequence[int]
    asked: list[list[int]]
    heard: asyncio.Event
    """Set when it has said all."""
    loop: asyncio.AbstractEventLoop
    pause_s: float = 0.0
    sampling: SamplingContext | None = None

    def decoder(self, sampling: SamplingContext) -> Local:
        self.sampling = sampling
        return self

    def propose(self, ids: Sequence[int], num_committed: int, max_tokens: int) -> Proposal:
        assert (num_committed, max_tokens) == (len(ids), 1)
        self.asked.append(list(ids))
        time.sleep(self.pause_s)
        if len(self.asked) > len(self.ids):
            self.loop.call_soon_threadsafe(self.heard.set)
            return Proposal()
        return Proposal([self.ids[len(self.asked) - 1]])


def local(*ids: int, pause_s: float = 0.0) -> Local:
    return Local(ids, [], asyncio.Event(), asyncio.get_running_loop(), pause_s)


def generation(
    executor: ThreadPoolExecutor, *channels: ScriptedChannel, own: Local | None = None, **options: Any
) -> Any:
    params = options.pop("params", SamplingParams(max_tokens=6))
    budget_s, fail_back = options.pop("budget_s", 10.0), options.pop("fail_back", FailBack.NEXT)
    sampling = replace(context(2, vocabulary=letters(), eos_ids=(2,)), params=params)
    return Generation(
        reach=Reach(hubs_of(*channels, fail_back=fail_back), budget_s),
        start=Open(PROMPT, params, b"", b""),
        sampling=sampling,
        max_length=options.pop("max_length", 8),
        drafter=None,
        local=LocalDecoder(own, sampling) if own else None,
        executor=executor,
        target="scripted",
        **({"fallback": Fallback.LOCAL if own else Fallback.WAIT} | options),
    )


async def run(*channels: ScriptedChannel, **options: Any) -> list[Event]:
    with ThreadPoolExecutor(1) as executor:
        return [event async for event in generation(executor, *channels, **options).events()]


def told(events: Sequence[Event]) -> list[Event]:
    """The events that are not steps, the last one left out."""
    return [event for event in events[1:-1] if not isinstance(event, Step)]


def finish_of(events: Sequence[Event]) -> Finish:
    assert isinstance(events[-1], Finish)
    return events[-1]


# -- without a model of its own


async def test_it_goes_on_where_it_was() -> None:
    """What arrived is what it says stands; the session is named, and nothing comes twice."""
    channel = ScriptedChannel(
        [[opened(), verdict(2, 10, 11), _GONE], [opened(4, 2), verdict(4, 12, 13, 14, 15, epoch=2), finished()]]
    )
    events = await run(channel)
    resume = channel.streams[1].opened_with.resume
    assert resume
    assert (resume.session_id, resume.session_key, resume.epoch) == ("s" * 16, b"s" * 32, 1)
    assert (resume.output_ids, resume.provisional_ids) == (TARGET[:2], ())
    assert finish_of(events).ids == TARGET
    assert finish_of(events).spans[0].provenance is Provenance.VERIFIED
    assert [e.state for e in told(events) if isinstance(e, LinkChanged)] == [LinkState.DOWN, LinkState.UP]
    assert [token for e in events if isinstance(e, Step) for token in e.ids] == list(TARGET)


async def test_a_link_that_breaks_again_and_again() -> None:
    """Each time from where it is then; the epoch is the last one."""
    scripts: list[list[Line]] = [
        [opened(2 + n, n + 1), verdict(2 + n, TARGET[n], epoch=n + 1), _GONE] for n in range(5)
    ]
    channel = ScriptedChannel([*scripts, [opened(7, 6), verdict(7, 15, epoch=6), finished()]])
    assert finish_of(await run(channel)).ids == TARGET
    resumes = [stream.opened_with.resume for stream in channel.streams[1:]]
    assert [(r.epoch, r.output_ids) for r in resumes if r] == [(n, TARGET[:n]) for n in range(1, 6)]


async def test_attempts_go_on_until_one_is_answered() -> None:
    """Nobody there, no room, an answer that breaks off: all are tried again."""
    channel = ScriptedChannel(
        [
            [opened(), verdict(2, 10), _GONE],
            [CapacityExhausted("full")],
            [HubTimeout("slow")],
            [opened(3, 2), verdict(3, *TARGET[1:], epoch=2), finished()],
        ],
        unready=[_GONE, _GONE],
    )
    assert finish_of(await run(channel)).ids == TARGET


async def test_the_budget_ends_it() -> None:
    channel = ScriptedChannel([[opened(), verdict(2, 10), _GONE]], unready=[_GONE] * 1000)
    with pytest.raises(HubUnavailable, match="gone"):
        await run(channel, budget_s=0.3)


async def test_a_node_that_begins_alone_is_checked_later() -> None:
    """No hub ever admitted the session: what was decoded is offered with the request itself."""
    own = local(10, 99)
    channel = ScriptedChannel(
        [[_GONE], [opened(continued=False), verdict(2, *TARGET), finished()]], unready=[_GONE] * 200
    )
    task = asyncio.create_task(run(channel, own=own))
    await asyncio.wait_for(own.heard.wait(), 5)
    channel.unready.clear()
    events = await task
    assert [type(e) for e in events[:2]] == [Started, LinkChanged]
    resume = channel.streams[1].opened_with.resume
    assert resume
    assert (resume.session_id, resume.epoch, resume.output_ids, resume.provisional_ids) == ("", 0, (), (10, 99))
    assert finish_of(events).ids == TARGET
    assert [type(e) for e in events if isinstance(e, (Confirmed, Retracted))] == [Confirmed, Retracted]


async def test_fail_means_at_once() -> None:
    channel = ScriptedChannel([[opened(), verdict(2, 10), _GONE]])
    with pytest.raises(HubUnavailable, match="gone"):
        await run(channel, fallback=Fallback.FAIL)
    assert len(channel.streams) == 1


@pytest.mark.parametrize("error", [InvalidRequest("no"), TargetMismatch("another"), BaruError("odd")])
async def test_what_a_hub_refuses_is_not_tried_again(error: BaruError) -> None:
    scripts: list[list[Line]] = [[opened(), verdict(2, 10), error], [opened(), _GONE]]
    for script in scripts:
        channel = ScriptedChannel([script, [error]])
        with pytest.raises(type(error)):
            await run(channel)


@pytest.mark.parametrize("fallback", [Fallback.WAIT, Fallback.FAIL])
async def test_a_link_that_breaks_before_the_hub_has_answered(fallback: Fallback) -> None:
    """It is an outage like any other."""
    channel = ScriptedChannel([[_GONE], [opened(continued=False), verdict(2, *TARGET), finished()]])
    if fallback is Fallback.FAIL:
        with pytest.raises(HubUnavailable):
            await run(channel, fallback=fallback)
        return
    events = await run(channel, fallback=fallback)
    assert channel.streams[1].opened_with.resume is None
    assert finish_of(events).ids == TARGET
    assert events[0] == Started("", "scripted", 2)


# -- silence


async def test_a_stream_that_falls_silent_is_lost() -> None:
    """Without a word from the transport; the connection is given up with it, once."""
    never = asyncio.Event()
    channel = ScriptedChannel(
        [[opened(), verdict(2, 10), never], [opened(3, 2), verdict(3, *TARGET[1:], epoch=2), finished()]]
    )
    events = await run(channel, timers=Timers(0.02, 0.05, 0.1))
    assert finish_of(events).ids == TARGET
    assert channel.num_renewed == 1
    lost = next(e for e in told(events) if isinstance(e, LinkChanged))
    assert "nothing was heard" in lost.reason
    beats = [frame for frame in channel.streams[0].sent if isinstance(frame, Heartbeat)]
    assert [beat.sequence for beat in beats] == list(range(1, len(beats) + 1))
    assert len(beats) >= 3


async def test_round_trips_are_samples_of_the_link() -> None:
    channel = ScriptedChannel([[opened(), Heartbeat(1, 0), verdict(2, *TARGET), finished()]])
    await run(channel, clock=lambda: 0.25)
    assert channel.link.round_trip_s == 0.25


# -- with a model of its own


async def test_its_own_ids_are_provisional_and_checked() -> None:
    """They follow what stands; the hub is told of them; what it says alike is confirmed, the rest withdrawn."""
    own = local(12, 13, 99)
    channel = ScriptedChannel(
        [
            [opened(), verdict(2, 10, 11), _GONE],
            [opened(4, 2), verdict(4, 12, 13, 14, epoch=2), verdict(7, 15, epoch=2), finished()],
        ]
    )
    channel.unready += [_GONE] * 200
    task = asyncio.create_task(run(channel, own=own))
    await asyncio.wait_for(own.heard.wait(), 5)
    channel.unready.clear()
    events = await task
    assert own.asked[:3] == [[1, 2, 10, 11], [1, 2, 10, 11, 12], [1, 2, 10, 11, 12, 13]]
    resume = channel.streams[1].opened_with.resume
    assert resume
    assert (resume.output_ids, resume.provisional_ids) == ((10, 11), (12, 13, 99))
    steps = [e for e in events if isinstance(e, Step)]
    assert [s.ids for s in steps if s.provenance is Provenance.PROVISIONAL] == [(12,), (13,), (99,)]
    assert [e for e in told(events) if isinstance(e, (Confirmed, Retracted))] == [
        Confirmed(2, 4),
        Retracted(4, (99,), letters().pieces[99].decode()),  # type: ignore[union-attr]
    ]
    finish = finish_of(events)
    assert finish.ids == TARGET
    assert finish.text == "".join((letters().pieces[i] or b"").decode() for i in TARGET)
    assert {span.provenance for span in finish.spans} == {Provenance.VERIFIED}


async def test_kept_ids_stand_and_are_marked() -> None:
    own = local(90, 91)
    channel = ScriptedChannel(
        [
            [opened(), verdict(2, 10, 11), _GONE],
            [opened(6, 1, continued=False, name="t"), verdict(6, 14, 15), finished()],
        ],
        unready=[_GONE] * 200,
    )
    task = asyncio.create_task(run(channel, own=own, reconcile=Reconcile.KEEP))
    await asyncio.wait_for(own.heard.wait(), 5)
    channel.unready.clear()
    events = await task
    resume = channel.streams[1].opened_with.resume
    assert resume
    assert (resume.output_ids, resume.provisional_ids) == ((10, 11, 90, 91), ())
    finish = finish_of(events)
    assert finish.ids == (10, 11, 90, 91, 14, 15)
    assert [(s.start, s.end, s.provenance.value) for s in finish.spans] == [
        (0, 2, "verified"),
        (2, 4, "provisional"),
        (4, 6, "verified"),
    ]
    assert not any(isinstance(e, (Retracted, Confirmed)) for e in events)


@pytest.mark.parametrize("reconcile", list(Reconcile))
async def test_what_a_hub_is_told_is_what_stands(reconcile: Reconcile) -> None:
    """Kept ids are what the hub goes on from, so none may come after it was told of them; and when it does not answer
    after all, decoding goes on. Ids that are to be checked may come meanwhile."""
    own, answer = local(*[90] * 2000, pause_s=0.01), asyncio.Event()
    channel = ScriptedChannel([[opened(), verdict(2, 10), _GONE], [answer, _GONE], [InvalidRequest("enough")]])
    task = asyncio.create_task(
        run(channel, own=own, reconcile=reconcile, params=SamplingParams(max_tokens=3000), max_length=3002)
    )
    await until(lambda: len(channel.streams) == 2)
    resume = channel.streams[1].opened_with.resume
    assert resume
    num_told = len(resume.output_ids) + len(resume.provisional_ids) - 1
    if reconcile is Reconcile.KEEP:
        await asyncio.sleep(0.2)
        assert len(own.asked) <= num_told + 2  # the last one is held back
    else:
        await until(lambda: len(own.asked) > num_told + 5)
    channel.unready += [_GONE] * 200
    num_asked = len(own.asked)
    answer.set()
    await until(lambda: len(own.asked) > num_asked + 2)
    channel.unready.clear()
    with pytest.raises(InvalidRequest, match="enough"):
        await task


async def until(holds: Callable[[], bool]) -> None:
    async def poll() -> None:
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.002)

    await asyncio.wait_for(poll(), 10)


async def test_what_the_orphan_decided_is_compared_with_what_was_decoded() -> None:
    own = local(12, 99)
    channel = ScriptedChannel(
        [
            [opened(), verdict(2, 10, 11), _GONE],
            [opened(4, 2), verdict(4, *TARGET[2:], epoch=2), finished()],
        ],
        unready=[_GONE] * 200,
    )
    task = asyncio.create_task(run(channel, own=own))
    await asyncio.wait_for(own.heard.wait(), 5)
    channel.unready.clear()
    events = await task
    assert finish_of(events).ids == TARGET
    assert [type(e) for e in told(events) if isinstance(e, (Confirmed, Retracted))] == [Confirmed, Retracted]


@pytest.mark.parametrize("ids", [(90, 91, 92, 93, 94, 95), (90, 2)])
@pytest.mark.parametrize("reconcile", list(Reconcile))
async def test_an_output_completed_alone(ids: tuple[int, ...], reconcile: Reconcile) -> None:
    """What stands as it is, is finished at once; what is to be checked waits for a hub, as long as the budget lasts."""
    own = local(*ids)
    channel = ScriptedChannel([[opened(), _GONE]], unready=[_GONE] * 1000)
    budget_s = 30.0 if reconcile is Reconcile.KEEP else 0.4
    events = await asyncio.wait_for(run(channel, own=own, reconcile=reconcile, budget_s=budget_s), 10)
    finish = finish_of(events)
    assert finish.ids == ids
    assert {span.provenance for span in finish.spans} == {Provenance.PROVISIONAL}
    assert finish.reason is (FinishReason.STOP if ids[-1] == 2 else FinishReason.LENGTH)
    assert finish.stopped_by == (2 if ids[-1] == 2 else None)
    assert (finish.usage.num_emitted, finish.usage.num_steps) == (len(ids), 0)


async def test_an_end_decoded_alone_may_be_wrong() -> None:
    """The hub is asked, and goes on where the node's model stopped."""
    own = local(2)
    channel = ScriptedChannel([[opened(), _GONE], [opened(2, 2), verdict(2, *TARGET, epoch=2), finished()]])
    channel.unready += [_GONE] * 3
    events = await run(channel, own=own)
    assert finish_of(events).ids == TARGET
    assert any(isinstance(e, Retracted) and e.ids == (2,) for e in events)


async def test_what_is_shown_past_the_targets_end_is_withdrawn() -> None:
    own = local(10, 11, 12, 13)
    done = Finished(FinishReason.STOP, replace(finished(2).usage))
    channel = ScriptedChannel(
        [[opened(), _GONE], [opened(2, 2), verdict(2, 10, 2, epoch=2), done]], unready=[_GONE] * 200
    )
    task = asyncio.create_task(run(channel, own=own))
    await asyncio.wait_for(own.heard.wait(), 5)
    channel.unready.clear()
    events = await task
    assert finish_of(events).ids == (10, 2)
    assert any(isinstance(e, Retracted) for e in events)


async def test_what_is_shown_past_what_the_hub_ended_with_is_withdrawn() -> None:
    """It agreed so far, and ended for a reason of its own."""
    own = local(10, 11)
    done = Finished(FinishReason.CANCELLED, finished(1).usage)
    channel = ScriptedChannel([[opened(), _GONE], [opened(2, 2), verdict(2, 10, epoch=2), done]], unready=[_GONE] * 200)
    task = asyncio.create_task(run(channel, own=own))
    await asyncio.wait_for(own.heard.wait(), 5)
    channel.unready.clear()
    events = await task
    assert finish_of(events).ids == (10,)
    assert [e.ids for e in events if isinstance(e, Retracted)] == [(11,)]


async def test_local_ids_are_chosen_as_the_request_says() -> None:
    """By draws of its own where the hub would reject: nobody checks them here."""
    params = SamplingParams(
        max_tokens=6, temperature=0.7, seed=5, sampling_mode=SamplingMode.REJECTION, verify_blocks=True
    )
    own = local(90)
    channel = ScriptedChannel([[opened(), _GONE]], unready=[_GONE] * 1000)
    with pytest.raises(HubUnavailable):
        await run(channel, own=own, params=params, budget_s=0.3)
    assert own.sampling
    assert own.sampling.params == replace(params, sampling_mode=SamplingMode.COUPLED, verify_blocks=False)


def test_a_node_without_a_model_cannot_decode() -> None:
    with pytest.raises(ConfigError, match="ngram"):
        require_model(NgramDrafter())
    with pytest.raises(ConfigError, match="none"):
        require_model(None)


# -- several hubs


async def test_another_hub_goes_on_by_replay() -> None:
    """With the same ids; it does not know the session, and makes one of its own."""
    first = ScriptedChannel([[opened(), verdict(2, 10, 11), _GONE]], address="first")
    second = ScriptedChannel(
        [[opened(4, 1, continued=False, name="t"), verdict(4, *TARGET[2:]), finished(num_steps=1)]], address="second"
    )
    first.unready += [_GONE] * 200
    events = await run(first, second)
    assert second.streams[0].opened_with.committed == (1, 2, 10, 11)
    finish = finish_of(events)
    assert finish.ids == TARGET
    assert finish.usage.num_steps == 1 + 1  # one verdict of the lost session
    assert finish.usage.num_emitted == 6
    assert [e.hub for e in told(events) if isinstance(e, LinkChanged)] == ["first", "second"]


async def test_its_own_hub_is_asked_first() -> None:
    """It may still have the session, even if it is not the first choice."""
    first = ScriptedChannel([[_GONE]], address="first")
    second = ScriptedChannel(
        [[opened(), verdict(2, 10), _GONE], [opened(3, 2), verdict(3, *TARGET[1:], epoch=2), finished()]],
        address="second",
    )
    assert finish_of(await run(first, second)).ids == TARGET
    assert (len(first.streams), len(second.streams)) == (1, 2)


@pytest.mark.parametrize("fail_back", list(FailBack))
async def test_where_the_next_generation_goes(fail_back: FailBack) -> None:
    first, second = ScriptedChannel([[_GONE]], address="first"), ScriptedChannel([], address="second")
    hubs = hubs_of(first, second, fail_back=fail_back)
    hubs.answered(second)  # type: ignore[arg-type]
    order = [channel.address for channel in hubs.in_order()]
    assert order == (["first", "second"] if fail_back is FailBack.NEXT else ["second", "first"])
    first.link.happen(LinkEvent.BROKE)
    assert hubs.in_order()[0].address == "second"
    first.link.happen(LinkEvent.HEARD)
    first.link.happen(LinkEvent.DRAIN)
    assert hubs.in_order()[0].address == "second"
    assert hubs.in_order(stay_with=first)[0].address == "second"  # type: ignore[arg-type]


async def test_a_hub_that_goes_down_hands_over() -> None:
    """To another one, if there is one; alone it is used to the end."""
    only = ScriptedChannel([[opened(), Drain(5.0), verdict(2, *TARGET), finished()]])
    events = await run(only)
    assert finish_of(events).ids == TARGET
    assert [e.state for e in told(events) if isinstance(e, LinkChanged)] == [LinkState.DRAINING]
    first = ScriptedChannel([[opened(), verdict(2, 10), Drain(5.0), asyncio.Event()]], address="first")
    second = ScriptedChannel(
        [[opened(3, continued=False, name="t"), verdict(3, *TARGET[1:]), finished()]], address="second"
    )
    events = await run(first, second)
    assert finish_of(events).ids == TARGET
    assert second.streams
    assert first.streams[0].closed


# -- what is left


async def test_leaving_in_an_outage_leaves_nothing() -> None:
    before = asyncio.all_tasks()
    channel = ScriptedChannel([[opened(), verdict(2, 10), _GONE]], unready=[_GONE] * 1000)
    with ThreadPoolExecutor(1) as executor:
        events = generation(executor, channel, own=local(11, 12)).events()
        async for event in events:
            if isinstance(event, Step) and event.provenance is Provenance.PROVISIONAL:
                break
        await events.aclose()
    assert asyncio.all_tasks() == before
    assert all(stream.closed for stream in channel.streams)


async def test_kept_ids_come_in_each_outage() -> None:
    """A hub that was told what stands, and answered, holds nothing back when it is gone again."""
    own = local(*[90] * 2000, pause_s=0.01)
    scripts: list[list[Line]] = [[opened(), _GONE], [], [InvalidRequest("enough")]]
    channel = ScriptedChannel(scripts)

    def answer(request: Open) -> list[Line]:
        return [opened(len(request.committed), continued=False), _GONE]

    channel.answer = answer
    task = asyncio.create_task(
        run(channel, own=own, reconcile=Reconcile.KEEP, params=SamplingParams(max_tokens=3000), max_length=3002)
    )
    await until(lambda: len(channel.streams) == 2)
    channel.unready += [_GONE] * 200
    num_asked = len(own.asked)
    await until(lambda: len(own.asked) > num_asked + 3)
    channel.unready.clear()
    with pytest.raises(InvalidRequest, match="enough"):
        await task

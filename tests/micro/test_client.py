"""The node library against a real hub on loopback: what it refuses, what it yields, what it leaves behind."""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from baru_common.errors import (
    BaruError,
    ConfigError,
    EmptyPrompt,
    HubUnavailable,
    InvalidDraft,
    InvalidRequest,
    PromptTooLong,
    ProtocolMismatch,
    VocabularyMismatch,
)
from baru_common.frames import HubDescription
from baru_common.sampling import SamplingParams
from baru_common.tokens import Tokenizer
from baru_hub.server import Hub
from baru_hub.verifier import Verifier
from baru_micro import Finish, FinishReason, Kind, MicroNode, Provenance, Span, Started, Step
from support.drafters import FunctionDrafter, oracle
from support.hubs import generate, hub_of
from support.lockstep import free_running
from support.tiny import plain_greedy, tiny_bundle, tiny_target

_WAIT_S = 10.0
_TARGET = tiny_target()
_PROMPT = [1, 5, 9]
_LONG = SamplingParams(ignore_eos=True)
_SHORT = SamplingParams(max_tokens=24, ignore_eos=True)


async def until(holds: Callable[[], bool]) -> None:
    async def poll() -> None:
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    await asyncio.wait_for(poll(), _WAIT_S)


# -- prompts


@pytest.mark.parametrize(
    ("prompt", "error"),
    [
        ("", EmptyPrompt),
        ([], EmptyPrompt),
        ((), EmptyPrompt),
        ([1, {"role": "user", "content": "x"}], InvalidRequest),
        ([{"role": "user", "content": "x"}, 1], InvalidRequest),
        ([1, "x"], InvalidRequest),
        ([1.0], InvalidRequest),
        ({"role": "user", "content": "x"}, InvalidRequest),
        ("lone \ud800 surrogate", InvalidRequest),
        ([-1], InvalidRequest),
        ([1, 300], InvalidRequest),
        ([1 << 40], InvalidRequest),
        ([1] * 512, PromptTooLong),
        ("x" * 512, PromptTooLong),
        (7, InvalidRequest),
        (None, InvalidRequest),
    ],
)
async def test_a_bad_prompt_is_refused_at_the_node(prompt: Any, error: type[BaruError]) -> None:
    """By its own name, before a session is opened; the node can be used on."""
    async with hub_of(_TARGET) as hub, MicroNode.connect(hub.address, drafter=None) as node:
        with pytest.raises(InvalidRequest) as refused:
            await anext(node.generate(prompt))
        assert type(refused.value) is error
        assert hub.verifier.num_sessions == 0
        assert isinstance(await anext(node.generate(_PROMPT, _SHORT)), Started)


@pytest.mark.parametrize("params", [{"max_tokens": 1 << 40}, {"stop_ids": (1 << 40,)}, {"stop_ids": (300,)}])
async def test_parameters_beyond_the_wire_are_no_crash(params: dict[str, Any]) -> None:
    """Numbers that fit no field: served as far as it makes sense, or refused as a wrong request."""
    async with hub_of(tiny_target(context_limit=64)) as hub:
        try:
            finish, _ = await generate(hub.address, _PROMPT, SamplingParams(ignore_eos=True, **params))
        except InvalidRequest:
            return
        assert "max_tokens" in params
        assert len(finish.ids) == 61


# -- connecting


async def test_an_unknown_drafter_is_refused_before_anything_is_asked() -> None:
    """It needs no hub to be wrong; the message says which there are."""
    with pytest.raises(ConfigError, match="'telepathy'") as refused:
        async with MicroNode.connect("127.0.0.1:1", drafter="telepathy"):
            pass
    assert "ngram" in refused.value.hint


async def test_a_hub_that_is_down_is_unavailable() -> None:
    """The address is in the message; nobody waits longer than told."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound, not listening
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(HubUnavailable, match=f"no hub answers at {address}") as refused:
            async with MicroNode.connect(address, timeout_s=2.0):
                pass
    assert "baru-hub serve" in refused.value.hint


async def test_a_hub_of_another_revision_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both revisions are named."""
    describe = Verifier.describe

    def of_tomorrow(self: Verifier) -> HubDescription:
        return replace(describe(self), protocol_revision=9)

    monkeypatch.setattr(Verifier, "describe", of_tomorrow)
    async with hub_of(_TARGET) as hub:
        with pytest.raises(ProtocolMismatch, match="revision 9, this node 1"):
            async with MicroNode.connect(hub.address):
                pass


async def test_a_drafter_of_another_vocabulary_is_refused() -> None:
    """With the first id that differs, before a token is drafted."""
    other = Tokenizer(tiny_bundle(num_ids=290)).vocabulary
    drafter = FunctionDrafter(lambda *_: [], "mine", other)
    async with hub_of(_TARGET) as hub:
        with pytest.raises(VocabularyMismatch, match="id 290") as refused:
            async with MicroNode.connect(hub.address, drafter=drafter):
                pass
    assert refused.value.details == {"first_differing_id": "290"}


# -- events


@pytest.mark.parametrize("depth", [0, 1, 5])
async def test_the_events_tell_one_story(depth: int) -> None:
    """Started, steps without a gap, Finish; kinds, text and spans agree with the ids and the counts."""
    expected = plain_greedy(_TARGET, _PROMPT, 24)
    drafter = oracle(_PROMPT, expected, depth) if depth else None
    async with hub_of(_TARGET) as hub, MicroNode.connect(hub.address, drafter=drafter) as node:
        started, *steps, finish = [event async for event in node.generate(_PROMPT, _SHORT)]
    assert isinstance(started, Started)
    assert (started.target, started.num_prompt) == ("tiny-0-0.0", 3)
    assert isinstance(finish, Finish)
    ids: list[int] = []
    for step in steps:
        assert isinstance(step, Step)
        assert (step.base, step.provenance) == (3 + len(ids), Provenance.VERIFIED)
        ids += step.ids
        kinds = [piece.kind for piece in step.pieces]
        last = Kind.BONUS if step.stats.num_verified else Kind.PLAIN
        assert kinds == [*[Kind.ACCEPTED] * step.stats.num_accepted, last]
    assert ids == list(finish.ids) == expected
    assert finish.text == "".join(s.text for s in steps if isinstance(s, Step)) + finish.tail
    assert (finish.reason, finish.spans) == (FinishReason.LENGTH, (Span(0, 24, Provenance.VERIFIED),))
    assert (finish.usage.num_emitted, finish.usage.num_steps) == (24, len(steps))
    assert 0 < finish.time_to_first_token_s <= finish.elapsed_s


async def test_generations_of_one_node_do_not_mix() -> None:
    """Six at a time over one connection, each its own prompt."""
    prompts = [[1 + i, 40 + i] for i in range(6)]

    async def run(node: MicroNode, prompt: list[int]) -> list[int]:
        events = [event async for event in node.generate(prompt, _SHORT)]
        assert isinstance(events[-1], Finish)
        return list(events[-1].ids)

    async with hub_of(_TARGET, scheduler=free_running()) as hub, MicroNode.connect(hub.address) as node:
        assert await asyncio.gather(*(run(node, prompt) for prompt in prompts)) == [
            plain_greedy(_TARGET, prompt, 24) for prompt in prompts
        ]


# -- drafters that misbehave


def _raises(*_: object) -> list[int]:
    raise ZeroDivisionError("no idea")


@pytest.mark.parametrize("blocking", [False, True])
async def test_a_drafter_that_fails_ends_its_generation(blocking: bool) -> None:
    """With the drafter's own words, and not in silence; the hub has nothing left of it."""
    async with hub_of(_TARGET) as hub:
        with pytest.raises(BaruError, match=r"the drafter failed.*no idea"):
            await generate(hub.address, _PROMPT, _LONG, FunctionDrafter(_raises, blocking=blocking))
        await until(lambda: hub.verifier.num_sessions == 0)


@pytest.mark.parametrize("ids", [[300], [5] * 100])
async def test_a_drafter_that_breaks_the_rules_is_named(ids: list[int]) -> None:
    """Ids that do not exist, or more of them than were asked for."""
    async with hub_of(_TARGET) as hub:
        with pytest.raises(InvalidDraft):
            await generate(hub.address, _PROMPT, _LONG, FunctionDrafter(lambda *_: ids))


# -- leaving early


async def _break(node: MicroNode) -> None:
    async for event in node.generate(_PROMPT, _LONG):
        if isinstance(event, Step):
            break


async def _close(node: MicroNode) -> None:
    events = node.generate(_PROMPT, _LONG)
    await anext(events)
    await events.aclose()


async def _cancel(node: MicroNode) -> None:
    async def consume() -> None:
        async for event in node.generate(_PROMPT, _LONG):
            seen.set() if isinstance(event, Step) else None

    seen = asyncio.Event()
    task = asyncio.create_task(consume())
    await seen.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def _time_out(node: MicroNode) -> None:
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(_to_the_end(node), 0.1)


async def _to_the_end(node: MicroNode) -> None:
    async for _ in node.generate(_PROMPT, _LONG):
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("leave", [_break, _close, _cancel, _time_out])
async def test_leaving_early_leaves_nothing(leave: Callable[[MicroNode], Any]) -> None:
    """No session at the hub, no task at the node; the connection is as good as before."""
    async with hub_of(_TARGET, scheduler=free_running()) as hub, MicroNode.connect(hub.address) as node:
        await leave(node)
        gc.collect()
        await until(lambda: hub.verifier.num_sessions == 0)
        await until(lambda: not _drafting_tasks())
        assert [e async for e in node.generate(_PROMPT, _SHORT) if isinstance(e, Finish)]


async def test_disconnecting_ends_a_generation_that_was_put_aside() -> None:
    """Nobody reads it any more, and its iterator is still held."""
    hub: Hub
    async with hub_of(_TARGET, scheduler=free_running()) as hub:
        async with MicroNode.connect(hub.address) as node:
            events = node.generate(_PROMPT, _LONG)
            await anext(events)
        await until(lambda: hub.verifier.num_sessions == 0)
        await events.aclose()
        await until(lambda: not _drafting_tasks())


def _drafting_tasks() -> list[str]:
    names = [getattr(task.get_coro(), "__qualname__", "") for task in asyncio.all_tasks()]
    return [name for name in names if name.startswith(("Generation.", "HubStream."))]

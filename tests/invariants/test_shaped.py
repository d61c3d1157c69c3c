"""A shaped stream is a stream like any other to those at its ends."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

import pytest

from baru_common.drafters.simulated import SimulatedDrafter
from baru_common.errors import BaruError, Incompatible
from baru_common.frames import Open, TrafficShape
from baru_hub.config import Shaping as HubShaping
from baru_micro import LinkOptions, LinkState, MicroNode, SamplingParams, Shaping, Step
from baru_micro.transport import HubChannel
from support.fault_proxy import FaultProxy
from support.faults import Fault
from support.hubs import hub_of
from support.link import PROMPT, Local, Shown, asked, script, scripted_engine, until
from support.lockstep import free_running

SHAPE: dict[str, Any] = {"traffic_shape": HubShaping.REQUIRED, "shape_tick_ms": 5, "shape_round_s": 0.2}
DEFAULT = TrafficShape()
ALLOWED = SHAPE | {"traffic_shape": HubShaping.ALLOWED}


async def test_the_caller_has_the_end_at_once_and_the_call_ends_with_its_round() -> None:
    """A prompt of many cells, drafts, verdicts; the session is over, and cells go on."""
    prompt, settings = PROMPT * 500, SHAPE | {"shape_round_s": 0.8}
    start_s = time.monotonic()
    async with (
        hub_of(scripted_engine(0.001), **settings) as hub,
        MicroNode.connect(hub.address, drafter=SimulatedDrafter(0.8)) as node,
    ):
        events = [event async for event in node.generate(prompt, asked(20))]
        assert [i for e in events if isinstance(e, Step) for i in e.ids] == script(20, len(prompt))
        assert hub.verifier.num_sessions == 0
        assert node._hubs.current.streams
    assert time.monotonic() - start_s >= 0.8


async def test_an_outage_is_one_as_ever() -> None:
    """Cut without a word, noticed, decoded through, resumed: the ids are the target's."""
    settings = SHAPE | {"scheduler": free_running()}
    async with (
        hub_of(scripted_engine(0.02), **settings) as hub,
        FaultProxy.open(hub.address) as proxy,
        MicroNode.connect(proxy.address, drafter=Local(0.8, token_ms=5)) as node,
    ):
        shown = Shown()
        following = asyncio.create_task(shown.follow(node, 120))
        await until(lambda: shown.num_steps >= 3)
        await proxy.apply(Fault.BLACK_HOLE)
        await until(lambda: shown.provisional)
        await proxy.heal()
        await following
    assert shown.ids == script(120)
    assert [change.state for change in shown.changes] == [LinkState.DOWN, LinkState.UP]


async def test_leaving_early_ends_the_session_and_not_the_call() -> None:
    """The hub is told within a cell."""
    async with hub_of(scripted_engine(0.01), **SHAPE) as hub, MicroNode.connect(hub.address, drafter=None) as node:
        events = node.generate(PROMPT, asked(10_000))
        await anext(events)
        await events.aclose()
        await until(lambda: hub.verifier.num_sessions == 0)
        (stream,) = node._hubs.current.streams
        await stream.ended()
        assert not node._hubs.current.streams


@pytest.mark.parametrize(
    ("hub_settings", "wanted", "words"),
    [
        pytest.param({}, Shaping.ON, "the hub does not", id="not-offered"),
        pytest.param(SHAPE, Shaping.OFF, "the hub requires", id="required"),
    ],
)
async def test_who_does_not_agree_does_not_talk(hub_settings: dict[str, Any], wanted: Shaping, words: str) -> None:
    """It is said when connecting."""
    async with hub_of(scripted_engine(0.001), **hub_settings) as hub:
        with pytest.raises(Incompatible, match=words):
            async with MicroNode.connect(hub.address, drafter=None, options=LinkOptions(shaping=wanted)):
                pass


@pytest.mark.parametrize(
    ("settings", "wanted", "shaped"),
    [(ALLOWED, Shaping.AUTO, False), (ALLOWED, Shaping.ON, True), (SHAPE, Shaping.AUTO, True)],
)
async def test_what_was_agreed_is_done(settings: dict[str, Any], wanted: Shaping, shaped: bool) -> None:
    """A shaped call outlives the answer."""
    options = LinkOptions(shaping=wanted)
    async with (
        hub_of(scripted_engine(0.001), **settings) as hub,
        MicroNode.connect(hub.address, drafter=None, options=options) as node,
    ):
        [event async for event in node.generate(PROMPT, asked(3))]
        assert bool(node._hubs.current.streams) is shaped


async def test_a_hub_refuses_what_it_did_not_agree_to() -> None:
    """Whatever a node does: plain streams where shaped ones are required, and the other way round."""
    request = Open(PROMPT, SamplingParams(max_tokens=3), bytes(32), bytes(32))

    async def refusal(hub_settings: dict[str, Any], *, shaped: bool) -> BaruError:
        async with hub_of(scripted_engine(0.001), **hub_settings) as hub:
            channel = HubChannel(hub.address, timeout_s=5)
            offered = (await channel.describe()).traffic_shape
            stream = channel.open_stream((offered or replace(DEFAULT, tick_ms=5)) if shaped else None)
            stream.send(request)
            try:
                with pytest.raises(BaruError) as refused:
                    [frame async for frame in stream.frames()]
            finally:
                await channel.close()
            return refused.value

    assert "shaped streams only" in (await refusal(SHAPE, shaped=False)).message
    assert "shapes no traffic" in (await refusal({}, shaped=True)).message
    wrong = await refusal(SHAPE, shaped=True)
    assert type(wrong).__name__ == "TargetMismatch"  # within the cells, whole
    assert wrong.hint

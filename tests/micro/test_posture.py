"""What a node makes of the posture that a hub hands out. Hubs are scripted: no network, no clock."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from baru_common.board import tier_of
from baru_common.errors import HubUnavailable
from baru_common.frames import Finished, FinishReason, Open, Opened, Posture, PostureChange, Usage, Verdict
from baru_common.sampling import SamplingParams
from baru_common.tokens import Tokenizer
from baru_micro.decoding import Fallback, Generation
from baru_micro.events import Event, PostureChanged
from baru_micro.reach import Reach
from support.drafters import FunctionDrafter
from support.sampling import context
from support.scripted import Line, ScriptedChannel, hubs_of
from support.tiny import tiny_bundle

_VOCABULARY = Tokenizer(tiny_bundle()).vocabulary
_OPENED = Opened("s" * 16, 1, 2, 8)
_USAGE = Usage(2, 2, 2, 0, 0, 0, 0, 0, 0)
_END: list[Line] = [Verdict(1, 2, 0, 0, (5,), depth_hint=8), Verdict(1, 3, 0, 0, (6,), depth_hint=8)]
_FINISHED = Finished(FinishReason.LENGTH, _USAGE)
_DRAFTER = FunctionDrafter(lambda _ids, _committed, most: [7] * most)
_OFF = Posture(drafting=False, reason="too small")


async def run(*scripts: Sequence[Line], **settings: Any) -> tuple[list[Event], ScriptedChannel]:
    channel = ScriptedChannel(scripts)
    with ThreadPoolExecutor(1) as executor:
        generation = Generation(
            reach=Reach(hubs_of(channel), 5.0),
            start=Open((1, 2), SamplingParams(), b"", b""),
            sampling=context(2, vocabulary=_VOCABULARY, eos_ids=(2,)),
            max_length=100,
            drafter=_DRAFTER,
            local=None,
            executor=executor,
            target="scripted",
            clock=lambda: 100.0,
            **settings,
        )
        return [event async for event in generation.events()], channel


def longest(channel: ScriptedChannel) -> int:
    """Most ids that a frame of the node held."""
    return max((len(getattr(frame, "token_ids", ())) for frame in channel.streams[0].sent), default=0)


@pytest.mark.parametrize(
    ("posture", "most", "num_told"),
    [
        (None, 8, 0),
        (Posture(max_depth=2), 8, 0),
        (Posture(max_ahead=3), 3, 0),
        (_OFF, 0, 1),
    ],
)
async def test_a_node_drafts_no_more_than_it_may(posture: Posture | None, most: int, num_told: int) -> None:
    """The window is the hub's, as far as the posture goes; being turned off is told, and why."""
    events, channel = await run([replace(_OPENED, posture=posture), *_END, _FINISHED])
    assert longest(channel) == most
    told = [event for event in events if isinstance(event, PostureChanged)]
    assert [event.posture for event in told] == [posture] * num_told


@pytest.mark.parametrize(("asked", "scripts"), [("fail", 1), ("wait", 2), ("local", 2)])
async def test_the_posture_chooses_what_to_do_without_a_hub_where_nobody_else_did(asked: str, scripts: int) -> None:
    """A node without a model waits where it is to decode by itself. An own choice stands, whatever the posture says."""
    opened = replace(_OPENED, posture=Posture(fallback=asked))
    lost: list[Line] = [opened, _END[0], HubUnavailable("gone")]
    back: list[Line] = [replace(_OPENED, num_committed=3), _END[1], _FINISHED]
    if scripts == 1:
        with pytest.raises(HubUnavailable):
            await run(lost, back, obeys_fallback=True)
    else:
        events, _ = await run(lost, back, obeys_fallback=True, fallback=Fallback.FAIL)
        assert events
    events, _ = await run(lost, back, fallback=Fallback.WAIT)
    assert events


async def test_a_change_stops_the_drafts_on_the_open_stream() -> None:
    """From off to on as well: then a draft goes out without a verdict to ask for it."""
    script: list[Line] = [replace(_OPENED, posture=_OFF), PostureChange(Posture()), *_END, _FINISHED]
    events, channel = await run(script)
    assert [e.posture.drafting for e in events if isinstance(e, PostureChanged)] == [False, True]
    assert longest(channel) == 8


@pytest.mark.parametrize(
    ("board", "tier"),
    [
        ("NVIDIA Jetson AGX Thor Developer Kit", "hub"),
        ("NVIDIA Jetson Orin Nano Engineering Reference Developer Kit Super", "micro"),
        ("NVIDIA Jetson Orin NX Engineering Reference Developer Kit", "standard"),
        ("NVIDIA Jetson AGX Orin Developer Kit", "heavy"),
        ("DGX Station GB300", "forward"),
        ("NVIDIA Jetson Xavier NX Developer Kit", "unknown"),
        ("", "unknown"),
    ],
)
def test_a_board_tells_its_tier(board: str, tier: str) -> None:
    """As its device tree names it."""
    assert tier_of(board) == tier

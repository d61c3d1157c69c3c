"""A hub that breaks the contract, frame by frame: the node stops and says so. No network, no clock."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from baru_common.errors import ProtocolViolation
from baru_common.frames import Finished, FinishReason, Heartbeat, HubFrame, Open, Opened, Usage, Verdict
from baru_common.sampling import SamplingParams
from baru_common.tokens import Tokenizer
from baru_micro.decoding import Generation
from baru_micro.events import Event, Finish, Step
from baru_micro.reach import Reach
from support.sampling import context
from support.scripted import ScriptedChannel, hubs_of
from support.tiny import tiny_bundle

_VOCABULARY = Tokenizer(tiny_bundle()).vocabulary
_OPENED = Opened("s" * 16, 1, 2, 8)
_USAGE = Usage(2, 1, 1, 0, 0, 0, 0, 0, 0)
_FINISHED = Finished(FinishReason.LENGTH, _USAGE)


def verdict(base: int, *ids: int) -> Verdict:
    return Verdict(1, base, 0, 0, ids, depth_hint=8)


async def run(script: Sequence[HubFrame]) -> tuple[list[Event], ScriptedChannel]:
    channel = ScriptedChannel([script])
    with ThreadPoolExecutor(1) as executor:
        generation = Generation(
            reach=Reach(hubs_of(channel), 5.0),
            start=Open((1, 2), SamplingParams(), b"", b""),
            sampling=context(2, vocabulary=_VOCABULARY, eos_ids=(2,)),
            max_length=10,
            drafter=None,
            local=None,
            executor=executor,
            target="scripted",
            clock=lambda: 100.0,
        )
        try:
            return [event async for event in generation.events()], channel
        finally:
            assert channel.streams[0].closed


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ([], "without a word"),
        ([_OPENED], "without a word"),
        ([_OPENED, verdict(2, 5)], "without a word"),
        ([replace(_OPENED, num_committed=3)], "committed 3 ids of 2"),
        ([_OPENED, verdict(3, 5)], "position 3"),
        ([_OPENED, verdict(2, 5), verdict(2, 5)], "position 2"),
        ([_OPENED, verdict(2, 300)], "outside the vocabulary"),
        ([_OPENED, verdict(2, 5), replace(_FINISHED, usage=replace(_USAGE, num_emitted=2))], "2 ids, 1 arrived"),
        ([_OPENED, verdict(2, 5), replace(_FINISHED, reason=FinishReason.STOP)], "stopped where"),
        ([_OPENED, Finished(FinishReason.STOP, replace(_USAGE, num_emitted=0))], "stopped where"),
        ([verdict(2, 5)], "Verdict"),
        ([_FINISHED], "Finished"),
        ([_OPENED, _OPENED], "Opened"),
    ],
)
async def test_a_hub_that_breaks_the_contract_is_not_believed(script: list[HubFrame], words: str) -> None:
    """ProtocolViolation says what was wrong; the stream is closed and no task is left."""
    before = asyncio.all_tasks()
    with pytest.raises(ProtocolViolation, match=words):
        await run(script)
    assert asyncio.all_tasks() == before


async def test_a_generation_that_keeps_it_is_finished() -> None:
    """The same script without a mistake; Open was the first frame, and times come from the clock given."""
    (_, step, finish), channel = await run([_OPENED, Heartbeat(1, 99_500_000_000), verdict(2, 5), _FINISHED])
    assert channel.streams[0].opened_with.prompt_ids == (1, 2)
    assert isinstance(step, Step)
    assert step.ids == (5,)
    assert isinstance(finish, Finish)
    assert (finish.ids, finish.elapsed_s, finish.round_trip_s) == ((5,), 0.0, 0.5)

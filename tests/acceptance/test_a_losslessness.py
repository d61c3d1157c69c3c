"""Group A of the public bug reports: the output is the target's own, whatever was drafted."""

from __future__ import annotations

import pytest

from baru_common.sampling import SamplingParams
from support.drafters import wrong_at
from support.hubs import generate, hub_of
from support.tiny import plain_greedy, tiny_target


@pytest.mark.parametrize("depth", range(1, 9))
async def test_a01_a_wrong_draft_is_never_accepted(depth: int) -> None:
    """The wrong id stands at each index of the block in turn: exactly the ids before it are accepted."""
    target, prompt = tiny_target(), [1, 1, 1]
    expected = plain_greedy(target, prompt, 32 + depth)
    async with hub_of(target) as hub:
        for index in range(depth):
            drafter = wrong_at(prompt, expected, depth, lambda i, at=index: i == at, target.vocabulary.size)
            finish, steps = await generate(hub.address, prompt, SamplingParams(max_tokens=32, ignore_eos=True), drafter)
            assert list(finish.ids) == expected[:32]
            whole = [s for s in steps if s.stats.num_verified > index]
            assert len(whole) >= 32 // (index + 1) - 1  # all but the last, which had no room
            for step in whole:
                assert step.stats.num_accepted == index
                assert step.ids[-1] == expected[step.base - len(prompt) + index]

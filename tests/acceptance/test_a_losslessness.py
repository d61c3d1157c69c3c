"""Group A of the public bug reports: the output is the target's own, whatever was drafted."""

from __future__ import annotations

import copy
import random

import pytest

from baru_common.model_files import LoadedModel
from baru_common.sampling import SamplingParams
from support.drafters import oracle, wrong_at
from support.hubs import generate, hub_of
from support.lockstep import Lockstep
from support.tiny import plain_greedy, tiny_target, twin


@pytest.mark.parametrize("depth", range(1, 9))
async def test_a01_a_wrong_draft_is_never_accepted(depth: int) -> None:
    """The wrong id stands at each index of the block in turn: exactly the ids before it are accepted."""
    target, prompt = tiny_target(), [1, 1, 1]
    expected = plain_greedy(target, prompt, 32 + depth)
    async with hub_of(target) as hub:
        for index in range(depth):
            drafter = wrong_at(prompt, expected, depth, index.__eq__, target.vocabulary.size)
            finish, steps = await generate(hub.address, prompt, SamplingParams(max_tokens=32, ignore_eos=True), drafter)
            assert list(finish.ids) == expected[:32]
            whole = [s for s in steps if s.stats.num_verified > index]
            assert len(whole) >= 32 // (index + 1) - 1  # all but the last, which had no room
            for step in whole:
                assert step.stats.num_accepted == index
                assert step.ids[-1] == expected[step.base - len(prompt) + index]


# -- A02


def with_ties(target: LoadedModel) -> LoadedModel:
    """The target with every second row of its head a copy of the one before: two equal maxima at every step."""
    tied = twin(target)
    head = copy.deepcopy(tied.model.lm_head)
    head.weight.data[1::2] = head.weight.data[::2]
    tied.model.lm_head = head
    return tied


@pytest.mark.parametrize("drafter", ["none", "oracle", "higher_id"])
async def test_a02_the_lowest_id_wins_a_tie_on_every_path(drafter: str) -> None:
    """Plain, verified and bonus ids alike; a draft of the other id of the pair is refused."""
    target, prompt = with_ties(tiny_target()), [40, 50, 60]
    answer = plain_greedy(target, prompt, 48)
    assert all(i % 2 == 0 for i in answer)
    chosen = {
        "none": None,
        "oracle": oracle(prompt, answer, depth=4),
        "higher_id": wrong_at(prompt, answer, 4, lambda _: True, 300),  # the right id + 1: its twin
    }[drafter]
    async with hub_of(target) as hub:
        finish, _ = await generate(hub.address, prompt, SamplingParams(max_tokens=48, ignore_eos=True), chosen)
    assert list(finish.ids) == answer
    if drafter == "higher_id":
        assert finish.usage.num_accepted == 0


@pytest.mark.parametrize("depth", [1, 2, 4, 8])
async def test_a02_every_block_size_says_what_plain_greedy_says(depth: int) -> None:
    """Fp32, many prompts: ids equal to a naive loop, right and wrong drafts mixed."""
    target, choose = tiny_target(), random.Random(depth)
    async with hub_of(target, scheduler=Lockstep(depth=depth)) as hub:
        for _ in range(6):
            prompt = [choose.randrange(3, 300) for _ in range(choose.randrange(1, 60))]
            answer = plain_greedy(target, prompt, 64)
            drafter = wrong_at(prompt, answer, depth, lambda _: choose.random() < 0.3, 300)
            params = SamplingParams(max_tokens=64, ignore_eos=True)
            finish, _ = await generate(hub.address, prompt, params, drafter)
            assert list(finish.ids) == answer

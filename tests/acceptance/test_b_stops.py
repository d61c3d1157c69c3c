"""Group B of the public bug reports: a generation ends exactly where it should."""

from __future__ import annotations

import pytest

from baru_common.errors import InvalidRequest
from baru_common.sampling import SamplingParams
from baru_micro import FinishReason
from support.drafters import oracle
from support.hubs import generate, hub_of
from support.tiny import plain_greedy, tiny_target, with_eos

PROMPT = [40, 50, 60, 70]


@pytest.mark.parametrize("index", range(9))
async def test_b01_eos_inside_a_block_ends_the_output(index: int) -> None:
    """EOS stands at every place of a block of 8 in turn, and as the bonus; nothing after it comes out."""
    answer = plain_greedy(tiny_target(), PROMPT, 64)
    eos = answer[index]
    assert eos not in answer[:index], "the test needs an id not seen before"
    target = with_eos(tiny_target(), eos)
    async with hub_of(target, max_depth=8) as hub:
        for drafter in (oracle(PROMPT, answer, depth=8), None):
            finish, steps = await generate(hub.address, PROMPT, SamplingParams(max_tokens=32), drafter)
            assert list(finish.ids) == answer[: index + 1]
            assert finish.reason is FinishReason.STOP
            assert [i for step in steps for i in step.ids] == answer[: index + 1]
            assert finish.usage.num_emitted == index + 1
            assert finish.usage.num_verified <= index + 1

        finish, _ = await generate(
            hub.address, PROMPT, SamplingParams(max_tokens=32, ignore_eos=True), oracle(PROMPT, answer, depth=8)
        )
        assert list(finish.ids) == answer[:32]
        assert finish.reason is FinishReason.LENGTH


async def test_b01_a_stop_id_of_the_request_counts_as_eos() -> None:
    answer = plain_greedy(tiny_target(), PROMPT, 64)
    async with hub_of(tiny_target(), max_depth=8) as hub:
        params = SamplingParams(max_tokens=32, stop_ids=(answer[5],))
        finish, _ = await generate(hub.address, PROMPT, params, oracle(PROMPT, answer))
        assert list(finish.ids) == answer[: answer.index(answer[5]) + 1]
        assert finish.reason is FinishReason.STOP


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 5, 7])
async def test_b03_max_tokens_is_exact(max_tokens: int) -> None:
    """A block accepted whole, and its bonus, never go past the limit, on the hub or on the node."""
    answer = plain_greedy(tiny_target(), PROMPT, 64)
    async with hub_of(tiny_target(), max_depth=4) as hub:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        finish, steps = await generate(hub.address, PROMPT, params, oracle(PROMPT, answer, depth=4))
        assert list(finish.ids) == answer[:max_tokens]
        assert finish.reason is FinishReason.LENGTH
        assert finish.usage.num_emitted == max_tokens
        # One id of each step is the target's own, so the last position is never drafted.
        assert finish.usage.num_drafted <= max_tokens - 1
        assert sum(step.stats.num_accepted for step in steps) <= max_tokens - 1


@pytest.mark.parametrize("max_tokens", [0, -1])
async def test_b03_a_limit_below_one_is_refused(max_tokens: int) -> None:
    with pytest.raises(InvalidRequest, match="max_tokens"):
        SamplingParams(max_tokens=max_tokens)


async def test_b03_the_context_limits_the_output() -> None:
    """Without max_tokens the output fills the context to the last position, and no further."""
    target = tiny_target(context_limit=64)
    for num_prompt, num_output in ((60, 4), (63, 1)):
        prompt = list(range(40, 40 + num_prompt))
        answer = plain_greedy(target, prompt, num_output)
        async with hub_of(target) as hub:
            finish, _ = await generate(hub.address, prompt, SamplingParams(ignore_eos=True), oracle(prompt, answer))
            assert list(finish.ids) == answer
            assert finish.reason is FinishReason.LENGTH

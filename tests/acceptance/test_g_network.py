"""Group G of the public bug reports: the link carries what it must, and says so when it cannot."""

from __future__ import annotations

import asyncio

import pytest

from baru_common import scripted, wire
from baru_common.channel_options import CLIENT_OPTIONS, MAX_MESSAGE_BYTES, SERVER_OPTIONS
from baru_common.drafters.simulated import SimulatedDrafter
from baru_common.errors import CapacityExhausted, PromptTooLong
from baru_common.frames import Draft, DrafterInfo, Open, Verdict
from baru_common.sampling import SamplingParams
from baru_hub.engines.simulated import DeviceProfile, SimulatedEngine
from baru_micro.transport import HubChannel
from support.hubs import generate, hub_of
from support.lockstep import free_running

PROFILE = DeviceProfile("quick", (0.002, 0.002), 0.0)
PARAMS = SamplingParams(max_tokens=40, ignore_eos=True)


def script(num_prompt: int, num_tokens: int) -> list[int]:
    return [scripted.scripted_id(i) for i in range(num_prompt, num_prompt + num_tokens)]


def test_g07_a_block_of_a_large_vocabulary_is_a_small_message() -> None:
    """Ids of a vocabulary of 152,064, eight to a block, far into a long context: no message comes near the limit."""
    draft = wire.encode_request(Draft(1, 9999, 199_000, 100, (152_063,) * 8)).ByteSize()
    verdict = wire.encode_response(Verdict(1, 199_000, 8, 8, (152_063,) * 9, 9999, 16)).ByteSize()
    assert draft <= 24 + 4 * 8
    assert verdict <= 48 + 4 * 9


def test_g07_both_ends_have_the_same_limits() -> None:
    """Set together, in one place, for both directions."""
    for name in ("grpc.max_receive_message_length", "grpc.max_send_message_length"):
        assert dict(CLIENT_OPTIONS)[name] == dict(SERVER_OPTIONS)[name] == MAX_MESSAGE_BYTES


@pytest.mark.parametrize(
    ("num_ids", "error"),
    [
        pytest.param(200_000, PromptTooLong, id="beyond-the-context"),
        pytest.param(3_000_000, CapacityExhausted, id="beyond-a-message"),
    ],
)
async def test_g07_a_prompt_too_long_is_refused_and_harms_nobody(num_ids: int, error: type[Exception]) -> None:
    """The hub says so by status; another session on the same connection goes on, and so does the connection."""
    async with hub_of(SimulatedEngine(PROFILE), scheduler=free_running()) as hub:
        with pytest.raises(PromptTooLong):
            await generate(hub.address, [200] * num_ids, PARAMS)  # refused at the node, nothing sent

        channel = HubChannel(hub.address, timeout_s=5)
        told = await channel.describe()

        async def run(num_prompt: int) -> list[int]:
            stream = channel.open_stream()
            prompt = (200,) * num_prompt
            stream.send(Open(prompt, PARAMS, told.target_fingerprint, told.tokenizer_digest, DrafterInfo("none-yet")))
            try:
                return [i async for frame in stream.frames() if isinstance(frame, Verdict) for i in frame.token_ids]
            finally:
                stream.close()

        neighbour = asyncio.create_task(run(5))
        with pytest.raises(error):
            await run(num_ids)
        assert await neighbour == script(5, 40)
        assert await run(7) == script(7, 40)
        await channel.close()


async def test_g07_a_long_prompt_that_fits_is_served() -> None:
    """100,000 ids in one message, fed in pieces, with drafts after it."""
    async with hub_of(SimulatedEngine(PROFILE), scheduler=free_running()) as hub:
        finish, _ = await generate(hub.address, [200] * 100_000, PARAMS, SimulatedDrafter(0.9))
    assert list(finish.ids) == script(100_000, 40)
    assert finish.usage.num_accepted > 0

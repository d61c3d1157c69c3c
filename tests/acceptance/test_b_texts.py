"""Group B of the public bug reports, where text and context end a generation."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from baru_common.drafters.causal_lm import CausalLmDrafter
from baru_common.errors import InvalidRequest, PromptTooLong
from baru_common.frames import Open, TokenLogprobs
from baru_common.sampling import SamplingParams
from baru_common.tokens import Tokenizer
from baru_hub.server import Hub
from baru_micro import Finish, FinishReason, Step
from baru_micro.transport import HubChannel
from support.drafters import FunctionDrafter, oracle
from support.hubs import generate, hub_of
from support.lockstep import Lockstep
from support.tiny import plain_greedy, tiny_target

# -- B05

TARGET = tiny_target(num_ids=403, padded_to=416)
"""Its tokenizer knows every pair of the twelve commonest letters."""
PROMPT = [40, 50, 60]
TEXT = "The quick brown fox ...END..."
TOKENIZER = Tokenizer(TARGET.bundle)
WRITTEN = tuple(TOKENIZER.encode_text(TEXT))
"""Forced, so that the target writes this text."""
STOPS = ("own fox", "END")
BEFORE = "The quick br"
DEPTHS = (1, 2, 4, 16, 32)


def aligned(ids: Sequence[int], depth: int, start: int = 0) -> FunctionDrafter:
    """Drafts what comes, such that blocks of `depth` ids follow each other from output place `start` on."""
    whole = [*PROMPT, *ids]

    def propose(ids: Sequence[int], num_committed: int, max_tokens: int) -> list[int]:
        before = len(PROMPT) + start - num_committed
        ahead = min(depth, before - 1) if before > 0 else depth  # the target adds one
        return whole[len(ids) : min(len(ids) + max_tokens, num_committed + ahead)]

    return FunctionDrafter(propose, "aligned")


@asynccontextmanager
async def writing_hub(depth: int) -> AsyncIterator[Hub]:
    async with hub_of(TARGET, scheduler=Lockstep(depth=depth), max_depth=depth) as hub:
        yield hub


def written(stops: Sequence[str], text: str = TEXT, **params: object) -> SamplingParams:
    ids = TOKENIZER.encode_text(text)
    return SamplingParams(
        max_tokens=len(ids),
        forced_ids=tuple(ids),
        stop_strings=tuple(stops),
        ignore_eos=True,
        **params,  # type: ignore[arg-type]
    )


def joined(steps: Sequence[Step], finish: Finish) -> str:
    return "".join(step.text for step in steps) + finish.tail


def logprobs_of(steps: Sequence[Step]) -> list[TokenLogprobs]:
    return [piece.logprobs for step in steps for piece in step.pieces if piece.logprobs]


def decoded(ids: Sequence[int]) -> str:
    return b"".join(map(TARGET.vocabulary.text_bytes, ids)).decode()


def test_b05_the_text_starts_a_stop_string_within_an_id() -> None:
    """What the next tests rest on: ids before the stop hold part of it, so text and ids cannot be cut alike."""
    assert decoded(WRITTEN) == TEXT
    ends = [len(decoded(WRITTEN[:i])) for i in range(len(WRITTEN) + 1)]
    assert len(BEFORE) not in ends
    assert len(WRITTEN) < len(TEXT)


@pytest.mark.parametrize("depth", DEPTHS)
async def test_b05_a_stop_string_ends_text_and_ids_wherever_a_block_holds_it(depth: int) -> None:
    """Blocks start such that the stop string ends at each index of one in turn, and begins in the one before."""
    params = written(STOPS, logprobs=2)
    async with writing_hub(depth) as hub:
        plain, plain_steps = await generate(hub.address, PROMPT, params)
        assert (plain.text, plain.reason, plain.stopped_by) == (BEFORE, FinishReason.STOP, "own fox")
        places, num_split = set(), 0
        for start in range(min(depth + 2, len(plain.ids))):
            finish, steps = await generate(hub.address, PROMPT, params, aligned(WRITTEN, depth, start))
            assert joined(steps, finish) == finish.text == BEFORE
            assert not any(letter in step.text for step in steps for letter in "ownf")
            assert (finish.reason, finish.stopped_by) == (FinishReason.STOP, "own fox")
            # Ids and log-probabilities: up to the id that completes the stop string, as without drafts.
            assert finish.ids == plain.ids == tuple(i for step in steps for i in step.ids)
            assert finish.usage.num_emitted == plain.usage.num_emitted == len(finish.ids)
            assert finish.usage.num_verified <= len(finish.ids)
            assert "own fox" in decoded(finish.ids)
            assert "own fox" not in decoded(finish.ids[:-1])
            assert len(logprobs_of(steps)) == len(finish.ids)
            assert [entry.top for entry in logprobs_of(steps)] == [entry.top for entry in logprobs_of(plain_steps)]
            places.add(len(steps[-1].ids) - 1)
            num_split += len(decoded([i for step in steps[:-1] for i in step.ids])) > len(BEFORE)
    assert places >= set(range(min(depth + 1, len(plain.ids) - 1)))
    assert num_split, "in some run the stop string must begin in one block and end in another"


@pytest.mark.parametrize("depth", [1, 4, 32])
async def test_b05_a_later_stop_string_in_the_same_block(depth: int) -> None:
    """Of two in one block the first counts; without it, the second, at any place."""
    async with writing_hub(depth) as hub:
        for stops, text in (
            (("END", "own fox"), BEFORE),
            (("END",), "The quick brown fox ..."),
            (("END...", "..."), "The quick brown fox "),
            (("brown fox ...E", "fox"), "The quick brown "),  # complete first, though it began later
            (("k brown", "quick brown"), "The "),  # complete together: the longer one
        ):
            finish, steps = await generate(hub.address, PROMPT, written(stops), aligned(WRITTEN, depth))
            assert joined(steps, finish) == finish.text == text
            assert finish.reason is FinishReason.STOP


@pytest.mark.parametrize("depth", [1, 4, 32])
async def test_b05_a_start_that_never_completes_comes_out_at_the_end(depth: int) -> None:
    """It is held back while it may still become a stop string, and lost never."""
    text = "The quick brown f"
    ids = TOKENIZER.encode_text(text)
    async with writing_hub(depth) as hub:
        finish, steps = await generate(hub.address, PROMPT, written(STOPS, text), aligned(ids, depth))
        assert "".join(step.text for step in steps) == BEFORE
        assert finish.tail == "own f"
        assert finish.text == text
        assert (finish.reason, finish.stopped_by) == (FinishReason.LENGTH, None)
        assert finish.usage.num_emitted == len(ids)

        # One that turns out to be something else comes out in the middle, as soon as that is certain.
        text = "brown f, brown fog, own."
        ids = TOKENIZER.encode_text(text)
        finish, steps = await generate(hub.address, PROMPT, written(STOPS, text), aligned(ids, depth))
        assert joined(steps, finish) == finish.text == text
        assert finish.tail == ""


async def test_b05_no_part_of_a_stop_string_is_seen_while_it_may_come() -> None:
    """Id by id: at no time is more than the text before it out."""
    async with writing_hub(1) as hub:
        _, steps = await generate(hub.address, PROMPT, written(STOPS))
    shown = ""
    for step in steps:
        for piece in step.pieces:
            shown += piece.text
            assert BEFORE.startswith(shown)
    assert shown == BEFORE


# -- B07

LIMITED = 64


@pytest.fixture(scope="module")
def limited_answers() -> dict[int, tuple[list[int], list[int]]]:
    """Prompts of each length, and all that fits after them."""
    target = tiny_target(context_limit=LIMITED)
    prompts = {length: [40 + i % 37 for i in range(length)] for length in (8, 28, 40, 60, 63)}
    return {length: (ids, plain_greedy(target, ids, LIMITED - length)) for length, ids in prompts.items()}


Answers = dict[int, tuple[list[int], list[int]]]
OPEN_ENDED = SamplingParams(ignore_eos=True)
"""max_tokens is left out."""


@asynccontextmanager
async def limited_hub(answers: Answers) -> AsyncIterator[Hub]:
    """A hub for 64 ids, blocks of 8; at its end an unrelated request is answered as it should."""
    async with hub_of(tiny_target(context_limit=LIMITED), scheduler=Lockstep(depth=8)) as hub:
        yield hub
        prompt, answer = answers[8]
        finish, _ = await generate(hub.address, prompt, replace(OPEN_ENDED, max_tokens=20), oracle(prompt, answer))
        assert list(finish.ids) == answer[:20]


def eager(prompt: Sequence[int], answer: Sequence[int]) -> FunctionDrafter:
    """Drafts as much as it is asked for, past the end of any context."""
    whole = [*prompt, *answer, *[50] * 100]
    return FunctionDrafter(lambda ids, _, max_tokens: whole[len(ids) : len(ids) + max_tokens], "eager")


@pytest.mark.parametrize(("num_prompt", "num_output"), [(60, 4), (63, 1)])
@pytest.mark.parametrize("max_tokens", [None, 100])
async def test_b07_the_context_ends_the_output(
    num_prompt: int, num_output: int, max_tokens: int | None, limited_answers: Answers
) -> None:
    """Exactly what fits, drafts or not, also where more is asked for; drafting ahead goes past no end."""
    prompt, answer = limited_answers[num_prompt]
    async with limited_hub(limited_answers) as hub:
        params = replace(OPEN_ENDED, max_tokens=max_tokens)
        for drafter in (None, eager(prompt, answer), CausalLmDrafter(tiny_target(context_limit=LIMITED))):
            finish, _ = await generate(hub.address, prompt, params, drafter)
            assert list(finish.ids) == answer
            assert len(answer) == num_output
            assert finish.reason is FinishReason.LENGTH
            assert finish.usage.num_drafted <= num_output - 1


async def test_b07_a_prompt_that_fills_the_context_is_refused(limited_answers: Answers) -> None:
    """By the node, and by the hub for a node that sends it all the same; then the hub goes on as before."""
    prompt = [40] * LIMITED
    async with limited_hub(limited_answers) as hub:
        with pytest.raises(PromptTooLong) as refused:
            await generate(hub.address, prompt, OPEN_ENDED)
        assert isinstance(refused.value, InvalidRequest)
        assert refused.value.details.get("param") == "prompt_ids"

        channel = HubChannel(hub.address, timeout_s=5)
        told = await channel.describe()
        stream = channel.open_stream()
        stream.send(Open(tuple(prompt), OPEN_ENDED, told.target_fingerprint, told.tokenizer_digest))
        with pytest.raises(PromptTooLong) as refused:
            await anext(aiter(stream.frames()))
        assert refused.value.status == "INVALID_ARGUMENT"
        assert refused.value.details.get("param") == "prompt_ids"
        await channel.close()


@pytest.mark.parametrize("num_prompt", [28, 40])
async def test_b07_a_drafter_of_a_shorter_context_stops_drafting_at_its_end(
    num_prompt: int, limited_answers: Answers
) -> None:
    """The same weights with a limit of 32: what it drafts before is right, after it there is nothing, and no error."""
    prompt, answer = limited_answers[num_prompt]
    short = CausalLmDrafter(tiny_target(context_limit=32))
    async with limited_hub(limited_answers) as hub:
        finish, steps = await generate(hub.address, prompt, OPEN_ENDED, short)
    assert list(finish.ids) == answer
    assert finish.reason is FinishReason.LENGTH
    assert finish.usage.num_drafted <= max(32 - num_prompt, 0)
    assert bool(finish.usage.num_drafted) is (num_prompt < 32)
    assert finish.usage.num_accepted == finish.usage.num_verified
    assert not any(step.stats.num_verified for step in steps if step.base >= 32)

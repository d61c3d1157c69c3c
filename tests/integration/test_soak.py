"""Many sessions that come, draft, and are killed at any moment: nothing is left of them.

The short form runs in CI; `make soak` runs the long one, with a printed seed: SOAK_S=120 SOAK_SEED=7 make soak.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter

import pytest

from baru_common.errors import BaruError, CapacityExhausted
from baru_common.sampling import SamplingParams
from baru_hub.engines.transformers import TransformersEngine
from baru_micro import Finish, MicroNode, Step
from support.drafters import FunctionDrafter
from support.hubs import hub_of
from support.lockstep import free_running
from support.tiny import plain_greedy, tiny_target, twin

PROMPTS = [[40, 50, 60], [7] * 30, list(range(10, 110))]
NUM_CLIENTS = 200
NUM_TOKENS = 60


def half_right(answer: list[int], start: int, choose: random.Random) -> FunctionDrafter:
    """A drafter that is right half of the time."""
    return FunctionDrafter(
        lambda ids, _, max_tokens: [
            token if choose.random() < 0.5 else (token + 1) % 300
            for token in answer[len(ids) - start : len(ids) - start + min(max_tokens, 6)]
        ]
    )


async def client(address: str, answers: list[list[int]], seed: int, until_s: float, seen: Counter[str]) -> None:
    """Generate again and again; leave early at random; whatever came must be the target's own."""
    choose = random.Random(seed)
    now = asyncio.get_running_loop().time
    while now() < until_s:
        which = choose.randrange(len(PROMPTS))
        prompt, answer = PROMPTS[which], answers[which]
        drafter = choose.choice((None, "ngram", half_right(answer, len(prompt), choose)))
        leave_after = choose.choice((0, 1, 3, 1000))
        try:
            async with MicroNode.connect(address, drafter=drafter, timeout_s=60) as node:
                emitted: list[int] = []
                events = node.generate(prompt, SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True))
                async for event in events:
                    if isinstance(event, Step):
                        emitted.extend(event.ids)
                        leave_after -= 1
                    if isinstance(event, Finish):
                        assert len(emitted) == NUM_TOKENS
                        seen["finished"] += 1
                    elif leave_after < 0:
                        seen["left"] += 1
                        break
                await events.aclose()
                assert emitted == answer[: len(emitted)]
        except CapacityExhausted as error:
            seen["refused" if error.retry_after_s > 0 else "refused without a hint"] += 1
            await asyncio.sleep(choose.random())
        except BaruError as error:
            seen[f"{type(error).__name__}: {error}"] += 1


async def soak(duration_s: float, seed: int) -> Counter[str]:
    target = tiny_target()
    answers = [plain_greedy(target, prompt, NUM_TOKENS) for prompt in PROMPTS]
    engine = TransformersEngine(twin(target), kv_cache_mb=8)
    seen: Counter[str] = Counter()
    async with hub_of(engine, scheduler=free_running(), max_sessions=64, orphan_grace_s=0.0) as hub:
        until_s = asyncio.get_running_loop().time() + duration_s
        clients = [client(hub.address, answers, seed * 1000 + i, until_s, seen) for i in range(NUM_CLIENTS)]
        await asyncio.gather(*clients)
        for _ in range(500):
            if hub.verifier.num_sessions == 0:
                break
            await asyncio.sleep(0.01)
        assert hub.verifier.num_sessions == 0
        engine.pool.check_integrity()
        assert engine.pool.num_held == 0
    assert not set(seen) - {"finished", "left", "refused"}, seen
    return seen


async def test_nothing_is_left_of_sessions_killed_at_random() -> None:
    seen = await soak(duration_s=6, seed=1)
    assert seen["finished"] > 5
    assert seen["left"] > 5


@pytest.mark.full
async def test_nothing_is_left_after_two_minutes() -> None:
    seed = int(os.environ.get("SOAK_SEED", "1"))
    seen = await soak(float(os.environ.get("SOAK_S", "120")), seed)
    print(f"seed {seed}: {dict(seen)}")  # noqa: T201

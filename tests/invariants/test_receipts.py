"""Shedu: what is signed of a transcript is the same with speculation on and off."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import torch

from baru_common.drafters import Drafter
from baru_common.receipts import verify
from baru_common.sampling import SamplingParams
from baru_common.signatures import Trust
from baru_micro import Finish, MicroNode
from support.drafters import FunctionDrafter
from support.hubs import hub_of
from support.lockstep import free_running
from support.tiny import tiny_target

_NUM_REQUESTS, _NUM_PROMPT, _NUM_TOKENS = 100, 6, 12
_TARGET = tiny_target()


def requests() -> list[tuple[tuple[int, ...], SamplingParams]]:
    """Greedy and sampled ones in turn, the latter with a seed and without."""
    generator = torch.Generator().manual_seed(5)
    prompts = torch.randint(3, 300, (_NUM_REQUESTS, _NUM_PROMPT), generator=generator).tolist()
    params = [
        SamplingParams(max_tokens=_NUM_TOKENS),
        SamplingParams(max_tokens=_NUM_TOKENS, temperature=0.8, seed=11, top_k=40),
        SamplingParams(temperature=1, seed=12, presence_penalty=0.5, logit_bias={9: 1}, max_tokens=_NUM_TOKENS),
    ]
    return [(tuple(prompt), params[i % 3]) for i, prompt in enumerate(prompts)]


async def answers(drafter: Drafter | None, **settings: Any) -> tuple[list[Finish], bytes]:
    """Ask for all of them at once; return the ends, and the key that signs."""
    async with hub_of(
        _TARGET, scheduler=free_running(), max_sessions=_NUM_REQUESTS, kv_cache_mb=128, **settings
    ) as hub:
        few_at_once = asyncio.Semaphore(25)
        async with MicroNode.connect(hub.address, drafter=drafter) as node:

            async def one(prompt: Sequence[int], params: SamplingParams) -> Finish:
                async with few_at_once:
                    events = [event async for event in node.generate(prompt, params)]
                assert isinstance(events[-1], Finish)
                return events[-1]

            finishes = await asyncio.gather(*(one(*request) for request in requests()))
        return finishes, hub.verifier._checkpoint.receipt_key


def half_right(known: dict[tuple[int, ...], tuple[int, ...]]) -> FunctionDrafter:
    """Drafts what was said before, but for every fourth id."""

    def propose(ids: Sequence[int], num_committed: int, max_tokens: int) -> list[int]:
        prompt = tuple(ids[:_NUM_PROMPT])
        whole = (*prompt, *known[prompt])
        place = range(len(ids), min(len(whole), len(ids) + max_tokens))
        return [whole[i] if i % 4 else (whole[i] + 1) % 300 for i in place]

    return FunctionDrafter(propose)


async def test_the_digest_of_100_transcripts_is_the_same_with_speculation_on_and_off() -> None:
    """And the receipts of both verify; how the ids came about is told apart by the counts."""
    off, off_key = await answers(None, max_depth=0)
    known = {prompt: finish.ids for (prompt, _), finish in zip(requests(), off, strict=True)}
    on, on_key = await answers(half_right(known))
    signed: list[list[str]] = []
    for finishes, key in ((off, off_key), (on, on_key)):
        assert all(finish.verified and finish.proof.receipt for finish in finishes)
        said = [verify(f.proof.receipt, Trust(key=key))[0] for f in finishes if f.proof.receipt]
        signed.append([statement.transcript_digest for statement in said])
        assert [s.num_decided for s in said] == [len(f.ids) for f in finishes]
    assert signed[0] == signed[1]
    assert len(set(signed[0])) == _NUM_REQUESTS
    assert sum(finish.usage.num_verified for finish in off) == 0
    assert 0 < sum(f.usage.num_accepted for f in on) < sum(f.usage.num_verified for f in on)

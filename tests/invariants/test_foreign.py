"""Invariant 1 with a drafter of another tokenizer: what the hub emits does not depend on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from baru_common.drafters import Drafter
from baru_common.model_files import LoadedModel
from baru_common.sampling import SamplingParams
from baru_hub.scheduler import Scheduler
from baru_micro import Finish
from support.foreign import bound, renamed, shouting, spelled
from support.hubs import generate, hub_of
from support.lockstep import Lockstep, free_running
from support.prompts import golden
from support.tiny import plain_greedy

PROMPTS = ("A", "THE GAUGE AT\n", "€ 水 reads <|im_end|> 3.2", "e t et te")
UNSTEADY = (b"e", b"t", b"et", b"\xe2", b"<|im_end|>")
SCHEDULERS: dict[str, Callable[[], Scheduler]] = {"waits": Lockstep, "free": free_running}


async def outputs(
    target: LoadedModel, drafter: Drafter | None, params: Sequence[SamplingParams], scheduler: Scheduler
) -> list[Finish]:
    """Each prompt with each of the parameters, through a hub and a node."""
    async with hub_of(target, scheduler=scheduler) as hub:
        return [
            (await generate(hub.address, spelled(target, prompt), each, drafter))[0]
            for prompt in PROMPTS
            for each in params
        ]


def requests(mode: str) -> list[SamplingParams]:
    if mode == "greedy":
        return [SamplingParams(max_tokens=40)]
    return [
        SamplingParams(max_tokens=30, temperature=temperature, seed=seed, top_k=top_k)
        for temperature, seed, top_k in ((0.05, 1, 0), (0.7, 2, 0), (1.5, 3, 5))
    ]


@pytest.mark.parametrize("schedule", SCHEDULERS)
@pytest.mark.parametrize("mode", ["greedy", "coupled"])
async def test_drafts_in_another_tokenizer_do_not_move_the_output(mode: str, schedule: str) -> None:
    """A noisy copy of the target, right and wrong by turns; its target also says letters that it merges itself, half
    characters and ends."""
    target = shouting(*UNSTEADY)
    drafter = bound(renamed(shouting(*UNSTEADY, noise=0.2), longest=1), target)
    alone = await outputs(target, None, requests(mode), SCHEDULERS[schedule]())
    drafted = await outputs(target, drafter, requests(mode), SCHEDULERS[schedule]())
    assert [finish.ids for finish in drafted] == [finish.ids for finish in alone]
    assert [finish.text for finish in drafted] == [finish.text for finish in alone]
    verified, accepted = (sum(getattr(f.usage, f"num_{what}") for f in drafted) for what in ("verified", "accepted"))
    assert accepted <= verified
    if schedule == "waits":  # else it may rightly find that a drafter as slow as this target does not pay
        assert 0 < accepted < verified


async def test_the_targets_own_weights_in_another_tokenizer_are_always_accepted() -> None:
    """Its state is in step in every phase: after a bonus, a plain step, a stop."""
    target = shouting()
    prompt = spelled(target, "THE GAUGE AT")
    async with hub_of(target) as hub:
        finish, _ = await generate(
            hub.address, prompt, SamplingParams(max_tokens=100), bound(renamed(target, longest=1), target)
        )
    assert list(finish.ids) == plain_greedy(target, prompt, 100)
    assert finish.usage.num_verified > 40
    assert finish.usage.num_accepted == finish.usage.num_verified


async def test_checked_by_rejection_its_drafts_are_accepted_too() -> None:
    """They are picks, without probabilities."""
    target = shouting()
    params = [SamplingParams(max_tokens=30, temperature=0.05, seed=1, sampling_mode="rejection")]  # type: ignore[arg-type]
    drafted = await outputs(target, bound(renamed(target), target), params, Lockstep())
    assert sum(finish.usage.num_accepted for finish in drafted) > 30


@pytest.mark.target
async def test_the_default_target_is_drafted_for_in_another_tokenizer(default_target: LoadedModel) -> None:
    """The drafter has the target's weights without the rows of pieces longer than 5 bytes, their merges gone and all
    ids shuffled: a tokenizer that splits most longer words otherwise, and a model that still predicts them."""
    drafter = bound(renamed(default_target, longest=5), default_target)
    emitted = steps = 0
    async with hub_of(default_target, scheduler=Lockstep(depth=4), kv_cache_mb=64) as hub:
        for prompt in golden()[::30]:
            finish, _ = await generate(hub.address, prompt.prompt_ids, SamplingParams(max_tokens=16), drafter)
            assert finish.ids == prompt.ids[:16], prompt.name
            emitted += finish.usage.num_emitted
            steps += finish.usage.num_steps
    assert emitted / steps > 1.5

"""Invariant 1: what the hub emits is what its target alone would have emitted, whatever was drafted."""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import torch

from baru_common.drafters import Drafter, NgramDrafter
from baru_common.drafters.causal_lm import CausalLmDrafter
from baru_common.model_files import LoadedModel
from baru_common.sampling import SamplingParams
from baru_micro import Finish, MicroNode
from support.drafters import oracle, wrong_at
from support.hubs import hub_of
from support.lockstep import free_running
from support.prompts import Golden, golden
from support.tiny import plain_greedy, tiny_target

DRAFTERS = ("ngram", "causal_lm", "oracle", "always_wrong")


def first_layers(target: LoadedModel, num_layers: int) -> LoadedModel:
    """A small model of the target's vocabulary: its own first layers."""
    config = copy.deepcopy(target.model.config)
    config.num_hidden_layers = num_layers
    model: Any = type(target.model)(config)
    model.load_state_dict(target.model.state_dict(), strict=False)
    model.eval().requires_grad_(False)
    return LoadedModel(target.files, model, target.bundle, target.dtype)


def drafter_of(kind: str, small: LoadedModel, prompt: Golden) -> Drafter:
    size = small.vocabulary.size
    makers: dict[str, Callable[[], Drafter]] = {
        "ngram": NgramDrafter,
        "causal_lm": lambda: CausalLmDrafter(small),
        "oracle": lambda: oracle(prompt.prompt_ids, prompt.ids, depth=8),
        "always_wrong": lambda: wrong_at(prompt.prompt_ids, prompt.ids, 8, lambda _: True, size),
    }
    return makers[kind]()


async def answers(address: str, prompt: Golden, num_tokens: int, drafter: Drafter) -> Finish:
    """Run one greedy generation of `num_tokens` as the golden one was run."""
    async with MicroNode.connect(address, drafter=drafter) as node:
        async for event in node.generate(prompt.prompt_ids, SamplingParams(max_tokens=num_tokens)):
            if isinstance(event, Finish):
                return event
    raise AssertionError("no Finish came")


# -- the tiny target: every drafter, many prompts, against a naive loop that recomputes everything


@pytest.mark.parametrize("kind", DRAFTERS)
async def test_the_tiny_target_says_what_it_would_say_alone(kind: str) -> None:
    target, small = tiny_target(), tiny_target(noise=0.3)
    generator = torch.Generator().manual_seed(7)
    async with hub_of(target, scheduler=free_running()) as hub:
        for length in (1, 2, 17, 40, 200):
            ids = torch.randint(3, 300, (length,), generator=generator).tolist()
            prompt = Golden(f"random-{length}", tuple(ids), tuple(plain_greedy(target, ids, 64, stop_ids=(2,))))
            finish = await answers(hub.address, prompt, 64, drafter_of(kind, small, prompt))
            assert finish.ids == prompt.ids
            if kind == "oracle":
                assert finish.usage.num_accepted == finish.usage.num_verified
            if kind == "always_wrong":
                assert finish.usage.num_accepted == 0


async def test_the_targets_own_weights_as_drafter_are_always_accepted() -> None:
    """The drafter's cache is in step in every phase: after a bonus, a plain step, a stop."""
    target = tiny_target()
    prompt = Golden("own", (40, 50, 60), tuple(plain_greedy(target, [40, 50, 60], 100)))
    async with hub_of(target) as hub:
        finish = await answers(hub.address, prompt, 100, CausalLmDrafter(target))
        assert finish.usage.num_verified > 40
        assert finish.usage.num_accepted == finish.usage.num_verified


async def test_an_output_without_drafting_is_the_same() -> None:
    target = tiny_target()
    expected = plain_greedy(target, [40, 50, 60], 64)
    async with hub_of(target, max_depth=0, scheduler=free_running()) as hub:
        prompt = Golden("off", (40, 50, 60), tuple(expected))
        finish = await answers(hub.address, prompt, 64, oracle(prompt.prompt_ids, prompt.ids))
        assert list(finish.ids) == expected
        assert finish.usage.num_verified == 0


# -- the default target, against transformers' own greedy `generate`


@pytest.fixture
async def default_hub(default_target: LoadedModel) -> AsyncIterator[str]:
    async with hub_of(default_target, scheduler=free_running(), kv_cache_mb=64) as hub:
        yield hub.address


@pytest.mark.target
@pytest.mark.timeout(300)
async def test_the_default_target_short(default_hub: str, default_target: LoadedModel) -> None:
    """A few prompts and the start of their answers; `test_the_default_target` is the long form."""
    for kind in DRAFTERS:
        await check_prompts(kind, default_hub, default_target, golden()[::13], num_tokens=24)


@pytest.mark.target
@pytest.mark.full
@pytest.mark.parametrize("kind", DRAFTERS)
async def test_the_default_target(kind: str, default_hub: str, default_target: LoadedModel) -> None:
    """All prompts, 128 ids."""
    await check_prompts(kind, default_hub, default_target, golden(), num_tokens=128)


async def check_prompts(
    kind: str, address: str, target: LoadedModel, prompts: tuple[Golden, ...], num_tokens: int
) -> None:
    small = first_layers(target, 4)
    num_emitted = num_steps = 0
    assert prompts
    for prompt in prompts:
        finish = await answers(address, prompt, num_tokens, drafter_of(kind, small, prompt))
        assert finish.ids == prompt.ids[:num_tokens], (kind, prompt.name)
        num_emitted += finish.usage.num_emitted
        num_steps += finish.usage.num_steps
    print(f"{kind}: {len(prompts)} prompts, {num_emitted} ids, mean accepted length {num_emitted / num_steps:.2f}")  # noqa: T201


@pytest.mark.target
def test_the_reference_is_what_transformers_says(default_target: LoadedModel) -> None:
    """The stored answers are those of the transformers installed now, on this machine."""
    for prompt in golden()[::20]:
        ids = torch.tensor([prompt.prompt_ids])
        whole = default_target.model.generate(  # type: ignore[operator]
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False
        )
        assert tuple(whole[0, len(prompt.prompt_ids) :].tolist()) == prompt.ids[:24]

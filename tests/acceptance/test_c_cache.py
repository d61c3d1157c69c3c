"""Group C of the public bug reports: what is in the cache is what was committed, row by row."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, MistralConfig, Qwen3Config
from transformers.models.qwen3_next import Qwen3NextConfig

from baru_common.drafters.causal_lm import CausalLmDrafter
from baru_common.errors import ModelFileError
from baru_common.frames import Draft, DrafterInfo, Open
from baru_common.model_files import LoadedModel
from baru_common.sampling import SamplingParams
from baru_hub.engines import Feed
from baru_hub.engines.transformers import PAGE_SIZE, TransformersEngine
from baru_hub.page_pool import page_keys
from baru_hub.session import Block
from baru_hub.verifier import LiveSession, Verifier
from support.drafters import FunctionDrafter
from support.hubs import generate, hub_of
from support.lines import Line, ids_of, write_plainly
from support.lockstep import Lockstep
from support.tiny import plain_greedy, tiny_target, twin

# -- C01


def model_of(config: Any) -> LoadedModel:
    """A tiny random model of any architecture."""
    torch.manual_seed(0)
    auto: Any = AutoModelForCausalLM  # transformers is only partly typed
    model: Any = auto.from_config(config)
    model.eval().requires_grad_(False)
    return replace(tiny_target(), model=model)


SMALL: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 256,
}


@pytest.mark.parametrize(
    ("config", "layer_type"),
    [
        pytest.param(
            MistralConfig(**SMALL, num_hidden_layers=2, sliding_window=16), "SlidingWindow", id="sliding-window"
        ),
        pytest.param(
            Qwen3Config(
                **SMALL,
                num_hidden_layers=2,
                use_sliding_window=True,
                sliding_window=16,
                layer_types=["full_attention", "sliding_attention"],
            ),
            "sliding_attention",
            id="mixed",
        ),
        pytest.param(
            Qwen3NextConfig(
                **SMALL,
                num_hidden_layers=2,
                layer_types=["linear_attention", "linear_attention"],
                linear_num_value_heads=2,
                linear_num_key_heads=2,
                linear_key_head_dim=16,
                linear_value_head_dim=16,
                num_experts=2,
                num_experts_per_tok=1,
                moe_intermediate_size=32,
                shared_expert_intermediate_size=32,
            ),
            "linear_attention",
            id="all-recurrent",
        ),
    ],
)
def test_c01_state_that_cannot_be_cut_back_is_refused_at_start(config: Any, layer_type: str) -> None:
    """On hub and node, by the name of the layer type: never a silent divergence later."""
    loaded = model_of(config)
    with pytest.raises(ModelFileError, match=layer_type):
        TransformersEngine(loaded, kv_cache_mb=16)
    with pytest.raises(ModelFileError, match=layer_type):
        CausalLmDrafter(loaded)


async def test_c01_an_anti_oracle_every_other_round_leaves_no_trace() -> None:
    """Where rollback is truncation, wrong blocks of four in every second round change nothing."""
    target, prompt = tiny_target(), [40, 50, 60]
    answer = plain_greedy(target, prompt, 64)
    whole = [*prompt, *answer]

    def propose(ids: Any, num_committed: int, max_tokens: int) -> list[int]:
        start = len(ids)
        right = whole[start : min(start + max_tokens, num_committed + 4)]
        return right if num_committed % 2 else [(i + 1) % 300 for i in right]

    async with hub_of(target, scheduler=Lockstep(depth=4)) as hub:
        finish, _ = await generate(
            hub.address, prompt, SamplingParams(max_tokens=64, ignore_eos=True), FunctionDrafter(propose)
        )
    assert list(finish.ids) == answer
    assert 0 < finish.usage.num_accepted < finish.usage.num_verified


# -- C02


async def test_c02_rows_of_a_mixed_step_are_those_of_each_session_alone() -> None:
    """Three sessions accept 0, 2 and 4 of their drafts in one pass: the next step's ids are each one's own."""
    target = tiny_target()
    engine = TransformersEngine(twin(target), kv_cache_mb=32)
    choose = random.Random(5)
    prompts = [[choose.randrange(3, 300) for _ in range(n)] for n in (5, 17, 40)]
    answers = [plain_greedy(target, prompt, 12) for prompt in prompts]
    drafts = [(), (*answers[1][:2], 299), tuple(answers[2][:4])]
    sequences = [engine.allocate(prompt, 64, None).sequence for prompt in prompts]

    decided = await engine.verify(
        [Feed(s, 0, Block(tuple(p), d)) for s, p, d in zip(sequences, prompts, drafts, strict=True)]
    )
    assert ids_of(decided[0]) == answers[0][:1]
    assert ids_of(decided[1])[:3] == answers[1][:3]
    assert ids_of(decided[2]) == answers[2][:5]

    emitted = [1, 3, 5]
    decided = await engine.verify(
        [
            Feed(s, len(p) + n - 1, Block((a[n - 1],)))
            for s, p, a, n in zip(sequences, prompts, answers, emitted, strict=True)
        ]
    )
    assert list(map(ids_of, decided)) == [[a[n]] for a, n in zip(answers, emitted, strict=True)]
    await engine.close()


async def test_c02_a_hundred_rounds_of_joining_and_leaving() -> None:
    """Random accept patterns, sessions that come and go: every one says what it would say alone."""
    target = tiny_target()
    engine = TransformersEngine(twin(target), kv_cache_mb=32)
    choose = random.Random(11)
    waiting = []
    for _ in range(24):
        prompt = [choose.randrange(3, 300) for _ in range(choose.choice((1, 5, 17, 40)))]
        waiting.append((prompt, plain_greedy(target, prompt, 40)))
    running: list[tuple[Line, list[int]]] = []
    num_rounds = 0
    while waiting or running:
        while waiting and len(running) < 5 and choose.random() < 0.5:
            prompt, answer = waiting.pop()
            running.append((Line(engine, prompt, 40, "one"), answer))
        feeds = []
        for line, answer in running:
            start, num_right = len(line.output), choose.randrange(6)
            wrong = [299] * choose.randrange(4)
            feeds.append(line.feed([*answer[start : start + num_right], *wrong]))
        for (line, answer), decided in zip(running, await engine.verify(feeds) if feeds else [], strict=True):
            line.take(decided)
            assert line.output == answer[: len(line.output)]
        for line, _ in [pair for pair in running if pair[0].done]:
            line.free()
        running = [pair for pair in running if not pair[0].done]
        engine.pool.check_integrity()
        num_rounds += 1
    assert num_rounds >= 60
    assert engine.pool.num_held == 0
    await engine.close()


# -- C03


async def test_c03_a_reused_prefix_gives_what_a_cold_run_gives() -> None:
    """Three requests with one prefix, rejections, a fragmented pool, warm-up passes in between."""
    target = tiny_target()
    engine = TransformersEngine(twin(target), kv_cache_mb=8)
    choose = random.Random(2)
    prefix = [choose.randrange(3, 300) for _ in range(PAGE_SIZE + 40)]
    prompts = [[*prefix, *(choose.randrange(3, 300) for _ in range(9))] for _ in range(3)]
    cold = [plain_greedy(target, prompt, 70) for prompt in prompts]
    for prompt, answer in zip(prompts, cold, strict=True):
        await engine.calibrate()
        line = Line(engine, prompt, 70, "anna")
        num_steps = num_accepted = 0
        while not line.done:
            start = len(line.output)
            right = answer[start : start + 3]
            (decided,) = await engine.verify([line.feed([*right, 299])])
            num_accepted += line.take(decided)
            num_steps += 1
        assert line.output == answer
        assert num_accepted >= 3 * (num_steps - 1)  # acceptance of a cold run: three right, one wrong, every time
        line.free()
        await fragment(engine, choose)
    assert engine.pool.find(page_keys("anna", [*prompts[0], *cold[0]], PAGE_SIZE))
    engine.pool.check_integrity()
    await engine.close()


async def fragment(engine: TransformersEngine, choose: random.Random) -> None:
    """Leave holes between the pages that are held: later sequences get scattered ones."""
    lines = [Line(engine, [choose.randrange(3, 300)], choose.randrange(64, 200), None) for _ in range(6)]
    for line in choose.sample(lines, len(lines)):
        line.free()


async def test_c03_scattered_pages_change_no_bit() -> None:
    """The pages of a sequence lie anywhere: its output is that of neighbouring pages."""
    target = tiny_target()
    engine = TransformersEngine(twin(target), kv_cache_mb=8)
    answer = plain_greedy(target, [40, 50, 60], 200)
    holes = [engine.allocate([5], PAGE_SIZE, None).sequence for _ in range(12)]
    rest = engine.allocate([5], engine.pool.num_available * PAGE_SIZE, None).sequence
    for hole in holes[::2]:
        engine.free(hole)
    assert await write_plainly(engine, [40, 50, 60], 200) == answer
    engine.free(rest)
    await engine.close()


async def test_c03_only_committed_ids_are_published_and_only_for_their_identity() -> None:
    """Refused drafts appear under no key; another identity finds nothing."""
    target = tiny_target()
    engine = TransformersEngine(twin(target), kv_cache_mb=8)
    prompt = list(range(10, 10 + PAGE_SIZE - 4))
    line = Line(engine, prompt, 80, "anna")
    while not line.done:
        (decided,) = await engine.verify([line.feed([299] * 8)])
        line.take(decided)
    committed = list(line.committed)
    line.free()
    num_full = len(engine.pool.find(page_keys("anna", committed, PAGE_SIZE)))
    assert num_full == (len(committed) - 2) // PAGE_SIZE  # the last id is never fed, the one before in the last step
    refused = [*prompt, *([299] * 20)]
    assert engine.pool.find(page_keys("anna", refused, PAGE_SIZE)) == []
    assert engine.pool.find(page_keys("bert", committed, PAGE_SIZE)) == []
    assert engine.allocate(committed, len(committed), "bert").num_cached == 0
    assert engine.allocate(committed, len(committed), None).num_cached == 0
    assert engine.allocate(committed, len(committed), "anna").num_cached == num_full * PAGE_SIZE
    await engine.close()


# -- C05


def expect(actual: object, expected: object) -> None:
    """An assertion that `python -O` does not remove."""
    if actual != expected:
        raise AssertionError(f"{actual!r}, expected {expected!r}")


async def check_cap(cap: int) -> None:
    """The node sends 7 right drafts, the hub checks `cap`: the verdict counts those and no others."""
    target, prompt = tiny_target(), [40, 50, 60]
    answer = plain_greedy(target, prompt, 60)
    engine = TransformersEngine(twin(target), kv_cache_mb=16)
    async with Verifier(engine, Lockstep(depth=cap)) as verifier:
        hub = verifier.describe()
        params = SamplingParams(max_tokens=60, ignore_eos=True)
        live = await verifier.open(
            Open(tuple(prompt), params, hub.target_fingerprint, hub.tokenizer_digest, DrafterInfo("seven"))
        )
        live.draft(Draft(1, 1, len(prompt), 0, tuple(answer[:7])))
        _, verdict, *rest = [frame async for frame in first_frames(live, 2)]
        expect(rest, [])
        expect((verdict.num_verified, verdict.num_accepted), (cap, cap))
        expect(list(verdict.token_ids), answer[: cap + 1])
        expect(len(live.state.committed), len(prompt) + cap + 1)
        expect(list(live.state.mailbox.usable(live.state.committed)), answer[cap + 1 : 7])
        live.state.has_drafter = False  # the rest without further drafts
        rest = [frame async for frame in live.frames()]
    emitted = [*verdict.token_ids, *(i for frame in rest[:-1] for i in frame.token_ids)]
    expect(emitted, answer)
    expect((rest[-1].usage.num_rejected, rest[-1].usage.num_discarded <= 7), (0, True))
    await engine.close()


async def first_frames(live: LiveSession, count: int) -> AsyncIterator[Any]:
    async for frame in live.frames():
        yield frame
        count -= 1
        if not count:
            return


CAPS = (3, 0, 1)


@pytest.mark.parametrize("cap", CAPS)
async def test_c05_what_was_not_verified_is_neither_refused_nor_committed(cap: int) -> None:
    await check_cap(cap)


def test_c05_holds_without_asserts() -> None:
    """The same under `python -O`, where an `assert` in the product would be gone."""
    program = (
        "import asyncio, importlib.util\n"
        f"spec = importlib.util.spec_from_file_location('case', {__file__!r})\n"
        "case = importlib.util.module_from_spec(spec); spec.loader.exec_module(case)\n"
        f"for cap in {CAPS}: asyncio.run(case.check_cap(cap))\n"
        "print('held, with asserts' if __debug__ else 'held')"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run(
        [sys.executable, "-O", "-c", program], capture_output=True, text=True, timeout=110, check=False, env=environment
    )
    assert (run.returncode, run.stdout.strip()) == (0, "held"), run.stderr

"""Row invariance: a model's own output, replayed as drafts, is accepted to the last id, in any company.

Plain steps of one session write the output; then it is checked in blocks of random lengths, alone and in
mixed batches with prompts being fed beside them. Every id must be accepted, in bf16 as in fp32.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from baru_common.model_files import DEFAULT_TARGET, LoadedModel, load
from baru_hub.engines.transformers import TransformersEngine
from support.lines import Line, write_plainly, write_together
from support.prompts import golden
from support.tiny import tiny_target, twin

NUM_ALONE = 4


async def replay(
    engine: TransformersEngine, scripts: Sequence[tuple[Sequence[int], Sequence[int]]], batch: int, seed: int
) -> int:
    """Check every (prompt, output) in blocks of random length, `batch` at a time; return the ids accepted."""
    choose = random.Random(seed)
    waiting = list(scripts)
    running: list[tuple[Line, Sequence[int]]] = []
    accepted = 0
    while waiting or running:
        while waiting and len(running) < batch:
            prompt, output = waiting.pop()
            running.append((Line(engine, prompt, len(output)), output))
        feeds = []
        for line, output in running:
            start, depth = len(line.output), choose.choice((0, 1, 2, 4, 7, 8, 15))
            feeds.append(line.feed(output[start : start + depth], choose.choice((5, 16, 33, 100, 1000))))
        for (line, output), decided in zip(running, await engine.verify(feeds), strict=True):
            before = len(line.output)
            assert line.take(decided) == len(line.block.draft), "an own id was refused"
            assert line.output[before:] == list(output[before : len(line.output)])
            accepted += len(line.output) - before
        for line, _ in [pair for pair in running if pair[0].done]:
            line.free()
        running = [pair for pair in running if not pair[0].done]
    engine.pool.check_integrity()
    assert engine.pool.num_held == 0
    return accepted


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_the_tiny_target_accepts_itself(dtype: str) -> None:
    target = tiny_target() if dtype == "float32" else in_bf16(tiny_target())
    engine = TransformersEngine(twin(target), kv_cache_mb=64)
    choose = random.Random(3)
    prompts = [[choose.randrange(3, 300) for _ in range(n)] for n in (1, 2, 5, 17, 40, 64, 100, 130)]
    scripts = [(p, await write_plainly(engine, p, 250)) for p in prompts]  # across a bucket of keys
    for batch in (1, 3, 8):
        assert await replay(engine, scripts, batch, seed=batch) == 8 * 250
    await engine.close()


def in_bf16(loaded: LoadedModel) -> LoadedModel:
    model: Any = copy.deepcopy(loaded.model)
    model.to(torch.bfloat16)
    return LoadedModel(loaded.files, model, loaded.bundle, "bfloat16")


@pytest.mark.target
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_the_default_target_accepts_itself_short(dtype: str) -> None:
    await check_default_target(dtype, num_prompts=4, num_tokens=16)


@pytest.mark.target
@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_the_default_target_accepts_itself(dtype: str) -> None:
    """40 prompts, 256 ids each, in batches of 8 twice over and in part alone: over 20,000 ids in each type."""
    assert await check_default_target(dtype, num_prompts=40, num_tokens=256) >= 20_000


async def check_default_target(dtype: str, num_prompts: int, num_tokens: int) -> int:
    engine = TransformersEngine(load(DEFAULT_TARGET, dtype=dtype), kv_cache_mb=512)
    prompts = [g.prompt_ids for g in golden()[:: 40 // num_prompts]]
    # The first are written alone, one row a step; the rest, to save time, in plain steps of eight.
    outputs = [await write_plainly(engine, prompt, num_tokens) for prompt in prompts[:NUM_ALONE]]
    for start in range(NUM_ALONE, num_prompts, 8):
        outputs += await write_together(engine, prompts[start : start + 8], num_tokens)
    scripts = list(zip(prompts, outputs, strict=True))
    accepted = [
        await replay(engine, scripts[:NUM_ALONE], batch=1, seed=1),
        await replay(engine, scripts, batch=8, seed=2),
        await replay(engine, scripts, batch=8, seed=3),
    ]
    assert accepted == [NUM_ALONE * num_tokens, num_prompts * num_tokens, num_prompts * num_tokens]
    await engine.close()
    print(f"{dtype}: {sum(accepted)} of {sum(accepted)} own ids accepted")  # noqa: T201
    return sum(accepted)

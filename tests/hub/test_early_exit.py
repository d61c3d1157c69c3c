"""The target's first layers as a drafter: a shallow model recomputed for each id, and the whole one, always right."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from baru_common.errors import ConfigError
from baru_hub.drafters import hub_drafter
from baru_hub.engines import Feed
from baru_hub.engines.transformers import TransformersEngine
from support import plain
from support.drafted import NUM_LAYERS, Driven, Phases, engine_with, future, layered_target, states_of, wrong

_PARAMS = [{}, {"temperature": 1.0, "seed": 9}]


@pytest.fixture
def opened() -> Iterator[Any]:
    engines: list[TransformersEngine] = []

    def make(num_layers: int) -> TransformersEngine:
        engines.append(engine_with(layered_target(), f"early_exit:{num_layers}"))
        return engines[-1]

    yield make
    for engine in engines:
        engine._worker.shutdown()
        engine.pool.check_integrity()


class Reference:
    """The states after so many layers, the target's last norm, its output."""

    def __init__(self, num_layers: int) -> None:
        self.num_layers = num_layers

    @torch.inference_mode()
    def __call__(self, committed: Sequence[int], drafted: Sequence[int]) -> torch.Tensor:
        model: Any = layered_target().model
        state = states_of(layered_target(), [*committed, *drafted])[self.num_layers][-1]
        if self.num_layers < NUM_LAYERS:  # after all of them it has been normed
            state = plain.rms(state, model.model.norm.weight, model.config.rms_norm_eps)
        logits: torch.Tensor = model.lm_head.weight @ state
        return logits


@pytest.mark.parametrize("params", _PARAMS, ids=["greedy", "sampled"])
@pytest.mark.parametrize(("num_layers", "num_prompt"), [(1, 70), (4, 250), (NUM_LAYERS, 245)])
async def test_drafts_are_right_in_every_phase(
    num_layers: int, num_prompt: int, params: dict[str, Any], opened: Any
) -> None:
    """What it leaves in the target's own cache harms nothing: the output is the target's."""
    engine = opened(num_layers)
    prompt = [3 + i * 41 % 290 for i in range(num_prompt)]
    answer = await future(engine, prompt, 60, **params)
    phases = Phases(Driven.open(engine, prompt, **params), Reference(num_layers))
    await phases.all(answer)
    assert phases.num_compared == 12
    assert phases.run.output == answer[: len(phases.run.output)]
    phases.run.free()


@pytest.mark.parametrize("params", _PARAMS, ids=["greedy", "sampled"])
@pytest.mark.parametrize("width", [1, 2])
async def test_the_whole_target_is_always_right(width: int, params: dict[str, Any], opened: Any) -> None:
    """After a prompt in pieces, plain steps, rejections and bonuses; with a node's draft, right or wrong."""
    engine = opened(NUM_LAYERS)
    prompt = [3 + i * 41 % 290 for i in range(200)]
    answer = await future(engine, prompt, 100, **params)
    run = Driven.open(engine, prompt, **params)

    def coming(num: int) -> list[int]:
        return answer[len(run.output) : len(run.output) + num]

    async def accepts_all(chain: Sequence[int] = ()) -> None:
        guesses = await run.draft(4, width, chain)
        path = list(guesses.path)
        assert path == coming(len(chain) + 4)
        assert await run.step(path, guesses.leaves) == len(chain) + 4

    await run.prefill(64)
    for _ in range(4):
        await accepts_all()
        await run.step()
        await accepts_all(coming(3))
        await run.step([wrong(token) for token in coming(2)])
    assert run.output == answer[: len(run.output)]
    # A node that is wrong at its second id: the right one is a leaf if there are two guesses, and stands.
    first, second = coming(2)
    guesses = await run.draft(2, width, [first, wrong(second)])
    assert [first, second] in [list(leaf) for leaf in guesses.leaves]
    assert await run.step(guesses.path, guesses.leaves) == 2
    run.free()


async def test_in_the_company_of_others_it_is_as_right(opened: Any) -> None:
    """Seven sessions of other lengths drafted for and verified together."""
    engine = opened(NUM_LAYERS)
    runs = [Driven.open(engine, [3 + i * 41 % 290 for i in range(length)]) for length in (1, 9, 63, 64, 65, 250, 251)]
    answers = [await future(engine, run.committed, 30) for run in runs]
    for run in runs:
        await run.prefill()
    for depth in (1, 4, 6):
        guesses = await engine.draft([run.want(depth, 1 + i % 2) for i, run in enumerate(runs)])
        blocks = [run.block(g.path, g.leaves) for run, g in zip(runs, guesses, strict=True)]
        feeds = [Feed(run.sequence, run.num_cached, block) for run, block in zip(runs, blocks, strict=True)]
        for run, block, decision in zip(runs, blocks, await engine.verify(feeds), strict=True):
            assert run.take(block, decision) == depth
    assert [run.output for run in runs] == [
        answer[: len(run.output)] for run, answer in zip(runs, answers, strict=True)
    ]
    for run in runs:
        run.free()


@pytest.mark.parametrize("num_layers", [0, NUM_LAYERS + 1])
def test_an_exit_that_is_not_there_is_refused(num_layers: int) -> None:
    with pytest.raises(ConfigError, match=f"after {num_layers} layers is not possible, the target has {NUM_LAYERS}"):
        engine_with(layered_target(), f"early_exit:{num_layers}")


@pytest.mark.parametrize(
    "spec", ["early_exit", "early_exit:two", "early_exit:-1", "eagle3", "eagle3:", "dflash:", "mtp:x", "medusa:x", ""]
)
def test_an_unknown_drafter_is_refused(spec: str) -> None:
    with pytest.raises(ConfigError, match="no hub drafter"):
        hub_drafter(spec, layered_target())


def test_the_target_stays_whole(opened: Any) -> None:
    """The shallow model shares weights and takes nothing away; it costs no memory."""
    engine = opened(2)
    assert len(engine._model.model.layers) == NUM_LAYERS
    drafter = engine._drafter
    assert len(drafter._model.model.layers) == 2
    assert drafter._model.lm_head.weight.data_ptr() == engine._model.lm_head.weight.data_ptr()
    assert (drafter.num_bytes, drafter.taps, engine.spec.drafter) == (0, (), "early_exit")

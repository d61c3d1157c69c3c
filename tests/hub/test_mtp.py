"""Layers for multi-token prediction under every family's names, against a reference that recomputes everything."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from baru_common.errors import ModelFileError
from baru_common.model_files import LoadedModel, ModelFiles, load
from baru_hub.drafters import hub_drafter
from baru_hub.drafters.mtp import Mtp
from baru_hub.engines.transformers import TransformersEngine
from support import plain
from support.drafted import (
    NUM_LAYERS,
    SIZE,
    WIDTH,
    Driven,
    Phases,
    as_lists,
    engine_with,
    expected,
    future,
    layered_target,
    states_of,
)
from support.plain import Shape, Tensors
from support.tiny import save

NAMES = {
    "qwen": {
        "embedding": "mtp.pre_fc_norm_embedding",
        "hidden": "mtp.pre_fc_norm_hidden",
        "join": "mtp.fc",
        "final": "mtp.norm",
        "block": "mtp.layers.0",
    },
    "deepseek": {
        "embedding": f"model.layers.{NUM_LAYERS}.enorm",
        "hidden": f"model.layers.{NUM_LAYERS}.hnorm",
        "join": f"model.layers.{NUM_LAYERS}.eh_proj",
        "final": f"model.layers.{NUM_LAYERS}.shared_head.norm",
        "block": f"model.layers.{NUM_LAYERS}",
    },
    "mimo": {
        "embedding": "model.mtp_layers.0.token_layernorm",
        "hidden": "model.mtp_layers.0.hidden_layernorm",
        "join": "model.mtp_layers.0.input_proj",
        "final": "model.mtp_layers.0.final_layernorm",
        "block": "model.mtp_layers.0",
    },
}
"""What each family calls the parts."""
_SHAPE = Shape(4, 2, 8, 1e-6, 1e4)
_PROMPT = [3 + i * 37 % 290 for i in range(70)]


@cache
def parts(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    block = plain.layer_tensors(generator, _SHAPE, WIDTH, 64)
    return {
        "embedding.weight": plain.norm_weight(generator, WIDTH),
        "hidden.weight": plain.norm_weight(generator, WIDTH),
        "join.weight": plain.matrix(generator, WIDTH, 2 * WIDTH),
        "final.weight": 1 + torch.randn(WIDTH, generator=generator),
        **{f"block.{name}": tensor for name, tensor in block.items()},
    }


def published(family: str, seed: int = 0) -> dict[str, torch.Tensor]:
    """The tensors under one family's names, with the copies of the target's that some carry."""
    tensors = {}
    for name, tensor in parts(seed).items():
        part, _, rest = name.partition(".")
        tensors[f"{NAMES[family][part]}.{rest}"] = tensor.clone()
    if family == "deepseek":
        model: Any = layered_target().model
        tensors[f"model.layers.{NUM_LAYERS}.embed_tokens.weight"] = model.model.embed_tokens.weight.clone()
        tensors[f"model.layers.{NUM_LAYERS}.shared_head.head.weight"] = model.lm_head.weight.clone()
    return tensors


class Reference:
    """As the technical report has it. Everything for each id, and no names."""

    def __init__(self, *, hidden_first: bool = False, recycle_normed: bool = True, seed: int = 0) -> None:
        self.parts: Tensors = parts(seed)
        self.hidden_first, self.recycle_normed = hidden_first, recycle_normed
        self.target = layered_target()

    def rows(self, state: torch.Tensor, following: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        tensors, eps, model = self.parts, _SHAPE.eps, self.target.model
        embedding: Any = model.get_input_embeddings()
        embedded = plain.rms(embedding.weight[list(following)], tensors["embedding.weight"], eps)
        normed = plain.rms(state, tensors["hidden.weight"], eps)
        joined = torch.cat((normed, embedded) if self.hidden_first else (embedded, normed), -1)
        positions = torch.arange(len(state))
        hidden = plain.layer(plain.under(tensors, "block."), _SHAPE, joined @ tensors["join.weight"].T, positions)
        read = plain.rms(hidden, tensors["final.weight"], eps)
        return (read if self.recycle_normed else hidden), read

    @torch.inference_mode()
    def __call__(self, committed: Sequence[int], drafted: Sequence[int]) -> torch.Tensor:
        ids = [*committed, *drafted]
        state = states_of(self.target, committed[:-1])[-1]
        for _ in range(len(drafted)):
            state = torch.cat((state, self.rows(state, ids[1 : 1 + len(state)])[0][-1:]))
        model: Any = self.target.model
        logits: torch.Tensor = model.get_output_embeddings().weight @ self.rows(state, ids[1 : 1 + len(state)])[1][-1]
        return logits


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The target's checkpoint with a head in it, one for each family of names."""
    made = {}
    for family in NAMES:
        folder = save(layered_target(), tmp_path_factory.mktemp(family))
        weights = folder / "model.safetensors"
        save_file(load_file(weights) | published(family), weights, metadata={"format": "pt"})
        made[family] = folder
    return made


@pytest.fixture
def opened(folders: dict[str, Path]) -> Iterator[Any]:
    engines: list[TransformersEngine] = []

    def make(family: str) -> TransformersEngine:
        engines.append(engine_with(load(str(folders[family]), dtype="float32"), "mtp"))
        return engines[-1]

    yield make
    for engine in engines:
        engine._worker.shutdown()
        engine.pool.check_integrity()


@pytest.mark.parametrize("family", NAMES)
async def test_every_familys_names_and_order(family: str, opened: Any) -> None:
    """MiMo's projection reads the state first, the others' the embedding."""
    engine, reference = opened(family), Reference(hidden_first=family == "mimo")
    assert engine.spec.drafter == "mtp"
    run = Driven.open(engine, _PROMPT[:20])
    await run.prefill()
    for width, chain in ((2, ()), (1, (30, 31))):
        wanted = expected(reference, run.committed, run.sampler, 4, width, chain)
        assert as_lists(await run.draft(4, width, chain)) == as_lists(wanted)
        await run.step()


@pytest.mark.parametrize("recycle_normed", [True, False])
async def test_what_goes_on_is_taken_after_the_last_norm_or_before(recycle_normed: bool, opened: Any) -> None:
    """A switch; the first id is the same either way."""
    engine = opened("qwen")
    drafter: Any = engine._drafter
    drafter._head = Mtp.load(published("qwen"), engine._loaded, recycle_normed=recycle_normed)
    reference = Reference(recycle_normed=recycle_normed)
    run = Driven.open(engine, _PROMPT[:20])
    await run.prefill()
    assert as_lists(await run.draft(6)) == as_lists(expected(reference, run.committed, run.sampler, 6))
    other = Reference(recycle_normed=not recycle_normed)
    assert as_lists(expected(other, run.committed, run.sampler, 6)) != as_lists(
        expected(reference, run.committed, run.sampler, 6)
    )


@pytest.mark.parametrize(
    ("num_prompt", "params"), [(70, {}), (250, {"temperature": 1.0, "seed": 9})], ids=["greedy", "sampled"]
)
async def test_drafts_are_right_in_every_phase(num_prompt: int, params: dict[str, Any], opened: Any) -> None:
    engine = opened("qwen")
    prompt = [3 + i * 41 % 290 for i in range(num_prompt)]
    answer = await future(engine, prompt, 60, **params)
    phases = Phases(Driven.open(engine, prompt, **params), Reference())
    await phases.all(answer)
    assert phases.num_compared == 12
    assert phases.run.output == answer[: len(phases.run.output)]
    phases.run.free()


# -- what is refused


def test_a_checkpoint_without_a_head_is_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(ModelFileError, match="known: qwen, deepseek, mimo"):
        Mtp.load({}, layered_target())


@pytest.mark.parametrize("family", NAMES)
@pytest.mark.parametrize("part", ["embedding", "hidden", "final"])
def test_a_missing_part_is_named(family: str, part: str) -> None:
    tensors = published(family)
    del tensors[f"{NAMES[family][part]}.weight"]
    with pytest.raises(ModelFileError, match=f"missing {part}"):
        Mtp.load(tensors, layered_target())


def test_a_tensor_too_many_is_named() -> None:
    tensors = published("qwen") | {"mtp.layers.0.self_attn.sinks": torch.ones(4)}
    with pytest.raises(ModelFileError, match=r"unknown block.self_attn.sinks"):
        Mtp.load(tensors, layered_target())


def test_another_width_is_named() -> None:
    tensors = published("qwen") | {"mtp.fc.weight": torch.ones(WIDTH, WIDTH)}
    with pytest.raises(ModelFileError, match=r"projection.weight is \(32, 32\)"):
        Mtp.load(tensors, layered_target())


def test_another_layers_number_is_not_taken_for_the_head() -> None:
    """A head numbered as if the target had more layers is none of this target's."""
    tensors = {
        name.replace(f"layers.{NUM_LAYERS}.", "layers.40."): tensor for name, tensor in published("deepseek").items()
    }
    with pytest.raises(ModelFileError, match="no MTP head"):
        Mtp.load(tensors, layered_target())


def test_a_gguf_file_is_refused() -> None:
    files = ModelFiles("small.gguf", Path("small.gguf"))
    assert files.is_gguf
    target: LoadedModel = replace(copy.copy(layered_target()), files=files)
    with pytest.raises(ModelFileError, match="GGUF"):
        hub_drafter("mtp", target)


def test_ids_that_mean_nothing_are_never_drafted(folders: dict[str, Path]) -> None:
    """The logits end with the vocabulary, whatever the output was padded to."""
    mtp = Mtp.load(published("qwen"), layered_target())
    assert mtp.logits(torch.ones(2, WIDTH)).shape == (2, SIZE)

"""DFlash heads against a reference that recomputes context and block for each draft."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from baru_common.errors import ModelFileError
from baru_common.sampling import SamplingParams
from baru_common.sampling.sampler import Sampler
from baru_hub.drafters.dflash import DFlash, default_layers
from baru_hub.engines.transformers import TransformersEngine
from support import plain
from support.drafted import (
    NUM_LAYERS,
    SIZE,
    WIDTH,
    Driven,
    as_lists,
    engine_with,
    future,
    layered_target,
    save_head,
    states_of,
    wrong,
)
from support.plain import Shape, Tensors

MASK_ID = 310
_PROMPT = [3 + i * 37 % 290 for i in range(70)]


@dataclass
class Head:
    """A head as it lies on the disk."""

    num_layers: int = 3
    layer_ids: tuple[int, ...] | None = None
    block_size: int | None = 16
    rope_theta: float = 1e6
    config: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.num_layers)
        for number in range(self.num_layers):
            weights = plain.layer_tensors(generator, self.shape, WIDTH, 48, qk_norm=True)
            self.tensors |= {f"layers.{number}.{name}": tensor for name, tensor in weights.items()}
        num_taps = self.num_layers if self.layer_ids is None else len(self.layer_ids)
        self.tensors["fc.weight"] = plain.matrix(generator, WIDTH, num_taps * WIDTH)
        for name in ("hidden_norm.weight", "norm.weight"):
            self.tensors[name] = plain.norm_weight(generator, WIDTH)

    @property
    def shape(self) -> Shape:
        return Shape(4, 2, 16, 1e-6, self.rope_theta)

    @property
    def raw(self) -> dict[str, Any]:
        raw: dict[str, Any] = {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "hidden_size": WIDTH,
            "intermediate_size": 48,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_hidden_layers": self.num_layers,
            "num_target_layers": NUM_LAYERS,
            "layer_types": ["full_attention"] * self.num_layers,
            "rms_norm_eps": 1e-6,
            "rope_theta": self.rope_theta,
            "max_position_embeddings": 40960,
            "vocab_size": 320,
        }
        raw |= {} if self.block_size is None else {"block_size": self.block_size}
        options: dict[str, Any] = {"mask_token_id": MASK_ID}
        options |= {} if self.layer_ids is None else {"target_layer_ids": list(self.layer_ids)}
        return raw | {"dflash_config": options | self.options} | self.config

    def save(self, folder: Path) -> str:
        return str(save_head(folder, self.tensors, self.raw))


class Reference:
    """The block's logits, slots 1 and on, from the published names."""

    def __init__(self, head: Head, layer_ids: Sequence[int]) -> None:
        self.tensors: Tensors = head.tensors
        self.shape, self.num_layers, self.layer_ids = head.shape, head.num_layers, layer_ids

    @torch.inference_mode()
    def block(self, committed: Sequence[int], size: int) -> torch.Tensor:
        tensors, shape = self.tensors, self.shape
        states = states_of(layered_target(), committed[:-1])
        joined = torch.cat([states[i + 1] for i in self.layer_ids], -1)
        context = plain.rms(joined @ tensors["fc.weight"].T, tensors["hidden_norm.weight"], shape.eps)
        start = len(committed) - 1
        positions = torch.arange(start + size)
        model: Any = layered_target().model
        hidden = model.model.embed_tokens.weight[[committed[-1], *[MASK_ID] * (size - 1)]]
        everything = torch.ones(size, start + size, dtype=torch.bool)
        for number in range(self.num_layers):
            weights = plain.under(tensors, f"layers.{number}.")
            normed = plain.rms(hidden, weights["input_layernorm.weight"], shape.eps)
            seen = torch.cat((context, normed))
            query = plain.projected(weights, shape, "q", normed, positions[start:])
            key = plain.projected(weights, shape, "k", seen, positions)
            value = plain.projected(weights, shape, "v", seen, None)
            mixed = plain.attended(query, key, value, everything, shape)
            hidden = hidden + mixed @ weights["self_attn.o_proj.weight"].T
            normed = plain.rms(hidden, weights["post_attention_layernorm.weight"], shape.eps)
            hidden = hidden + plain.feed_forward(weights, normed)
        read = plain.rms(hidden, tensors["norm.weight"], shape.eps)[1:]
        logits: torch.Tensor = (read @ model.lm_head.weight.T)[:, :SIZE]
        return logits

    def drafted(self, committed: Sequence[int], sampler: Sampler, size: int) -> list[int]:
        """The block's ids; `size` counts the committed one that it begins with."""
        ids: list[int] = []
        for row in self.block(committed, size):
            ids += sampler.rank(row[None], committed, ids, 1)
        return ids


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Any]:
    engines: list[TransformersEngine] = []

    def make(head: Head) -> TransformersEngine:
        engines.append(engine_with(layered_target(), f"dflash:{head.save(tmp_path / str(len(engines)))}"))
        return engines[-1]

    yield make
    for engine in engines:
        engine._worker.shutdown()
        engine.pool.check_integrity()


KINDS = {
    "default layers": (Head(), (1, 2, 3)),
    "one layer": (Head(num_layers=1), (3,)),
    "layers of its choice": (Head(num_layers=2, layer_ids=(0, 2, 4)), (0, 2, 4)),
    "the last layer": (Head(num_layers=1, layer_ids=(5,)), (5,)),
    "another rope": (Head(rope_theta=100.0), (1, 2, 3)),
}


@pytest.mark.parametrize("name", KINDS)
async def test_blocks_are_what_the_reference_drafts(name: str, opened: Any) -> None:
    """A whole block of sixteen, then a short one; the states of one step or of several are new."""
    head, layer_ids = KINDS[name]
    engine, reference = opened(head), Reference(head, layer_ids)
    run = Driven.open(engine, _PROMPT)
    await run.prefill(30)
    for depth in (15, 4):
        found = await run.draft(depth)
        assert as_lists(found) == (reference.drafted(run.committed, run.sampler, depth + 1), [])
        for _ in range(3):
            await run.step()
    run.free()


@pytest.mark.parametrize(("block_size", "most"), [(16, 15), (6, 5), (None, 15)])
async def test_a_block_is_as_long_as_the_head_was_made_for(block_size: int | None, most: int, opened: Any) -> None:
    head = Head(block_size=block_size)
    engine, reference = opened(head), Reference(head, (1, 2, 3))
    run = Driven.open(engine, _PROMPT[:9])
    await run.prefill()
    assert list((await run.draft(40)).path) == reference.drafted(run.committed, run.sampler, most + 1)
    run.free()


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "seed": 9}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("num_prompt", [60, 245])
async def test_drafts_are_right_in_every_phase(num_prompt: int, params: dict[str, Any], opened: Any) -> None:
    """After rejections, a bonus, steps without drafts; blocks that cross a page or a bucket of 256 keys."""
    head = Head()
    engine, reference = opened(head), Reference(head, (1, 2, 3))
    prompt = [3 + i * 41 % 290 for i in range(num_prompt)]
    answer = await future(engine, prompt, 40, **params)
    run = Driven.open(engine, prompt, **params)
    await run.prefill(50)

    def coming(num: int) -> list[int]:
        return answer[len(run.output) : len(run.output) + num]

    async def compare() -> None:
        assert as_lists(await run.draft(9)) == (reference.drafted(run.committed, run.sampler, 10), [])

    await compare()
    await run.step([wrong(token) for token in coming(4)])
    await compare()  # after a rejection
    assert await run.step([*coming(3), wrong(coming(4)[3])]) == 3
    await compare()
    assert await run.step(coming(5)) == 5
    await compare()  # after a bonus
    for _ in range(3):
        await run.step()
    await compare()  # after steps in which nothing was drafted
    first, second = coming(2)
    assert await run.step([first, wrong(second)], [[first, second]]) == 2
    await compare()  # after a leaf that stood
    assert run.output == answer[: len(run.output)]
    run.free()


async def test_a_nodes_draft_goes_first_and_the_block_beside_it(opened: Any) -> None:
    """While they agree it is one path; where they part the block's id is a leaf, and so it is if that is its first."""
    head = Head(block_size=6)
    engine, reference = opened(head), Reference(head, (1, 2, 3))
    for length in (0, 1, 2, 4, 5, 6, 9):
        for parting in (*range(length), None):
            run = Driven.open(engine, _PROMPT[:9])
            await run.prefill()
            # A block depends on its length, which goes by what is wanted.
            block = reference.drafted(run.committed, run.sampler, min(length + 2 + 1, 6))
            chain = (block + [7] * 9)[:length]
            if parting is not None:
                chain[parting] = wrong(chain[parting])
            found = as_lists(await run.draft(2, 1, chain))
            beside = parting if parting is None or parting < len(block) else None
            if length <= len(block) and parting is None:
                assert found == (block, [])
            else:
                assert found == (chain, [] if beside is None else [block[: beside + 1]])
            run.free()


async def test_a_grammar_that_has_ended_leaves_nothing_to_draft(opened: Any) -> None:
    """No id is possible: the path is the node's draft, be there one or not."""
    engine = opened(Head())
    spec = engine.spec
    for chain in ((), (8, 9)):
        run = Driven.open(engine, _PROMPT[:9])
        await run.prefill()
        nothing = SamplingParams(banned_ids=tuple(range(spec.vocabulary.size)))
        sequence = engine._sequences[run.sequence]
        sequence.sampler = Sampler(type(run.sampling)(nothing, 9, spec.vocabulary, spec.eos_ids), torch.device("cpu"))
        assert as_lists(await run.draft(3, 1, chain)) == (list(chain), [])
        run.free()


async def test_sessions_drafted_for_together_draft_what_they_would_alone(opened: Any) -> None:
    """Blocks of other sizes in one pass; one session has nothing to read from."""
    head = Head()
    engine, reference = opened(head), Reference(head, (1, 2, 3))
    runs = [Driven.open(engine, _PROMPT[i : i + length]) for i, length in enumerate((5, 63, 64, 31))]
    for run in runs:
        await run.prefill()
    untouched = Driven.open(engine, [7])
    wants = [run.want(depth) for run, depth in zip(runs, (1, 15, 3, 7), strict=True)]
    *found, nothing = await engine.draft([*wants, untouched.want(4, 1, (8, 9))])
    assert as_lists(nothing) == ([8, 9], [])
    for run, guesses, depth in zip(runs, found, (1, 15, 3, 7), strict=True):
        assert list(guesses.path) == reference.drafted(run.committed, run.sampler, depth + 1)
    for run in (*runs, untouched):
        run.free()


# -- what is read and what is refused


@pytest.mark.parametrize(
    ("num_target_layers", "num_layers", "layers"), [(36, 5, [1, 9, 17, 25, 33]), (32, 1, [16]), (28, 3, [1, 13, 25])]
)
def test_layers_read_by_default(num_target_layers: int, num_layers: int, layers: list[int]) -> None:
    assert default_layers(num_target_layers, num_layers) == layers


def without(name: str) -> Head:
    head = Head()
    del head.tensors[name]
    return head


REFUSED: dict[str, tuple[Head, str]] = {
    "windows": (Head(options={"use_swa": True}), "use_swa"),
    "sinks": (Head(options={"attention_sink_bias": True}), "attention_sink_bias"),
    "causal blocks": (Head(options={"causal": True}), "causal"),
    "sliding layers": (Head(config={"layer_types": ["full_attention", "sliding_attention"]}), "sliding"),
    "code of its own": (Head(config={"auto_map": {"AutoModel": "x.Y"}}), "auto_map"),
    "no mask id": (Head(options={"mask_token_id": None}), "mask id None"),
    "a mask id past the target": (Head(options={"mask_token_id": 320}), "mask id 320"),
    "another width": (Head(config={"hidden_size": 48}), "width 48"),
    "layers past the target": (Head(num_layers=1, layer_ids=(6,)), "6 layers"),
    "a tensor missing": (without("layers.1.self_attn.q_norm.weight"), r"missing layers.1.self_attn.q_norm"),
    "a head of markov form": (Head(tensors={"markov_head.markov_w1.weight": torch.ones(2, 2)}), "unknown markov_head"),
    "fc of other taps": (Head(options={"target_layer_ids": [1, 2]}), "fc.weight"),
    "layers that are no numbers": (Head(options={"target_layer_ids": ["1", "2", "3"]}), "target_layer_ids"),
    "no block": (Head(block_size=1), "block_size"),
    "a block of nothing": (Head(block_size=0), "block_size"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_by_name(name: str, tmp_path: Path) -> None:
    head, message = REFUSED[name]
    with pytest.raises(ModelFileError, match=message):
        DFlash.load(head.save(tmp_path), layered_target())

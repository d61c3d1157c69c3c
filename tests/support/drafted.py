"""Sessions driven by hand through an engine that drafts itself, and what they must draft in every phase."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from baru_common.errors import BaruError
from baru_common.model_files import LoadedModel, ModelFiles
from baru_common.sampling import SamplingContext, SamplingParams
from baru_common.sampling.sampler import Sampler
from baru_hub.acceptance import accept
from baru_hub.engines import Feed, Want
from baru_hub.engines.transformers import TransformersEngine
from baru_hub.guesses import Guesses
from baru_hub.session import Block

from .tiny import tiny_bundle, twin

SIZE, WIDTH, NUM_LAYERS = 300, 32, 6
"""Ids, width and layers of `layered_target`."""

Logits = Callable[[Sequence[int], Sequence[int]], torch.Tensor]
"""A slow reference: (committed ids, ids drafted so far) -> the drafter's logits [vocabulary] for the next one."""


@cache
def layered_target(tie: bool = False) -> LoadedModel:
    """A random model of six narrow layers, so that every tap is another one."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=WIDTH,
        intermediate_size=64,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=0,
        initializer_range=0.3,
        tie_word_embeddings=tie,
    )
    model: Any = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:  # weights of one would hide a norm left out
                weight.add_(0.3 * torch.randn(weight.shape, generator=generator))
    model.eval().requires_grad_(False)
    files = ModelFiles(f"layered-{tie}", Path("layered"))
    files.__dict__["digest"] = f"layered-{tie}"
    return LoadedModel(files, model, tiny_bundle(), "float32")


@torch.inference_mode()
def states_of(target: LoadedModel, ids: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """The target's hidden states, [num_ids, width] each: the embedding, then after each layer; the last is normed."""
    output = target.model(input_ids=torch.tensor([list(ids)]), use_cache=False, output_hidden_states=True)
    return tuple(state[0] for state in output.hidden_states)


def save_head(folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any], *, as_bin: bool = False) -> Path:
    """Write a head as it is published."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if as_bin:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def engine_with(target: LoadedModel, drafter: str | None) -> TransformersEngine:
    return TransformersEngine(twin(target), kv_cache_mb=8, drafter=drafter)


def expected(
    logits: Logits, committed: Sequence[int], sampler: Sampler, depth: int, width: int = 1, chain: Sequence[int] = ()
) -> Guesses:
    """What a drafter that goes on id by id makes of these logits: a path along `chain` and on, and leaves beside it."""
    path: list[int] = []
    leaves: list[list[int]] = []
    while len(path) < len(chain) + depth:
        ranked = sampler.rank(logits(committed, path)[None, :SIZE], committed, path, width)
        main = chain[len(path)] if len(path) < len(chain) else ranked[0]
        leaves += [[*path, token] for token in ranked if token != main]
        path.append(main)
    return Guesses(path, leaves)


def as_lists(guesses: Guesses) -> tuple[list[int], list[list[int]]]:
    return list(guesses.path), [list(leaf) for leaf in guesses.leaves]


@dataclass
class Driven:
    """One session on an engine: what the hub's loop does with it, step by step."""

    engine: TransformersEngine
    committed: list[int]
    num_cached: int
    sequence: int
    sampling: SamplingContext

    @classmethod
    def open(
        cls, engine: TransformersEngine, prompt: Sequence[int], identity: str | None = None, **params: Any
    ) -> Driven:
        spec = engine.spec
        sampling = SamplingContext(
            SamplingParams(ignore_eos=True, **params), len(prompt), spec.vocabulary, spec.eos_ids
        )
        allocation = engine.allocate(prompt, spec.context_limit, identity, sampling)
        return cls(engine, list(prompt), allocation.num_cached, allocation.sequence, sampling)

    @property
    def output(self) -> list[int]:
        return self.committed[self.sampling.num_prompt :]

    @property
    def sampler(self) -> Sampler:
        return Sampler(self.sampling, torch.device("cpu"))

    async def prefill(self, max_pending: int = 1000) -> None:
        """Feed the prompt in pieces, up to the step that decides the first id."""
        while len(self.committed) - self.num_cached > max_pending:
            piece = tuple(self.committed[self.num_cached : self.num_cached + max_pending])
            await self.engine.verify([Feed(self.sequence, self.num_cached, Block(piece, decides=False))])
            self.num_cached += len(piece)
        await self.step()

    def block(self, path: Sequence[int] = (), leaves: Sequence[Sequence[int]] = ()) -> Block:
        plain = Block(tuple(self.committed[self.num_cached :]))
        return plain.extended(path, leaves) if path or leaves else plain

    async def step(self, path: Sequence[int] = (), leaves: Sequence[Sequence[int]] = ()) -> int:
        """Verify a path and leaves beside it; return how many ids of them stood."""
        block = self.block(path, leaves)
        (decision,) = await self.engine.verify([Feed(self.sequence, self.num_cached, block)])
        return self.take(block, decision)

    def take(self, block: Block, decision: Any) -> int:
        if isinstance(decision, BaruError):
            raise decision
        emitted = accept(block.tree, decision).emitted
        self.committed.extend(emitted)
        self.num_cached = len(self.committed) - 1
        return len(emitted) - 1

    def want(self, depth: int = 3, width: int = 1, chain: Sequence[int] = ()) -> Want:
        return Want(self.sequence, list(self.committed), list(chain), depth, width)

    async def draft(self, depth: int = 3, width: int = 1, chain: Sequence[int] = ()) -> Guesses:
        (guesses,) = await self.engine.draft([self.want(depth, width, chain)])
        return guesses

    def free(self) -> None:
        self.engine.free(self.sequence)


async def future(engine: TransformersEngine, committed: Sequence[int], num_ids: int, **params: Any) -> list[int]:
    """What the target will say after `committed`: decoded plainly, in a sequence of its own."""
    other = Driven.open(engine, committed, **params)
    while len(other.output) < num_ids:
        await other.step()
    other.free()
    return other.output[:num_ids]


def wrong(token: int) -> int:
    return 3 + (token + 1) % (SIZE - 3)


@dataclass
class Phases:
    """Takes a session through everything that may come between two drafts, and compares each draft."""

    run: Driven
    logits: Logits
    depth: int = 3
    num_compared: int = 0

    async def compare(self, width: int = 1, chain: Sequence[int] = ()) -> Guesses:
        found = await self.run.draft(self.depth, width, chain)
        wanted = expected(self.logits, self.run.committed, self.run.sampler, self.depth, width, chain)
        assert as_lists(found) == as_lists(wanted), (len(self.run.committed), self.num_compared)
        self.num_compared += 1
        return found

    async def all(self, answer: Sequence[int]) -> None:
        """`answer`: what the target says after the prompt."""
        run, start = self.run, len(self.run.committed)

        def coming(num: int) -> list[int]:
            at = len(run.committed) - start
            return list(answer[at : at + num])

        await run.prefill(30)
        found = await self.compare()  # after a prompt in pieces
        await run.step(found.path)
        await self.compare(2)  # after whatever became of the draft
        for _ in range(3):
            await run.step()
        await self.compare()  # after steps in which nothing was drafted
        assert await run.step([wrong(token) for token in coming(3)]) == 0
        await self.compare()  # after a rejection
        assert await run.step([*coming(2), wrong(coming(3)[2])]) == 2
        await self.compare(2)  # after a rejection further on
        assert await run.step(coming(4)) == 4
        await self.compare()  # after a bonus
        first, second = coming(2)
        assert await run.step([first, wrong(second)], [[wrong(first)], [first, second]]) == 2
        await self.compare()  # after a leaf that stood
        await run.step()
        await self.compare_along(coming(2))
        await run.step(coming(1))
        await self.compare_along([coming(1)[0], wrong(coming(2)[1])])
        await run.step(coming(1))
        await run.step()
        await self.compare(3)

    async def compare_along(self, chain: Sequence[int]) -> None:
        """With a draft of the node's; whatever becomes of it."""
        found = await self.compare(2, chain)
        assert list(found.path[: len(chain)]) == list(chain)
        await self.run.step(found.path, found.leaves)
        await self.compare()
        await self.run.step()

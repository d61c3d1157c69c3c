"""Invariant 1 with a hub that drafts itself: whoever drafts, beside whomever, however deep: the target's own ids.

The reference is the target alone, with no drafter anywhere, one id a step. Compared are ids in fp32, exactly.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from baru_common.drafters import Drafter, NgramDrafter
from baru_common.model_files import LoadedModel, load
from baru_common.sampling import Grammar, SamplingMode, SamplingParams
from baru_hub.engines.transformers import TransformersEngine
from baru_hub.scheduler import Plan
from baru_hub.session import Session
from baru_micro import Finish, MicroNode
from support import plain
from support.drafted import NUM_LAYERS, SIZE, WIDTH, layered_target, save_head
from support.drafters import FunctionDrafter
from support.hubs import hub_of
from support.lockstep import Lockstep, free_running
from support.plain import Shape
from support.tiny import save, twin

FAMILIES = ("early_exit", "whole", "eagle3", "mtp", "dflash")
NODES = ("none", "ngram", "oracle", "always_wrong")
_SHAPE = Shape(4, 2, 8, 1e-6, 1e4)


# -- drafters


def _weights(generator: torch.Generator, **kinds: Any) -> dict[str, torch.Tensor]:
    return plain.layer_tensors(generator, _SHAPE, WIDTH, 40, **kinds)


def _config(**more: Any) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": WIDTH,
        "intermediate_size": 40,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-6,
        "vocab_size": 320,
        "max_position_embeddings": 512,
        **more,
    }


def _eagle3(folder: Path, generator: torch.Generator) -> Path:
    ids = torch.arange(100) * 3
    tensors = {f"midlayer.{name}": tensor for name, tensor in _weights(generator, inputs=2).items()}
    tensors |= {name: plain.norm_weight(generator, WIDTH) for name in ("midlayer.hidden_norm.weight", "norm.weight")}
    tensors |= {"fc.weight": plain.matrix(generator, WIDTH, 3 * WIDTH), "d2t": ids - torch.arange(100)}
    model: Any = layered_target().model
    tensors["lm_head.weight"] = model.lm_head.weight[ids].clone()
    return save_head(folder, tensors, _config(draft_vocab_size=100))


def _dflash(folder: Path, generator: torch.Generator) -> Path:
    tensors = {f"layers.0.{name}": tensor for name, tensor in _weights(generator, qk_norm=True).items()}
    tensors |= {name: plain.norm_weight(generator, WIDTH) for name in ("hidden_norm.weight", "norm.weight")}
    tensors["fc.weight"] = plain.matrix(generator, WIDTH, WIDTH)
    return save_head(folder, tensors, _config(block_size=6, dflash_config={"mask_token_id": 310}))


def _with_mtp(folder: Path, generator: torch.Generator) -> Path:
    """The target's own checkpoint, with a head whose block adds little to the target's state."""
    save(layered_target(), folder)
    tensors = {f"mtp.layers.0.{name}": 0.3 * tensor for name, tensor in _weights(generator).items()}
    tensors = {
        name: tensor if tensor.shape[0] != 40 else torch.zeros(64, WIDTH)
        for name, tensor in tensors.items()
        if "down" not in name
    }
    tensors["mtp.layers.0.mlp.down_proj.weight"] = torch.zeros(WIDTH, 64)
    for name in ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm"):
        tensors[f"{name}.weight"] = torch.ones(WIDTH)
    tensors["mtp.fc.weight"] = torch.cat((0.2 * torch.eye(WIDTH), torch.eye(WIDTH)), 1)
    weights = folder / "model.safetensors"
    save_file(load_file(weights) | tensors, weights, metadata={"format": "pt"})
    return folder


@dataclass(frozen=True)
class Served:
    target: LoadedModel
    spec: str

    def engine(self) -> TransformersEngine:
        return TransformersEngine(twin(self.target), kv_cache_mb=8, drafter=self.spec)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Served]:
    folder, generator = tmp_path_factory.mktemp("heads"), torch.Generator().manual_seed(0)
    target = layered_target()
    return {
        "early_exit": Served(target, "early_exit:4"),
        "whole": Served(target, f"early_exit:{NUM_LAYERS}"),
        "eagle3": Served(target, f"eagle3:{_eagle3(folder / 'eagle3', generator)}"),
        "dflash": Served(target, f"dflash:{_dflash(folder / 'dflash', generator)}"),
        "mtp": Served(load(str(_with_mtp(folder / "mtp", generator)), dtype="float32"), "mtp"),
    }


# -- requests


@dataclass(frozen=True)
class Request:
    prompt: tuple[int, ...]
    params: SamplingParams


def _asked(length: int, number: int, num_tokens: int = 20, **params: Any) -> Request:
    generator = torch.Generator().manual_seed(number)
    prompt = torch.randint(3, SIZE, (length,), generator=generator).tolist()
    return Request(tuple(prompt), SamplingParams(max_tokens=num_tokens, **params))


REQUESTS = {
    "greedy": _asked(5, 1, 40, ignore_eos=True),
    "greedy, long": _asked(244, 2, 24, ignore_eos=True),
    "sampled": _asked(58, 3, 24, temperature=1.0, seed=5),
    "filtered": _asked(20, 4, temperature=0.8, seed=6, top_k=40, top_p=0.95, repetition_penalty=1.3, logprobs=2),
    "penalised": _asked(1, 5, presence_penalty=0.8, frequency_penalty=0.5, min_tokens=12),
    "json": _asked(
        12,
        6,
        temperature=0.7,
        seed=7,
        grammar=Grammar.json_schema(
            {"type": "object", "properties": {"a": {"type": "integer", "maximum": 99}}, "required": ["a"]}
        ),
    ),
    "regex": _asked(63, 7, grammar=Grammar.regex("[a-f]{6,20}( [0-9]{2,6})?")),
    "stops": _asked(30, 8, temperature=1.0, seed=8, stop_ids=tuple(range(3, 40)), stop_strings=("e", "th", "\n")),
}
"""Eight sessions of a batch. Prompts end before, at and after page ends; the long one grows into another bucket."""


async def said(address: str, request: Request, drafter: Drafter | None) -> Finish:
    async with MicroNode.connect(address, drafter=drafter) as node:
        events = [event async for event in node.generate(request.prompt, request.params)]
    assert isinstance(events[-1], Finish)
    return events[-1]


_answers: dict[str, Finish] = {}


@pytest.fixture
async def answers() -> dict[str, Finish]:
    """What the target says to each request with drafting off."""
    if not _answers:
        async with hub_of(layered_target(), max_depth=0) as hub:
            for name, request in REQUESTS.items():
                _answers[name] = await said(hub.address, request, None)
    return _answers


def node_of(kind: str, answers: dict[str, Finish]) -> Drafter | None:
    """A node's drafter, for any of the requests."""
    wholes = {REQUESTS[name].prompt: [*REQUESTS[name].prompt, *answer.ids] for name, answer in answers.items()}

    def right(ids: Sequence[int], num_committed: int, max_tokens: int) -> list[int]:
        whole = next(whole for prompt, whole in wholes.items() if tuple(ids[: len(prompt)]) == prompt)
        return whole[len(ids) : min(len(ids) + max_tokens, num_committed + 3)]

    def wrong(ids: Sequence[int], num_committed: int, max_tokens: int) -> list[int]:
        return [(token + 1) % SIZE for token in right(ids, num_committed, max_tokens)]

    return {
        "none": None,
        "ngram": NgramDrafter(),
        "oracle": FunctionDrafter(right, "oracle"),
        "always_wrong": FunctionDrafter(wrong, "wrong"),
    }[kind]


class Own(Lockstep):
    """Lockstep, and the hub drafts as deep and as wide as it is told, in another mix each step."""

    def __init__(self, *shapes: tuple[int, int]) -> None:
        super().__init__()
        self.shapes, self.num_plans = shapes, 0

    def plan(self, sessions: Sequence[Session], now_s: float) -> Plan:
        for number, session in enumerate(sessions):
            if session.own:
                session.own.depth, session.own.width = self.shapes[(self.num_plans + number) % len(self.shapes)]
        plan = super().plan(sessions, now_s)
        self.num_plans += bool(plan.blocks)
        return plan


@pytest.mark.parametrize("node", NODES)
@pytest.mark.parametrize("family", FAMILIES)
async def test_hub_drafts_do_not_move_the_output(
    family: str, node: str, served: dict[str, Served], answers: dict[str, Finish]
) -> None:
    """Alone, one after the other; then eight sessions at a time, each drafted for in other depths and widths."""
    schedule = Own((4, 2), (0, 1), (7, 1), (1, 3), (3, 2))
    async with hub_of(served[family].engine(), scheduler=schedule) as hub:
        drafter = node_of(node, answers)
        alone = ("sampled", "json") if node == "none" else ("greedy",)
        finished = {name: await said(hub.address, REQUESTS[name], drafter) for name in alone}
        for name, finish in finished.items():
            assert (finish.ids, finish.reason) == (answers[name].ids, answers[name].reason), name
        together = await asyncio.gather(*(said(hub.address, request, drafter) for request in REQUESTS.values()))
    for (name, answer), finish in zip(answers.items(), together, strict=True):
        assert (finish.ids, finish.reason) == (answer.ids, answer.reason), name
        assert finish.text == answer.text
        assert finish.usage.num_emitted == len(answer.ids)
        if node == "always_wrong" and not REQUESTS[name].params.grammar:  # what a grammar forces is right
            assert finish.usage.num_accepted == 0, name
        if node == "oracle":
            assert finish.usage.num_accepted == finish.usage.num_verified, name
    num_guessed = sum(finish.usage.num_guessed for finish in together)
    if family in ("whole", "early_exit"):
        assert num_guessed > 10


@pytest.mark.parametrize("family", FAMILIES)
async def test_the_real_schedule_does_not_move_the_output_either(
    family: str, served: dict[str, Served], answers: dict[str, Finish]
) -> None:
    """Nobody is waited for: drafts are late, and the hub's own beside them go as deep as seems to pay."""
    async with hub_of(served[family].engine(), scheduler=free_running()) as hub:
        kinds = [node_of(kind, answers) for kind in (*NODES, *NODES)]
        finished = await asyncio.gather(
            *(said(hub.address, request, kind) for request, kind in zip(REQUESTS.values(), kinds, strict=True))
        )
    for (name, answer), finish in zip(answers.items(), finished, strict=True):
        assert (finish.ids, finish.reason) == (answer.ids, answer.reason), name
    if family == "whole":
        assert sum(finish.usage.num_guessed for finish in finished) > 10


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("node", ["none", "oracle"])
async def test_the_targets_own_layers_are_always_right(
    node: str, width: int, served: dict[str, Served], answers: dict[str, Finish]
) -> None:
    """With all of them every guess stands, so each step but the first emits all that it can."""
    async with hub_of(served["whole"].engine(), scheduler=Own((4, width))) as hub:
        for name in ("greedy", "greedy, long", "sampled"):
            finish = await said(hub.address, REQUESTS[name], node_of(node, answers))
            assert finish.ids == answers[name].ids
            num_ids = len(finish.ids)
            most = 5 if node == "none" else 8
            assert finish.usage.num_steps <= 3 + -(-num_ids // most), name
            if node == "none":
                # All that was emitted was guessed, but one id a step.
                assert finish.usage.num_guessed >= num_ids - finish.usage.num_steps - 1
            else:
                assert finish.usage.num_accepted == finish.usage.num_verified > 5


async def test_under_rejection_sampling_the_hub_does_not_draft(served: dict[str, Served]) -> None:
    """It checks one chain against what it was drawn from: the node's. A greedy request has nothing to reject."""
    prompt = REQUESTS["greedy"].prompt
    params = SamplingParams(max_tokens=30, ignore_eos=True, temperature=1.0, seed=3)
    rejecting = SamplingParams(
        max_tokens=30, ignore_eos=True, temperature=1.0, seed=3, sampling_mode=SamplingMode.REJECTION
    )
    greedy = SamplingParams(max_tokens=30, ignore_eos=True, sampling_mode=SamplingMode.REJECTION)
    async with hub_of(served["whole"].engine(), scheduler=Own((4, 2))) as hub:
        num_guessed = [
            (await said(hub.address, Request(prompt, each), NgramDrafter())).usage.num_guessed
            for each in (params, rejecting, greedy)
        ]
    assert num_guessed[0] > 10
    assert num_guessed[1] == 0
    assert num_guessed[2] > 10


async def test_a_depth_of_nothing_turns_the_hubs_drafter_off(
    served: dict[str, Served], answers: dict[str, Finish]
) -> None:
    async with hub_of(served["whole"].engine(), scheduler=free_running(), max_depth=0) as hub:
        finish = await said(hub.address, REQUESTS["greedy"], None)
    assert (finish.ids, finish.usage.num_guessed) == (answers["greedy"].ids, 0)


@pytest.mark.parametrize("width", [1, 2])
async def test_a_nodes_draft_with_a_stop_id_in_it(
    width: int, served: dict[str, Served], answers: dict[str, Finish]
) -> None:
    """It is checked whole, be the stop id right or wrong, and what the hub guessed does not count as the node's."""
    whole = [*REQUESTS["greedy"].prompt, *answers["greedy"].ids]
    unheard = next(token for token in range(3, SIZE) if token not in answers["greedy"].ids)
    request = Request(REQUESTS["greedy"].prompt, SamplingParams(max_tokens=40, ignore_eos=True, stop_ids=(unheard,)))

    def propose(ids: Sequence[int], num_committed: int, max_tokens: int) -> list[int]:
        right = whole[len(ids) : min(len(ids) + max_tokens, num_committed + 4)]
        return [unheard if i == 0 else token for i, token in enumerate(right)] if len(ids) == num_committed else []

    async with hub_of(served["whole"].engine(), scheduler=Own((3, width))) as hub:
        finish = await said(hub.address, request, FunctionDrafter(propose, "stopping"))
    assert finish.ids == answers["greedy"].ids[:40]
    assert finish.usage.num_accepted == 0
    assert finish.usage.num_verified > 20
    if width == 2:  # the id in the place of the wrong one is a leaf, and stands
        assert finish.usage.num_guessed > 10

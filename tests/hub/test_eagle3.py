"""EAGLE-3 heads in the layouts they are published in, against a reference that recomputes everything for each id."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from baru_common.errors import ModelFileError
from baru_common.model_files import LoadedModel
from baru_hub.drafters.checkpoint import tap_layers
from baru_hub.drafters.eagle3 import Eagle3
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
    save_head,
    states_of,
)
from support.plain import Shape, Tensors

DRAFT_SIZE, INNER = 120, 40
_PROMPT = [3 + i * 37 % 290 for i in range(70)]


@dataclass
class Head:
    """A head as it lies on the disk: config.json and tensors."""

    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    as_bin: bool = False
    taps: tuple[int, ...] = (2, 3, 3)

    def save(self, folder: Path) -> str:
        return str(save_head(folder, self.tensors, self.config, as_bin=self.as_bin))


@dataclass
class Kind:
    """How a head differs from the plainest."""

    config: dict[str, Any] = field(default_factory=dict)
    prefix: str = "midlayer."
    as_bin: bool = False
    width: int = WIDTH
    num_taps: int = 3
    taps: tuple[int, ...] = (2, 3, 3)
    head_dim: int = 8
    draft_size: int | None = DRAFT_SIZE
    own_embedding: bool = False
    own_head: bool = True
    d2t: bool = True
    t2d: bool = True
    fc: bool = True
    extra_norms: tuple[str, ...] = ()
    qk_norm: bool = False
    nested: bool = False
    num_layers: int = 1

    def make(self, seed: int = 0) -> Head:
        generator = torch.Generator().manual_seed(seed)
        shape = Shape(4, 2, self.head_dim, 1e-5, 1e4)
        size = self.draft_size or 320
        config: dict[str, Any] = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "hidden_size": self.width,
            "intermediate_size": INNER,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": self.head_dim,
            "num_hidden_layers": self.num_layers,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 2048,
            "vocab_size": 320,
        }
        if self.nested:
            config = {
                "architectures": ["Eagle3Speculator"],
                "transformer_layer_config": config | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
            }
        config |= {"draft_vocab_size": self.draft_size} | self.config
        ids = torch.randperm(SIZE, generator=generator)[:size].sort().values
        tensors = {
            f"{self.prefix}{name}": tensor
            for name, tensor in plain.layer_tensors(
                generator, shape, self.width, INNER, inputs=2, qk_norm=self.qk_norm
            ).items()
        }
        tensors[f"{self.prefix}hidden_norm.weight"] = plain.norm_weight(generator, self.width)
        for number in range(1, self.num_layers):
            more = plain.layer_tensors(generator, shape, self.width, INNER, qk_norm=self.qk_norm)
            tensors |= {f"layers.{number}.{name}": tensor for name, tensor in more.items()}
        tensors["norm.weight"] = plain.norm_weight(generator, self.width)
        if self.fc:
            tensors["fc.weight"] = plain.matrix(generator, self.width, self.num_taps * WIDTH)
        if self.own_head:
            tensors["lm_head.weight"] = plain.matrix(generator, size, self.width)
        if self.own_embedding:
            tensors["embed_tokens.weight"] = torch.randn(320, self.width, generator=generator)
        if self.d2t:
            tensors["d2t"] = ids - torch.arange(size)
        if self.t2d:
            tensors["t2d"] = torch.zeros(320, dtype=torch.bool).index_fill(0, ids, True)
        sizes = {"input_norm.weight": self.num_taps * WIDTH}
        for name in self.extra_norms:
            tensors[name] = plain.norm_weight(generator, sizes.get(name, WIDTH))
        return Head(config, tensors, self.as_bin, self.taps)


_AUX = "eagle_aux_hidden_state_layer_ids"
KINDS = {
    "plain": Kind(),
    "a torch archive": Kind(as_bin=True),
    "layers.0": Kind(prefix="layers.0."),
    "model.layers.0": Kind(prefix="model.layers.0."),
    "no t2d": Kind(t2d=False),
    "the whole vocabulary": Kind(draft_size=320, d2t=False, t2d=False),
    "no size, no maps": Kind(draft_size=None, d2t=False, t2d=False),
    "the target's output": Kind(draft_size=None, d2t=False, t2d=False, own_head=False),
    "its own embedding": Kind(own_embedding=True),
    "another width": Kind(width=24, head_dim=6, own_embedding=True, config={"target_hidden_size": WIDTH}),
    "norm before residual": Kind(config={"norm_before_residual": True}),
    "norm before fc": Kind(config={"norm_before_fc": True}, extra_norms=("input_norm.weight",)),
    "norm before fc, nested": Kind(
        config={"eagle_config": {"norm_before_fc": True}}, extra_norms=("input_norm.weight",)
    ),
    "a norm for each tap": Kind(config={"fc_norm": True}, extra_norms=tuple(f"fc_norm.{i}.weight" for i in range(3))),
    "norm output": Kind(config={"norm_output": True}),
    "head norms": Kind(qk_norm=True),
    "nested settings": Kind(nested=True, qk_norm=True, config={"norm_before_residual": True}),
    "its own rope": Kind(config={"rope_theta": 500.0}),
    "wide heads": Kind(head_dim=16),
    "two layers": Kind(num_layers=2),
    "boundaries": Kind(config={_AUX: [2, 3, 5]}, taps=(2, 3, 5)),
    "outputs, nested": Kind(config={"eagle_config": {_AUX: [1, 3, 4]}}, taps=(2, 4, 5)),
    "four taps": Kind(config={_AUX: [2, 3, 4, 5]}, taps=(2, 3, 4, 5), num_taps=4),
    "one tap": Kind(config={_AUX: [4]}, taps=(4,), num_taps=1),
    "the last state": Kind(
        config={"eagle_config": {"use_aux_hidden_state": False}}, fc=False, num_taps=1, taps=(NUM_LAYERS,)
    ),
}


class Reference:
    """The head as its authors describe it, from the published names on. Rows before `first` are not there."""

    def __init__(self, head: Head, target: LoadedModel, first: int = 0) -> None:
        raw = head.config
        self.config = raw.get("transformer_layer_config", {}) | raw
        self.config |= raw.get("eagle_config", {})
        self.taps, self.target, self.first = head.taps, target, first
        self.tensors: Tensors = {name.removeprefix("model."): tensor for name, tensor in head.tensors.items()}
        prefix = "midlayer." if "midlayer.hidden_norm.weight" in self.tensors else "layers.0."
        self.layer = plain.under(self.tensors, prefix)
        config = self.config
        self.shape = Shape(4, 2, config["head_dim"], config["rms_norm_eps"], config.get("rope_theta", 1e4))
        model: Any = target.model
        self.embedding = self.tensors.get("embed_tokens.weight", model.model.embed_tokens.weight)
        self.output = self.tensors.get("lm_head.weight", model.lm_head.weight)

    def fused(self, ids: Sequence[int]) -> torch.Tensor:
        states = states_of(self.target, ids)
        taps = [states[i] for i in self.taps]
        tensors, eps = self.tensors, self.shape.eps
        if "fc_norm.0.weight" in tensors:
            taps = [plain.rms(tap, tensors[f"fc_norm.{i}.weight"], eps) for i, tap in enumerate(taps)]
        joined = torch.cat(taps, -1)
        if "input_norm.weight" in tensors:
            joined = plain.rms(joined, tensors["input_norm.weight"], eps)
        return joined @ tensors["fc.weight"].T if "fc.weight" in tensors else joined

    def rows(self, state: torch.Tensor, following: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """(what goes on, what the output reads) of all rows, each with the id after it."""
        weights, eps = self.layer, self.shape.eps
        positions = torch.arange(self.first, self.first + len(state))
        normed = plain.rms(state, weights["hidden_norm.weight"], eps)
        embedded = plain.rms(self.embedding[list(following)], weights["input_layernorm.weight"], eps)
        hidden = normed if self.config.get("norm_before_residual") else state
        hidden = hidden + plain.attention(weights, self.shape, torch.cat((embedded, normed), -1), positions)
        hidden = hidden + plain.feed_forward(
            weights, plain.rms(hidden, weights["post_attention_layernorm.weight"], eps)
        )
        for number in range(1, self.config["num_hidden_layers"]):
            hidden = plain.layer(plain.under(self.tensors, f"layers.{number}."), self.shape, hidden, positions)
        read = plain.rms(hidden, self.tensors["norm.weight"], eps)
        return (read if self.config.get("norm_output") else hidden), read

    @torch.inference_mode()
    def __call__(self, committed: Sequence[int], drafted: Sequence[int]) -> torch.Tensor:
        ids = [*committed, *drafted]
        state = self.fused(committed[:-1])[self.first :]
        for _ in range(len(drafted)):  # each drafted row reads the row before it, so they come one by one
            following, _ = self.rows(state, ids[self.first + 1 : self.first + 1 + len(state)])
            state = torch.cat((state, following[-1:]))
        _, read = self.rows(state, ids[self.first + 1 : self.first + 1 + len(state)])
        drafted_logits = self.output @ read[-1]
        places = torch.arange(len(drafted_logits)) + self.tensors.get("d2t", 0)
        return torch.full((320,), float("-inf")).index_copy(0, places, drafted_logits)


def reference_of(head: Head, first: int = 0) -> Reference:
    return Reference(head, layered_target(), first)


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Any]:
    engines: list[TransformersEngine] = []

    def make(head: Head) -> TransformersEngine:
        engines.append(engine_with(layered_target(), f"eagle3:{head.save(tmp_path / str(len(engines)))}"))
        return engines[-1]

    yield make
    for engine in engines:
        engine._worker.shutdown()
        engine.pool.check_integrity()


@pytest.mark.parametrize("name", KINDS)
async def test_every_published_layout_drafts_what_its_authors_describe(name: str, opened: Any) -> None:
    """First from the prompt's states alone, then from a few of the head's own; along a node's draft too."""
    head = KINDS[name].make()
    engine, reference = opened(head), reference_of(head)
    run = Driven.open(engine, _PROMPT[:20])
    await run.prefill()
    for width, chain in ((2, ()), (1, (30, 31))):
        wanted = expected(reference, run.committed, run.sampler, 4, width, chain)
        assert as_lists(await run.draft(4, width, chain)) == as_lists(wanted)
        await run.step()
    run.free()


@pytest.mark.parametrize("name", ["plain", "norm output", "two layers"])
def test_logits_equal_the_references(name: str, opened: Any) -> None:
    """Not only which is the likeliest: all of them, -inf where the head has no word."""
    head = KINDS[name].make()
    engine, reference = opened(head), reference_of(head)
    ids = _PROMPT[:12]
    eagle: Any = engine._drafter._head
    states = states_of(layered_target(), ids[:-1])
    taps = torch.stack([states[i] for i in head.taps], 1)

    def attend(_layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2)

    embedded = eagle._embedding(torch.tensor([ids[1:]]))
    _, read = eagle._head(embedded, eagle.fused(taps), torch.arange(len(ids) - 1), attend)
    torch.testing.assert_close(eagle.logits(read[0])[-1], reference(ids, [])[:SIZE], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "seed": 9}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("num_prompt", [70, 250])
async def test_drafts_are_right_in_every_phase(num_prompt: int, params: dict[str, Any], opened: Any) -> None:
    """After steps without drafts, rejections, a bonus, a leaf that stood, across pages and a bucket of 256 keys."""
    head = Kind(t2d=False).make(seed=1)
    engine = opened(head)
    prompt = [3 + i * 41 % 290 for i in range(num_prompt)]
    answer = await future(engine, prompt, 60, **params)
    phases = Phases(Driven.open(engine, prompt, **params), reference_of(head))
    await phases.all(answer)
    assert phases.num_compared == 12
    assert phases.run.output == answer[: len(phases.run.output)]
    phases.run.free()


async def test_sessions_drafted_for_together_draft_what_they_would_alone(opened: Any) -> None:
    """Of other lengths, depths and widths, some just opened, one whose states are not there yet."""
    head = Kind().make(seed=2)
    engine, reference = opened(head), reference_of(head)
    runs = [Driven.open(engine, _PROMPT[i : i + length]) for i, length in enumerate((5, 64, 65, 31))]
    for run in runs:
        await run.prefill()
    await runs[1].step()
    untouched = Driven.open(engine, [7])
    asked = [(1, 3, ()), (4, 1, ()), (2, 2, (50, 60)), (3, 1, (9,))]
    wants = [run.want(depth, width, chain) for run, (depth, width, chain) in zip(runs, asked, strict=True)]
    *found, nothing = await engine.draft([*wants, untouched.want(4, 2, (8, 9))])
    assert as_lists(nothing) == ([8, 9], [])
    for run, guesses, (depth, width, chain) in zip(runs, found, asked, strict=True):
        assert as_lists(guesses) == as_lists(expected(reference, run.committed, run.sampler, depth, width, chain))
    for run in (*runs, untouched):
        run.free()


async def test_after_a_prompt_found_in_the_cache(opened: Any) -> None:
    """The head's keys of whole pages are found with the target's."""
    head = Kind().make(seed=3)
    engine, reference = opened(head), reference_of(head)
    first = Driven.open(engine, _PROMPT, "alice")
    await first.prefill()
    await first.draft()
    await first.step()
    second = Driven.open(engine, _PROMPT, "alice")
    assert second.num_cached == 64
    await second.prefill()
    assert as_lists(await second.draft()) == as_lists(expected(reference, second.committed, second.sampler, 3))
    for run in (first, second):
        run.free()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_positions_keep_their_precision_in_any_numeric_type(dtype: torch.dtype, tmp_path: Path) -> None:
    """Frequencies rounded to bf16 would turn far positions by radians."""
    whole = layered_target()
    model: Any = copy.deepcopy(whole.model)
    target = LoadedModel(whole.files, model.to(dtype), whole.bundle, str(dtype))
    loaded: Any = Eagle3.load(Kind(config={"rope_theta": 5000.0}).make().save(tmp_path), target)
    positions = torch.tensor([1, 100, 2000])
    cos, sin = loaded._head.rotary(positions, torch.zeros(1, dtype=dtype))
    angles = positions[:, None].double() * 5000.0 ** (-torch.arange(4).double() / 4)
    torch.testing.assert_close(cos[0, :, :4].double(), angles.cos(), rtol=0, atol=1e-2)
    torch.testing.assert_close(sin[0, :, 4:].double(), angles.sin(), rtol=0, atol=1e-2)
    assert loaded._head.fc.weight.dtype == dtype


# -- what is refused


def broken(**changes: Any) -> Head:
    """A plain head with other tensors (None: without) or other settings (under `config`)."""
    head = Kind(t2d=False).make()
    head.config |= changes.pop("config", {})
    for name, tensor in changes.items():
        if tensor is None:
            del head.tensors[name]
        else:
            head.tensors[name] = tensor
    return head


_IDS = torch.arange(DRAFT_SIZE)
REFUSED: dict[str, tuple[Head, str]] = {
    "code of its own": (broken(config={"auto_map": {"AutoModel": "x.Y"}}), "auto_map"),
    "a tensor too many": (broken(**{"midlayer.extra.weight": torch.ones(2)}), "unknown midlayer.extra.weight"),
    "a tensor missing": (broken(**{"midlayer.mlp.up_proj.weight": None}), "missing midlayer.mlp.up_proj.weight"),
    "no fc": (broken(**{"fc.weight": None}), "fc.weight"),
    "no output for a reduced vocabulary": (broken(**{"lm_head.weight": None}), "lm_head.weight"),
    "another shape": (broken(**{"norm.weight": torch.ones(31)}), r"norm.weight is \(31,\)"),
    "fc of two taps": (broken(**{"fc.weight": torch.ones(WIDTH, 2 * WIDTH)}), "fc.weight"),
    "more taps than fc reads": (broken(config={_AUX: [2, 3, 4, 5]}), "fc.weight"),
    "another target's width": (broken(config={"target_hidden_size": 48}), "48|fc.weight"),
    "taps past the target": (broken(config={_AUX: [2, 3, 7]}), "6 layers"),
    "taps that are no list": (broken(config={_AUX: "2,3,4"}), _AUX),
    "no taps": (broken(config={_AUX: []}), _AUX),
    "too many taps": (broken(config={_AUX: [2] * 17}), _AUX),
    "taps that are no numbers": (broken(config={_AUX: [2, "3", 4]}), _AUX),
    "ids past the target": (broken(d2t=_IDS * 2 + 100), "ids below"),
    "ids below nothing": (broken(d2t=_IDS * 0 - 5), "another target"),
    "a width that needs an embedding": (Kind(width=24, head_dim=6, config={"target_hidden_size": WIDTH}).make(), "24"),
    "a width that needs an output": (
        Kind(
            width=24,
            head_dim=6,
            own_embedding=True,
            own_head=False,
            draft_size=None,
            d2t=False,
            t2d=False,
            config={"target_hidden_size": WIDTH},
        ).make(),
        "24",
    ),
    "an embedding of fewer ids": (
        broken(config={"vocab_size": 200}, **{"embed_tokens.weight": torch.ones(200, WIDTH)}),
        "200",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_by_name(name: str, tmp_path: Path) -> None:
    head, message = REFUSED[name]
    with pytest.raises(ModelFileError, match=message):
        Eagle3.load(head.save(tmp_path), layered_target())


@pytest.mark.parametrize(
    ("missing", "message"), [("config.json", "config.json is missing"), ("model.safetensors", "x")]
)
def test_a_folder_that_is_no_head_is_refused(missing: str, message: str, tmp_path: Path) -> None:
    folder = Path(Kind().make().save(tmp_path))
    (folder / missing).unlink()
    with pytest.raises(ModelFileError, match=message if message != "x" else "model.safetensors or pytorch_model.bin"):
        Eagle3.load(str(folder), layered_target())


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_what_cannot_be_read_is_refused(name: str, tmp_path: Path) -> None:
    folder = Path(Kind().make().save(tmp_path))
    (folder / name).write_bytes(b"\x00nonsense")
    with pytest.raises(ModelFileError, match=r"cannot be read|another kind"):
        Eagle3.load(str(folder), layered_target())


@pytest.mark.parametrize("raw", ["[]", "3"])
def test_a_configuration_of_another_kind_is_refused(raw: str, tmp_path: Path) -> None:
    folder = Path(Kind().make().save(tmp_path))
    (folder / "config.json").write_text(raw)
    with pytest.raises(ModelFileError, match="another kind"):
        Eagle3.load(str(folder), layered_target())


def test_a_torch_archive_runs_nothing(tmp_path: Path) -> None:
    """A pickled object is refused, not made."""
    head = Kind(as_bin=True).make()
    head.tensors["norm.weight"] = Path("x")  # type: ignore[assignment]  # any object that is no tensor
    with pytest.raises(ModelFileError, match="cannot be read"):
        Eagle3.load(head.save(tmp_path), layered_target())


@pytest.mark.parametrize(
    ("raw", "num_layers", "taps"),
    [
        ({}, 32, (2, 16, 29)),
        ({}, 36, (2, 18, 33)),
        ({_AUX: [1, 15, 28]}, 32, (2, 16, 29)),
        ({"eagle_config": {_AUX: [24, 30, 35]}}, 36, (24, 30, 35)),
        ({_AUX: [2, 3, 4], "eagle_config": {_AUX: [5, 6, 7]}}, 36, (2, 3, 4)),
    ],
)
def test_taps_in_either_convention(raw: dict[str, Any], num_layers: int, taps: tuple[int, ...]) -> None:
    """Ids that start at 1 name outputs; others name boundaries, as they are."""
    assert tap_layers(raw, num_layers) == taps

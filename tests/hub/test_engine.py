"""The embedded engine on the tiny target: what is shared, what is refused, and what a failure leaves behind."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import random
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MambaConfig, MistralConfig, PreTrainedConfig

from baru_common.errors import BaruError, CapacityExhausted, ConfigError, EngineFailure, ModelFileError
from baru_common.model_files import LoadedModel, ModelFiles
from baru_common.sampling import SamplingContext
from baru_common.tokens import TokenizerBundle
from baru_hub.acceptance import Decision
from baru_hub.engines import Feed
from baru_hub.engines.transformers import PAGE_SIZE, TransformersEngine
from baru_hub.ragged_batch import RaggedBatch
from baru_hub.session import Block
from support.lines import Line, ids_of
from support.sampling import context
from support.tiny import plain_greedy, tiny_bundle, tiny_target, twin

_POISON = 77
"""An id whose embedding a test spoils."""
_PROMPT = [token for token in (3 + i * 11 % 290 for i in range(151)) if token != _POISON][:150]


def engine_of(kv_cache_mb: int = 1, bundle: TokenizerBundle | None = None) -> TransformersEngine:
    """1 MB holds 32 pages of the tiny target. The weights are this engine's own, so a test may spoil them."""
    target = twin(tiny_target())
    own = LoadedModel(target.files, copy.deepcopy(target.model), bundle or target.bundle, target.dtype)
    return TransformersEngine(own, kv_cache_mb=kv_cache_mb)


@pytest.fixture
def engine() -> Iterator[TransformersEngine]:
    made = engine_of()
    yield made
    made._worker.shutdown()
    made.pool.check_integrity()


def line_of(engine: TransformersEngine, prompt: Sequence[int], identity: str | None, room: int = 40) -> Line:
    return Line(engine, prompt, room, identity)


def pages_of(line: Line) -> list[int]:
    return line.engine._sequences[line.allocation.sequence].pages


async def step(line: Line, draft: Sequence[int] = (), max_pending: int = 1000) -> None:
    (decided,) = await line.engine.verify([line.feed(draft, max_pending)])
    line.take(decided)


async def decode(line: Line, num_ids: int, max_pending: int = 1000) -> list[int]:
    while len(line.output) < num_ids:
        await step(line, max_pending=max_pending)
    return line.output


@pytest.mark.parametrize(("num_prompt", "num_reused"), [(60, 0), (64, 0), (65, 64), (128, 64), (129, 128), (150, 128)])
async def test_whole_pages_of_an_equal_prompt_are_reused(
    engine: TransformersEngine, num_prompt: int, num_reused: int
) -> None:
    """All but the last prompt id may be cached already; what follows is as from a cold start."""
    prompt = _PROMPT[:num_prompt]
    first = line_of(engine, prompt, "alice")
    cold = await decode(first, 12)
    assert cold == plain_greedy(tiny_target(), prompt, 12)
    second = line_of(engine, prompt, "alice")
    assert (first.num_cached > 0, second.num_cached) == (True, num_reused)
    assert pages_of(second)[: num_reused // PAGE_SIZE] == pages_of(first)[: num_reused // PAGE_SIZE]
    assert not set(pages_of(second)[num_reused // PAGE_SIZE :]) & set(pages_of(first))
    assert await decode(second, 12) == cold
    first.free()
    assert line_of(engine, prompt, "alice").num_cached == num_reused  # a page outlives its sequence


async def test_pages_are_shared_within_an_identity_only(engine: TransformersEngine) -> None:
    """Not with another one, and not with nobody, either way."""
    await decode(line_of(engine, _PROMPT, "alice"), 2)
    await decode(line_of(engine, _PROMPT[:140], None), 2)
    for identity, num_cached in (("bob", 0), (None, 0), ("alice", 128)):
        assert line_of(engine, _PROMPT, identity).num_cached == num_cached


async def test_refused_drafts_are_never_shared(engine: TransformersEngine) -> None:
    """Only committed ids are published: a page that a wrong draft filled is not found by those who ask for it."""
    prompt = _PROMPT[:60]
    own = plain_greedy(tiny_target(), prompt, 12)
    wrong = [(token + 1) % 300 for token in own]
    line = line_of(engine, prompt, "alice")
    await step(line, draft=wrong)
    await step(line, draft=[*own[1:3], *wrong[3:12]])
    for _ in range(3):
        await step(line)
    assert line.output == own[: len(line.output)]
    assert line_of(engine, [*prompt, *wrong], "alice").num_cached == 0
    assert line_of(engine, [*prompt, own[0], *wrong[1:]], "alice").num_cached == 0
    assert line_of(engine, [*prompt, *own], "alice").num_cached == 64


async def test_a_prompt_not_yet_fed_is_not_shared(engine: TransformersEngine) -> None:
    """Pages are published as they fill, not as they are reserved."""
    line = line_of(engine, _PROMPT, "alice")
    assert line_of(engine, _PROMPT, "alice").num_cached == 0
    await step(line, max_pending=100)
    await step(line, max_pending=10)
    assert line_of(engine, _PROMPT, "alice").num_cached == 64


async def test_when_the_pool_is_exhausted_nothing_changes(engine: TransformersEngine) -> None:
    """The error says when to try again; who has pages goes on; afterwards there is room again."""
    lines = [line_of(engine, _PROMPT, "alice", room=490 - 150) for _ in range(4)]  # 8 pages each: all of them
    held = engine.pool.num_held, set(engine._sequences)
    with pytest.raises(CapacityExhausted) as refused:
        engine.allocate(_PROMPT, 200, "alice")
    assert refused.value.retry_after_s > 0
    assert refused.value.hint
    assert (engine.pool.num_held, set(engine._sequences)) == held
    assert await decode(lines[0], 5) == plain_greedy(tiny_target(), _PROMPT, 5)
    lines[1].free()
    assert engine.allocate(_PROMPT, 200, "alice").num_cached == 128


@pytest.mark.parametrize("kv_cache_mb", [0, -5])
def test_a_cache_without_a_page_is_refused(kv_cache_mb: int) -> None:
    """With the least that will do."""
    with pytest.raises(ConfigError, match="at least 1 MB"):
        engine_of(kv_cache_mb)


async def test_a_small_cache_is_calibrated_with_what_it_holds() -> None:
    """A pool of two pages, less than the calibration would like, still starts."""
    config = LlamaConfig(
        vocab_size=320, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, head_dim=128
    )
    model = LlamaForCausalLM(config).requires_grad_(False)
    files = ModelFiles("small", Path("small"))
    files.__dict__["digest"] = "small"
    loaded = LoadedModel(files, model, tiny_bundle(), "float32")
    engine = TransformersEngine(loaded, kv_cache_mb=1)
    assert (engine.pool.num_pages, (await engine.calibrate()).row_s >= 0) == (2, True)
    assert engine.pool.num_held == 0
    await engine.close()


def embeddings(engine: TransformersEngine) -> torch.Tensor:
    weight = engine._model.get_input_embeddings().weight
    assert isinstance(weight, torch.Tensor)
    return weight.data


def spoil(engine: TransformersEngine, *ids: int) -> torch.Tensor:
    """Make the embeddings of these ids NaN; return what was there."""
    weight = embeddings(engine)
    before = weight.clone()
    weight[list(ids)] = float("nan")
    return before


# -- from logits to ids

_SIZE, _WIDTH = 300, 320  # the last 20 columns are padding
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_INF, _NAN = float("inf"), float("nan")


async def decided_for(engine: TransformersEngine, logits: torch.Tensor) -> Decision | BaruError:
    """What the engine makes of these rows ([num_rows, width]), put in the place of its model's own."""

    def instead(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        whole = torch.zeros(output.shape, dtype=logits.dtype)
        whole[0, : len(logits)] = logits
        return whole

    hook = engine._model.lm_head.register_forward_hook(instead)
    sequence = engine.allocate([5], 40, None).sequence
    try:
        (result,) = await engine.verify([Feed(sequence, 0, Block((5,), (6,) * (len(logits) - 1)))])
    finally:
        engine.free(sequence)
        hook.remove()
    return result


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("value", [9.0, _INF, -_INF, _NAN])
async def test_what_padding_and_holes_hold_does_not_matter(dtype: torch.dtype, value: float) -> None:
    """Even infinities and NaN there neither win nor count as a failure; of the real maxima the lowest id is chosen."""
    spec = json.loads(tiny_bundle().tokenizer_json)
    spec["model"]["merges"] = [m for m in spec["model"]["merges"] if "".join(m) not in ("et", "te", "ea", "ta")]
    holes = sorted(spec["model"]["vocab"].pop(token) for token in ("et", "te", "ea", "ta"))
    engine = engine_of(bundle=TokenizerBundle(json.dumps(spec)))
    assert list(engine.spec.vocabulary.holes) == holes
    choose = random.Random(7)
    for _ in range(8):
        logits = torch.tensor([[choose.randint(-2, 2) for _ in range(_WIDTH)] for _ in range(5)], dtype=dtype)
        logits[0, : holes[-1] + 1] = -3  # one maximum only, past the holes
        logits[0, holes[-1] + 1] = 3
        logits[:, holes] = value
        logits[:, _SIZE:] = value
        rows, allowed = logits.tolist(), [i for i in range(_SIZE) if i not in holes]
        expected = [min(allowed, key=lambda i, row=row: (-row[i], i)) for row in rows]  # type: ignore[misc]
        assert ids_of(await decided_for(engine, logits)) == expected
    await engine.close()


@pytest.mark.parametrize("value", [_NAN, _INF])
@pytest.mark.parametrize("row", [0, 2])
@pytest.mark.parametrize("dtype", _DTYPES)
async def test_logits_that_are_not_finite_are_refused(
    engine: TransformersEngine, value: float, row: int, dtype: torch.dtype
) -> None:
    """One such logit in one row of the block is enough."""
    logits = torch.zeros(3, _WIDTH, dtype=dtype)
    logits[row, 5] = value
    result = await decided_for(engine, logits)
    assert isinstance(result, EngineFailure)
    assert "not finite" in result.message


async def test_a_row_without_any_choice_is_refused(engine: TransformersEngine) -> None:
    """All ids masked out: no id is made up, also where padding has a value."""
    logits = torch.full((1, _WIDTH), -_INF)
    logits[0, _SIZE:] = 1.0
    result = await decided_for(engine, logits)
    assert isinstance(result, EngineFailure)
    assert "not finite" in result.message


async def test_masked_ids_beside_a_finite_one_are_fine(engine: TransformersEngine) -> None:
    """Minus infinity is an ordinary way to say "not this one"."""
    logits = torch.full((2, _WIDTH), -_INF)
    logits[0, 1] = logits[1, 299] = -3.0
    assert ids_of(await decided_for(engine, logits)) == [1, 299]


async def test_a_tie_in_the_models_numeric_type_goes_to_the_lowest_id(engine: TransformersEngine) -> None:
    """The larger one in fp32 stands later; in bf16 both round to one value."""
    logits = torch.zeros(1, _WIDTH)
    logits[0, 1], logits[0, 2] = 8.0, 8.001
    assert ids_of(await decided_for(engine, logits)) == [2]
    assert ids_of(await decided_for(engine, logits.bfloat16())) == [1]


# -- what is not finite


@pytest.mark.parametrize("num_prompt", [1, 150])
async def test_what_is_not_finite_fails_and_is_wiped(engine: TransformersEngine, num_prompt: int) -> None:
    """EngineFailure for that step; its pages, and the spare one, hold zeros before anybody else gets them."""
    line = line_of(engine, _PROMPT[:num_prompt], None)
    before = spoil(engine, *range(320))
    with pytest.raises(EngineFailure, match="finite"):
        await decode(line, 1)
    for layer in engine._cache._pages:
        assert layer.keys.isfinite().all()
        assert layer.values.isfinite().all()
    line.free()
    embeddings(engine).copy_(before)
    assert await decode(line_of(engine, _PROMPT, None), 8) == plain_greedy(tiny_target(), _PROMPT, 8)


@pytest.mark.parametrize("max_pending", [1000, 100, 64, 30])
@pytest.mark.parametrize("identity", ["alice", None])
async def test_a_poisoned_prompt_harms_nobody_else(
    engine: TransformersEngine, max_pending: int, identity: str | None
) -> None:
    """Also when it is fed in pieces that decide nothing: neither those who share nor those who get its pages later."""
    poisoned = [*_PROMPT[:10], _POISON, *_PROMPT[11:]]
    spoil(engine, _POISON)
    line = line_of(engine, poisoned, identity)
    with pytest.raises(EngineFailure):
        await decode(line, 1, max_pending)
    line.free()
    assert line_of(engine, poisoned, identity).num_cached == 0
    line = line_of(engine, poisoned, identity)
    if max_pending < len(poisoned):  # it leaves before anything was decided
        with contextlib.suppress(EngineFailure):
            await step(line, max_pending=max_pending)
    for sequence in list(engine._sequences):
        engine.free(sequence)
    for _ in range(4):  # all pages
        other = line_of(engine, _PROMPT[:150], None, room=490 - 150)
        assert await decode(other, 3) == plain_greedy(tiny_target(), _PROMPT, 3)


def sampling_of(kind: str) -> SamplingContext:
    """Greedy, drawing, or greedy with log-probabilities: each decides in a way of its own."""
    params: dict[str, Any] = {"greedy": {}, "drawing": {"temperature": 1.0, "seed": 5}, "logprobs": {"logprobs": 2}}
    return context(70, vocabulary=tiny_target().vocabulary, eos_ids=tiny_target().eos_ids, **params[kind])


@pytest.mark.parametrize("poisoned", ["greedy", "drawing"])
@pytest.mark.parametrize("max_pending", [1000, 40])
async def test_one_sequence_that_is_not_finite_fails_alone(
    engine: TransformersEngine, poisoned: str, max_pending: int
) -> None:
    """Its neighbours in the batch, before and after it, get the ids they get alone; its pages hold zeros at once."""
    prompts = [_PROMPT[i : i + 70] for i in (0, 20, 40)]
    alone = []
    for kind, prompt in zip(("greedy", "drawing", "logprobs"), prompts, strict=True):
        line = Line(engine, prompt, 40, None, sampling_of(kind))
        alone.append(await decode(line, 12))
        line.free()
    assert alone[0] == plain_greedy(tiny_target(), prompts[0], 12)

    spoil(engine, _POISON)
    bad = Line(engine, [*_PROMPT[:30], _POISON, *_PROMPT[31:70]], 40, None, sampling_of(poisoned))
    good = [
        Line(engine, prompt, 40, None, sampling_of(kind))
        for kind, prompt in zip(("greedy", "drawing", "logprobs"), prompts, strict=True)
    ]
    feeds = [line.feed(max_pending=max_pending) for line in (good[0], bad, *good[1:])]
    first, failure, *others = await engine.verify(feeds)
    assert isinstance(failure, EngineFailure)
    assert "not finite" in failure.message
    for layer in engine._cache._pages:
        for page in pages_of(bad):
            slots = slice(page * PAGE_SIZE, (page + 1) * PAGE_SIZE)
            assert not layer.keys[slots].any()
            assert not layer.values[slots].any()
        assert layer.keys.isfinite().all()
        assert layer.values.isfinite().all()
    for line, result in zip(good, (first, *others), strict=True):
        line.take(result)
    bad.free()
    for line, expected in zip(good, alone, strict=True):
        assert await decode(line, 12) == expected


@pytest.mark.parametrize("num_cancels", [1, 2])
async def test_a_cancelled_step_ends_only_with_its_thread(
    engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch, num_cancels: int
) -> None:
    """Memory is freed after `verify` has returned, so it returns when the pass is over, however often cancelled."""
    entered, may_end = threading.Event(), threading.Event()
    forward = engine._forward

    def slow(batch: RaggedBatch) -> tuple[torch.Tensor, torch.Tensor | None]:
        entered.set()
        assert may_end.wait(20)
        return forward(batch)

    monkeypatch.setattr(engine, "_forward", slow)
    line = line_of(engine, _PROMPT, None)
    task = asyncio.create_task(step(line))
    try:
        assert await asyncio.to_thread(entered.wait, 20)
        for _ in range(num_cancels):
            task.cancel()
            await asyncio.sleep(0.02)
            assert not task.done()
    finally:
        may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (MistralConfig(num_hidden_layers=2, sliding_window=8), "Sliding"),
        (MambaConfig(num_hidden_layers=2), "linear_attention"),
    ],
)
def test_a_state_that_cannot_be_cut_back_is_refused_by_name(config: PreTrainedConfig, kind: str) -> None:
    """Before anything is reserved, with the type of the layer."""
    model: Any = torch.nn.Module()
    model.config = config
    with pytest.raises(BaruError, match=kind) as refused:
        TransformersEngine(LoadedModel(ModelFiles("it", Path("it")), model, tiny_bundle(), "float32"), kv_cache_mb=1)
    assert type(refused.value) is ModelFileError

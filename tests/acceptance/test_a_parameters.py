"""Group A of the public bug reports: every sampling parameter counts at every position of a block."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import cache
from typing import Any

import pytest
import torch
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from baru.drafting.v1 import drafting_pb2 as pb
from baru_common import wire
from baru_common.drafters import Proposal
from baru_common.drafters.causal_lm import CausalLmDrafter
from baru_common.errors import InvalidRequest
from baru_common.frames import Open
from baru_common.model_files import LoadedModel
from baru_common.sampling import Grammar, SamplingContext, SamplingMode, SamplingParams, SparseProbs
from baru_common.sampling.sampler import Sampler
from baru_hub.acceptance import accept
from baru_hub.deciding import decide
from baru_hub.engines.simulated import DeviceProfile, SimulatedEngine
from baru_hub.engines.transformers import TransformersEngine
from baru_hub.session import Block
from baru_micro import Finish, MicroNode
from support.drafters import oracle
from support.hubs import KV_CACHE_MB, generate, hub_of
from support.lines import Line
from support.lockstep import Lockstep
from support.tiny import tiny_target, twin, with_eos
from support.toys import FIRST_ID, chi_square_p, toy_target, toy_vocabulary

PROMPT = [40, 50, 60, 70]
NOISY = tiny_target(noise=0.1)
CPU = torch.device("cpu")

# -- A04 (a)


def assert_even(chosen: Sequence[Sequence[int]]) -> None:
    """Each of three ids 60 to 140 times out of 300, at each position of the block."""
    assert len(chosen) == 300
    for position in zip(*chosen, strict=True):
        counts = Counter(position)
        assert len(counts) == 3
        assert all(60 <= count <= 140 for count in counts.values()), counts


async def test_a04_three_equal_logits_come_out_equally_often() -> None:
    """Accepted, corrected and bonus ids alike, through a hub; the drafter is the target, so that all is accepted."""
    toy = toy_target((1 / 3, 1 / 3, 1 / 3))
    async with (
        hub_of(toy, scheduler=Lockstep(depth=2)) as hub,
        MicroNode.connect(hub.address, drafter=CausalLmDrafter(toy)) as node,
    ):
        chosen, num_bonus = [], 0
        for seed in range(300):
            params = SamplingParams(temperature=1.0, seed=seed, max_tokens=3)
            events = [event async for event in node.generate([FIRST_ID], params)]
            assert isinstance(events[-1], Finish)
            chosen.append(events[-1].ids)
            num_bonus += events[-1].usage.num_accepted + events[-1].usage.num_steps == 3
    assert num_bonus == 300, "every id that is not accepted is the one after a whole draft"
    assert_even(chosen)


@pytest.mark.parametrize("verify_blocks", [False, True])
@torch.inference_mode()
def test_a04_three_equal_logits_come_out_equally_often_by_rejection(verify_blocks: bool) -> None:
    """The draft is always the first id: accepted a third of the time, corrected to the two others else."""
    logits = torch.zeros(3, 3)
    chosen: list[Sequence[int]] = []
    bonus: list[int] = []
    for seed in range(300):
        params = SamplingParams(
            temperature=1.0, seed=seed, sampling_mode=SamplingMode.REJECTION, verify_blocks=verify_blocks
        )
        sampler = Sampler(SamplingContext(params, 1, toy_vocabulary(3), ()), CPU)
        block = Block((0,), (0, 0), True, 1)
        emitted = accept(block.draft, decide(logits, sampler, [0], block)).emitted
        chosen.append(emitted[:1])
        bonus += emitted[2:]
    assert_even(chosen)
    assert set(bonus) == {0, 1, 2}


# -- A04 (b)

FILTERED = SamplingParams(temperature=0.7, top_k=5, top_p=0.8, min_p=0.1)
SIZE, NUM_ROWS, LENGTH = 24, 8, 500
LOGITS = torch.randn(NUM_ROWS, SIZE, generator=torch.Generator().manual_seed(3))
"""The target's logits at a position, by the position modulo their number."""
# In the others min_p has nothing to do after the filters before it.
LOGITS[0] = FILTERED.temperature * torch.tensor([0.68, 0.1, 0.0665, 0.066, 0.0655] + [7e-4] * (SIZE - 5)).log()


def filtered_probs(logits: torch.Tensor, params: SamplingParams = FILTERED) -> torch.Tensor:
    """The distribution of each row by the filters of transformers, in the same order: [num_rows, vocabulary]."""
    none: Any = None  # they do not look at the ids
    for warper in (
        TemperatureLogitsWarper(params.temperature),
        TopKLogitsWarper(params.top_k or logits.shape[1]),
        TopPLogitsWarper(params.top_p),
        MinPLogitsWarper(params.min_p),
    ):
        logits = warper(none, logits)
    return logits.double().softmax(dim=1)


PROBS = filtered_probs(LOGITS)


def test_a04_each_of_the_filters_has_something_to_do() -> None:
    """What the next tests rest on."""
    support = PROBS > 0
    for without in ({"temperature": 1.0}, {"top_k": 0}, {"top_p": 1.0}, {"min_p": 0.0}):
        assert not torch.equal(filtered_probs(LOGITS, replace(FILTERED, **without)), PROBS)
    assert support.sum(dim=1).min() >= 2


def rows_at(position: int, num: int) -> torch.Tensor:
    return LOGITS[[(position + i) % NUM_ROWS for i in range(num)]]


FLAT = [SparseProbs.of(list(enumerate(row))) for row in (PROBS * 0.9 + 0.1 / SIZE).tolist()]
"""What a drafter thinks that gives every id a chance."""


def drafted(params: SamplingParams, position: int, plain: Sequence[int], choose: random.Random) -> Proposal:
    """Four draft ids at `position`: mostly what will be decided or, to be rejected, drawn from something flatter."""
    if params.sampling_mode is SamplingMode.COUPLED:
        return Proposal([t if choose.random() < 0.97 else choose.randrange(SIZE) for t in plain[position:][:4]])
    ids, probs = [], []
    for i in range(4):
        row = FLAT[(position + i) % NUM_ROWS]
        ids.append(choose.choices(row.ids, row.probs)[0])
        probs.append(row)
    return Proposal(ids, probs)


@pytest.mark.parametrize(
    ("mode", "verify_blocks", "num"),
    [
        ("coupled", False, 100_000),
        ("rejection", False, 10_000),
        ("rejection", True, 10_000),
        pytest.param("rejection", False, 100_000, marks=pytest.mark.full),
        pytest.param("rejection", True, 100_000, marks=pytest.mark.full),
    ],
)
@torch.inference_mode()
def test_a04_filters_hold_at_every_position_of_a_block(mode: SamplingMode, verify_blocks: bool, num: int) -> None:
    """No id outside the support; the distribution is that of the filters of another library (chi-square test)."""
    counts = torch.zeros(5, NUM_ROWS, SIZE)
    for seed in range(num // LENGTH):
        params = replace(FILTERED, seed=seed, sampling_mode=mode, verify_blocks=verify_blocks)
        sampling = SamplingContext(params, 1, toy_vocabulary(SIZE), ())
        sampler, choose, ids = Sampler(sampling, CPU), random.Random(seed), [0]
        plain = [0, *sampler.choose(rows_at(1, LENGTH + 8), ids, 1, 1)]
        while len(ids) <= LENGTH:
            at = len(ids)
            proposal = drafted(params, at, plain, choose)
            block = Block((ids[-1],), tuple(proposal.ids), True, 1, tuple(proposal.draft_probs))
            emitted = accept(block.draft, decide(rows_at(at, 5), sampler, ids, block)).emitted
            for index, token in enumerate(emitted):
                counts[index, (at + index) % NUM_ROWS, token] += 1
            ids.extend(emitted)
        if mode == "coupled":
            assert ids == plain[: len(ids)], "what plain sampling with the same seed gives"

    assert counts.sum() >= num
    assert bool((counts.sum(dim=(1, 2)) > num / 50).all()), "every place of a block must have been seen"
    for place in (*counts, counts.sum(dim=0)):
        assert chi_square_p(list(zip(place.tolist(), PROBS.tolist(), strict=True))) > 0.001
    for row, probs in zip(counts.sum(dim=0).tolist(), PROBS.tolist(), strict=True):
        assert chi_square_p([(row, probs)]) > 0.001


@pytest.mark.parametrize("mode", ["coupled", "rejection"])
async def test_a04_filters_hold_through_a_hub(mode: SamplingMode) -> None:
    """With a real target and a real drafter: no id outside the support that follows from the ids before it."""
    target, num_tokens = tiny_target(), 96
    async with hub_of(target, scheduler=Lockstep(depth=4)) as hub:
        for seed in range(3):
            params = replace(FILTERED, seed=seed, sampling_mode=mode, max_tokens=num_tokens, ignore_eos=True)
            finish, _ = await generate(hub.address, PROMPT, params, CausalLmDrafter(NOISY))
            ids = torch.tensor([[*PROMPT, *finish.ids]])
            with torch.inference_mode():
                logits = target.model(input_ids=ids, use_cache=False).logits[0, len(PROMPT) - 1 : -1, :300]
            probs = filtered_probs(logits.float())
            assert bool((probs.gather(1, torch.tensor(finish.ids)[:, None]) > 0).all())
            assert finish.usage.num_accepted > 10
            likeliest = probs.argmax(dim=1).tolist()
            assert finish.ids != tuple(likeliest), "the temperature must have had an effect"


# -- A04 (c)

BASE = SamplingParams(temperature=0.9, seed=7, max_tokens=24)
EOS_INDEX = 15
"""Place in its answer of the id that is made the target's end of sequence."""

PARAMETERS: dict[str, dict[str, Any]] = {
    "max_tokens": {"max_tokens": 5},
    "temperature": {"temperature": 3.0},
    "seed": {"seed": 8},
    "ignore_eos": {"ignore_eos": True},
    "stop_ids": {"stop_ids": "id 5"},
    "top_k": {"top_k": 2},
    "top_p": {"top_p": 0.3},
    "min_p": {"min_p": 0.7},
    "repetition_penalty": {"repetition_penalty": 5.0},
    "presence_penalty": {"presence_penalty": 2.0},
    "frequency_penalty": {"frequency_penalty": 2.0},
    "logit_bias": {"logit_bias": {100: 8}},  # a whole number, as most people write it
    "banned_ids": {"banned_ids": "id 2"},
    "allowed_ids": {"allowed_ids": tuple(range(40, 80))},
    "forced_ids": {"forced_ids": (50, 51)},
    "min_tokens": {"min_tokens": 20},
    "stop_strings": {"stop_strings": "text 4"},
    "logprobs": {"logprobs": 2},
    "sampling_mode": {"sampling_mode": "rejection"},
    "verify_blocks": {"sampling_mode": "rejection", "verify_blocks": True},
    "grammar": {"grammar": Grammar.regex("[a-z]{5,30}")},
}
"""For each parameter a request that it changes. "id 5": the id at place 5 of the answer without it."""


def filled_in(value: Any, target: LoadedModel, ids: Sequence[int]) -> Any:
    what, _, place = value.partition(" ") if isinstance(value, str) else ("", "", "")
    if what == "id":
        return (ids[int(place)],)
    return (target.vocabulary.text_bytes(ids[int(place)]).decode(),) if what == "text" else value


def test_a04_the_table_of_parameters_is_complete() -> None:
    """A parameter that is added later has to be entered here, and shown to have an effect."""
    assert set(PARAMETERS) == {field.name for field in fields(SamplingParams)}


@pytest.mark.parametrize("name", PARAMETERS)
async def test_a04_no_parameter_is_ignored_while_drafting(name: str) -> None:
    """With drafts comes exactly what comes without; and it is not what comes without the parameter."""
    target = tiny_target()
    async with hub_of(target, scheduler=Lockstep(depth=4)) as hub:
        long, _ = await generate(hub.address, PROMPT, BASE)
        eos = long.ids[EOS_INDEX]
        assert eos not in long.ids[:EOS_INDEX], "the test needs an id not seen before"
    async with hub_of(with_eos(target, eos), scheduler=Lockstep(depth=4)) as hub:
        base, _ = await generate(hub.address, PROMPT, BASE)
        assert len(base.ids) == EOS_INDEX + 1
        params = replace(BASE, **{key: filled_in(value, target, base.ids) for key, value in PARAMETERS[name].items()})
        plain, plain_steps = await generate(hub.address, PROMPT, params)
        drafted, steps = await generate(hub.address, PROMPT, params, CausalLmDrafter(NOISY))

    assert drafted.usage.num_verified > 0
    if params.sampling_mode is SamplingMode.REJECTION:
        assert plain.ids != base.ids, "what is drawn how is shown by the distributions of case A03"
        return
    assert drafted.ids == plain.ids
    assert (drafted.text, drafted.reason, drafted.stopped_by) == (plain.text, plain.reason, plain.stopped_by)
    if name == "logprobs":
        assert all(piece.logprobs and len(piece.logprobs.top) == 2 for step in steps for piece in step.pieces)
        assert [p.logprobs.top[0][0] for s in steps for p in s.pieces if p.logprobs] == [
            p.logprobs.top[0][0] for s in plain_steps for p in s.pieces if p.logprobs
        ]
    else:
        assert (drafted.ids, drafted.reason, drafted.stopped_by) != (base.ids, base.reason, base.stopped_by)


def refused_by_wire(message: pb.DecodeRequest) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        wire.decode_request(message)
    assert caught.value.status == "INVALID_ARGUMENT"
    return caught.value


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1.0),
        ("top_k", 2**32),
        ("top_p", 1.5),
        ("min_p", -0.1),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("logprobs", 21),
        ("sampling_mode", 99),
    ],
)
def test_a04_what_cannot_be_served_is_refused_by_name(name: str, value: Any) -> None:
    """From any client, whatever checks it has; never served with the value left out."""
    message = wire.encode_request(Open((1,), BASE, b"", b""))
    try:
        setattr(message.open.params, name, value)
    except ValueError:  # the contract itself has no room for it
        with pytest.raises(InvalidRequest) as caught:
            SamplingParams(**{name: value})
        assert caught.value.details["param"] == name
        return
    assert refused_by_wire(message).details["param"] == name


def test_a04_a_parameter_of_a_later_revision_is_refused() -> None:
    """Protobuf would pass over it in silence."""
    message = wire.encode_request(Open((1,), BASE, b"", b""))
    message.open.params.MergeFromString(bytes([0xF8, 0x3F, 1]))  # field 1023, varint
    error = refused_by_wire(message)
    assert error.details["param"] == "params"
    assert "1023" in error.message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 1.0),
        ("repetition_penalty", 1.3),
        ("presence_penalty", 0.5),
        ("frequency_penalty", 0.5),
        ("logit_bias", {3: 1.0}),
        ("banned_ids", (3,)),
        ("allowed_ids", (3,)),
        ("forced_ids", (3,)),
        ("min_tokens", 3),
        ("logprobs", 0),
        ("grammar", Grammar.regex("a+")),
    ],
)
async def test_a04_an_engine_that_follows_a_script_refuses_what_it_would_ignore(name: str, value: Any) -> None:
    """It has no logits. The error says which parameter is in the way."""
    engine = SimulatedEngine(DeviceProfile("quick", (0.0, 0.0), 0.0))
    async with hub_of(engine) as hub:
        with pytest.raises(InvalidRequest) as caught:
            await generate(hub.address, [200], SamplingParams(max_tokens=4, **{name: value}))
        assert caught.value.details.get("param") == name


# -- A05

PHRASE = (70, 80, 90)
LOOPING = [*PHRASE] * 8
PENALISED = SamplingParams(
    max_tokens=200,
    ignore_eos=True,
    repetition_penalty=1.3,
    frequency_penalty=0.8,
    presence_penalty=0.5,
    logit_bias={100: 3.0, 80: -2.0},
)
NUM_TOKENS = 200


@cache
def looping_target() -> LoadedModel:
    """The tiny target with a liking for the phrase: without penalties it says nothing else."""
    looping = twin(tiny_target())
    head = torch.nn.Linear(looping.model.lm_head.in_features, looping.model.lm_head.out_features)
    head.requires_grad_(False)
    head.weight.copy_(looping.model.lm_head.weight)
    head.bias.zero_()
    head.bias[list(PHRASE)] = 12.0
    looping.model.lm_head = head
    return looping


@cache
@torch.inference_mode()
def penalised_greedy() -> list[int]:
    """The slow, plain reference: recompute everything for each id, and recount what is there."""
    target, output = looping_target(), list[int]()
    while len(output) < NUM_TOKENS:
        ids = torch.tensor([[*LOOPING, *output]])
        logits = target.model(input_ids=ids, use_cache=False).logits[0, -1, : target.vocabulary.size].clone()
        for token, bias in PENALISED.biases:
            logits[token] += bias
        counts = Counter(output)
        for token in {*LOOPING, *output}:
            factor = PENALISED.repetition_penalty
            logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
        for token, count in counts.items():
            logits[token] -= PENALISED.presence_penalty
            logits[token] -= PENALISED.frequency_penalty * count
        output.append(int(torch.nonzero(logits == logits.max())[0, 0]))
    return output


def held_counts(sampler: Sampler, committed: Sequence[int]) -> list[float]:
    """What the penalties take from equal logits after `committed`: for each id, as the sampler sees it now."""
    return sampler.adjusted(torch.ones(1, 300), committed, len(committed), len(committed))[0].tolist()


def recounted(committed: Sequence[int], num_prompt: int) -> list[float]:
    logits = torch.ones(300)
    for token, bias in PENALISED.biases:
        logits[token] += bias
    for token in set(committed):
        logits[token] *= 1 / PENALISED.repetition_penalty if logits[token] > 0 else PENALISED.repetition_penalty
    for token, count in Counter(committed[num_prompt:]).items():
        logits[token] -= PENALISED.presence_penalty + PENALISED.frequency_penalty * count
    return logits.tolist()


@pytest.mark.parametrize("depth", [6, 3])
async def test_a05_penalties_do_not_fade_with_acceptance(depth: int) -> None:
    """All drafts are accepted, so each step commits several ids; with a period of 3, whole periods at a time."""
    target = looping_target()
    expected = penalised_greedy()
    async with hub_of(target, scheduler=Lockstep(depth=depth)) as hub:
        finish, steps = await generate(hub.address, LOOPING, PENALISED, oracle(LOOPING, expected, depth))
        plain, _ = await generate(hub.address, LOOPING, PENALISED)
        free, _ = await generate(hub.address, LOOPING, SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True))
    assert list(finish.ids) == list(plain.ids) == expected
    assert finish.usage.num_accepted == finish.usage.num_verified >= NUM_TOKENS * depth // (depth + 1) - depth
    assert max(len(step.ids) for step in steps) == depth + 1
    most_free, most_penalised = (max(Counter(f.ids).values()) for f in (free, finish))
    assert most_penalised < most_free / 2, "without the penalties it must loop"


@pytest.mark.parametrize("mode", ["greedy", "one-candidate-by-rejection"])
@pytest.mark.parametrize("depth", [6, 3])
async def test_a05_counts_are_of_committed_ids_only(depth: int, mode: str) -> None:
    """Drafts that are often wrong: after each round the penalties are those of a recount."""
    target = looping_target()
    expected = penalised_greedy()
    params = PENALISED
    if mode != "greedy":  # with one candidate there is nothing to draw, so it is greedy decoding by another path
        params = replace(PENALISED, temperature=1.0, seed=1, top_k=1, sampling_mode=SamplingMode.REJECTION)
    engine = TransformersEngine(twin(target), kv_cache_mb=KV_CACHE_MB)
    sampling = SamplingContext(params, len(LOOPING), target.vocabulary, target.eos_ids)
    line, choose = Line(engine, LOOPING, NUM_TOKENS, sampling=sampling), random.Random(depth)
    sampler = engine._sequences[line.allocation.sequence].sampler
    num_rejected = num_accepted = 0
    while not line.done:
        # Wrong ones are ids of the phrase, which the penalties are about.
        right = expected[len(line.output) : len(line.output) + depth]
        draft = [choose.choice(PHRASE) if choose.random() < 0.3 else token for token in right]
        (decision,) = await engine.verify([line.feed(draft)])
        accepted = line.take(decision)
        num_accepted += accepted
        num_rejected += accepted < len(line.block.draft)
        assert held_counts(sampler, line.committed) == pytest.approx(recounted(line.committed, len(LOOPING)))
    await engine.close()
    assert line.output[:NUM_TOKENS] == expected
    assert num_rejected > 10
    assert num_accepted > 50

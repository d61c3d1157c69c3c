"""Group E of the public bug reports: structured output and log-probabilities, at every position of a block."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import jsonschema
import llguidance
import pytest
import torch

from baru_common.drafters.causal_lm import CausalLmDrafter
from baru_common.errors import InvalidRequest
from baru_common.frames import Open, TokenLogprobs
from baru_common.sampling import Grammar, SamplingContext, SamplingMode, SamplingParams
from baru_common.sampling.guide import Guide, GuideCursor
from baru_hub.engines.simulated import DeviceProfile, SimulatedEngine
from baru_hub.engines.transformers import TransformersEngine
from baru_micro import FinishReason, Step
from support.drafters import FunctionDrafter, oracle
from support.hubs import KV_CACHE_MB, generate, hub_of
from support.lines import Line
from support.lockstep import Lockstep
from support.tiny import plain_greedy, tiny_target, twin, with_eos
from support.toys import FIRST_ID, toy_target

TARGET = tiny_target()
SIZE = TARGET.vocabulary.size
(EOS,) = TARGET.eos_ids

# -- E01

SCHEMA = {
    "type": "object",
    "properties": {
        "op": {"enum": ["up", "no", "on"]},
        "at": {
            "type": "object",
            "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99}},
            "required": ["x"],
            "additionalProperties": False,
        },
        "n": {"type": "integer", "minimum": -5, "maximum": 500},
    },
    "required": ["op", "at", "n"],
    "additionalProperties": False,
}
GRAMMAR = Grammar.json_schema(SCHEMA)
MAX_TOKENS = 48
"""More than the longest text of the schema has characters."""
GREEDY = SamplingParams(grammar=GRAMMAR, max_tokens=MAX_TOKENS)
DEPTH = 6

Draft = Callable[[Sequence[int]], list[int]]
"""Draft ids after these committed ones."""


@cache
def guide() -> Guide:
    return Guide.compile(GRAMMAR, TARGET.bundle, TARGET.eos_ids)


def prompts(num: int) -> list[list[int]]:
    choose = random.Random(num)
    return [[choose.randrange(3, SIZE) for _ in range(choose.randrange(1, 12))] for _ in range(num)]


def parsed(ids: Sequence[int]) -> object:
    """The value that an output stands for; an error unless it is valid JSON of the schema, and then the end."""
    assert ids[-1] == EOS
    assert EOS not in ids[:-1]
    value = json.loads(b"".join(map(TARGET.vocabulary.text_bytes, ids)))
    jsonschema.validate(value, SCHEMA)
    return value


@cache
def grammar_tokenizer() -> llguidance.LLTokenizer:
    return llguidance.LLTokenizer(TARGET.bundle.tokenizer_json, eos_token=EOS)


@torch.inference_mode()
def constrained_greedy(prompt: Sequence[int]) -> list[int]:
    """The slow, plain reference: recompute and replay everything for each id."""
    tokenizer = grammar_tokenizer()
    text = llguidance.LLMatcher.grammar_from_json_schema(
        json.dumps(SCHEMA),
        defaults={"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "},
    )
    output: list[int] = []
    while EOS not in output:
        matcher = llguidance.LLMatcher(tokenizer, text)
        assert matcher.consume_tokens(output)
        mask = matcher.compute_bitmask()
        allowed = [i for i in range(SIZE) if mask[i // 8] >> i % 8 & 1]
        if len(allowed) > 1:
            values = TARGET.model(input_ids=torch.tensor([[*prompt, *output]]), use_cache=False).logits[0, -1].tolist()
            allowed.sort(key=lambda i: (-values[i], i))
        output.append(allowed[0])
    return output


def anything(choose: random.Random) -> Draft:
    """Unconstrained: any ids at all, of which hardly any is allowed."""
    return lambda _committed: [choose.randrange(SIZE) for _ in range(DEPTH)]


def mostly(whole: Sequence[int], choose: random.Random) -> Draft:
    """What will be decided, as a drafter without a grammar might know it: one in six is anything else."""
    return lambda committed: [
        choose.randrange(SIZE) if choose.random() < 1 / 6 else token for token in whole[len(committed) :][:DEPTH]
    ]


def replayed(output: Sequence[int]) -> GuideCursor:
    cursor = guide().start()
    assert cursor.seek(output)
    return cursor


class Constrained:
    """One request driven by hand through an engine, up to its end."""

    def __init__(self, engine: TransformersEngine, prompt: Sequence[int], params: SamplingParams, draft: Draft) -> None:
        sampling = SamplingContext(params, len(prompt), TARGET.vocabulary, TARGET.eos_ids, guide())
        self.line = Line(engine, prompt, MAX_TOKENS, sampling=sampling)
        self.draft = draft
        self.num_bonus = 0
        self._cursor = engine._sequences[self.line.allocation.sequence].sampler._cursor
        self._num_before = 0

    @property
    def output(self) -> list[int]:
        output = self.line.output
        return output[: output.index(EOS) + 1] if EOS in output else output

    @property
    def done(self) -> bool:
        return EOS in self.line.output

    def check_state(self) -> None:
        """The matcher is back where the step began, and as if it had never read anything but what is committed."""
        cursor, output = self._cursor, self.line.output
        assert cursor is not None
        assert cursor._ids == output[: self._num_before]
        assert cursor.masks([]) == replayed(cursor._ids).masks([])
        self._num_before = len(output)


async def finish_all(engine: TransformersEngine, requests: Sequence[Constrained]) -> list[list[int]]:
    """Run requests side by side; after each round check each matcher."""
    while running := [r for r in requests if not r.done]:
        results = await engine.verify([r.line.feed(r.draft(r.line.committed)) for r in running])
        for request, result in zip(running, results, strict=True):
            num_accepted = request.line.take(result)
            request.num_bonus += num_accepted == len(request.line.block.draft) > 0
            request.check_state()
    for request in requests:
        request.line.free()
    return [request.output for request in requests]


async def run_all(params: Sequence[SamplingParams], drafts: Sequence[Draft]) -> tuple[list[list[int]], int]:
    """Run 100 requests, 25 at a time; return their outputs, and how often an id came after a whole draft."""
    engine = TransformersEngine(twin(TARGET), kv_cache_mb=KV_CACHE_MB)
    requests = [Constrained(engine, *given) for given in zip(prompts(100), params, drafts, strict=True)]
    outputs = [
        output for start in range(0, 100, 25) for output in await finish_all(engine, requests[start : start + 25])
    ]
    await engine.close()
    return outputs, sum(request.num_bonus for request in requests)


async def test_e01_greedy_output_is_valid_and_equals_plain_constrained_greedy() -> None:
    """100 requests with drafts of anything at all, then with drafts that are mostly right."""
    expected = [constrained_greedy(prompt) for prompt in prompts(100)]
    choose = random.Random(1)
    outputs, _ = await run_all([GREEDY] * 100, [anything(choose)] * 100)
    assert outputs == expected
    values = [json.dumps(parsed(output)) for output in outputs]
    assert len(set(values)) > 10, "the prompts must make a difference"

    right = [mostly([*prompt, *output], choose) for prompt, output in zip(prompts(100), expected, strict=True)]
    outputs, num_bonus = await run_all([GREEDY] * 100, right)
    assert outputs == expected
    assert num_bonus > 100


@pytest.mark.parametrize("mode", list(SamplingMode))
async def test_e01_sampled_output_is_valid(mode: SamplingMode) -> None:
    """100 requests at temperature 1. With coupled sampling the drafts do not change the output either."""
    params = [replace(GREEDY, temperature=1.0, seed=seed, sampling_mode=mode) for seed in range(100)]
    choose = random.Random(2)
    outputs, _ = await run_all(params, [anything(choose)] * 100)
    assert len({json.dumps(parsed(output)) for output in outputs}) > 50

    right = [mostly([*prompt, *output], choose) for prompt, output in zip(prompts(100), outputs, strict=True)]
    again, num_bonus = await run_all(params, right)
    for output in again:
        parsed(output)
    assert num_bonus > 50
    if mode is SamplingMode.COUPLED:
        assert again == outputs


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_e01_through_a_hub(temperature: float) -> None:
    """The same with what a node can send: random drafts, a drafter with the grammar, the n-gram drafter with it."""
    choose = random.Random(3)
    # With a vocabulary of its own the drafter counts as one that chooses for itself: it is not kept to the grammar.
    wild = FunctionDrafter(
        lambda _ids, _num_committed, num: [choose.randrange(SIZE) for _ in range(min(num, DEPTH))],
        vocabulary=TARGET.vocabulary,
    )
    async with hub_of(TARGET, scheduler=Lockstep(depth=DEPTH)) as hub:
        for number, prompt in enumerate(prompts(4)):
            params = replace(GREEDY, temperature=temperature, seed=number)
            plain, _ = await generate(hub.address, prompt, params)
            parsed(plain.ids)
            for drafter in (wild, CausalLmDrafter(tiny_target(noise=0.1)), "ngram"):
                finish, _ = await generate(hub.address, prompt, params, drafter)
                assert finish.ids == plain.ids
                assert (finish.reason, finish.stopped_by) == (FinishReason.STOP, EOS)
                jsonschema.validate(json.loads(finish.text), SCHEMA)
                assert finish.usage.num_verified > 0


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "not": {"const": "a"}},
        {"type": "array", "uniqueItems": True},
        {"type": "string", "format": "nonsense"},
        {"$ref": "http://localhost/schema"},
        {"type": "strange"},
        {"enum": []},
    ],
)
async def test_e01_a_schema_that_cannot_be_kept_to_is_refused(schema: dict[str, object]) -> None:
    """By hub and node alike; nothing comes out that was not constrained."""
    params = SamplingParams(grammar=Grammar.json_schema(schema), max_tokens=8)
    async with hub_of(TARGET) as hub:
        with pytest.raises(InvalidRequest) as refused:
            await generate(hub.address, [40], params)
        assert refused.value.details["param"] == "grammar"
        told = hub.verifier.describe()
        with pytest.raises(InvalidRequest) as refused:
            await hub.verifier.open(Open((40,), params, told.target_fingerprint, told.tokenizer_digest))
        assert refused.value.details["param"] == "grammar"
        assert hub.verifier.num_sessions == 0


async def test_e01_an_engine_or_a_target_that_cannot_constrain_refuses() -> None:
    """A scripted engine has no logits to mask; a target without an end-of-sequence id could never end."""
    params = SamplingParams(grammar=Grammar.regex("a+"), max_tokens=8)
    for target in (SimulatedEngine(DeviceProfile("quick", (0.0, 0.0), 0.0)), with_eos(TARGET)):
        async with hub_of(target) as hub:
            with pytest.raises(InvalidRequest) as refused:
                await generate(hub.address, [40], params)
            assert refused.value.details.get("param") == "grammar"


# -- E03

PROMPT = [40, 50, 60, 70]
NUM_TOKENS = 48
REPORTED = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=3)
CHANGED = replace(REPORTED, temperature=0.5, repetition_penalty=1.2, seed=11)
TOLERANCE = 1e-4


def logprobs_of(steps: Sequence[Step]) -> list[TokenLogprobs]:
    entries = [piece.logprobs for step in steps for piece in step.pieces]
    assert all(entries)
    return [entry for entry in entries if entry]


@torch.inference_mode()
def reference_logprobs(prompt: Sequence[int], ids: Sequence[int]) -> torch.Tensor:
    """Of the plain logits, all in one pass: [num_ids, vocabulary]."""
    logits = TARGET.model(input_ids=torch.tensor([[*prompt, *ids]]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    logprobs: torch.Tensor = logits[:, :SIZE].float().log_softmax(dim=1)
    return logprobs


def assert_true(steps: Sequence[Step], prompt: Sequence[int] = PROMPT) -> None:
    """Every entry is the target's own, whatever else was asked for."""
    ids = [i for step in steps for i in step.ids]
    reference = reference_logprobs(prompt, ids)
    for token, entry, row in zip(ids, logprobs_of(steps), reference, strict=True):
        assert entry.logprob == pytest.approx(float(row[token]), abs=TOLERANCE)
        assert entry.logprob != 0.0
        values, tokens = row.topk(3)
        assert [token for token, _ in entry.top] == tokens.tolist()
        assert [logprob for _, logprob in entry.top] == pytest.approx(values.tolist(), abs=TOLERANCE)
        if token in dict(entry.top):
            assert dict(entry.top)[token] == entry.logprob


@pytest.mark.parametrize("params", [REPORTED, CHANGED], ids=["greedy", "temperature-and-penalty"])
async def test_e03_drafted_ids_have_the_log_probabilities_of_a_plain_run(params: SamplingParams) -> None:
    """One entry for each id, accepted or not; the text is what the ids stand for."""
    async with hub_of(TARGET, scheduler=Lockstep(depth=4)) as hub:
        plain, plain_steps = await generate(hub.address, PROMPT, params)
        finish, steps = await generate(hub.address, PROMPT, params, oracle(PROMPT, plain.ids, depth=4))
    assert finish.ids == plain.ids
    assert finish.usage.num_accepted >= NUM_TOKENS * 4 // 5 - 4
    entries, plain_entries = logprobs_of(steps), logprobs_of(plain_steps)
    assert len(entries) == len(plain_entries) == finish.usage.num_emitted == NUM_TOKENS
    for entry, other in zip(entries, plain_entries, strict=True):
        assert entry.logprob == pytest.approx(other.logprob, abs=TOLERANCE)
        assert [token for token, _ in entry.top] == [token for token, _ in other.top]
        assert [value for _, value in entry.top] == pytest.approx([value for _, value in other.top], abs=TOLERANCE)
    assert_true(steps)
    text = b"".join(map(TARGET.vocabulary.text_bytes, finish.ids)).decode(errors="replace")
    assert text == finish.text == "".join(step.text for step in steps) + finish.tail
    chosen = [entry.top[0][0] for entry in entries]
    assert (chosen == list(finish.ids)) is (params is REPORTED), "without penalties the likeliest comes, with them not"


@pytest.mark.parametrize("verify_blocks", [False, True])
async def test_e03_with_rejection_sampling_the_values_are_the_targets(verify_blocks: bool) -> None:
    """Not the drafter's, and not those of the distribution that the target's id was drawn from after a refusal."""
    params = replace(CHANGED, sampling_mode=SamplingMode.REJECTION, verify_blocks=verify_blocks)
    async with hub_of(TARGET, scheduler=Lockstep(depth=4)) as hub:
        finish, steps = await generate(hub.address, PROMPT, params, CausalLmDrafter(tiny_target(noise=0.1)))
    assert 0 < finish.usage.num_rejected < finish.usage.num_verified
    assert len(logprobs_of(steps)) == len(finish.ids) == NUM_TOKENS
    assert_true(steps)


async def test_e03_neighbours_do_not_change_the_values() -> None:
    """In one step with requests of other temperatures, penalties, masks and grammars."""
    others = [
        CHANGED,
        replace(REPORTED, presence_penalty=2.0),
        replace(REPORTED, frequency_penalty=2.0),
        replace(REPORTED, logit_bias={100: 50.0}),
        replace(REPORTED, temperature=0.5, seed=3, top_k=5, top_p=0.8, min_p=0.1),
        replace(REPORTED, allowed_ids=tuple(range(40, 60))),
        SamplingParams(grammar=GRAMMAR, logprobs=3, max_tokens=NUM_TOKENS),
    ]
    answer = plain_greedy(TARGET, PROMPT, NUM_TOKENS)
    async with hub_of(TARGET, scheduler=Lockstep(depth=4)) as hub:
        (finish, steps), *rest = await asyncio.gather(
            generate(hub.address, PROMPT, REPORTED, oracle(PROMPT, answer, depth=4)),
            *(generate(hub.address, PROMPT, params) for params in others),
        )
    assert list(finish.ids) == answer
    assert_true(steps)
    for _, other_steps in rest:
        assert_true(other_steps)


async def test_e03_a_certain_id_has_zero_and_nobody_who_did_not_ask_gets_any() -> None:
    certain = toy_target((1.0,))
    async with hub_of(certain, scheduler=Lockstep(depth=4)) as hub:
        params = SamplingParams(max_tokens=8, logprobs=1)
        _, steps = await generate(hub.address, [FIRST_ID], params, oracle([FIRST_ID], [FIRST_ID] * 8, depth=4))
        assert [entry.logprob for entry in logprobs_of(steps)] == [0.0] * 8
        _, steps = await generate(hub.address, [FIRST_ID], replace(params, logprobs=None))
        assert not any(piece.logprobs for step in steps for piece in step.pieces)

"""Invariant 1 under seeded sampling: with drafting on or off, whoever drafts, in any company: the same output.

The reference is the target alone: one session, no drafter, one id a step. Compared are ids, text, finish reason and
log-probabilities, in fp32, to the last bit.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch

from baru_common.drafters import CascadeDrafter, Drafter, DraftStream, NgramDrafter, Proposal, started
from baru_common.drafters.causal_lm import CausalLmDrafter
from baru_common.drafters.suffix import SuffixDrafter
from baru_common.errors import BaruError, InvalidRequest
from baru_common.frames import FinishReason, TokenLogprobs
from baru_common.sampling import Grammar, SamplingContext, SamplingParams
from baru_common.sampling.guide import Guide
from baru_common.sampling.sampler import Sampler
from baru_common.tokens import TextStream
from baru_hub.engines import Feed
from baru_hub.engines.transformers import TransformersEngine
from baru_micro import Finish, MicroNode, Step
from baru_micro.chain import Outcome
from support.dialogue import Dialogue
from support.drafters import FunctionDrafter
from support.hubs import hub_of
from support.lockstep import Lockstep, free_running
from support.tiny import tiny_target, twin

NUM_REQUESTS, BATCH = 60, 8
CASCADE = "suffix+causal_lm"
DRAFTERS = ("ngram", "causal_lm", CASCADE, "hostile")
_SIZE = 300
_GRAMMARS = (
    Grammar.json_schema(
        {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yy"]}}, "required": ["a", "b"]}
    ),
    Grammar.regex("[a-f]{3,12}( [0-9]+)?"),
    Grammar.choices(["there", "therein", "not there"]),
    Grammar.lark('start: item ("," item)*\nitem: /[a-z]+/ | "[" start "]"'),
)


# -- what is asked for


@dataclass(frozen=True)
class Request:
    prompt: tuple[int, ...]
    params: SamplingParams

    @property
    def sampling(self) -> SamplingContext:
        target = tiny_target()
        guide = guide_of(self.params.grammar) if self.params.grammar else None
        return SamplingContext(self.params, len(self.prompt), target.vocabulary, target.eos_ids, guide)

    @property
    def max_tokens(self) -> int:
        assert self.params.max_tokens is not None
        return self.params.max_tokens


@cache
def guide_of(grammar: Grammar) -> Guide:
    target = tiny_target()
    return Guide.compile(grammar, target.bundle, target.eos_ids)


@cache
def request(seed: int) -> Request:
    """A prompt and a random mix of parameters that leaves something to say."""
    chance = random.Random(seed)
    few = chance.sample(range(3, _SIZE), 60)
    max_tokens = chance.randint(10, 32)
    params: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": chance.choice((0, 0.3, 0.7, 1, 1.5)),
        "seed": chance.getrandbits(64),
        "logprobs": chance.choice((None, None, 0, 3)),
        "ignore_eos": chance.random() < 0.2,
    }
    choices: list[dict[str, Any]] = [
        {"top_k": chance.choice((1, 3, 40))},
        {"top_p": chance.choice((0.3, 0.9))},
        {"min_p": chance.choice((0.05, 0.3))},
        {"repetition_penalty": chance.choice((0.7, 1.3))},
        {"presence_penalty": chance.choice((-1.5, 0.8))},
        {"frequency_penalty": chance.choice((-0.5, 1.0))},
        {"logit_bias": {token: chance.uniform(-8, 8) for token in few[:8]}},
        {"stop_strings": tuple(chance.sample(("e", "th", "ing", "a", "tt", "he", "\n", "é"), 5))},
        {"stop_ids": few[8:30]},
        {"stop_ids": few[8:], "min_tokens": chance.randint(1, max_tokens)},  # it stops as soon as it may
    ]
    for choice in choices:
        params |= choice if chance.random() < 0.35 else {}
    if chance.random() < 0.2:
        params |= {"grammar": chance.choice(_GRAMMARS), "ignore_eos": False, "min_tokens": 0}
    else:
        masks: list[dict[str, Any]] = [
            {"banned_ids": few[30:50]},
            {"allowed_ids": few[:30]},
            {"forced_ids": few[: chance.randint(1, 4)]},
            {"min_tokens": chance.randint(1, max_tokens)},
        ]
        for mask in masks:
            params |= mask if chance.random() < 0.3 else {}
    # Prompts that repeat themselves, so that n-grams have something to find.
    motif = chance.choices(range(3, _SIZE), k=chance.randint(1, 9))
    prompt = (seed % 290 + 3, *motif * chance.randint(1, 4))
    return Request(prompt, SamplingParams(**params))


REQUESTS = range(NUM_REQUESTS)


# -- what comes out


@dataclass(frozen=True)
class Output:
    ids: tuple[int, ...]
    text: str
    reason: FinishReason | None
    logprobs: tuple[TokenLogprobs | None, ...]


def output_of(request: Request, dialogue: Dialogue) -> Output:
    params = request.params
    stream = TextStream(tiny_target().vocabulary, params.stop_strings, params.min_tokens)
    text = "".join(map(stream.push, dialogue.output)) + stream.finish()
    logprobs = tuple(entry for verdict in dialogue.verdicts for entry in verdict.logprobs)
    return Output(tuple(dialogue.output), text, dialogue.session.finish, logprobs or (None,) * len(dialogue.output))


# -- the engine, driven by hand


@dataclass
class Hand:
    """Drives sessions on one engine: all that run take part in every step. Nodes act when chance says so."""

    engine: TransformersEngine
    chance: random.Random
    counts: Counter[str]

    async def run(self, requests: Sequence[Request], streams: Sequence[DraftStream | None]) -> list[Output]:
        dialogues = [
            Dialogue(r.sampling, r.prompt, r.max_tokens, stream) for r, stream in zip(requests, streams, strict=True)
        ]
        sequences = [
            self.engine.allocate(r.prompt, len(r.prompt) + r.max_tokens, None, d.session.sampling).sequence
            for r, d in zip(requests, dialogues, strict=True)
        ]
        while running := [(d, s) for d, s in zip(dialogues, sequences, strict=True) if not d.done]:
            for dialogue, _ in running:
                self.let_act(dialogue)
            blocks = [
                d.session.next_block(self.chance.choice((0, 1, 2, 4, 7)), self.chance.choice((3, 1000)))
                for d, _ in running
            ]
            feeds = [Feed(s, d.session.num_cached, b) for (d, s), b in zip(running, blocks, strict=True)]
            decisions = await self.engine.verify(feeds)
            for (dialogue, _), block, decision in zip(running, blocks, decisions, strict=True):
                if self.chance.random() < 0.3:
                    dialogue.read_draft()  # it came while the target was at it
                if isinstance(decision, BaruError):
                    raise decision
                dialogue.take(block, decision)
        for sequence in sequences:
            self.engine.free(sequence)
        self.note(dialogues)
        return [output_of(r, d) for r, d in zip(requests, dialogues, strict=True)]

    def let_act(self, dialogue: Dialogue) -> None:
        """Now and then a node is slow: its drafts come late, and verdicts wait for it."""
        if dialogue.stream is None or self.chance.random() < 0.15:
            return
        for _ in range(1 + len(dialogue.to_node)):
            dialogue.read_verdict()
        for _ in range(self.chance.choice((0, 1, 2, 3))):
            dialogue.draft(self.chance.choice((1, 4)))
        for _ in range(self.chance.choice((0, 1, 4, 4))):
            dialogue.read_draft()

    def note(self, dialogues: Sequence[Dialogue]) -> None:
        for dialogue in dialogues:
            self.counts["verified"] += dialogue.session.num_verified
            self.counts["accepted"] += dialogue.session.num_accepted
            self.counts.update(outcome.value for outcome in dialogue.outcomes)


@cache
def engine() -> TransformersEngine:
    return TransformersEngine(twin(tiny_target()), kv_cache_mb=32)


_alone: dict[int, Output] = {}


async def alone(seed: int) -> Output:
    """What the target says to one request by itself."""
    if seed not in _alone:
        (_alone[seed],) = await Hand(engine(), random.Random(0), Counter()).run([request(seed)], [None])
    return _alone[seed]


class Hostile:
    """Knows the answer, and gives it away; but a quarter of its ids are wrong, and it takes no notice of grammars."""

    def __init__(self, whole: Sequence[int], chance: random.Random) -> None:
        self._whole, self._chance = whole, chance

    def propose(self, ids: Sequence[int], num_committed: int, max_tokens: int) -> Proposal:
        right = self._whole[len(ids) : len(ids) + max_tokens]
        noise = [self._chance.randrange(_SIZE) for _ in range(max_tokens - len(right))]
        return Proposal([token if self._chance.random() < 0.75 else (token + 1) % _SIZE for token in [*right, *noise]])


def stream_of(kind: str, request: Request, answer: Output, chance: random.Random) -> DraftStream:
    sampling = request.sampling
    if kind == "hostile":
        return Hostile([*request.prompt, *answer.ids], chance)
    return started(drafters()[kind], sampling)


def drafters() -> dict[str, Drafter]:
    """Those that know nothing of the answer."""
    model = CausalLmDrafter(tiny_target(noise=0.2))
    cascade = CascadeDrafter((SuffixDrafter(shortest=2), replace(model, min_confidence=0.02)))
    return {"ngram": NgramDrafter(), "causal_lm": model, CASCADE: cascade}


async def check_by_hand(kind: str, batch: int, seeds: Sequence[int]) -> Counter[str]:
    """Generate with drafts, `batch` requests at a time, and compare each with what the target says alone."""
    chance, counts = random.Random(f"{kind} {batch}"), Counter[str]()
    hand = Hand(engine(), chance, counts)
    for start in range(0, len(seeds), batch):
        some = seeds[start : start + batch]
        expected = [await alone(seed) for seed in some]
        streams = [stream_of(kind, request(s), answer, chance) for s, answer in zip(some, expected, strict=True)]
        found = await hand.run([request(seed) for seed in some], streams)
        for seed, output, answer in zip(some, found, expected, strict=True):
            assert output == answer, (seed, request(seed).params)
    engine().pool.check_integrity()
    assert engine().pool.num_held == 0
    print(f"{kind}, {batch} at a time: {dict(counts)}")  # noqa: T201
    return counts


async def test_the_requests_hold_what_they_should() -> None:
    """Every parameter is there, in some mix, and outputs end in every way."""
    params = [request(seed).params for seed in REQUESTS]
    defaults = SamplingParams()
    for name in vars(defaults).keys() - {"sampling_mode", "verify_blocks"}:
        assert len([p for p in params if getattr(p, name) != getattr(defaults, name)]) >= 5, name
    answers = [await alone(seed) for seed in REQUESTS]
    assert len({p.prompt for p in map(request, REQUESTS)}) == NUM_REQUESTS
    ends = Counter(
        "length"
        if answer.reason is FinishReason.LENGTH
        else "id"
        if answer.ids[-1] in request(seed).sampling.stop_ids
        else "text"
        for seed, answer in zip(REQUESTS, answers, strict=True)
    )
    assert min(ends["length"], ends["id"], ends["text"]) >= 5, ends


@torch.inference_mode()
def naively(request: Request) -> list[int]:
    """The slow, plain reference: all of the text through the model for each id, and a new sampler each time."""
    target, sampling, ids = tiny_target(), request.sampling, list(request.prompt)
    text = TextStream(target.vocabulary, request.params.stop_strings, request.params.min_tokens)
    while len(ids) < len(request.prompt) + request.max_tokens:
        logits = target.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1:, :_SIZE]
        (token,) = Sampler(sampling, torch.device("cpu")).choose(logits, ids, len(ids), len(ids))
        ids.append(token)
        text.push(token)
        if token in sampling.stop_ids or text.stopped_by is not None:
            break
    return ids[len(request.prompt) :]


async def test_the_target_alone_says_what_a_naive_loop_says() -> None:
    """The reference of all that follows is right, itself."""
    for seed in REQUESTS:
        assert list((await alone(seed)).ids) == naively(request(seed)), request(seed).params


@pytest.mark.parametrize(("kind", "batch"), [*product(("ngram", "causal_lm", "hostile"), (1, BATCH)), (CASCADE, BATCH)])
async def test_drafts_do_not_move_the_output(kind: str, batch: int) -> None:
    """Alone, and beside seven others with other parameters; drafts are right, wrong, late, overtaken and void."""
    counts = await check_by_hand(kind, batch, REQUESTS)
    assert counts["accepted"] >= {"ngram": 30, "hostile": 150}.get(kind, 60)
    assert counts["verified"] - counts["accepted"] >= 50
    assert {outcome.value for outcome in Outcome} <= counts.keys()


@pytest.mark.full
@pytest.mark.parametrize("batch", [1, BATCH])
@pytest.mark.parametrize("kind", DRAFTERS)
async def test_drafts_do_not_move_any_output(kind: str, batch: int) -> None:
    """The long form: ten times as many requests."""
    await check_by_hand(kind, batch, range(10 * NUM_REQUESTS))


# -- a real hub, and real nodes


def hostile_drafter(answers: dict[tuple[int, ...], Output], chance: random.Random) -> Drafter:
    """For a node: finds out by the prompt which answer to spoil."""

    def propose(ids: Sequence[int], num_committed: int, max_tokens: int) -> list[int]:
        prompt, answer = next((p, a) for p, a in answers.items() if tuple(ids[: len(p)]) == p)
        count = min(max_tokens, chance.choice((1, 3, 8)))
        return list(Hostile([*prompt, *answer.ids], chance).propose(ids, num_committed, count).ids)

    return FunctionDrafter(propose, "hostile")


async def generated(node: MicroNode, request: Request) -> tuple[Output, Finish]:
    events = [event async for event in node.generate(request.prompt, request.params)]
    finish = events[-1]
    assert isinstance(finish, Finish)
    pieces = [piece for event in events if isinstance(event, Step) for piece in event.pieces]
    return Output(finish.ids, finish.text, finish.reason, tuple(piece.logprobs for piece in pieces)), finish


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("kind", ["none", *DRAFTERS])
async def test_a_hub_says_what_its_target_says_alone(kind: str, waits: bool) -> None:
    """Over the wire, eight sessions at a time with parameters of their own. A hub that does not wait for drafts
    overtakes them, and chains start anew all the time; one that does checks them all."""
    answers = {request(seed).prompt: await alone(seed) for seed in REQUESTS}
    drafter = hostile_drafter(answers, random.Random(5)) if kind == "hostile" else drafters().get(kind)
    num_verified = num_accepted = 0
    async with (
        hub_of(tiny_target(), scheduler=Lockstep() if waits else free_running()) as hub,
        MicroNode.connect(hub.address, drafter=drafter) as node,
    ):
        for start in range(0, NUM_REQUESTS, BATCH):
            some = [request(seed) for seed in REQUESTS[start : start + BATCH]]
            for asked, (output, finish) in zip(
                some, await asyncio.gather(*(generated(node, r) for r in some)), strict=True
            ):
                assert output == answers[asked.prompt], asked.params
                num_verified += finish.usage.num_verified
                num_accepted += finish.usage.num_accepted
    print(f"{kind}, {waits=}: {num_accepted} of {num_verified} draft ids accepted")  # noqa: T201
    if kind == "none":
        assert not num_verified
    elif waits:  # otherwise it is a race how many drafts are in time
        assert 30 < num_accepted < num_verified - 30


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("drafting", [False, True])
async def test_what_comes_before_an_impossible_position_is_emitted(temperature: float, drafting: bool) -> None:
    """A request that cannot go on ends with the same error after the same ids, be the last of them drafted or not."""
    target, prompt = tiny_target(), (40, 50, 60)
    text_ids = [target.vocabulary.pieces.index(bytes([byte])) for byte in b"1234"]
    impossible = [i for i, piece in enumerate(target.vocabulary.pieces) if b"x" in (piece or b"")]
    params = SamplingParams(
        temperature=temperature, seed=1, grammar=Grammar.regex("1234x"), banned_ids=tuple(impossible)
    )
    whole = [*prompt, *text_ids, impossible[0]]
    oracle = FunctionDrafter(lambda ids, *rest: whole[len(ids) : len(ids) + rest[-1]])
    emitted: list[int] = []

    async def generate(node: MicroNode) -> None:
        async for event in node.generate(prompt, params):
            emitted.extend(event.ids if isinstance(event, Step) else ())

    async with hub_of(target) as hub, MicroNode.connect(hub.address, drafter=oracle if drafting else None) as node:
        with pytest.raises(InvalidRequest, match="no id to choose at output position 4"):
            await generate(node)
    assert emitted == text_ids

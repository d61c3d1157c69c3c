"""Group A of the public bug reports, above temperature 0: whose distribution comes out, and whose random numbers.

The numbers of the cases are kept. Where a hub would need minutes for them, the target's own decision (`decide`) and
the drafter's draw (`Sampler.draft`) are driven by hand here, and a shorter run goes through a hub.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import product

import pytest
import torch

from baru_common.drafters import Drafter, NgramDrafter, Proposal
from baru_common.drafters.causal_lm import CausalLmDrafter
from baru_common.sampling import SamplingContext, SamplingMode, SamplingParams, SparseProbs
from baru_common.sampling.noise import Stream, noise_key, race
from baru_common.sampling.sampler import Sampler
from baru_hub.acceptance import Decision, accept
from baru_hub.deciding import decide
from baru_hub.rejection import Rejection, check_block, check_singly
from baru_hub.session import Block
from baru_micro import Finish, MicroNode
from support.drafters import FunctionDrafter
from support.hubs import generate, hub_of
from support.tiny import plain_greedy, tiny_target
from support.toys import FIRST_ID, distance, toy_target, toy_vocabulary

# -- A03

P, Q = (0.1, 0.2, 0.3, 0.4), (0.7, 0.1, 0.1, 0.1)
"""What the target says with which probability, and what the drafter's model thinks of that."""
PAIRS = [a * b for a, b in product(P, P)]
P_LOGITS, Q_LOGITS = torch.tensor(P).log(), torch.tensor(Q).log()
KINDS = ("argmax", "sampling", "ngram")
CHECKS = ("singly", "block")

Propose = Callable[[list[int], int, int], Proposal]
"""Ids so far, where the chain forked, how many ids."""


def context_of(seed: int, num_prompt: int, **params: object) -> SamplingContext:
    given = SamplingParams(temperature=1.0, seed=seed, **params)  # type: ignore[arg-type]
    return SamplingContext(given, num_prompt, toy_vocabulary(len(P)), ())


def proposer(kind: str, sampling: SamplingContext) -> Propose:
    """Three ways to draft: the drafter's likeliest id, a draw from what it thinks, or what was there before."""
    if kind == "argmax":
        likeliest = max(range(len(Q)), key=Q.__getitem__)
        return lambda _ids, _origin, num: Proposal([likeliest] * num)
    if kind == "ngram":
        stream = NgramDrafter().start(sampling)
        return lambda ids, _origin, num: stream.propose(ids, len(ids), num)

    sampler = Sampler(sampling, torch.device("cpu"))

    def draw(ids: list[int], origin: int, num: int) -> Proposal:
        drawn: list[int] = []
        probs: list[SparseProbs] = []
        for _ in range(num):
            token, of = sampler.draft(Q_LOGITS[None], [*ids, *drawn], len(ids), origin)
            assert of is not None
            drawn.append(token)
            probs.append(of)
        return Proposal(drawn, probs)

    return draw


def first_pair(kind: str, seed: int, *, verify_blocks: bool) -> tuple[tuple[int, int], int]:
    """Return the first two ids of a request checked by rejection, and how many drafts its first step accepted."""
    ids = [(seed + i) % 4 for i in range(8)]  # so that the n-gram drafter has something to say
    start = len(ids)
    sampling = context_of(seed, start, sampling_mode=SamplingMode.REJECTION, verify_blocks=verify_blocks)
    sampler, propose = Sampler(sampling, torch.device("cpu")), proposer(kind, sampling)
    accepted: list[int] = []
    while len(ids) < start + 2:
        drafted = propose(ids, len(ids), 2 if len(ids) == start else 1)
        block = Block((ids[-1],), tuple(drafted.ids), True, 1, tuple(drafted.draft_probs))
        outcome = accept(block.draft, decide(P_LOGITS.repeat(len(block.draft) + 1, 1), sampler, ids, block))
        accepted.append(outcome.num_accepted)
        ids.extend(outcome.emitted)
    return (ids[start], ids[start + 1]), accepted[0]


@cache
@torch.inference_mode()
def first_pairs(kind: str, check: str, num: int) -> tuple[Counter[tuple[int, int]], int]:
    """Count `first_pair` over seeds; and all that was accepted."""
    pairs = [first_pair(kind, seed, verify_blocks=check == "block") for seed in range(num)]
    return Counter(pair for pair, _ in pairs), sum(num_accepted for _, num_accepted in pairs)


def assert_follows(counts: Counter[tuple[int, int]], bound: float, bound_of_pairs: float) -> None:
    firsts = [sum(counts[a, b] for b in range(len(P))) for a in range(len(P))]
    assert distance(firsts, P) <= bound
    assert distance([counts[pair] for pair in product(range(len(P)), range(len(P)))], PAIRS) <= bound_of_pairs


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_a03_coupled_sampling_follows_the_target(kind: str) -> None:
    """200 000 pairs of ids. The drafter that draws shares the target's noise, which must not show."""
    counts: Counter[tuple[int, int]] = Counter()
    num_ids, num_accepted = 4000, 0
    for seed in range(100):
        sampling = context_of(seed, 1)
        if kind == "sampling":
            drafts = Sampler(sampling, torch.device("cpu")).choose(Q_LOGITS.repeat(num_ids, 1), [0], 1, 1)
        elif kind == "argmax":
            drafts = [0] * num_ids
        else:
            drafts = [random.Random(seed).randrange(4) for _ in range(num_ids)]
        block = Block((0,), tuple(drafts), True, 1)
        sampler = Sampler(sampling, torch.device("cpu"))
        decided = decide(P_LOGITS.repeat(num_ids + 1, 1), sampler, [0], block).ids
        # What a position decides does not depend on the drafts here, so that blocks of two can be cut from it.
        emitted: list[int] = []
        while len(emitted) < num_ids:
            at = len(emitted)
            draft = drafts[at : at + 2]
            outcome = accept(draft, Decision(decided[at : at + len(draft) + 1]))
            num_accepted += outcome.num_accepted
            emitted.extend(outcome.emitted)
        counts.update(zip(emitted[:num_ids:2], emitted[1:num_ids:2], strict=True))
    assert counts.total() == 200_000
    assert num_accepted > 20_000, "the drafts must have had a say"
    assert_follows(counts, 0.01, 0.01)


def test_a03_the_first_ids_of_200_000_seeds_follow_the_target() -> None:
    """Seeds as people choose them, 0, 1, 2, ...: their first two ids are independent, too."""
    weights = torch.tensor(P).repeat(20_000, 1)
    counts: Counter[tuple[int, int]] = Counter()
    for start in range(0, 200_000, 20_000):
        firsts, seconds = (
            race(weights, [noise_key(seed, Stream.CHOICE, position) for seed in range(start, start + 20_000)])
            for position in (1, 2)
        )
        counts.update(zip(firsts, seconds, strict=True))
    assert_follows(counts, 0.01, 0.01)


CHECKED = [("argmax", "singly"), ("ngram", "block"), ("sampling", "singly"), ("sampling", "block")]
NUM_SHORT = 2500


@pytest.mark.parametrize(
    ("kind", "check", "num"),
    [(*pair, NUM_SHORT) for pair in CHECKED]
    + [pytest.param(*pair, 200_000, marks=pytest.mark.full) for pair in CHECKED],
)
def test_a03_rejection_sampling_follows_the_target(kind: str, check: str, num: int) -> None:
    """Each request with a seed of its own, through draws, checks and the target's own id of the product."""
    bound, bound_of_pairs = (0.01, 0.01) if num >= 200_000 else (0.03, 0.045)  # chance alone gives a third of it
    counts, num_accepted = first_pairs(kind, check, num)
    assert num_accepted > 0.05 * num, "the drafts must have had a say"
    assert_follows(counts, bound, bound_of_pairs)


@pytest.mark.parametrize("check", [check_singly, check_block])
@pytest.mark.parametrize("drafts", ["picked", "drawn"])
def test_a03_rejection_of_one_draft_gives_exactly_the_target(check: Callable[..., Rejection], drafts: str) -> None:
    """By summing over all that may be drafted and drawn, instead of sampling: no luck, good or bad."""
    target, num_steps = torch.tensor([P, P], dtype=torch.double), 1400
    drawn = (SparseProbs.of(list(enumerate(Q))),)

    def law_after(draft: int, probs: tuple[SparseProbs, ...]) -> torch.Tensor:
        law = torch.zeros(4, dtype=torch.double)
        for step in range(num_steps):
            outcome = check((draft,), probs, target, ((step + 0.5) / num_steps,))
            own = outcome.residual / outcome.residual.sum()
            law += torch.eye(4, dtype=torch.double)[draft] if outcome.num_accepted else own
        return law / num_steps

    if drafts == "picked":  # whichever it is
        laws = [law_after(draft, ()) for draft in range(4)]
    else:
        laws = [sum((drawn[0].prob(draft) * law_after(draft, drawn) for draft in range(4)), torch.zeros(4))]
    for law in laws:
        assert float((law - target[0]).abs().sum()) / 2 <= 0.001


def test_a03_a_block_accepts_more_than_its_ids_one_by_one() -> None:
    """The setting has an effect: the same drafts are accepted more often as a block."""
    (_, singly), (_, block) = (first_pairs("sampling", check, NUM_SHORT) for check in CHECKS)
    assert block > singly


HUB_P, HUB_Q = (0.4, 0.3, 0.2, 0.1), (0.5, 0.3, 0.1, 0.1)
"""Here a draft that is taken for a draw although it was picked would come out twice as often as it should."""


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        ("sampling", "coupled"),
        ("sampling", "singly"),
        ("sampling", "block"),
        ("argmax", "singly"),
        ("argmax", "block"),
        ("ngram", "singly"),
    ],
)
async def test_a03_through_a_hub(kind: str, mode: str) -> None:
    """A real target and a real drafter of these distributions: what travels with a draft is what it was drawn from."""
    drafters: dict[str, Drafter] = {
        "argmax": FunctionDrafter(lambda _ids, _num_committed, num: [FIRST_ID] * min(num, 2), "argmax"),
        "sampling": CausalLmDrafter(toy_target(HUB_Q)),
        "ngram": NgramDrafter(),
    }
    params = SamplingParams(
        temperature=1.0,
        seed=1,
        max_tokens=400,
        sampling_mode="coupled" if mode == "coupled" else "rejection",  # type: ignore[arg-type]
        verify_blocks=mode == "block",
    )
    async with hub_of(toy_target(HUB_P), max_depth=4) as hub:
        finish, _ = await generate(hub.address, [FIRST_ID], params, drafters[kind])
    assert finish.usage.num_accepted > 40
    if kind == "sampling":  # taken for picked, its drafts would be accepted a third of the time
        assert finish.usage.acceptance_rate > 0.6
    assert distance([finish.ids.count(FIRST_ID + i) for i in range(4)], HUB_P) <= 0.1


# -- A06

PROMPT = [40, 50, 60, 70]
SEEDED = SamplingParams(temperature=1.0, seed=42, max_tokens=64, ignore_eos=True)
NOISY = tiny_target(noise=0.1)


async def ids_of(node: MicroNode, prompt: Sequence[int], params: SamplingParams) -> tuple[int, ...]:
    events = [event async for event in node.generate(prompt, params)]
    assert isinstance(events[-1], Finish)
    return events[-1].ids


@pytest.mark.parametrize("mode", list(SamplingMode))
async def test_a06_a_seed_gives_the_same_ids_alone_in_company_and_after_a_restart(mode: SamplingMode) -> None:
    """Which ids a seed gives is a matter of the request: not of what the hub did before, nor of who is beside it.

    With rejection sampling it is a matter of what was drafted, too; so that one runs without drafts.
    """
    drafter = CausalLmDrafter(NOISY) if mode is SamplingMode.COUPLED else None
    params = replace(SEEDED, sampling_mode=mode)

    def other(number: int) -> SamplingParams:
        """Of each kind some: with a seed, without, greedy; and the same seed under another temperature."""
        temperature, seed = ((1.0, number), (1.5, None), (0.0, None), (0.7, 42))[number % 4]
        return replace(params, temperature=temperature, seed=seed)

    async with hub_of(tiny_target()) as hub, MicroNode.connect(hub.address, drafter=drafter) as node:
        alone = await ids_of(node, PROMPT, params)
        assert len(set(alone)) > 20
        for number in range(100 if drafter else 10):
            await ids_of(node, PROMPT[: 1 + number % 4], replace(other(number), max_tokens=2))
        assert await ids_of(node, PROMPT, params) == alone
        beside, *_ = await asyncio.gather(
            ids_of(node, PROMPT, params), *(ids_of(node, PROMPT[number % 4 :], other(number)) for number in range(7))
        )
        assert beside == alone

    async with hub_of(tiny_target()) as hub:
        finish, _ = await generate(hub.address, PROMPT, params, drafter)
        assert finish.ids == alone
        assert finish.usage.seed == 42


async def test_a06_seeds_differ_and_requests_without_one_do_too() -> None:
    async with (
        hub_of(tiny_target()) as hub,
        MicroNode.connect(hub.address, drafter=CausalLmDrafter(NOISY)) as node,
    ):
        one, two = [await ids_of(node, PROMPT, replace(SEEDED, seed=s)) for s in (1, 2)]
        assert one != two
        free = replace(SEEDED, temperature=1.5, seed=None, max_tokens=16)
        assert len({await ids_of(node, PROMPT, free) for _ in range(8)}) >= 7


async def test_a06_the_seed_of_a_request_without_one_is_told_and_repeats_it() -> None:
    async with hub_of(tiny_target()) as hub:
        params = replace(SEEDED, seed=None)
        free, _ = await generate(hub.address, PROMPT, params, CausalLmDrafter(NOISY))
        again = replace(SEEDED, seed=free.usage.seed)
        repeated, _ = await generate(hub.address, PROMPT, again)
    assert free.usage.seed is not None
    assert repeated.ids == free.ids


async def test_a06_a_greedy_request_beside_seeded_ones_is_plain_greedy() -> None:
    greedy = SamplingParams(max_tokens=64, ignore_eos=True)
    async with (
        hub_of(tiny_target()) as hub,
        MicroNode.connect(hub.address, drafter=CausalLmDrafter(NOISY)) as node,
    ):
        others = [replace(SEEDED, seed=seed) for seed in (1, 2, 42, None)]
        ids, *_ = await asyncio.gather(
            ids_of(node, PROMPT, greedy), *(ids_of(node, PROMPT, params) for params in others)
        )
    assert list(ids) == plain_greedy(tiny_target(), PROMPT, 64)

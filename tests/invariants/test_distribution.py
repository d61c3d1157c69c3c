"""Invariant 1 above temperature 0: what is emitted follows the target's own law, whatever was drafted, and when.

Toy targets and drafters are tables: what may come after which id. All the rest is real: decisions, draws, chains,
mailboxes, sessions. The law of a whole output is computed exactly, by walking every branch of everything random; then
it is sampled with the real noise, which must be as good as if no number of it were ever used twice.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from baru_common.errors import InvalidRequest
from baru_common.sampling import NO_ID, SamplingContext, SamplingMode
from baru_common.sampling.noise import Stream, noise_key, race, uniform
from baru_common.sampling.sampler import Sampler
from baru_hub.acceptance import Decision, accept
from baru_hub.deciding import decide
from baru_hub.session import Block
from baru_micro.chain import Outcome
from support.dialogue import Dialogue
from support.enumeration import Dice, H, distance, law
from support.tables import CPU, KINDS, Toy

Ids = tuple[int, ...]


def deciding(toy: Toy, dialogue: Dialogue) -> Callable[[Block], Decision]:
    """The hub's side of a dialogue, as an engine does it."""
    sampler = Sampler(dialogue.session.sampling, CPU)

    def run(block: Block) -> Decision:
        return decide(toy.rows([block.pending[-1], *block.draft]), sampler, dialogue.session.committed, block)

    return run


@pytest.fixture(autouse=True)
def _quick() -> Iterator[None]:
    with torch.inference_mode():
        yield


# -- exactly


@dataclass
class Ideal:
    """Stands in for the noise: every draw is independent of all others, and no key is drawn from twice."""

    dice: Dice
    _keys: set[int] = field(default_factory=set)

    def uniform(self, key: int) -> Any:
        self._use(key)
        return self.dice.uniform()

    def race(self, weights: torch.Tensor, keys: Sequence[int]) -> list[int]:
        for key in keys:
            self._use(key)
        return [self.dice.choose(row) for row in weights.tolist()]

    @contextmanager
    def noise(self) -> Iterator[None]:
        """Draw from the dice, in place of the noise."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("baru_hub.deciding.uniform", self.uniform)
            patch.setattr("baru_hub.deciding.race", self.race)
            patch.setattr("baru_common.sampling.sampler.race", self.race)
            yield

    def _use(self, key: int) -> None:
        assert key not in self._keys, "the same noise was used twice"
        self._keys.add(key)


@dataclass(frozen=True)
class Schedule:
    """Who acts when, again and again until the output ends; it knows nothing of what is drafted or decided."""

    acts: tuple[str, ...]
    depths: tuple[int, ...]

    @classmethod
    def random(cls, chance: random.Random) -> Schedule:
        """One to three rounds of drafting, sending, checking and reading; some of them out of order."""
        acts: list[str] = []
        for _ in range(chance.randint(1, 3)):
            num_drafts = chance.choice((0, 1, 2, 2, 3))
            of_round = chance.choices(("draft", "draft two", "draft, too late"), weights=(6, 1, 1), k=num_drafts)
            of_round += ["hub reads"] * chance.choice((num_drafts, num_drafts, num_drafts + 1, 1))
            of_round += chance.choices(("step", "step, drafts come", "adapt"), weights=(4, 1, 2))
            of_round += ["node reads"] * chance.choice((1, 1, 1, 0, 2))
            if chance.random() < 0.3:
                chance.shuffle(of_round)
            acts += of_round
        return cls(tuple(acts), tuple(chance.choices((0, 1, 1, 2, 2, 3), k=len(acts))))

    def run(self, toy: Toy, dialogue: Dialogue) -> None:
        decided = deciding(toy, dialogue)
        for act, depth in itertools.cycle(zip(self.acts, self.depths, strict=True)):
            if act.startswith("draft"):
                late = dialogue.read_verdict if act == "draft, too late" else lambda: None
                dialogue.draft(2 if act == "draft two" else 1, late)
            elif act == "hub reads":
                dialogue.read_draft()
            elif act == "node reads":
                dialogue.read_verdict()
            elif act == "adapt":  # how deep to go is learned from what came of the last block
                dialogue.step(decided, dialogue.verdicts[-1].num_accepted + 1 if dialogue.verdicts else 1)
            else:
                meanwhile = dialogue.read_draft if act == "step, drafts come" else lambda: None
                dialogue.step(decided, depth, meanwhile)
            if dialogue.done:
                return


_VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {},
    {"stop_ids": (1,)},
    {"stop_ids": (0,), "min_tokens": 2},
    {"frequency_penalty": 1.5},
    {"repetition_penalty": 1.5, "top_k": 2},
    {"forced_ids": (1, 0)},
    {"banned_ids": (1,)},
)


def targets_law(toy: Toy, sampling: SamplingContext, max_tokens: int) -> dict[Ids, float]:
    """The law of the output as one step after the other gives it, each on its own."""
    found: dict[Ids, float] = {}

    def extend(ids: Ids, prob: float) -> None:
        if len(ids) == 1 + max_tokens or (len(ids) > 1 and ids[-1] in {NO_ID, *sampling.stop_ids}):
            found[ids[1:]] = prob
            return
        row = Sampler(sampling, CPU).probs(toy.rows(ids[-1:]), ids, len(ids), len(ids))[0]
        if not row.any():
            extend((*ids, NO_ID), prob)
        for token, weight in enumerate(row.tolist()):
            if weight > 0:
                extend((*ids, token), prob * weight)

    extend((0,), 1.0)
    return found


def random_toy(chance: random.Random, *, zeros: bool) -> Toy:
    """Two or three ids, a drafter that is more or less like the target; with `zeros` ids that cannot come, too."""
    size, unlike = chance.choice((2, 3)), chance.choice((0.05, 0.3, 1.0))

    def some_row() -> list[float]:
        weights = [chance.random() ** 2 * (not zeros or chance.random() > 0.2) for _ in range(size)]
        weights[chance.randrange(size)] += 0.05
        return [weight / sum(weights) for weight in weights]

    target = [some_row() for _ in range(size)]
    return Toy(target, [[p + unlike * (q - p) for p, q in zip(row, some_row(), strict=True)] for row in target])


def note(events: Counter[str], dialogue: Dialogue) -> None:
    """Count what must have happened for a walk to prove anything."""
    for block, verdict in zip(dialogue.blocks, dialogue.verdicts, strict=True):
        if verdict.num_accepted < verdict.num_verified and verdict.num_accepted < len(verdict.token_ids):
            events["a refused id is said by the target"] += block.draft[verdict.num_accepted] == verdict.token_ids[-1]
    for verdict, outcome in zip(dialogue.verdicts, dialogue.outcomes, strict=False):
        events[outcome.value] += 1
        events["a chain outlives its block"] += bool(verdict.num_verified) and outcome is Outcome.AGREED
        events["a plain id agrees with the chain"] += not verdict.num_verified and outcome is Outcome.AGREED
        events["several refused"] += verdict.num_verified - verdict.num_accepted > 1
    events["verdicts under way"] += len(dialogue.to_node) > 1


@dataclass
class Walk:
    """One toy, one schedule, one kind of drafter: the law of the output, exactly."""

    toy: Toy
    schedule: Schedule
    kind: str
    sampling: SamplingContext
    max_tokens: int
    window: int
    most: int = 1 << 20
    events: Counter[str] = field(default_factory=Counter)

    @classmethod
    def random(cls, kind: str, seed: int, **params: Any) -> Walk:
        chance = random.Random(f"{kind} {seed}")
        variant = params | chance.choice(_VARIANTS)
        toy = random_toy(chance, zeros=variant == params)
        # Each further id that is drawn multiplies the branches.
        max_tokens, window = (chance.choice((4, 5)), 4) if toy.size == 2 else (chance.choice((3, 4)), 3)
        return cls(toy, Schedule.random(chance), kind, toy.sampling(seed=7, **variant), max_tokens, window)

    def law(self) -> dict[Ids, float]:
        """The law of the output of the dialogue. An output that cannot go on ends with `NO_ID`."""

        def run(dice: Dice) -> Ids:
            with Ideal(dice).noise():
                stream = self.toy.stream(self.kind, self.sampling)
                dialogue = Dialogue(self.sampling, [0], self.max_tokens, stream, self.window)
                try:
                    self.schedule.run(self.toy, dialogue)
                except InvalidRequest:
                    return (*dialogue.output, NO_ID)
                note(self.events, dialogue)
                return tuple(dialogue.output)

        return law(run, self.most)

    def check(self) -> None:
        expected, found = targets_law(self.toy, self.sampling, self.max_tokens), self.law()
        for output in {*expected, *found}:
            assert found.get(output, 0.0) == pytest.approx(expected.get(output, 0.0), abs=1e-9), output


def check_walks(kind: str, verify_blocks: bool, num_walks: int, most: int) -> None:
    """Check walks of at most `most` branches; others are passed over."""
    events: Counter[str] = Counter()
    seeds = itertools.count()
    while events["walks"] < num_walks:
        walk = Walk.random(kind, next(seeds), sampling_mode=SamplingMode.REJECTION, verify_blocks=verify_blocks)
        walk.most = most
        with suppress(OverflowError):
            walk.check()
            events += walk.events
            events["walks"] += 1
    print(f"{kind}, {'as a block' if verify_blocks else 'singly'}: {dict(events)}")  # noqa: T201
    assert {outcome.value for outcome in Outcome} <= events.keys()
    assert events["a chain outlives its block"] > 10
    assert events["a plain id agrees with the chain"] > 10
    assert events["verdicts under way"] > 10
    assert events["several refused"] > 10
    assert not events["a refused id is said by the target"]


@pytest.mark.parametrize("verify_blocks", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_law_of_the_output_is_exact_under_any_schedule(kind: str, verify_blocks: bool) -> None:
    """Outputs of 3 to 5 ids; chains that are late, void, overtaken, cut by the depth, or outlive their block."""
    check_walks(kind, verify_blocks, num_walks=20 if kind == "sampling" else 40, most=300)


@pytest.mark.full
@pytest.mark.parametrize("verify_blocks", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_law_of_the_output_is_exact_under_many_schedules(kind: str, verify_blocks: bool) -> None:
    """The long form."""
    check_walks(kind, verify_blocks, num_walks=300, most=3000)


@pytest.mark.parametrize("verify_blocks", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_dead_ends_are_as_likely_as_ever(kind: str, verify_blocks: bool) -> None:
    """What comes before a text that cannot go on is emitted, and no more rarely because of what follows it."""
    num_dead = 0
    for seed in range(8 if kind == "sampling" else 30):
        walk = Walk.random(kind, seed)
        toy = Toy([[0.4, 0.4, 0.2], [0, 0, 1], [0.2, 0.5, 0.3]], [[0.3, 0.6, 0.1], [0.4, 0.4, 0.2], [0.4, 0.3, 0.3]])
        sampling = toy.sampling(seed=7, sampling_mode="rejection", verify_blocks=verify_blocks, banned_ids=(2,))
        walk = replace(walk, toy=toy, sampling=sampling, max_tokens=3, window=3)
        walk.check()
        num_dead += len([output for output in walk.law() if output[-1] == NO_ID])
    assert num_dead > 10


# -- with the real noise


def chi_square_p(found: Mapping[H, int], expected: Mapping[H, float]) -> float:
    """The p-value of Pearson's test."""
    assert {key for key, count in found.items() if count} <= {key for key, prob in expected.items() if prob > 0}
    total = sum(found.values())
    counts = [(found.get(key, 0), total * prob) for key, prob in expected.items() if prob > 0]
    statistic = torch.tensor(sum((count - mean) ** 2 / mean for count, mean in counts), dtype=torch.double)
    return float(torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2, dtype=torch.double), statistic / 2))


def off(found: Mapping[H, int], expected: Mapping[H, float]) -> float:
    """The total variation distance of what was counted from a law."""
    total = sum(found.values())
    return distance({key: count / total for key, count in found.items()}, dict(expected))


TOY = Toy(
    [[0.5, 0.3, 0.15, 0.05], [0.1, 0.2, 0.3, 0.4], [0.25, 0.25, 0.25, 0.25], [0.05, 0.85, 0.1, 0.0]],
    [[0.4, 0.4, 0.1, 0.1], [0.3, 0.2, 0.2, 0.3], [0.1, 0.3, 0.2, 0.4], [0.2, 0.6, 0.1, 0.1]],
)
NUM = 200_000
PAIRS = {(a, b): TOY.target[0][a] * TOY.target[a][b] for a in range(4) for b in range(4)}


def plain(position: int, num_rows: int) -> tuple[list[int], Block]:
    """Committed ids up to a position, and a block whose rows decide there and at the positions after it."""
    return [0] * position, Block((0,), (0,) * (num_rows - 1))


def test_coupled_ids_follow_the_targets_law_along_a_text() -> None:
    """One seed, 200 000 first ids at every second position, and what follows each of them: at most 0.01 apart."""
    sampler = Sampler(TOY.sampling(seed=1), CPU)
    committed, block = plain(1, 2 * NUM)
    firsts = decide(TOY.rows([0]).expand(2 * NUM, -1), sampler, committed, block).ids[::2]
    before = [token for first in firsts for token in (0, first)]
    decided = decide(TOY.rows(before), sampler, committed, block).ids
    assert decided[::2] == firsts
    singles, pairs = Counter((a,) for a in firsts), Counter(zip(decided[::2], decided[1::2], strict=True))
    distances = off(singles, {(a,): p for a, p in enumerate(TOY.target[0])}), off(pairs, PAIRS)
    print(f"coupled, along a text: {distances[0]:.4f} for first ids, {distances[1]:.4f} for pairs")  # noqa: T201
    assert max(distances) <= 0.01
    assert chi_square_p(pairs, PAIRS) > 1e-4


def test_coupled_ids_follow_the_targets_law_over_seeds() -> None:
    """10 000 seeds in a row, 20 positions of each: first ids, and neighbours, which must not know of each other."""
    row, num_rows = TOY.target[0], 20
    committed, block = plain(1, num_rows)
    logits = TOY.rows([0]).expand(num_rows, -1)
    texts = [decide(logits, Sampler(TOY.sampling(seed=s), CPU), committed, block).ids for s in range(NUM // num_rows)]
    single: dict[Ids, float] = {(a,): p for a, p in enumerate(row)}
    product: dict[Ids, float] = {(a, b): p * q for a, p in enumerate(row) for b, q in enumerate(row)}
    found: dict[str, tuple[Counter[Ids], dict[Ids, float]]] = {
        "ids": (Counter((a,) for text in texts for a in text), single),
        "first ids": (Counter((text[0],) for text in texts), single),
        "neighbours": (Counter(pair for text in texts for pair in itertools.pairwise(text)), product),
        "same place, next seed": (Counter((a[0], b[0]) for a, b in itertools.pairwise(texts)), product),
        "next place, next seed": (Counter((a[1], b[0]) for a, b in itertools.pairwise(texts)), product),
    }
    for name, (counts, expected) in found.items():
        print(f"coupled, over seeds, {name}: {off(counts, expected):.4f}")  # noqa: T201
        assert chi_square_p(counts, expected) > 1e-4, name
    assert max(off(*found[name]) for name in ("ids", "neighbours")) <= 0.01


@pytest.mark.parametrize("kind", KINDS)
def test_coupled_drafts_agree_as_often_as_they_can(kind: str) -> None:
    """A coupled drafter at least as often as theory promises (Daliri, Musco & Suresh 2024): (1 - TV) / (1 + TV); any
    other as often as what it says is likely. What the target says is the same each time."""
    sampler, committed, block = Sampler(TOY.sampling(seed=2), CPU), *plain(1, NUM)
    rows = torch.tensor(TOY.drafter[:1]).log().expand(NUM, -1)
    drawn = Sampler(TOY.sampling(seed=2), CPU).choose(rows, [0] * NUM, 1, 1) if kind == "sampling" else ()
    drafted = tuple(drawn) or (1 if kind == "argmax" else 0,) * NUM
    decided = decide(TOY.rows([0]).expand(NUM, -1), sampler, committed, replace(block, draft=drafted[1:])).ids
    assert decided == decide(TOY.rows([0]).expand(NUM, -1), sampler, committed, block).ids
    agreed = sum(
        accept(draft, Decision((own, 0))).num_accepted for draft, own in zip(zip(drafted), decided, strict=True)
    )
    apart = sum(abs(p - q) for p, q in zip(TOY.target[0], TOY.drafter[0], strict=True)) / 2
    expected = {"argmax": TOY.target[0][1], "ngram": TOY.target[0][0], "sampling": (1 - apart) / (1 + apart)}[kind]
    print(f"coupled, {kind}: {agreed / NUM:.3f} agree, at least {expected:.3f} expected")  # noqa: T201
    assert agreed / NUM > expected - 0.005


def sampled(kind: str, verify_blocks: bool, num_ids: int) -> list[Ids]:
    """Outputs of 20 ids, each by its own seed and schedule."""
    outputs: list[Ids] = []
    for seed in range(num_ids // 20):
        sampling = TOY.sampling(seed=seed, sampling_mode=SamplingMode.REJECTION, verify_blocks=verify_blocks)
        dialogue = Dialogue(sampling, [0], 20, TOY.stream(kind, sampling), window=6)
        Schedule.random(random.Random(seed)).run(TOY, dialogue)
        outputs.append(tuple(dialogue.output))
    return outputs


def check_sampled(kind: str, verify_blocks: bool, num_ids: int) -> float:
    """Compare what follows each id, and each pair, with the target's law; return the total variation distance of
    pairs, given how often their first ids are there."""
    texts = [(0, *output) for output in sampled(kind, verify_blocks, num_ids)]
    before, apart = Counter(token for text in texts for token in text[:-1]), 0.0
    pairs = Counter[Ids](pair for text in texts for pair in itertools.pairwise(text))
    triples = Counter[Ids](triple for text in texts for triple in zip(text, text[1:], text[2:], strict=False))
    for first in range(TOY.size):
        expected: dict[Ids, float] = {(first, then): p for then, p in enumerate(TOY.target[first])}
        followed = {pair: count for pair, count in pairs.items() if pair[0] == first}
        assert chi_square_p(followed, expected) > 1e-4, first
        apart += off(followed, expected) * before[first] / before.total()
        for earlier in range(TOY.size):  # what came earlier has no say
            late = {triple[1:]: count for triple, count in triples.items() if triple[:2] == (earlier, first)}
            assert sum(late.values()) < 50 or chi_square_p(late, expected) > 1e-4, (earlier, first)
    firsts = off(Counter(text[1] for text in texts), dict(enumerate(TOY.target[0])))
    how = "as a block" if verify_blocks else "singly"
    print(f"{kind}, {how}: {apart:.4f} for pairs, {firsts:.4f} for {len(texts)} first ids")  # noqa: T201
    return apart


@pytest.mark.parametrize("verify_blocks", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_rejection_follows_the_targets_law(kind: str, verify_blocks: bool) -> None:
    """A few thousand ids with the real noise; `..._at_length` is the long form."""
    assert check_sampled(kind, verify_blocks, 3000) <= 0.05


@pytest.mark.full
@pytest.mark.parametrize("verify_blocks", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_rejection_follows_the_targets_law_at_length(kind: str, verify_blocks: bool) -> None:
    """200 000 ids: at most 0.01 apart."""
    assert check_sampled(kind, verify_blocks, NUM) <= 0.01


# -- keys


_KEYS: dict[str, Callable[[int], tuple[int, int]]] = {
    "what was drafted, and what the target says": lambda n: (
        noise_key(n, Stream.DRAFT, 5, 4),
        noise_key(n, Stream.RESIDUAL, 5, 4),
    ),
    "what was drafted, and a coupled choice": lambda n: (noise_key(n, Stream.DRAFT, 5), noise_key(n, Stream.CHOICE, 5)),
    "one chain, and the next": lambda n: (noise_key(n, Stream.DRAFT, 9, 4), noise_key(n, Stream.DRAFT, 9, 5)),
    "one step, and the next": lambda n: (noise_key(n, Stream.RESIDUAL, 9, 8), noise_key(n, Stream.RESIDUAL, 9, 9)),
    "one place, and the next": lambda n: (noise_key(n, Stream.DRAFT, 9, 4), noise_key(n, Stream.DRAFT, 10, 4)),
    "place and origin exchanged": lambda n: (noise_key(n, Stream.DRAFT, 9, 4), noise_key(n, Stream.DRAFT, 4, 9)),
    "one seed, and the next": lambda n: (noise_key(n, Stream.DRAFT, 9, 4), noise_key(n + 1, Stream.DRAFT, 9, 4)),
    "seed and place, one more and one less": lambda n: (
        noise_key(n, Stream.CHOICE, n + 1),
        noise_key(n + 1, Stream.CHOICE, n),
    ),
    "along a text": lambda n: (noise_key(3, Stream.CHOICE, n), noise_key(3, Stream.CHOICE, n + 1)),
}


@pytest.mark.parametrize("pair", _KEYS)
def test_draws_of_different_keys_know_nothing_of_each_other(pair: str) -> None:
    """Of five ids each: all pairs are as likely as if drawn apart. And so with the single number of a key."""
    num, weights = 20_000, [0.3, 0.1, 0.2, 0.15, 0.25]
    keys = [_KEYS[pair](n) for n in range(num)]
    rows = torch.tensor([weights]).expand(num, -1)
    one, other = race(rows, [key for key, _ in keys]), race(rows, [key for _, key in keys])
    assert (
        chi_square_p(
            Counter(zip(one, other, strict=True)),
            {(a, b): p * q for a, p in enumerate(weights) for b, q in enumerate(weights)},
        )
        > 1e-4
    )
    fifths = [int(5 * uniform(key)) for key, _ in keys]
    assert (
        chi_square_p(
            Counter(zip(fifths, other, strict=True)), {(a, b): q / 5 for a in range(5) for b, q in enumerate(weights)}
        )
        > 1e-4
    )

"""Rejection sampling of blocks, by exact computation: every draft, every outcome of every comparison is walked.

The law of what is emitted, completed by the target to one id more than the draft has, must be the target's own.
"""

from __future__ import annotations

import itertools
import random
import struct
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from baru_common.sampling import NO_ID, SparseProbs
from baru_hub.rejection import Rejection, check_block, check_singly
from support.enumeration import Dice, outcomes

Check = Callable[[Sequence[int], Sequence[SparseProbs], torch.Tensor, Sequence[float]], Rejection]
Ids = tuple[int, ...]
CHECKS = {"singly": check_singly, "block": check_block}
_EXACT = 1e-9


@dataclass(frozen=True)
class Case:
    """A target and a drafter as tables: what may follow each text of up to `depth` ids."""

    size: int
    depth: int
    target: Mapping[Ids, Sequence[float]]
    drafter: Mapping[Ids, SparseProbs]
    picks: bool
    """The drafter's ids were picked, not drawn: each of its distributions is one id, and is not sent."""
    ends: frozenset[Ids]
    """Drafts that the drafter leaves as short as they are."""

    def draw(self, dice: Dice) -> Ids:
        """Draw a draft."""
        draft: Ids = ()
        while len(draft) < self.depth and draft not in self.ends:
            probs = self.drafter[draft]
            draft = (*draft, probs.ids[dice.choose(probs.probs)])
        return draft

    def sent(self, draft: Ids) -> list[SparseProbs]:
        return [] if self.picks else [self.drafter[draft[:i]] for i in range(len(draft))]

    def rows(self, draft: Ids) -> torch.Tensor:
        return torch.tensor([self.target[draft[:i]] for i in range(len(draft) + 1)], dtype=torch.double)

    def drafts(self) -> Iterator[tuple[float, Ids]]:
        """Every draft with its probability."""
        return outcomes(self.draw)

    def verdicts(self, check: Check, draft: Ids) -> Iterator[tuple[float, Rejection]]:
        """Every verdict on one draft with its probability."""

        def run(dice: Dice) -> Rejection:
            uniforms: Any = [dice.uniform() for _ in draft]
            return check(draft, self.sent(draft), self.rows(draft), uniforms)

        return outcomes(run)

    def completed(self, text: Ids) -> Iterator[tuple[float, Ids]]:
        """What the target makes of a text, up to one id more than the deepest draft."""
        if len(text) == self.depth + 1 or text[-1:] == (NO_ID,):
            yield 1.0, text
            return
        if not any(self.target[text]):
            yield 1.0, (*text, NO_ID)
        for token, prob in enumerate(self.target[text]):
            if prob > 0:
                yield from ((prob * rest, whole) for rest, whole in self.completed((*text, token)))

    def law(self, check: Check) -> dict[Ids, float]:
        """The law of what is emitted, completed by the target."""
        found: dict[Ids, float] = defaultdict(float)
        for drafted, draft in self.drafts():
            for decided, verdict in self.verdicts(check, draft):
                for prob, token in self.owns(verdict):
                    for rest, whole in self.completed((*draft[: verdict.num_accepted], token)):
                        found[whole] += drafted * decided * prob * rest
        return found

    def owns(self, verdict: Rejection) -> list[tuple[float, int]]:
        """The target's own ids after a verdict."""
        total = float(verdict.residual.sum())
        weights = enumerate(verdict.residual.tolist())
        return [(weight / total, token) for token, weight in weights if weight > 0] or [(1.0, NO_ID)]

    def survival(self, check: Check) -> dict[Ids, float]:
        """For each text: the chance that the draft begins with it, and that so much is accepted."""
        found: dict[Ids, float] = defaultdict(float)
        for drafted, draft in self.drafts():
            for decided, verdict in self.verdicts(check, draft):
                for length in range(1, verdict.num_accepted + 1):
                    found[draft[:length]] += drafted * decided
        return found

    def mean_accepted(self, check: Check) -> float:
        return sum(self.survival(check).values())


def random_case(seed: int, *, picks: bool) -> Case:
    """Three or four ids, depth 1 to 3; at times with zeros on either side, texts after which the target has no id
    left, or drafts of unequal lengths."""
    chance = random.Random(seed)
    size, depth = chance.choice(((3, 1), (3, 2), (3, 3), (4, 1), (4, 2), (4, 3)))
    zeros = chance.choice((0.0, 0.0, 0.3, 0.6))
    texts = [text for length in range(depth + 1) for text in itertools.product(range(size), repeat=length)]
    drafter = {}
    for text in texts:
        if picks:
            drafter[text] = SparseProbs.of([(chance.randrange(size), 1.0)])
        else:
            ids = chance.sample(range(size), chance.randint(1, size) if zeros else size)
            drafter[text] = SparseProbs.of([(i, chance.random() + 1e-3) for i in ids])
    target = {text: some_probs(chance, size, zeros) for text in texts}
    if zeros and chance.random() < 0.5:
        target |= {text: [0.0] * size for text in texts if text and chance.random() < 0.2}
    ends = frozenset(text for text in texts if text and chance.random() < 0.3) if chance.random() < 0.4 else frozenset()
    return Case(size, depth, target, drafter, picks, ends)


def some_probs(chance: random.Random, size: int, zeros: float) -> list[float]:
    weights = [chance.random() ** chance.choice((1, 4)) * (chance.random() >= zeros) for _ in range(size)]
    weights[chance.randrange(size)] += 1e-3
    return [weight / sum(weights) for weight in weights]


def steady(target: Sequence[float], drafter: SparseProbs, depth: int, *, picks: bool = False) -> Case:
    """A target and a drafter that say the same after every text."""
    texts = [t for length in range(depth + 1) for t in itertools.product(range(len(target)), repeat=length)]
    return Case(
        len(target), depth, dict.fromkeys(texts, target), dict.fromkeys(texts, drafter), picks, ends=frozenset()
    )


def halves(*weights: float, ids: Sequence[int] | None = None) -> SparseProbs:
    """A distribution with these weights, each exact in half precision."""
    return SparseProbs(tuple(ids or range(len(weights))), struct.pack(f"<{len(weights)}e", *weights))


CASES = [random_case(seed, picks=False) for seed in range(60)] + [random_case(seed, picks=True) for seed in range(30)]


def assert_is_the_targets(case: Case, check: Check) -> None:
    expected = {whole: prob for prob, whole in case.completed(())}
    found = case.law(check)
    assert sum(found.values()) == pytest.approx(1, abs=_EXACT)
    for text in {*expected, *found}:
        assert found.get(text, 0.0) == pytest.approx(expected.get(text, 0.0), abs=_EXACT), text


# -- the law


def test_the_cases_hold_what_they_should() -> None:
    """Zeros on both sides and on one, dead ends, drafts of unequal lengths, all depths."""
    drawn = [case for case in CASES if not case.picks]
    pairs = [(p, q.prob(i)) for c in drawn for t, q in c.drafter.items() for i, p in enumerate(c.target[t])]
    assert {(p > 0, q > 0) for p, q in pairs} == {(True, True), (True, False), (False, True), (False, False)}
    assert {case.depth for case in CASES} == {1, 2, 3}
    assert any(not any(row) for case in drawn for row in case.target.values())
    assert any(len({len(draft) for _, draft in case.drafts()}) > 1 for case in drawn)


@pytest.mark.parametrize("name", CHECKS)
def test_what_is_emitted_follows_the_targets_law(name: str) -> None:
    for case in CASES:
        assert_is_the_targets(case, CHECKS[name])


_EDGES = {
    "the drafter is the target": steady([0.5, 0.25, 0.25], halves(2, 1, 1), 3),
    "almost the target": steady([0.5 + 1e-12, 0.25, 0.25 - 1e-12], halves(2, 1, 1), 3),
    "nothing in common": steady([0.5, 0.5, 0, 0], halves(1, 3, ids=(2, 3)), 2),
    "the target is certain": steady([0, 1, 0], halves(1, 2, 5), 3),
    "the drafter is certain": steady([0.2, 0.3, 0.5], halves(1, ids=(2,)), 3),
    "both are certain, and agree": steady([0, 1, 0], halves(1, ids=(1,)), 3),
    "both are certain, and differ": steady([0, 1, 0], halves(1, ids=(2,)), 3),
    "picked": steady([0.2, 0.3, 0.5], halves(1, ids=(2,)), 3, picks=True),
    "picked, and the target's only id": steady([0, 0, 1], halves(1, ids=(2,)), 3, picks=True),
    "picked, and impossible": steady([0.2, 0.8, 0], halves(1, ids=(2,)), 3, picks=True),
    "the least that half precision holds": steady([0.2, 0.3, 0.5], halves(2**-24, 1, 60000), 2),
}


@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize("edge", _EDGES)
def test_the_law_holds_at_the_edges(name: str, edge: str) -> None:
    assert_is_the_targets(_EDGES[edge], CHECKS[name])


@pytest.mark.parametrize("name", CHECKS)
def test_picked_ids_are_as_if_drawn_from_themselves_alone(name: str) -> None:
    """No `draft_probs`, or such that leave no choice: the same verdict for the same numbers."""
    chance = random.Random(1)
    for case in (case for case in CASES if case.picks):
        for _, draft in case.drafts():
            uniforms = [chance.random() for _ in draft]
            picked = CHECKS[name](draft, [], case.rows(draft), uniforms)
            drawn = CHECKS[name](draft, [halves(1, ids=(token,)) for token in draft], case.rows(draft), uniforms)
            assert picked.num_accepted == drawn.num_accepted
            assert torch.equal(picked.residual, drawn.residual)


@pytest.mark.parametrize("name", CHECKS)
def test_without_a_draft_the_targets_own_row_is_all(name: str) -> None:
    row = torch.tensor([[0.2, 0.3, 0.5]], dtype=torch.double)
    verdict = CHECKS[name]([], [], row, [])
    assert verdict.num_accepted == 0
    assert torch.equal(verdict.residual, row[0])


@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize("dead", [0, 1, 2])
def test_where_the_target_has_no_id_left_nothing_is_accepted_and_nothing_follows(name: str, dead: int) -> None:
    """A row of zeros, as a request that forbids everything leaves it. What comes before it is as likely as ever."""
    case = steady([0.2, 0.3, 0.5], halves(1, 2, 1), 2)
    case = replace(case, target={text: [0.0] * (len(text) == dead) * 3 or row for text, row in case.target.items()})
    assert_is_the_targets(case, CHECKS[name])
    assert {len(text) for text in case.law(CHECKS[name])} == {dead + 1}


@pytest.mark.parametrize("name", CHECKS)
def test_an_id_that_the_target_excludes_is_never_accepted(name: str) -> None:
    """Not even by the smallest number that there is."""
    case = steady([0.5, 0.0, 0.5], halves(1, 5, 1), 3)
    for _, draft in case.drafts():
        verdict = CHECKS[name](draft, case.sent(draft), case.rows(draft), [2.0**-53] * 3)
        assert 1 not in draft[: verdict.num_accepted]
        assert verdict.residual[1] == 0


# -- how much is accepted


def test_a_block_accepts_at_least_as_much_as_one_by_one() -> None:
    """Every text stands as often as one by one, at least; and in some cases more often."""
    gains = []
    for case in [*CASES, *_EDGES.values()]:
        singly, block = case.survival(check_singly), case.survival(check_block)
        assert all(block.get(text, 0.0) >= prob - _EXACT for text, prob in singly.items())
        gains.append(sum(block.values()) - sum(singly.values()))
        if case.depth == 1:
            assert gains[-1] == pytest.approx(0, abs=_EXACT)
    assert max(gains) > 0.05


def test_the_first_id_is_accepted_as_often_as_can_be() -> None:
    """One by one: with one less the total variation between drafter and target, the most that is possible."""
    for case in CASES:
        overlap = sum(min(p, case.drafter[()].prob(i)) for i, p in enumerate(case.target[()]))
        survival = case.survival(check_singly)
        accepted = sum(survival.get((token,), 0.0) for token in range(case.size))
        assert accepted == pytest.approx(overlap, abs=_EXACT)


def test_the_example_of_the_paper() -> None:
    """Two ids, always 1/3 and 2/3 against 2/3 and 1/3, blocks of two: 10/9 ids one by one, 11/9 as a block."""
    case = steady([1 / 3, 2 / 3], halves(2, 1), 2)
    assert case.mean_accepted(check_singly) == pytest.approx(10 / 9, abs=_EXACT)
    assert case.mean_accepted(check_block) == pytest.approx(11 / 9, abs=_EXACT)


# -- against slow statements of the algorithms, in the papers' own terms


def speculative_sampling(
    draft: Sequence[int], q: Sequence[Sequence[float]], p: Sequence[Sequence[float]], r: Sequence[float]
) -> tuple[int, list[float]]:
    """Leviathan et al. 2023, algorithm 1: n = min({i - 1: r_i > p_i(x) / q_i(x)} and gamma)."""
    refused = [i for i, x in enumerate(draft) if r[i] > p[i][x] / q[i][x]]
    n = min([*refused, len(draft)])
    last = list(p[n])
    if n < len(draft):
        last = [max(0.0, p[n][x] - q[n][x]) for x in range(len(p[n]))]
    return n, [weight / sum(last) for weight in last]


def block_verification(
    draft: Sequence[int], q: Sequence[Sequence[float]], p: Sequence[Sequence[float]], eta: Sequence[float]
) -> tuple[int, list[float]]:
    """Sun et al. 2025, algorithm 2; `q` and `p` are the small and the big model's rows."""
    gamma, vocabulary = len(draft), range(len(p[0]))
    weights = [1.0]
    for i in range(gamma):
        weights.append(min(1.0, weights[-1] * p[i][draft[i]] / q[i][draft[i]]))

    def left(i: int) -> list[float]:
        return [max(0.0, weights[i] * p[i][x] - q[i][x]) for x in vocabulary]

    tau = 0
    for i in range(1, gamma + 1):
        if i == gamma:
            h = weights[i]
        else:
            mass = sum(left(i))
            h = mass / (mass + 1 - weights[i]) if mass > 0 else 0.0
        if eta[i - 1] <= h:
            tau = i
    own = list(p[gamma]) if tau == gamma else left(tau)
    return tau, [weight / sum(own) for weight in own]


@pytest.mark.parametrize("name", CHECKS)
def test_it_decides_as_the_papers_say(name: str) -> None:
    """The same numbers give the same prefix, and the same distribution after it."""
    reference = {"singly": speculative_sampling, "block": block_verification}[name]
    chance, num_by_length = random.Random(2), Counter[int]()
    for case in CASES:
        for _ in range(25 if all(map(any, case.target.values())) else 0):
            draft: Ids = ()
            while len(draft) < case.depth and draft not in case.ends:
                probs = case.drafter[draft]
                draft = (*draft, chance.choices(probs.ids, probs.probs)[0])
            uniforms = [chance.random() for _ in draft]
            q = [[case.drafter[draft[:i]].prob(x) for x in range(case.size)] for i in range(len(draft))]
            verdict = CHECKS[name](draft, case.sent(draft), case.rows(draft), uniforms)
            accepted, own = reference(draft, q, case.rows(draft).tolist(), uniforms)
            assert verdict.num_accepted == accepted
            assert (verdict.residual / verdict.residual.sum()).tolist() == pytest.approx(own, abs=_EXACT)
            num_by_length[accepted] += 1
    assert all(num_by_length[length] > 20 for length in range(4))

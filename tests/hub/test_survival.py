"""What is learned of a drafter from its verdicts: steady, quick to notice a change, never beyond the evidence."""

from __future__ import annotations

import statistics
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baru_hub.survival import Survival


def verdicts(survival: Survival, acceptance: float, num_steps: int, *, depth: int = 4, seed: int = 0) -> None:
    """Feed verdicts of a drafter that is right with this chance at each position."""
    random = Random(seed)
    for _ in range(num_steps):
        num_accepted = 0
        while num_accepted < depth and random.random() < acceptance:
            num_accepted += 1
        survival.observe(depth, num_accepted)


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.6, 0.8, 0.95, 1.0])
def test_a_constant_acceptance_is_found(acceptance: float) -> None:
    """Position j survives with its j-th power."""
    survival = Survival(16)
    verdicts(survival, acceptance, 1500)
    expected = [acceptance**j for j in range(1, 5)]
    assert survival.gains()[:4] == pytest.approx(expected, abs=0.08)


@pytest.mark.parametrize(("before", "after"), [(0.9, 0.1), (0.1, 0.9), (0.8, 0.3), (0.3, 0.8), (1.0, 0.0), (0.0, 1.0)])
def test_a_new_regime_is_noticed(before: float, after: float) -> None:
    """Forty verdicts after hundreds of others, the estimate has gone most of the way, up or down (median of runs)."""
    left = []
    for seed in range(15):
        survival = Survival(16)
        verdicts(survival, before, 300, seed=seed)
        verdicts(survival, after, 40, seed=100 + seed)
        left.append(abs(survival.gains()[0] - after) / abs(before - after))
    assert statistics.median(left) < 0.35


@given(
    max_depth=st.integers(0, 12),
    seen=st.lists(st.tuples(st.integers(0, 16), st.floats(0, 1)), max_size=80),
)
@settings(max_examples=80, deadline=None)
def test_gains_are_chances_that_never_rise(max_depth: int, seen: list[tuple[int, float]]) -> None:
    """Whatever was seen: one for each position up to the reach, between 0 and 1, falling."""
    survival = Survival(max_depth)
    deepest = 0
    for num_verified, share in seen:
        num_accepted = round(share * num_verified)
        survival.observe(num_verified, num_accepted)
        deepest = max(deepest, min(num_accepted + 1, num_verified))
        gains = survival.gains()
        assert len(gains) == survival.reach == min(max(4, deepest + 1), max_depth)
        assert all(0 <= gain <= 1 for gain in gains)
        assert gains == sorted(gains, reverse=True)


def test_reach_grows_by_evidence_only() -> None:
    """Short drafts, always right, do not vouch for longer ones; each one tried opens one more."""
    survival = Survival(16)
    verdicts(survival, 1.0, 500, depth=2)
    assert survival.reach == 4
    for depth in range(4, 16):
        survival.observe(depth, depth)
        assert survival.reach == depth + 1
    survival.observe(16, 16)
    assert survival.reach == 16
    survival.observe(16, 0)
    assert survival.reach == 16


def test_positions_after_a_refused_one_were_not_tried() -> None:
    """The first refusal says nothing of what would have come after it."""
    survival = Survival(8)
    for _ in range(50):
        survival.observe(6, 2)
    gains = survival.gains()
    assert gains[1] > 0.85
    assert gains[2] < 0.1
    assert [position.slow.tries > 0 for position in survival._positions] == [True] * 3 + [False] * 5


def test_what_is_unknown_is_taken_from_the_position_before() -> None:
    """A drafter known to be good at the first position is believed to be so at the next."""
    survival = Survival(8)
    verdicts(survival, 1.0, 300, depth=1)
    gains = survival.gains()
    assert gains == pytest.approx([1.0] * 4, abs=0.05)


def test_a_step_without_drafts_teaches_nothing() -> None:
    """Plain steps leave all as it was."""
    survival = Survival(8)
    verdicts(survival, 0.7, 100)
    before = survival.gains()
    survival.observe(0, 0)
    assert survival.gains() == before

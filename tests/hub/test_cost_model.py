"""What the cost model learns, and what it must not: known costs and known noise go in."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baru_hub.cost_model import CostModel, StepShape

_TRUE = (0.030, 0.0012, 0.0020, 0.0040)
_PLAIN = StepShape(1, 1, 200)
_PROBES = (StepShape(1, 1, 0), StepShape(9, 1, 500), StepShape(24, 8, 4000), StepShape(5, 4, 8000))


def cost_s(shape: StepShape, weights: tuple[float, ...] = _TRUE) -> float:
    return float(sum(w * f for w, f in zip(weights, shape.features(), strict=True)))


def any_shape(random: Random) -> StepShape:
    num_sessions = random.randint(1, 8)
    return StepShape(num_sessions * random.randint(1, 12), num_sessions, num_sessions * random.randint(0, 1500))


def feed(model: CostModel, num_steps: int, *, seed: int = 0, noise: float = 0.05, factor: float = 1.0) -> CostModel:
    random = Random(seed)
    for _ in range(num_steps):
        shape = any_shape(random)
        model.observe(shape, factor * cost_s(shape) * (1 + random.gauss(0, noise)))
    return model


def off(model: CostModel, factor: float = 1.0) -> float:
    """Largest relative error over the probes."""
    return max(abs(model.predict_s(shape) / (factor * cost_s(shape)) - 1) for shape in _PROBES)


@pytest.mark.parametrize("seed", range(5))
def test_a_linear_cost_is_recovered_from_noise(seed: int) -> None:
    """A few hundred steps of all shapes: predictions within 5 %, and a row's price within 15 %."""
    model = feed(CostModel(), 300, seed=seed)
    assert off(model) < 0.05
    assert model.row_s == pytest.approx(_TRUE[1], rel=0.15)


def test_what_was_never_seen_keeps_its_prior() -> None:
    """Plain steps alone, twice as slow as foreseen, say nothing of what a draft row costs."""
    prior = (0.02, 0.0005, 0.0005, 0.0005)
    model = CostModel(prior)
    for _ in range(500):
        model.observe(_PLAIN, 2 * cost_s(_PLAIN, prior))
    assert model.predict_s(_PLAIN) == pytest.approx(2 * cost_s(_PLAIN, prior), rel=0.02)
    assert model.row_s == pytest.approx(prior[1], rel=0.05)
    assert model.predict_s(StepShape(1, 1, 1200)) - model.predict_s(_PLAIN) == pytest.approx(prior[3], rel=0.05)


@pytest.mark.parametrize("num_before", [30, 100, 400])
def test_one_hiccup_teaches_little(num_before: int) -> None:
    """A step that took fifty times too long moves no prediction by 10 %."""
    model = feed(CostModel(), num_before, noise=0.0)
    before = [model.predict_s(shape) for shape in _PROBES]
    model.observe(_PLAIN, 50 * cost_s(_PLAIN))
    for shape, expected_s in zip(_PROBES, before, strict=True):
        assert model.predict_s(shape) == pytest.approx(expected_s, rel=0.1)


@pytest.mark.parametrize("num_before", [0, 1, 3, 7])
def test_one_hiccup_right_after_the_calibration_teaches_little(num_before: int) -> None:
    """The first steps of a hub that has just been calibrated are its slowest: they count as others do."""
    shapes = [StepShape(n, 1, c) for n, c in ((1, 0), (16, 0), (4, 16), (1, 16), (16, 16), (1, 496))]
    model = CostModel.calibrated((shape, cost_s(shape)) for shape in shapes)
    for _ in range(num_before):
        model.observe(_PLAIN, cost_s(_PLAIN))
    before_s = model.predict_s(_PLAIN)
    model.observe(_PLAIN, 50 * cost_s(_PLAIN))
    assert model.predict_s(_PLAIN) == pytest.approx(before_s, rel=0.15)


def test_the_calibration_is_the_prior() -> None:
    """What the calibration found holds before the first step, and is not lost to later plain steps."""
    shapes = [StepShape(n, 1, c) for n in (1, 4, 16) for c in (0, 16, 500)] * 3
    model = CostModel.calibrated((shape, cost_s(shape)) for shape in shapes)
    assert model.row_s == pytest.approx(_TRUE[1], rel=0.1)
    for _ in range(300):
        model.observe(_PLAIN, cost_s(_PLAIN))
    assert model.row_s == pytest.approx(_TRUE[1], rel=0.1)


@given(
    steps=st.lists(
        st.tuples(st.integers(1, 64), st.integers(1, 8), st.integers(0, 9000), st.floats(1e-6, 5.0)), max_size=40
    )
)
@settings(max_examples=50, deadline=None)
def test_more_work_never_costs_less(steps: list[tuple[int, int, int, float]]) -> None:
    """Whatever nonsense was observed, a further row, session with its row, or context costs zero or more."""
    model = CostModel()
    for num_rows, num_sessions, num_context, step_s in steps:
        model.observe(StepShape(num_rows, num_sessions, num_context), step_s)
    base_s = model.predict_s(StepShape(4, 2, 1000))
    assert model.row_s >= 0
    assert base_s >= 0
    for more in (StepShape(5, 2, 1000), StepShape(5, 3, 1000), StepShape(4, 2, 2000)):
        assert model.predict_s(more) >= base_s


def test_cheaper_rows_are_not_negative_rows() -> None:
    """Steps with more rows that take less time make a row free, not a gain."""
    model = CostModel()
    for i in range(200):
        num_rows = 1 + i % 16
        model.observe(StepShape(num_rows, 1, 0), 0.05 - 0.002 * num_rows)
    assert model.row_s == 0
    assert model.predict_s(StepShape(64, 1, 0)) >= model.predict_s(StepShape(1, 1, 0))


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_a_changed_machine_is_learned(factor: float) -> None:
    """Two hundred steps after it turned slower or faster, predictions are within a fifth."""
    model = feed(CostModel(), 400)
    feed(model, 200, seed=1, factor=factor)
    assert off(model, factor) < 0.2

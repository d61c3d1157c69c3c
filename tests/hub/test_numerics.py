"""The row floor is found on layers whose arithmetic is known to depend on the number of rows."""

from __future__ import annotations

import logging

import pytest
import torch

from baru_hub.numerics import row_floor


class Fickle(torch.nn.Linear):
    """Mock: computes a row in another way when fewer than `floor` rows, or `odd` rows, are in the pass."""

    def __init__(self, floor: int, width: int = 8, odd: int = 0) -> None:
        super().__init__(width, 4)
        self.floor = floor
        self.odd = odd

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        exact = (rows.double() @ self.weight.double().T).float()
        return exact if len(rows) >= self.floor and len(rows) != self.odd else exact * (1 + 2**-20)


@pytest.mark.parametrize(
    ("floor", "found"), [(1, 2), (2, 2), (3, 4), (4, 4), (5, 8), (8, 8), (9, 16), (16, 16), (17, 32), (32, 32)]
)
def test_the_floor_is_the_first_tried_that_does(floor: int, found: int, caplog: pytest.LogCaptureFixture) -> None:
    """No more rows than needed, and no warning."""
    with caplog.at_level(logging.WARNING):
        assert row_floor(torch.nn.Sequential(Fickle(floor))) == found
    assert not caplog.records


@pytest.mark.parametrize("order", [(3, 9), (9, 3)])
def test_the_worst_layer_counts(order: tuple[int, int]) -> None:
    """Every shape of layer is tried, whatever the order."""
    first, second = order
    assert row_floor(torch.nn.Sequential(Fickle(first, 8), Fickle(second, 16))) == 16


@pytest.mark.parametrize("odd", [6, 33, 200])
def test_one_odd_number_of_rows_counts(odd: int, caplog: pytest.LogCaptureFixture) -> None:
    """From the floor on all counts must do, also one far above it."""
    found = row_floor(torch.nn.Sequential(Fickle(1, odd=odd)))
    assert found == (8 if odd == 6 else 32)
    assert bool(caplog.records) == (odd > 32)


def test_a_hopeless_layer_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    """The most that is tried is returned, and the log says that it does not do."""
    with caplog.at_level(logging.WARNING):
        assert row_floor(torch.nn.Sequential(Fickle(250))) == 32
    assert "(4, 8)" in caplog.text


def test_a_model_without_linear_layers_needs_no_company() -> None:
    """Nothing to measure: the least floor."""
    assert row_floor(torch.nn.Sequential(torch.nn.ReLU())) == 2

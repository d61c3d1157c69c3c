"""The greedy choice: the lowest id of a row's maxima, in every numeric type and at every width."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from baru_common.sampling.sampler import lowest_argmax

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_INF = float("inf")


@given(
    rows=st.lists(st.lists(st.integers(-2, 2), min_size=12, max_size=12), min_size=1, max_size=5),
    masked=st.sets(st.integers(0, 11), max_size=11),
    dtype=st.sampled_from(_DTYPES),
)
def test_of_several_maxima_the_lowest_id_is_chosen(rows: list[list[int]], masked: set[int], dtype: torch.dtype) -> None:
    """Each row's id is the first of the largest logits, what is masked out left aside, in every numeric type."""
    allowed = [i for i in range(12) if i not in masked]
    expected = [min(allowed, key=lambda i, row=row: (-row[i], i)) for row in rows]  # type: ignore[misc]
    logits = torch.tensor(rows, dtype=dtype)
    logits[:, sorted(masked)] = -_INF
    assert lowest_argmax(logits) == expected


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("tied", [(49_000, 49_151), (7, 8, 40_000), (0, 49_151), tuple(range(3, 49_152, 64))])
def test_ties_in_a_wide_row_go_to_the_lowest_id(dtype: torch.dtype, tied: tuple[int, ...]) -> None:
    """As wide as a real vocabulary, where kernels split the row among lanes and threads."""
    logits = torch.zeros(2, 49_152, dtype=dtype)
    logits[1, list(tied)] = 1.5
    assert lowest_argmax(logits) == [0, tied[0]]


def test_logits_that_bf16_cannot_tell_apart_are_a_tie() -> None:
    """The larger one in fp32 stands later; in bf16 both round to one value, so the lower id is chosen."""
    logits = torch.tensor([[0.0, 8.0, 8.001, 1.0]])
    assert lowest_argmax(logits) == [2]
    assert lowest_argmax(logits.bfloat16()) == [1]


def test_masked_ids_beside_a_finite_one_are_fine() -> None:
    """Minus infinity is an ordinary way to say "not this one"."""
    assert lowest_argmax(torch.tensor([[-_INF, -3.0, -_INF], [-_INF, -_INF, 0.0]])) == [1, 2]

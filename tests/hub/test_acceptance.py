"""What a step decides, against the plainest statements of the same rules."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from baru_common.errors import EngineFailure
from baru_common.frames import FinishReason
from baru_hub.acceptance import Acceptance, accept, decide, stop

STOP = FinishReason.STOP
LENGTH = FinishReason.LENGTH
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_SIZE, _WIDTH = 12, 16  # the last four columns are padding

# -- decide


@given(
    rows=st.lists(st.lists(st.integers(-2, 2), min_size=_WIDTH, max_size=_WIDTH), min_size=1, max_size=5),
    holes=st.sets(st.integers(0, _SIZE - 1), max_size=_SIZE - 1),
    dtype=st.sampled_from(_DTYPES),
)
def test_of_several_maxima_the_lowest_real_id_is_chosen(
    rows: list[list[int]], holes: set[int], dtype: torch.dtype
) -> None:
    """Each row's id is the first of the largest logits, padding and holes left out, in every numeric type."""
    allowed = [i for i in range(_SIZE) if i not in holes]
    expected = [min(allowed, key=lambda i, row=row: (-row[i], i)) for row in rows]  # type: ignore[misc]
    assert decide(torch.tensor(rows, dtype=dtype), _SIZE, sorted(holes)) == expected


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("tied", [(49_000, 49_151), (7, 8, 40_000), (0, 49_151), tuple(range(3, 49_152, 64))])
def test_ties_in_a_wide_row_go_to_the_lowest_id(dtype: torch.dtype, tied: tuple[int, ...]) -> None:
    """As wide as a real vocabulary, where kernels split the row among lanes and threads."""
    logits = torch.zeros(2, 49_152, dtype=dtype)
    logits[1, list(tied)] = 1.5
    assert decide(logits, 49_152) == [0, tied[0]]


def test_logits_that_bf16_cannot_tell_apart_are_a_tie() -> None:
    """The larger one in fp32 stands later; in bf16 both round to one value, so the lower id is chosen."""
    logits = torch.tensor([[0.0, 8.0, 8.001, 1.0]])
    assert decide(logits, 4) == [2]
    assert decide(logits.bfloat16(), 4) == [1]


def test_what_padding_and_holes_hold_does_not_matter() -> None:
    """Even infinities and NaN there neither win nor count as a failure."""
    logits = torch.tensor([[1.0, 3.0, 2.0, 9.0, 9.0]])
    for value in (9.0, float("inf"), float("nan")):
        logits[0, 1] = logits[0, 3] = logits[0, 4] = value
        assert decide(logits, 3, (1,)) == [2]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("row", [0, 2])
@pytest.mark.parametrize("dtype", _DTYPES)
def test_logits_that_are_not_finite_are_refused(value: float, row: int, dtype: torch.dtype) -> None:
    """One such logit in one row of the step is enough."""
    logits = torch.zeros(3, 8, dtype=dtype)
    logits[row, 5] = value
    with pytest.raises(EngineFailure, match="not finite"):
        decide(logits, 8)


def test_a_row_without_any_choice_is_refused() -> None:
    """All ids masked out: no id is made up."""
    with pytest.raises(EngineFailure, match="not finite"):
        decide(torch.full((1, 4), float("-inf")), 4)


def test_masked_ids_beside_a_finite_one_are_fine() -> None:
    """Minus infinity is an ordinary way to say "not this one"."""
    assert decide(torch.tensor([[float("-inf"), -3.0, float("-inf")]]), 3) == [1]


# -- accept


@pytest.mark.parametrize(
    ("draft", "decided", "num_accepted"),
    [
        ((), (5,), 0),  # plain: the target's own id
        ((5,), (5, 6), 1),  # bonus
        ((4,), (5, 6), 0),  # correction
        ((5, 6, 7), (5, 6, 7, 8), 3),
        ((5, 6, 9), (5, 6, 7, 8), 2),
        ((5, 9, 7), (5, 6, 7, 8), 1),  # right again after a wrong one does not count
        ((9, 6, 7), (5, 6, 7, 8), 0),
    ],
)
def test_the_accepted_are_the_prefix_that_agrees(
    draft: tuple[int, ...], decided: tuple[int, ...], num_accepted: int
) -> None:
    """Emitted are the accepted ids and the target's own next one."""
    assert accept(draft, decided) == Acceptance(len(draft), num_accepted, decided[: num_accepted + 1])


@pytest.mark.parametrize("num_decided", [0, 2, 4])
def test_a_wrong_number_of_decided_ids_is_an_engine_failure(num_decided: int) -> None:
    """There is one for each draft id and one more; anything else would be guessed."""
    with pytest.raises(EngineFailure, match="must be one more"):
        accept((1, 2), range(num_decided))


# -- stop


@pytest.mark.parametrize("index", range(5))
def test_a_stop_id_ends_the_output_wherever_it_stands(index: int) -> None:
    """In a block of four accepted ids and the bonus: the stop id is the last one, the rest never happened."""
    emitted = (10, 11, 12, 13, 14)
    outcome = stop(Acceptance(4, 4, emitted), {10 + index}, room=50)
    kept = index + 1
    assert outcome == Acceptance(min(kept, 4), min(kept, 4), emitted[:kept], STOP)


@pytest.mark.parametrize(
    ("room", "expected"),
    [
        (1, Acceptance(1, 1, (10,), LENGTH)),
        (2, Acceptance(2, 2, (10, 11), LENGTH)),
        (3, Acceptance(4, 2, (10, 11, 12), LENGTH)),  # whole, with its correction: just used up
        (4, Acceptance(4, 2, (10, 11, 12))),
    ],
)
def test_room_cuts_the_output(room: int, expected: Acceptance) -> None:
    """Never more than `room` ids; the one that takes the last of it ends the generation."""
    assert stop(Acceptance(4, 2, (10, 11, 12)), (), room) == expected


def test_a_stop_id_in_the_last_place_is_a_stop() -> None:
    """Both ends at once: the model ended by itself, so that is the reason."""
    assert stop(Acceptance(1, 1, (10, 11)), {11}, room=2).finish is STOP


def test_a_stop_id_past_the_room_is_not_seen() -> None:
    """What would not be emitted cannot stop anything."""
    assert stop(Acceptance(1, 1, (10, 11)), {11}, room=1) == Acceptance(1, 1, (10,), LENGTH)


@given(
    draft=st.lists(st.integers(0, 3), max_size=6),
    decided=st.lists(st.integers(0, 3), min_size=7, max_size=7),
    stop_ids=st.sets(st.integers(0, 3), max_size=2),
    room=st.integers(1, 9),
)
def test_a_step_equals_deciding_one_id_at_a_time(
    draft: list[int], decided: list[int], stop_ids: set[int], room: int
) -> None:
    """The slow reference walks the ids singly and knows nothing of blocks."""
    emitted: list[int] = []
    num_verified = num_accepted = 0
    finish = None
    for i in range(len(draft) + 1):
        emitted.append(decided[i])
        agrees = i < len(draft) and draft[i] == decided[i]
        num_accepted += agrees
        finish = STOP if decided[i] in stop_ids else LENGTH if len(emitted) == room else None
        if finish or not agrees:
            # A block whose correction or bonus was emitted was checked whole.
            num_verified = num_accepted if agrees else len(draft)
            break
    outcome = stop(accept(draft, decided[: len(draft) + 1]), stop_ids, room)
    assert outcome == Acceptance(num_verified, num_accepted, tuple(emitted), finish)

"""What a step decides, against the plainest statements of the same rules."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baru_common.errors import EngineFailure
from baru_common.frames import FinishReason
from baru_hub.acceptance import Acceptance, Decision, accept, stop

STOP = FinishReason.STOP
LENGTH = FinishReason.LENGTH

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
    assert accept(draft, Decision(decided)) == Acceptance(len(draft), num_accepted, decided[: num_accepted + 1])


@pytest.mark.parametrize("num_decided", [0, 2, 4])
def test_a_wrong_number_of_decided_ids_is_an_engine_failure(num_decided: int) -> None:
    """There is one for each draft id and one more; anything else would be guessed."""
    with pytest.raises(EngineFailure, match="must be one more"):
        accept((1, 2), Decision(tuple(range(num_decided))))


@pytest.mark.parametrize("num_accepted", range(4))
def test_what_rejection_sampling_accepted_is_taken_as_it_is(num_accepted: int) -> None:
    """Also where the id after the accepted ones equals the draft id that was refused."""
    draft, emitted = (5, 6, 7), (5, 6, 7, 8)[: num_accepted + 1]
    assert accept(draft, Decision(emitted, num_accepted)) == Acceptance(3, num_accepted, emitted)


@pytest.mark.parametrize(
    ("num_accepted", "num_emitted"), [(-1, 0), (0, 0), (0, 2), (1, 1), (2, 2), (2, 4), (3, 4), (3, 3)]
)
def test_a_rejection_that_does_not_fit_the_draft_is_an_engine_failure(num_accepted: int, num_emitted: int) -> None:
    """More accepted than drafted, or not exactly one id of the target's own."""
    with pytest.raises(EngineFailure, match=f"{num_accepted} of 2 draft ids accepted, and {num_emitted} ids"):
        accept((1, 2), Decision((1, 2, 3, 4)[:num_emitted], num_accepted))


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


@pytest.mark.parametrize(
    ("text_end", "stop_ids", "room", "expected"),
    [
        (1, (), 9, Acceptance(1, 1, (10,), STOP)),
        (2, (), 9, Acceptance(2, 2, (10, 11), STOP)),
        (3, (), 9, Acceptance(4, 2, (10, 11, 12), STOP)),  # the correction completes it
        (2, (), 2, Acceptance(2, 2, (10, 11), STOP)),  # in the last place: a stop
        (3, (), 2, Acceptance(2, 2, (10, 11), LENGTH)),  # past the room: not seen
        (3, (11,), 9, Acceptance(2, 2, (10, 11), STOP)),
        (1, (11,), 9, Acceptance(1, 1, (10,), STOP)),
    ],
)
def test_a_stop_string_ends_the_output_at_the_id_that_completes_it(
    text_end: int, stop_ids: tuple[int, ...], room: int, expected: Acceptance
) -> None:
    """Whichever comes first of it, a stop id and the end of the room."""
    assert stop(Acceptance(4, 2, (10, 11, 12)), stop_ids, room, text_end) == expected


@given(
    draft=st.lists(st.integers(0, 3), max_size=6),
    decided=st.lists(st.integers(0, 3), min_size=7, max_size=7),
    stop_ids=st.sets(st.integers(0, 3), max_size=2),
    room=st.integers(1, 9),
    text_end=st.none() | st.integers(1, 7),
)
def test_a_step_equals_deciding_one_id_at_a_time(
    draft: list[int], decided: list[int], stop_ids: set[int], room: int, text_end: int | None
) -> None:
    """The slow reference walks the ids singly and knows nothing of blocks."""
    emitted: list[int] = []
    num_verified = num_accepted = 0
    finish = None
    for i in range(len(draft) + 1):
        emitted.append(decided[i])
        agrees = i < len(draft) and draft[i] == decided[i]
        num_accepted += agrees
        stops = decided[i] in stop_ids or len(emitted) == text_end
        finish = STOP if stops else LENGTH if len(emitted) == room else None
        if finish or not agrees:
            # A block whose correction or bonus was emitted was checked whole.
            num_verified = num_accepted if agrees else len(draft)
            break
    outcome = stop(accept(draft, Decision(tuple(decided[: len(draft) + 1]))), stop_ids, room, text_end)
    assert outcome == Acceptance(num_verified, num_accepted, tuple(emitted), finish)

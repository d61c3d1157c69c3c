"""What was shown, what stands, and what is taken back: ids, text and who stands behind them always agree."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from baru_common.frames import TokenLogprobs
from baru_common.tokens import TextStream, Vocabulary
from baru_micro.events import Confirmed, Event, Finish, Kind, Provenance, Retracted, Span, Step, StepStats
from baru_micro.transcript import Transcript
from support.sampling import context

_STATS = StepStats(0, 0, None)
_BYTES = Vocabulary(tuple(bytes([i]) for i in range(256)), frozenset())
WHO = Provenance


def transcript(**params: Any) -> Transcript:
    return Transcript(context(2, vocabulary=_BYTES, **params))


def decided(found: Transcript, *ids: int) -> list[Event]:
    return found.decided(ids, [Kind.PLAIN] * len(ids), [None] * len(ids), _STATS)


def reading(shown: str, events: Sequence[Event]) -> str:
    """What a caller has on the screen after these events."""
    for event in events:
        if isinstance(event, Step):
            shown += event.text
        elif isinstance(event, Retracted):
            assert shown.endswith(event.text)
            shown = shown[: len(shown) - len(event.text)]
    return shown


def test_what_the_target_says_alike_is_confirmed() -> None:
    found = transcript()
    decided(found, 65)
    for token in (66, 67, 68):
        assert found.decoded(token).provenance is WHO.PROVISIONAL
    assert decided(found, 66, 67) == [Confirmed(1, 3)]
    assert (found.settled, found.provisional) == ([65, 66, 67], [68])
    assert found.spans() == (Span(0, 3, WHO.VERIFIED), Span(3, 4, WHO.PROVISIONAL))
    assert found.text == "ABCD"


def test_what_it_says_otherwise_is_taken_back() -> None:
    found = transcript()
    for token in (65, 66, 67):
        found.decoded(token)
    confirmed, retracted, step = decided(found, 65, 90, 91)
    assert confirmed == Confirmed(0, 1)
    assert retracted == Retracted(1, (66, 67), "BC")
    assert isinstance(step, Step)
    assert (step.base, step.ids, step.text) == (2 + 1, (90, 91), "Z[")
    assert found.spans() == (Span(0, 3, WHO.VERIFIED),)


def test_log_probabilities_come_with_what_was_confirmed() -> None:
    found, logprobs = transcript(logprobs=0), TokenLogprobs(-1.0)
    found.decoded(65)
    assert found.logprobs == [None]
    confirmed, _ = found.decided([65, 66], [Kind.ACCEPTED, Kind.BONUS], [logprobs, TokenLogprobs(-2.0)], _STATS)
    assert confirmed == Confirmed(0, 1, (logprobs,))
    assert found.logprobs == [logprobs, TokenLogprobs(-2.0)]


def test_what_is_kept_stays_marked() -> None:
    found = transcript()
    decided(found, 65)
    found.decoded(66)
    found.keep()
    assert decided(found, 67)[0] != Confirmed(1, 2)
    assert found.ids == found.settled == [65, 66, 67]
    assert found.spans() == (Span(0, 1, WHO.VERIFIED), Span(1, 2, WHO.PROVISIONAL), Span(2, 3, WHO.VERIFIED))
    assert found.withdraw() == []


def test_a_character_across_the_switch_is_never_shown_broken() -> None:
    """Half of it from the hub, half of it from here, and the other way round; taken back in the middle, too."""
    first, second, other = "é".encode()[0], "é".encode()[1], "è".encode()[1]
    found = transcript()
    shown = reading("", decided(found, first))
    assert shown == ""
    shown = reading(shown, [found.decoded(second)])
    assert shown == "é"
    shown = reading(shown, [found.decoded(first)])
    assert shown == "é"
    shown = reading(shown, decided(found, other))
    assert shown == found.text == "è"
    shown = reading(shown, [found.decoded(first)])
    shown = reading(shown, decided(found, first, second))
    assert shown == found.text == "èé"


def test_a_stop_string_across_the_switch_is_held_back() -> None:
    found = transcript(stop_strings=("END",))
    shown = reading("", decided(found, *b"xE"))
    shown = reading(shown, [found.decoded(token) for token in b"ND"])
    assert (shown, found.stopped_by) == ("x", "END")
    shown = reading(shown, decided(found, *b"Nx"))
    assert (shown, found.stopped_by) == ("xENx", None)


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[str, list[int]]]:
    ids = st.sampled_from(list("aé€😀E N".encode()))
    kinds = st.sampled_from(["decoded", "decided", "keep", "withdraw"])
    return draw(st.lists(st.tuples(kinds, st.lists(ids, min_size=1, max_size=5)), max_size=12))


@given(histories())
def test_what_is_shown_is_the_text_of_the_ids(history: list[tuple[str, list[int]]]) -> None:
    """After whatever happened: as if only the ids that are left had come, one by one."""
    found, shown = transcript(stop_strings=("EN",), ignore_eos=True), ""
    for kind, ids in history:
        if kind == "decoded":
            events: list[Event] = [found.decoded(token) for token in ids]
        elif kind == "decided":
            before = found.num_settled
            events = decided(found, *ids)
            assert found.ids[before : before + len(ids)] == ids
        elif kind == "keep":
            found.keep()
            events = []
        else:
            events = found.withdraw()
        shown = reading(shown, events)
        stream = TextStream(_BYTES, ("EN",))
        assert shown == found.text == "".join(map(stream.push, found.ids))
        assert found.settled + found.provisional == found.ids
        spans = found.spans()
        assert [i for span in spans for i in range(span.start, span.end)] == list(range(len(found.ids)))
        assert all(a.provenance is not b.provenance for a, b in pairwise(spans))
        assert not any(isinstance(event, Finish) for event in events)

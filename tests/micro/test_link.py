"""The state of the way to a hub: by what happened and what time it is, and nothing else."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baru_micro.link import TRANSITIONS, Link, LinkEvent, LinkState, Timers, after

S, E = LinkState, LinkEvent


@dataclass
class Clock:
    now_s: float = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_every_state_can_be_reached_and_left() -> None:
    reached, todo = {S.CONNECTING}, [S.CONNECTING]
    while todo:
        state = todo.pop()
        found = {after(state, event) for event in E} - reached
        reached |= found
        todo += found
    assert reached == set(S)
    assert {before for before, _ in TRANSITIONS} == set(S)
    assert all(after(before, event) is not before for before, event in TRANSITIONS)


@given(st.lists(st.sampled_from(list(E))))
def test_what_is_heard_last_decides(events: list[LinkEvent]) -> None:
    """After a break it is down, whatever was; after a frame it is up, unless the hub goes down."""
    state = S.CONNECTING
    for event in events:
        state = after(state, event)
    assert after(state, E.BROKE) is S.DOWN
    assert after(state, E.SILENT) is S.DOWN
    assert after(state, E.HEARD) is (S.DRAINING if state is S.DRAINING else S.UP)
    assert (after(state, E.DRAIN) is S.DRAINING) is (state in (S.UP, S.SUSPECT, S.DRAINING))
    assert (after(state, E.QUIET) is state) is (state is not S.UP)


@pytest.mark.parametrize(
    ("silence_s", "state"), [(0.0, S.UP), (0.49, S.UP), (0.5, S.SUSPECT), (0.99, S.SUSPECT), (1.0, S.DOWN), (9, S.DOWN)]
)
def test_silence_counts_while_something_is_expected(silence_s: float, state: LinkState) -> None:
    clock = Clock()
    link = Link(Timers(), clock)
    link.happen(E.HEARD)
    clock.now_s += silence_s
    assert link.state is S.UP  # nobody looked
    link.tick()
    assert link.state is state


def test_a_frame_ends_the_silence() -> None:
    clock = Clock()
    seen: list[LinkState] = []
    link = Link(Timers(suspect_s=0.5, down_s=1.0), clock, on_change=seen.append)
    for _ in range(10):
        clock.now_s += 0.6
        link.tick()
        link.happen(E.HEARD)
    assert seen == [S.UP, *[S.SUSPECT, S.UP] * 9]
    since_s = link.since_s
    clock.now_s += 0.1
    link.happen(E.HEARD)
    assert link.since_s == since_s  # it was up before


def test_an_attempt_has_its_time() -> None:
    """However long the link was down, an attempt is no silence yet."""
    clock = Clock()
    link = Link(Timers(), clock)
    link.happen(E.BROKE)
    clock.now_s += 100
    link.happen(E.ATTEMPT)
    states = []
    for _ in range(3):
        link.tick()
        states.append(link.state)
        clock.now_s += 0.6
    assert states == [S.CONNECTING, S.CONNECTING, S.DOWN]


def test_the_diagram_in_the_docs_is_the_table() -> None:
    """Each arrow is a transition, and each transition an arrow."""
    text = (Path(__file__).parents[2] / "docs" / "link.md").read_text()
    drawn = {
        (S(before), E(event.strip()), S(behind))
        for before, behind, events in re.findall(r"^ +(\w+) --> (\w+) ?: ?(.+)$", text, re.MULTILINE)
        for event in events.split(",")
    }
    assert drawn == {(before, event, behind) for (before, event), behind in TRANSITIONS.items()}


def test_timers_are_in_order() -> None:
    timers = Timers()
    times = [timers.heartbeat_s, timers.suspect_s, timers.down_s]
    assert all(a * 2 <= b for a, b in itertools.pairwise(times))

"""What a person and a pipe see of a generation whose hub goes away for a while."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import replace

import pytest
from rich.console import Console

from baru_common.frames import FinishReason, Usage
from baru_micro import (
    Confirmed,
    Event,
    Finish,
    Kind,
    LinkChanged,
    LinkState,
    Piece,
    Provenance,
    Retracted,
    Span,
    Step,
    StepStats,
)
from baru_micro.reader import Reader, summary

_FINISH = Finish(
    FinishReason.STOP, "", (1, 2), (Span(0, 2, Provenance.VERIFIED),), Usage(1, 2, 1, 0, 0, 0, 0, 0, 0), 1.0, 0.1, None
)


def step(text: str, *, own: bool = False) -> Step:
    who, kind = (Provenance.PROVISIONAL, Kind.LOCAL) if own else (Provenance.VERIFIED, Kind.PLAIN)
    return Step(0, tuple(Piece(5, letter, kind) for letter in text), who, StepStats(0, 0, None))


def shown(events: Sequence[Event], *, keeps: bool = False, terminal: bool = False) -> tuple[str, str]:
    out, err = io.StringIO(), io.StringIO()
    consoles = [Console(file=file, force_terminal=terminal, soft_wrap=True, no_color=True) for file in (out, err)]
    reader = Reader(keeps=keeps, out=consoles[0], err=consoles[1])
    for event in events:
        reader.take(event)
    return out.getvalue(), err.getvalue()


_OUTAGE: list[Event] = [
    step("ab"),
    LinkChanged(LinkState.DOWN, "hub", "gone \x1b[2J"),
    step("cXY", own=True),
    LinkChanged(LinkState.UP, "hub"),
    Confirmed(2, 3),
    Retracted(3, (5, 5), "XY"),
    step("de"),
]


def test_into_a_pipe_goes_what_stands() -> None:
    out, err = shown([*_OUTAGE, replace(_FINISH, tail="!")])
    assert out == "abcde!\n"
    assert "gone" in err
    assert "back" in err
    assert "\x1b" not in err


def test_what_nobody_checked_is_written_at_the_end() -> None:
    alone = replace(_FINISH, spans=(Span(0, 2, Provenance.VERIFIED), Span(2, 5, Provenance.PROVISIONAL)))
    out, err = shown([*_OUTAGE[:3], alone])
    assert out == "abcXY\n"
    assert "3 provisional, not verified" in err


def test_what_is_kept_is_written_at_once() -> None:
    out, _ = shown([step("ab"), step("cd", own=True)], keeps=True)
    assert out == "abcd"


def test_a_terminal_shows_all_and_says_what_is_withdrawn() -> None:
    out, _ = shown(_OUTAGE, terminal=True)
    out = re.sub(r"\x1b\[[0-9;]*m", "", out)
    assert out.index("ab") < out.index("cXY") < out.index("withdrawn: XY") < out.index("de")


@pytest.mark.parametrize("own", [0, 2])
def test_the_summary_says_who_stands_behind_it(own: int) -> None:
    spans = (Span(0, 2, Provenance.PROVISIONAL if own else Provenance.VERIFIED),)
    _, err = shown([replace(_FINISH, spans=spans)])
    assert ("all verified" in err) is (own == 0)
    assert summary(replace(_FINISH, spans=spans))["provenance"][0]["end"] == 2

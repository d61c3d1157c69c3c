"""Whatever is put into cells comes out again, and nothing of it shows in their size or time."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baru_common.cells import CellReader, CellWriter
from baru_common.errors import ConfigError, InvalidRequest
from baru_common.frames import TrafficShape
from baru_common.shaping import check_shape, last_tick, ticks

LIMIT = 4096


def reader(cell_bytes: int = 64) -> CellReader:
    return CellReader(cell_bytes, LIMIT, InvalidRequest)


@settings(max_examples=40, deadline=None)
@given(
    batches=st.lists(st.lists(st.binary(max_size=300), max_size=4), max_size=12),
    cell_bytes=st.integers(64, 600),
    last=st.binary(max_size=40),
)
def test_messages_survive_in_order(batches: Sequence[Sequence[bytes]], cell_bytes: int, last: bytes) -> None:
    """However they are cut, and whenever they are put in; every cell is of one size."""
    writer, taken = CellWriter(cell_bytes), reader(cell_bytes)
    found: list[bytes] = []

    def tick() -> None:
        cell = writer.next_cell()
        assert len(cell) == cell_bytes
        found.extend(taken.take(cell))

    for batch in batches:
        for message in batch:
            writer.put(message)
        tick()
    writer.end(last)
    for _ in range(writer.num_cells):
        assert taken.last_word is None
        tick()
    assert not writer.num_queued
    assert found == [message for batch in batches for message in batch]
    assert taken.last_word == last


def cell(stream: bytes, size: int | None = None, num_bytes: int = 64) -> bytes:
    return (struct.pack(">H", len(stream) if size is None else size) + stream).ljust(num_bytes, b"\0")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        pytest.param(cell(b"", num_bytes=63), "has 63 bytes", id="short"),
        pytest.param(cell(b"", num_bytes=65), "has 65 bytes", id="long"),
        pytest.param(b"", "has 0 bytes", id="empty"),
        pytest.param(cell(b"", size=63), "holds 63 bytes", id="claims-too-much"),
        pytest.param(cell(b"abc", size=2), "holds 2 bytes", id="padding-is-not-zero"),
        pytest.param(cell(b"\x07" + bytes(4)), "kind 7", id="unknown-kind"),
        pytest.param(cell(b"\x00" + struct.pack(">I", LIMIT + 1)), "4097 bytes is announced", id="message-too-large"),
        pytest.param(cell(b"\x00" + b"\xff" * 4), "4294967295 bytes is announced", id="message-absurd"),
        pytest.param(cell(b"\x80" + bytes(4) + b"x"), "follows the last word", id="after-the-end"),
    ],
)
def test_a_wrong_cell_is_refused_at_once(wrong: bytes, words: str) -> None:
    """By what it claims, before anything of it is kept."""
    with pytest.raises(InvalidRequest, match=words):
        list(reader().take(wrong))


async def test_ticks_do_not_drift_and_are_never_made_up_for() -> None:
    """A tick is at its own time whatever the others took; whoever was away for three goes on with the fourth."""
    now, slept = [100.0], []

    async def sleep(wait_s: float) -> None:
        slept.append(wait_s)
        now[0] += wait_s + 0.001  # sleep is never exact

    seen = []
    async for tick in ticks(0.02, clock=lambda: now[0], sleep=sleep):
        seen.append((tick, round(now[0] - 100 - tick * 0.02, 6)))
        now[0] += 0.065 if tick == 2 else 0.005
        if tick == 8:
            break
    assert seen == [(0, 0.0), (1, 0.001), (2, 0.001), *((n, 0.001) for n in (6, 7, 8))]
    assert all(wait_s > 0 for wait_s in slept)


@pytest.mark.parametrize(("tick", "last"), [(0, 50), (1, 50), (50, 50), (51, 100), (101, 200), (399, 400), (401, 800)])
def test_a_stream_lasts_a_round_or_a_power_of_two_of_them(tick: int, last: int) -> None:
    """The first such end that is not past."""
    assert last_tick(TrafficShape(tick_ms=20, round_ms=1000), tick) == last


@pytest.mark.parametrize("shape", [TrafficShape(cell_bytes=63), TrafficShape(tick_ms=0), TrafficShape(round_ms=99)])
def test_a_shape_out_of_range_is_refused(shape: TrafficShape) -> None:
    """By name."""
    with pytest.raises(ConfigError, match=r"of the traffic shape is .*, must be"):
        check_shape(shape, ConfigError)

"""The layout of a pass: every id at its place, every row with all the keys that it needs, and no more company."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baru_hub.ragged_batch import BUCKET, MAX_SEGMENT_ROWS, RaggedBatch, SequenceFeed, lay_out
from baru_hub.session import Block

_NUM_PAGES = 64
"""Per sequence; the spare page comes after all."""


@st.composite
def feeds_strategy(draw: st.DrawFn, page_size: int) -> list[SequenceFeed]:
    feeds = []
    num_pages = 1600 // page_size
    for i in range(draw(st.integers(1, 4))):
        num_cached = draw(st.one_of(st.integers(0, 40), st.integers(200, 300), st.integers(400, 900)))
        num_pending = draw(st.one_of(st.just(1), st.integers(1, 20), st.integers(100, 400)))
        decides = draw(st.booleans())
        num_draft = draw(st.integers(0, 16)) if decides else 0
        first = 10_000 * (i + 1)
        ids = range(first, first + num_pending + num_draft)
        pages = [1 + i * num_pages + (p * 7 + 3) % num_pages for p in range(num_pages)]
        held = -(-(num_cached + len(ids)) // page_size)
        block = Block(tuple(ids[:num_pending]), tuple(ids[num_pending:]), decides)
        feeds.append(SequenceFeed(pages[:held], num_cached, block))
    return feeds


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[SequenceFeed], int, int, RaggedBatch]:
    page_size = draw(st.sampled_from([16, 64, 256]))
    row_floor = draw(st.sampled_from([2, 8, 32]))
    feeds = draw(feeds_strategy(page_size))
    return feeds, page_size, row_floor, lay_out(feeds, page_size, row_floor, spare_page=9999)


Case = tuple[list[SequenceFeed], int, int, RaggedBatch]
_few = settings(max_examples=60, deadline=None)


def rows_of(feeds: list[SequenceFeed]) -> list[tuple[SequenceFeed, int, int]]:
    """(feed, position, id) of each row, by hand."""
    rows = []
    for feed in feeds:
        for i, token in enumerate((*feed.block.pending, *feed.block.draft)):
            rows.append((feed, feed.num_cached + i, token))
    return rows


@given(case=cases())
@_few
def test_every_id_is_fed_once_at_its_place(case: Case) -> None:
    """Ids in order; position and slot are the sequence's own."""
    feeds, page_size, _, batch = case
    rows = rows_of(feeds)
    assert batch.ids[: len(rows)] == [token for _, _, token in rows]
    assert batch.positions[: len(rows)] == [position for _, position, _ in rows]
    for slot, (feed, position, _) in zip(batch.slots, rows, strict=False):
        assert divmod(slot, page_size) == (feed.pages[position // page_size], position % page_size)
    assert len(set(batch.slots[: len(rows)])) == len(rows)


@given(case=cases())
@_few
def test_padding_touches_nobody(case: Case) -> None:
    """There are `row_floor` rows at least; those that fill it up write to the spare page."""
    feeds, page_size, row_floor, batch = case
    num_fed = len(rows_of(feeds))
    assert batch.num_rows == max(num_fed, row_floor)
    assert len(batch.positions) == len(batch.slots) == batch.num_rows
    assert {slot // page_size for slot in batch.slots[num_fed:]} <= {9999}
    assert all(segment.end <= num_fed for segment in batch.segments)


@given(case=cases())
@_few
def test_segments_cover_each_row_once_within_their_bounds(case: Case) -> None:
    """In order, without gap or overlap, one sequence and one bucket each, and never too many rows."""
    feeds, _, _, batch = case
    rows, end = rows_of(feeds), 0
    for segment in batch.segments:
        assert segment.start == end < segment.end
        end = segment.end
        assert end - segment.start <= MAX_SEGMENT_ROWS
        covered = rows[segment.start : segment.end]
        assert len({id(feed) for feed, _, _ in covered}) == 1
        assert [position for _, position, _ in covered] == list(
            range(segment.first_position, segment.first_position + len(covered))
        )
        assert len({position // BUCKET for _, position, _ in covered}) == 1
    assert end == len(rows)


@given(case=cases())
@_few
def test_a_segment_has_all_the_keys_of_its_bucket(case: Case) -> None:
    """Whole buckets: the sequence's own pages up to the row's bucket, the spare one where it has none yet."""
    feeds, page_size, _, batch = case
    rows = rows_of(feeds)
    for segment in batch.segments:
        feed, last, _ = rows[segment.end - 1]
        assert len(segment.pages) * page_size == (last // BUCKET + 1) * BUCKET
        own = list(feed.pages[: len(segment.pages)])
        assert list(segment.pages) == own + [9999] * (len(segment.pages) - len(own))
        assert segment.pages[last // page_size] == feed.pages[last // page_size]


@given(case=cases())
@_few
def test_the_deciding_rows_are_the_last_pending_one_and_the_drafts(case: Case) -> None:
    """And none of a piece of a prompt."""
    feeds, _, _, batch = case
    start = 0
    for feed, deciding in zip(feeds, batch.deciding, strict=True):
        fed = (*feed.block.pending, *feed.block.draft)
        ids = [batch.ids[row] for row in deciding]
        assert ids == ([feed.block.pending[-1], *feed.block.draft] if feed.block.decides else [])
        assert all(start <= row < start + len(fed) for row in deciding)
        start += len(fed)


@pytest.mark.parametrize(
    ("num_cached", "num_rows", "bounds"),
    [
        (0, 1, [(0, 1)]),
        (0, 128, [(0, 128)]),
        (0, 129, [(0, 128), (128, 129)]),
        (255, 2, [(0, 1), (1, 2)]),
        (250, 140, [(0, 6), (6, 134), (134, 140)]),
        (256, 256, [(0, 128), (128, 256)]),
    ],
)
def test_where_segments_are_cut(num_cached: int, num_rows: int, bounds: list[tuple[int, int]]) -> None:
    """At each bucket's end, and after the most rows of one call."""
    feed = SequenceFeed(range(40), num_cached, Block(tuple(range(num_rows))))
    batch = lay_out([feed], 64, 2, 40)
    assert [(s.start, s.end) for s in batch.segments] == bounds

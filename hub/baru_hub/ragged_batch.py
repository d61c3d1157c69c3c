"""One forward pass over any mix of sequences, laid out flat. Plain bookkeeping: no tensors.

    ids         [num_rows]      all feeds' ids, one after the other, then padding
    positions   [num_rows]      position of each id in its sequence
    slots       [num_rows]      where its keys and values go: page * page_size + offset in the page
    segments                    runs of rows that attend alike: one sequence, one bucket of keys
    deciding    per feed        the rows whose logits decide

A row's numbers must not depend on its company (FACTS of the numerics are in docs/decisions.md), so:
keys are padded to whole buckets, rows of different buckets get separate attention calls, and the flat
batch is padded to `row_floor` rows, from which on a linear layer computes each row alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .session import Block

BUCKET = 256
"""Keys of an attention call are a multiple of this; a row at position p attends in bucket p // BUCKET."""
MAX_SEGMENT_ROWS = 128
"""Most rows of one attention call; more make the kernel split its work in another way."""


@dataclass(frozen=True)
class SequenceFeed:
    """One sequence's part of a pass."""

    pages: Sequence[int]
    num_cached: int
    block: Block


@dataclass(frozen=True)
class Segment:
    """Rows [start, end) of the batch; row r attends to the keys at positions up to its own."""

    start: int
    end: int
    first_position: int
    pages: tuple[int, ...]
    """Pages that hold the keys, a whole bucket or more; the last may not be written yet."""


@dataclass(frozen=True)
class RaggedBatch:
    """A laid out pass; see the module."""

    ids: list[int]
    positions: list[int]
    slots: list[int]
    segments: list[Segment]
    deciding: list[range]

    @property
    def num_rows(self) -> int:
        return len(self.ids)


def lay_out(feeds: Sequence[SequenceFeed], page_size: int, row_floor: int, spare_page: int) -> RaggedBatch:
    """Return the pass that feeds every block.

    `spare_page` belongs to no sequence: padding rows write there, and it stands in for pages that a
    bucket reaches past the end of a sequence's own.
    """
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    segments: list[Segment] = []
    deciding: list[range] = []
    for feed in feeds:
        start = len(ids)
        fed = (*feed.block.pending, *feed.block.draft)
        ids.extend(fed)
        for position in range(feed.num_cached, feed.num_cached + len(fed)):
            positions.append(position)
            slots.append(feed.pages[position // page_size] * page_size + position % page_size)
        segments.extend(_segments(feed, start, len(fed), page_size, spare_page))
        num_deciding = len(feed.block.draft) + 1 if feed.block.decides else 0
        deciding.append(range(len(ids) - num_deciding, len(ids)))
    padding = max(0, row_floor - len(ids))
    ids.extend([0] * padding)
    positions.extend([0] * padding)
    slots.extend([spare_page * page_size] * padding)
    return RaggedBatch(ids, positions, slots, segments, deciding)


def _segments(feed: SequenceFeed, start: int, num_rows: int, page_size: int, spare_page: int) -> Iterator[Segment]:
    first, done = feed.num_cached, 0
    while done < num_rows:
        position = first + done
        bucket_end = (position // BUCKET + 1) * BUCKET
        rows = min(num_rows - done, bucket_end - position, MAX_SEGMENT_ROWS)
        num_pages = bucket_end // page_size
        own = tuple(feed.pages[:num_pages])
        pages = own + (spare_page,) * (num_pages - len(own))
        yield Segment(start + done, start + done + rows, position, pages)
        done += rows

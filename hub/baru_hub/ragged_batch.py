"""One forward pass over any mix of sequences, laid out flat. Plain bookkeeping: no tensors.

    ids         [num_rows]      all feeds' ids, one after the other, then padding
    positions   [num_rows]      position of each id in its sequence
    slots       [num_rows]      where its keys and values go: page * page_size + offset in the page
    segments                    runs of rows that attend alike: one sequence, one path, one bucket of keys
    deciding    per feed        the rows whose logits decide: of the last pending id, then of each draft id

A row's numbers must not depend on its company (FACTS of the numerics are in docs/decisions.md), so:
keys are padded to whole buckets, rows of different buckets get separate attention calls, and the flat
batch is padded to `row_floor` rows, from which on a linear layer computes each row alike.

A draft that is a tree is fed path by path. The first path's ids go to their own positions' slots, as a chain's do;
those beside it to scratch slots, for two ids may guess at one position. Each run of a path attends to the keys of its
own ancestors, in the order of positions: so a row is computed as it would be in a chain, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .session import Block

BUCKET = 256
"""Keys of an attention call are a multiple of this; a row at position p attends in bucket p // BUCKET."""
SCRATCH_SLOTS = 1024
"""Room for ids beside the first paths of a pass's trees."""
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
    moved: tuple[tuple[int, int], ...] = ()
    """(position, slot) of keys that are not in their page."""


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

    def whole_segments(self, sizes: Sequence[int]) -> list[Segment]:
        """Return one segment for each feed, of `sizes` rows, over all the keys that its last row has: for rows that
        see each other whole, and need not be computed alike in any company."""
        whole, start = [], 0
        for size in sizes:
            parts = [s for s in self.segments if start <= s.start < start + size]
            whole.append(Segment(start, start + size, parts[0].first_position, parts[-1].pages))
            start += size
        return whole


@dataclass
class _Scratch:
    """Slots for ids beside a first path, handed out from the start anew for each pass."""

    next_slot: int

    def take(self) -> int:
        self.next_slot += 1
        return self.next_slot - 1


def lay_out(feeds: Sequence[SequenceFeed], page_size: int, row_floor: int, spare_page: int) -> RaggedBatch:
    """Return the pass that feeds every block.

    `spare_page` belongs to no sequence: padding rows write there, and it stands in for pages that a
    bucket reaches past the end of a sequence's own. Scratch slots are those of the pages after it.
    """
    batch = RaggedBatch([], [], [], [], [])
    scratch = _Scratch((spare_page + 1) * page_size)
    for feed in feeds:
        _add(feed, batch, scratch, page_size, spare_page)
    padding = max(0, row_floor - batch.num_rows)
    batch.ids.extend([0] * padding)
    batch.positions.extend([0] * padding)
    batch.slots.extend([spare_page * page_size] * padding)
    return batch


def _add(feed: SequenceFeed, batch: RaggedBatch, scratch: _Scratch, page_size: int, spare_page: int) -> None:
    """Append one feed's rows: what is pending and the first path, then the other runs of the tree."""
    block, start = feed.block, batch.num_rows
    tree = block.tree
    first_draft = feed.num_cached + len(block.pending)  # position
    runs = tree.runs()
    num_first = len(block.pending) + (len(runs[0]) if runs else 0)
    batch.ids.extend((*block.pending, *tree.ids))
    batch.positions.extend(range(feed.num_cached, first_draft))
    batch.positions.extend(first_draft + depth for depth in tree.depths)
    home = range(feed.num_cached, feed.num_cached + num_first)
    batch.slots.extend(feed.pages[at // page_size] * page_size + at % page_size for at in home)
    batch.slots.extend(scratch.take() for _ in range(len(block.pending) + len(tree) - num_first))
    batch.segments.extend(_segments(feed, start, feed.num_cached, num_first, (), page_size, spare_page))
    rows = start + len(block.pending)
    for run in runs[1:]:
        ancestors = tree.ancestors(run[-1])
        moved = tuple(
            (batch.positions[rows + node], batch.slots[rows + node]) for node in ancestors if node >= runs[0].stop
        )
        first = first_draft + tree.depths[run.start]
        batch.segments.extend(_segments(feed, rows + run.start, first, len(run), moved, page_size, spare_page))
    num_deciding = len(tree) + 1 if block.decides else 0
    batch.deciding.append(range(batch.num_rows - num_deciding, batch.num_rows))


def _segments(
    feed: SequenceFeed,
    start: int,
    first: int,
    num_rows: int,
    moved: tuple[tuple[int, int], ...],
    page_size: int,
    spare_page: int,
) -> Iterator[Segment]:
    """Split rows at positions from `first` on at bucket ends, and where they are too many for one call."""
    done = 0
    while done < num_rows:
        position = first + done
        bucket_end = (position // BUCKET + 1) * BUCKET
        rows = min(num_rows - done, bucket_end - position, MAX_SEGMENT_ROWS)
        num_pages = bucket_end // page_size
        own = tuple(feed.pages[:num_pages])
        pages = own + (spare_page,) * (num_pages - len(own))
        here = tuple((at, slot) for at, slot in moved if at < position + rows)
        yield Segment(start + done, start + done + rows, position, pages, here)
        done += rows

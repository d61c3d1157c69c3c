"""An index over texts that do not change: what followed the last ids wherever they occur.

A suffix array over ends: `_ends` holds the index after every id, sorted by the text before it read backwards. All
places where the last m ids of a context occur are then neighbours, for every m at once. 8 bytes an id.

Manber & Myers, "Suffix arrays" (1990); sorted by prefix doubling.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence

SEPARATOR = 0xFFFFFFFF
"""Stands between texts; no id, so nothing matches across it or goes on past it."""
_LONGEST = 64
"""Ends that agree on so many ids are left in text order."""


class SuffixIndex:
    """Texts as ids. Never changes, so any number of sessions and threads may look things up."""

    def __init__(self, texts: Iterable[Sequence[int]] = ()) -> None:
        self._ids = array("I", [SEPARATOR])
        for text in texts:
            self._ids.extend(text)
            self._ids.append(SEPARATOR)
        self._ends = array("I", _sorted_ends(self._ids))

    @property
    def num_ids(self) -> int:
        """Ids of all texts."""
        return sum(token != SEPARATOR for token in self._ids)

    @property
    def num_bytes(self) -> int:
        """Memory of the index."""
        return sum(len(part) * part.itemsize for part in (self._ids, self._ends))

    def find(
        self, context: Sequence[int], longest: int, most_places: int, most_ids: int
    ) -> tuple[int, list[Sequence[int]]]:
        """Return how many of the last ids of `context` occur somewhere, at most `longest`, and the up to `most_ids`
        ids that followed there: at `most_places` places, evenly over all of them; (0, []) when not even the last
        one does."""
        backwards = array("I", context[: -longest - 1 : -1])
        if not backwards or not self._ends:
            return 0, []
        place = bisect_left(self._ends, backwards, key=self._before(len(backwards)))
        neighbours = self._ends[max(place - 1, 0) : place + 1]
        length = max(self._agreement(end, backwards) for end in neighbours)
        if length == 0:
            return 0, []
        wanted, before = backwards[:length], self._before(length)
        first = bisect_left(self._ends, wanted, hi=place, key=before)
        last = bisect_right(self._ends, wanted, lo=place, key=before)
        step = -(-(last - first) // most_places)
        return length, [self._ids[end : end + most_ids] for end in self._ends[first:last:step]]

    def _before(self, length: int) -> Callable[[int], array[int]]:
        """Return what reads the `length` ids before an end, backwards."""
        ids = self._ids
        return lambda end: ids[end - 1 : end - 1 - length if end > length else None : -1]

    def _agreement(self, end: int, backwards: Sequence[int]) -> int:
        ids = self._ids
        length = 0
        while length < len(backwards) and ids[end - 1 - length] == backwards[length]:
            length += 1
        return length


def _sorted_ends(ids: Sequence[int]) -> list[int]:
    """Sort the ends after ids other than SEPARATOR by the text before them, backwards, up to `_LONGEST` ids."""
    num = len(ids) + 1
    ranks = [0, *(token + 1 for token in ids)]  # by end; 0: before the first id
    order = sorted(range(num), key=ranks.__getitem__)
    reach = 1
    while reach < _LONGEST:
        ranks = _ranked(order, ranks)
        wide = [rank * num + ranks[max(end - reach, 0)] for end, rank in enumerate(ranks)]
        order.sort(key=wide.__getitem__)
        ranks = wide
        reach *= 2
    return [end for end in order if end and ids[end - 1] != SEPARATOR]


def _ranked(order: Sequence[int], keys: Sequence[int]) -> list[int]:
    """Replace keys by their places among the different ones."""
    ranks, rank, before = [0] * len(keys), -1, None
    for end in order:
        if keys[end] != before:
            rank, before = rank + 1, keys[end]
        ranks[end] = rank
    return ranks

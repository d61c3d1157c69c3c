"""An index over texts that do not change: what followed the last ids wherever they occur.

A suffix array over ends: `_ends` holds the index after every id, sorted by the text before it read backwards. All
places where the last m ids of a context occur are then neighbours, for every m at once. 8 bytes an id.

Manber & Myers, "Suffix arrays" (1990).
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence

SEPARATOR = 0xFFFFFFFF
"""Stands between texts; no id, so nothing matches across it or goes on past it."""
_LONGEST = 64
"""Ends that agree on so many ids are left in text order, and none are looked up."""
_FEW = 512
"""Ends that are sorted at once."""


class SuffixIndex:
    """Texts as ids. Never changes, so any number of sessions and threads may look things up."""

    def __init__(self, texts: Iterable[Sequence[int]] = ()) -> None:
        self._ids = array("I", [SEPARATOR])
        for text in texts:
            self._ids.extend(text)
            self._ids.append(SEPARATOR)
        self._ends = _sorted_ends(self._ids)

    @property
    def num_ids(self) -> int:
        """Ids of all texts."""
        return len(self._ends)

    @property
    def num_bytes(self) -> int:
        """Memory of the index."""
        return sum(len(part) * part.itemsize for part in (self._ids, self._ends))

    def find(
        self, context: Sequence[int], longest: int, most_places: int, most_ids: int
    ) -> tuple[int, list[Sequence[int]]]:
        """Return how many of the last ids of `context` occur somewhere, at most `longest`, and the up to `most_ids`
        ids that followed there, SEPARATOR where the text ends: at up to `most_places` places, evenly over all of them;
        (0, []) when not even the last one does."""
        backwards = array("I", context[max(len(context) - min(longest, _LONGEST), 0) :][::-1])
        if not backwards or not self._ends:
            return 0, []
        place = bisect_left(self._ends, backwards, key=_before(self._ids, 0, len(backwards)))
        length = max(self._agreement(end, backwards) for end in self._ends[max(place - 1, 0) : place + 1])
        if length == 0:
            return 0, []
        wanted, before = backwards[:length], _before(self._ids, 0, length)
        first = bisect_left(self._ends, wanted, hi=place, key=before)
        last = bisect_right(self._ends, wanted, lo=place, key=before)
        step = -(-(last - first) // most_places)
        return length, [self._ids[end : end + most_ids] for end in self._ends[first:last:step]]

    def _agreement(self, end: int, backwards: Sequence[int]) -> int:
        ids = self._ids
        length = 0
        while length < len(backwards) and ids[end - 1 - length] == backwards[length]:
            length += 1
        return length


def _sorted_ends(ids: array[int]) -> array[int]:
    """Sort the ends after ids other than SEPARATOR by the text before them, backwards, up to `_LONGEST` ids.

    Large groups are split by one id more, small ones sorted at once: that needs little memory besides the result, and
    no single call that would keep other threads waiting.
    """
    done = array("I")
    todo = [(0, array("I", (end for end in range(1, len(ids) + 1) if ids[end - 1] != SEPARATOR)))]
    while todo:
        depth, ends = todo.pop()
        if depth == _LONGEST:
            done.extend(ends)
        elif len(ends) <= _FEW:
            done.extend(sorted(ends, key=_before(ids, depth, _LONGEST)))
        else:
            groups: dict[int, array[int]] = {}
            for end in ends:
                token = ids[end - 1 - depth] if end > depth else -1
                groups.setdefault(token, array("I")).append(end)
            todo += [(depth + 1, groups[token]) for token in sorted(groups, reverse=True)]
    return done


def _before(ids: array[int], first: int, last: int) -> Callable[[int], array[int]]:
    """Return what reads ids before an end, backwards: the ones from `first` to `last`, as far as there are any."""
    return lambda end: ids[end - last if end > last else 0 : end - first if end > first else 0][::-1]

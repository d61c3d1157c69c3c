"""What is found equals a plain search through all texts, in memory that is known beforehand."""

from __future__ import annotations

import random
import sys
import tracemalloc
from collections.abc import Sequence
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baru_common.drafters import suffix_index
from baru_common.drafters.suffix_index import SEPARATOR, SuffixIndex

_TEXTS = st.lists(st.lists(st.integers(0, 2), max_size=30), max_size=4)
_ALL = 10**6


def followed(texts: Sequence[Sequence[int]], run: Sequence[int], most_ids: int) -> list[list[int]]:
    """What stands after each occurrence of `run`, up to the end of its text; in no particular order."""
    ends = [(t, e) for t in texts for e in range(len(run), len(t) + 1) if list(t[e - len(run) : e]) == list(run)]
    return sorted(list(text[end : end + most_ids]) for text, end in ends)


def reference(
    texts: Sequence[Sequence[int]], context: Sequence[int], longest: int, most_ids: int
) -> tuple[int, list[list[int]]]:
    """The longest end of `context` that occurs at all, and what follows wherever it does."""
    for length in range(min(longest, len(context)), 0, -1):
        if places := followed(texts, context[-length:], most_ids):
            return length, places
    return 0, []


def within(place: Sequence[int]) -> list[int]:
    """What `find` returned of one place, up to the end of its text."""
    ids = list(place)
    return ids[: ids.index(SEPARATOR)] if SEPARATOR in ids else ids


@given(
    texts=_TEXTS,
    context=st.lists(st.integers(0, 3), max_size=8),
    longest=st.integers(0, 9),
    most_ids=st.integers(0, 4),
    few=st.sampled_from((0, 1, 4, 512)),
)
def test_all_places_of_the_longest_match_are_found(
    texts: list[list[int]], context: list[int], longest: int, most_ids: int, few: int
) -> None:
    """However many ends are sorted at once."""
    with patch.object(suffix_index, "_FEW", few):
        index = SuffixIndex(texts)
    length, places = index.find(context, longest, _ALL, most_ids)
    assert (length, sorted(map(within, places))) == reference(texts, context, longest, most_ids)


@given(texts=_TEXTS, context=st.lists(st.integers(0, 2), min_size=1, max_size=4), most_places=st.integers(1, 5))
def test_of_many_places_some_are_taken_from_all_over(
    texts: list[list[int]], context: list[int], most_places: int
) -> None:
    """Every n-th of them, with the least n that gives no more than asked for."""
    index = SuffixIndex(texts)
    length, places = index.find(context, 4, most_places, 3)
    same, everywhere = index.find(context, 4, _ALL, 3)
    step = -(-len(everywhere) // most_places)
    assert length == same
    assert len(places) <= most_places
    assert places == everywhere[:: max(step, 1)]


def test_a_match_does_not_reach_over_the_end_of_a_text() -> None:
    index = SuffixIndex([[1, 2, 3], [4, 5]])
    length, (place,) = index.find([3, 4], 8, 8, 8)
    assert (length, within(place)) == (1, [5])
    assert index.find([2, 3], 8, 8, 8)[0] == 2


def test_what_follows_ends_with_the_text() -> None:
    _, (place,) = SuffixIndex([[1, 2, 3], [4, 5]]).find([1, 2], 8, 8, 8)
    assert list(place)[:2] == [3, SEPARATOR]


@pytest.mark.parametrize("texts", [[], [[]], [[], []]])
def test_without_ids_nothing_is_found(texts: list[list[int]]) -> None:
    index = SuffixIndex(texts)
    assert (index.num_ids, index.find([1, 2], 8, 8, 8)) == (0, (0, []))


def test_nothing_follows_an_empty_context() -> None:
    assert SuffixIndex([[1, 2]]).find([], 8, 8, 8) == (0, [])


@pytest.mark.parametrize("longest", [63, 64, 65, 200])
def test_runs_longer_than_those_that_are_sorted_are_found_as_far_as_they_are(longest: int) -> None:
    """A thousand times the same id between two others: each place is one of the longest match that is looked for."""
    index = SuffixIndex([[0] + [7] * 1000 + [8]])
    length, places = index.find([7] * 300, longest, _ALL, 1)
    assert length == min(longest, 64)
    assert sorted(place[0] for place in places) == [7] * (1000 - length) + [8]


def many_texts(num_texts: int, num_ids: int) -> list[list[int]]:
    """Texts as they come: most ids are few, some runs repeat."""
    generator = random.Random(5)
    runs = [[min(int(generator.paretovariate(0.7)), 48_000) for _ in range(20)] for _ in range(300)]
    return [[token for _ in range(num_ids // 20) for token in generator.choice(runs)] for _ in range(num_texts)]


def test_an_id_costs_8_bytes() -> None:
    """`num_bytes` says what is held: two 4-byte words an id, one a text, one more."""
    index = SuffixIndex(many_texts(50, 400))
    assert index.num_ids == 20_000
    assert index.num_bytes == 8 * index.num_ids + 4 * 51
    held = sum(sys.getsizeof(part) for part in vars(index).values())
    assert index.num_bytes <= held < 1.25 * index.num_bytes


def test_building_takes_little_more_than_the_index_itself() -> None:
    """At most 40 bytes an id at any time, whether the texts vary or are all the same."""
    for texts in (many_texts(25, 400), [[3, 4] * 200] * 25):
        tracemalloc.start()
        try:
            SuffixIndex(texts)
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak_bytes < 40 * 10_000


def test_a_lookup_reads_a_few_places_only() -> None:
    """40,000 ids: a binary search reads some dozens of runs, not all of them."""
    index = SuffixIndex(many_texts(100, 400))
    reads, plain = [0], suffix_index._before

    def counted(*arguments: object) -> object:
        read = plain(*arguments)  # type: ignore[arg-type]

        def before(end: int) -> object:
            reads[0] += 1
            return read(end)

        return before

    with patch.object(suffix_index, "_before", counted):
        assert index.find([1, 1, 2], 8, 8, 8)[0] > 0
    assert 0 < reads[0] < 100

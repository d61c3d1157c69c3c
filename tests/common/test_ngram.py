from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baru_common.drafters import NgramDrafter, load_drafter
from baru_common.errors import ConfigError


def reference(drafter: NgramDrafter, ids: Sequence[int], num_committed: int, max_tokens: int) -> list[int]:
    """Search from the longest run and from the end; the slow form of what `propose` does."""
    for n in range(min(drafter.longest, len(ids) - 1), drafter.shortest - 1, -1):
        for end in range(num_committed - 1, n - 1, -1):
            if ids[end - n : end] == ids[len(ids) - n :]:
                return list(ids[end : min(end + max_tokens, num_committed)])
    return []


def propose(ids: list[int], num_committed: int | None = None, max_tokens: int = 64, **options: Any) -> list[int]:
    return list(NgramDrafter(**options).start().propose(ids, num_committed or len(ids), max_tokens).ids)


def test_the_continuation_of_the_longest_match_is_proposed() -> None:
    """`2 3` occurred with `1` before it and, more recently, without: three ids that match win over two."""
    assert propose([1, 2, 3, 40, 9, 2, 3, 50, 1, 2, 3], max_tokens=1) == [40]


def test_the_most_recent_occurrence_wins() -> None:
    assert propose([7, 8, 1, 7, 8, 2, 7, 8], max_tokens=2) == [2, 7]


def test_a_shorter_match_serves_when_no_longer_one_is_there() -> None:
    assert propose([5, 6, 1, 2, 5], max_tokens=2) == [6, 1]


def test_a_run_shorter_than_the_shortest_is_no_match() -> None:
    assert propose([5, 6, 1, 2, 5], shortest=2) == []
    assert propose([4, 5, 6, 1, 4, 5], shortest=2) == [6, 1, 4, 5]


@pytest.mark.parametrize("ids", [[], [1], [1, 2, 3, 4]])
def test_nothing_is_proposed_where_nothing_repeats(ids: list[int]) -> None:
    assert NgramDrafter().start().propose(ids, len(ids), 64).ids == ()


def test_drafts_are_continued_from_committed_ids_only() -> None:
    """The draft tail is looked up, but what it holds is never proposed."""
    assert propose([1, 2, 3, 1], num_committed=3) == [2, 3]
    assert propose([1, 2, 3, 1, 2, 3], num_committed=3) == []


def test_no_more_than_asked_for() -> None:
    assert propose([1, 2, 3, 4, 1], max_tokens=2) == [2, 3]
    assert propose([1, 2, 3, 4, 1], max_tokens=0) == []


@given(st.data())
def test_an_index_that_grew_equals_one_built_from_scratch(data: st.DataObject) -> None:
    """Whatever was drafted and refused between calls, the answer is that of a new stream, and of a plain search."""
    shortest = data.draw(st.integers(1, 3))
    drafter = NgramDrafter(longest=data.draw(st.integers(shortest, 4)), shortest=shortest)
    committed = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=60))
    stream, num_committed = drafter.start(), 0
    while num_committed < len(committed):
        num_committed = data.draw(st.integers(num_committed + 1, len(committed)))
        drafts = data.draw(st.lists(st.integers(0, 3), max_size=5))
        max_tokens = data.draw(st.integers(0, 8))
        ids = committed[:num_committed] + drafts
        expected = reference(drafter, ids, num_committed, max_tokens)
        assert list(stream.propose(ids, num_committed, max_tokens).ids) == expected
        assert list(drafter.start().propose(ids, num_committed, max_tokens).ids) == expected


class Counted(Sequence[int]):
    """Ids that count how many of them are read."""

    def __init__(self, ids: list[int]) -> None:
        self.ids = ids
        self.num_read = 0

    def __len__(self) -> int:
        return len(self.ids)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        self.num_read += len(range(*index.indices(len(self.ids)))) if isinstance(index, slice) else 1
        return self.ids[index]


def test_a_long_session_costs_as_much_per_id_as_a_short_one() -> None:
    """10,000 ids in steps of two: each id is read a few times, not once for each call after it."""
    text = [(i * i + i // 7) % 97 for i in range(10_000)]
    stream, num_read = NgramDrafter().start(), 0
    for num_committed in range(2, len(text) + 1, 2):
        ids = Counted(text[:num_committed])
        stream.propose(ids, num_committed, 8)
        num_read += ids.num_read
    assert num_read < 20 * len(text)


@pytest.mark.parametrize(("shortest", "longest"), [(0, 3), (-1, 3), (4, 3)])
def test_lengths_that_are_no_range_are_refused(shortest: int, longest: int) -> None:
    with pytest.raises(ConfigError, match=f"{shortest} to {longest}"):
        NgramDrafter(longest=longest, shortest=shortest)


def test_drafters_are_loaded_by_name() -> None:
    assert load_drafter("ngram") == NgramDrafter()
    assert load_drafter("none") is None


@pytest.mark.parametrize("spec", ["", "nrgam", "ngram:3", "none:x", "causal_lm:"])
def test_an_unknown_drafter_is_refused_by_name(spec: str) -> None:
    """The error repeats what was asked for and lists what there is."""
    with pytest.raises(ConfigError) as caught:
        load_drafter(spec)
    assert repr(spec) in str(caught.value)
    assert "causal_lm[:PATH]" in str(caught.value)

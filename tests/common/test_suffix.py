"""What is proposed equals a slow form of the same rule, whatever was drafted and refused before."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import overload

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baru_common.drafters import load_drafter
from baru_common.drafters.suffix import SuffixDrafter, continuation
from baru_common.drafters.suffix_index import SEPARATOR, SuffixIndex
from baru_common.errors import ConfigError

_PLACES = 8


def agreement(one: Sequence[int], other: Sequence[int], longest: int) -> int:
    """How many ids at their ends are the same."""
    length = 0
    while length < min(longest, len(one), len(other)) and one[-1 - length] == other[-1 - length]:
        length += 1
    return length


def majority(places: Sequence[Sequence[int]], most_ids: int) -> list[int]:
    """The commonest first id of those places that have one, then the same of the places that agree."""
    firsts = Counter(place[0] for place in places if place)
    if not firsts or most_ids == 0:
        return []
    token, _ = firsts.most_common(1)[0]
    return [token, *majority([place[1:] for place in places if place and place[0] == token], most_ids - 1)]


def in_session(ids: list[int], num_committed: int, longest: int) -> tuple[int, list[list[int]]]:
    """The longest match in the committed ids: of the last 8 places of the last two ids, else the last place of the
    last one."""
    for num_same, most_places in ((2, _PLACES), (1, 1)):
        followed = range(num_same, num_committed)
        ends = [end for end in followed if ids[end - num_same : end] == ids[len(ids) - num_same :]][-most_places:]
        if ends and len(ids) >= num_same:
            lengths = [num_same + agreement(ids[: e - num_same], ids[:-num_same], longest) for e in ends]
            return max(lengths), [ids[e:num_committed] for e, n in zip(ends, lengths, strict=True) if n == max(lengths)]
    return 0, []


def in_texts(texts: list[list[int]], ids: list[int], longest: int) -> tuple[int, list[list[int]]]:
    """The longest match in the texts."""
    ends = [(text, end) for text in texts for end in range(1, len(text) + 1)]
    lengths = [agreement(text[:end], ids, longest) for text, end in ends]
    best = max(lengths, default=0)
    return best, [text[end:] for (text, end), n in zip(ends, lengths, strict=True) if n == best > 0]


def is_right(
    proposed: list[int], texts: list[list[int]], longest: int, ids: list[int], num_committed: int, max_tokens: int
) -> bool:
    """Whether the slow search proposes that, too, but for the order of places of the texts, which decides a tie."""
    own_length, own = in_session(ids, num_committed, longest)
    length, places = in_texts(texts, ids, longest)
    if (own_length and length <= own_length + 1) or not any(places):
        return proposed == majority(own, max_tokens)
    if len(places) > _PLACES and not proposed:
        return True  # all the places that were looked at may end there
    agreeing = [place for place in places if place[: len(proposed)] == proposed]
    goes_on = any(len(place) > len(proposed) for place in agreeing) and len(places) <= _PLACES
    return bool(agreeing) and len(proposed) <= max_tokens and (len(proposed) == max_tokens or not goes_on)


def propose(
    ids: list[int], num_committed: int | None = None, max_tokens: int = 64, texts: Sequence[Sequence[int]] = ()
) -> list[int]:
    stream = SuffixDrafter(SuffixIndex(texts)).start()
    return list(stream.propose(ids, num_committed or len(ids), max_tokens).ids)


# -- which place


def test_the_continuation_of_the_longest_match_is_proposed() -> None:
    """`2 3` occurred with `1` before it and, more recently, without."""
    assert propose([1, 2, 3, 40, 9, 2, 3, 50, 1, 2, 3], max_tokens=1) == [40]


def test_a_longer_match_than_any_n_gram_counts() -> None:
    """Ten ids tell which of two places it is; the last nine do not."""
    run = list(range(10, 19))
    assert propose([1, *run, 50, 2, *run, 60, 3, *run, 70, 2, *run], max_tokens=1) == [60]


def test_what_most_places_go_on_with_is_proposed() -> None:
    """Not what came last: `5 6` went on with 7 twice, then with 9."""
    assert propose([5, 6, 7, 1, 5, 6, 7, 2, 5, 6, 9, 3, 5, 6], max_tokens=2) == [7, 1]


def test_a_text_is_used_where_the_session_says_nothing() -> None:
    assert propose([90, 91, 5], texts=[[4, 5, 6, 7]]) == [6, 7]


def test_the_session_is_nearer_than_a_text() -> None:
    """A text that matches one id more stands back, one that matches two more does not."""
    session = [1, 2, 3, 30, 8, 7, 9, 2, 3]
    assert propose(session, max_tokens=1, texts=[[7, 9, 2, 3, 70]]) == [70]
    assert propose(session, max_tokens=1, texts=[[9, 2, 3, 70]]) == [30]


def test_a_text_that_ends_there_leaves_the_word_to_the_session() -> None:
    assert propose([1, 2, 3, 30, 8, 7, 9, 2, 3], max_tokens=1, texts=[[8, 7, 9, 2, 3]]) == [30]


def test_a_match_is_looked_for_as_far_as_longest() -> None:
    """With 3 ids at most, session and text match alike, so that the session counts."""
    session = [5, 1, 2, 3, 30, 4, 1, 2, 3]
    for longest, expected in ((3, 30), (8, 70)):
        drafter = SuffixDrafter(SuffixIndex([[30, 4, 1, 2, 3, 70]]), longest=longest)
        assert list(drafter.start().propose(session, len(session), 1).ids) == [expected]


# -- what is committed


@pytest.mark.parametrize("ids", [[], [1], [1, 2, 3, 4]])
def test_nothing_is_proposed_where_nothing_repeats(ids: list[int]) -> None:
    assert list(SuffixDrafter().start().propose(ids, len(ids), 64).ids) == []


def test_drafts_are_continued_from_committed_ids_only() -> None:
    """The draft tail is looked up, but what it holds is never proposed."""
    assert propose([1, 2, 3, 1], num_committed=3) == [2, 3]
    assert propose([1, 2, 3, 1, 2, 3], num_committed=3) == []


@pytest.mark.parametrize("max_tokens", [0, 1, 2, 5])
def test_no_more_than_asked_for(max_tokens: int) -> None:
    assert propose([1, 2, 3, 4, 1], max_tokens=max_tokens) == [2, 3, 4, 1][:max_tokens]
    assert propose([9, 1], max_tokens=max_tokens, texts=[[1, 2, 3, 4]]) == [2, 3, 4][:max_tokens]


@given(st.data())
def test_an_index_that_grew_equals_one_built_from_scratch(data: st.DataObject) -> None:
    """Whatever was drafted and refused between calls, the answer is that of a new stream, and of a plain search.

    Drafted ids are partly ones that are never committed and in no text: none of those is ever proposed.
    """
    texts = data.draw(st.lists(st.lists(st.integers(0, 3), max_size=12), max_size=3))
    longest = data.draw(st.integers(2, 6))
    drafter = SuffixDrafter(SuffixIndex(texts), longest=longest)
    committed = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=60))
    stream, num_committed = drafter.start(), 0
    while num_committed < len(committed):
        num_committed = data.draw(st.integers(num_committed + 1, len(committed)))
        drafts = data.draw(st.lists(st.integers(0, 5), max_size=5))
        max_tokens = data.draw(st.integers(0, 8))
        ids = committed[:num_committed] + drafts
        proposed = list(stream.propose(ids, num_committed, max_tokens).ids)
        assert proposed == list(drafter.start().propose(ids, num_committed, max_tokens).ids)
        assert is_right(proposed, texts, longest, ids, num_committed, max_tokens)
        assert max(proposed, default=0) <= 3


@given(st.data())
def test_sessions_know_nothing_of_each_other(data: st.DataObject) -> None:
    """Two of one drafter, in turns, say what each says alone."""
    drafter = SuffixDrafter(SuffixIndex([[0, 1, 2, 3]]))
    sessions = [data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=30)) for _ in range(2)]
    streams = [drafter.start(), drafter.start()]
    for num_committed in range(1, 31):
        for ids, stream in zip(sessions, streams, strict=True):
            if num_committed <= len(ids):
                before = ids[:num_committed]
                alone = drafter.start().propose(before, num_committed, 4).ids
                assert list(stream.propose(before, num_committed, 4).ids) == list(alone)


# -- the vote


@given(places=st.lists(st.lists(st.integers(0, 2), max_size=5), max_size=8), max_tokens=st.integers(0, 6))
def test_a_continuation_is_voted_on_id_by_id(places: list[list[int]], max_tokens: int) -> None:
    assert continuation(places, max_tokens) == majority(places, max_tokens)


def test_a_text_that_has_ended_has_no_vote() -> None:
    """Nor does what stands after it, which is another text."""
    assert continuation([[1, 2, SEPARATOR, 4], [1, 2, SEPARATOR, 4], [1, 2, 3]], 8) == [1, 2, 3]
    assert continuation([[1, 2, SEPARATOR, 4], [1, SEPARATOR, 5, 6]], 8) == [1, 2]


# -- cost, names


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
    """10,000 ids in steps of two: a call reads some hundred ids at most, whatever came before."""
    text = [(i * i + i // 7) % 97 for i in range(10_000)]
    stream = SuffixDrafter().start()
    for num_committed in range(2, len(text) + 1, 2):
        ids = Counted(text[:num_committed])
        stream.propose(ids, num_committed, 8)
        assert ids.num_read < 700


def test_a_session_holds_a_bounded_number_of_places_an_id() -> None:
    """Even when one pair of ids is all there is."""
    stream = SuffixDrafter().start()
    stream.propose([1, 2] * 5000, 10_000, 1)
    assert sum(map(len, stream._ends.values())) <= 4 * _PLACES


@pytest.mark.parametrize(("shortest", "proposed"), [(1, [40]), (2, [40]), (3, [40]), (4, [])])
def test_a_match_shorter_than_wanted_is_none(shortest: int, proposed: list[int]) -> None:
    """In the session, and in texts."""
    drafter = SuffixDrafter(shortest=shortest)
    assert list(drafter.start().propose([1, 2, 3, 40, 9, 1, 2, 3], 8, 1).ids) == proposed
    text = SuffixDrafter(SuffixIndex([[1, 2, 3, 40]]), shortest=shortest)
    assert list(text.start().propose([9, 1, 2, 3], 4, 1).ids) == proposed


@pytest.mark.parametrize(("shortest", "proposed"), [(1, [40]), (2, [])])
def test_one_id_may_not_be_enough(shortest: int, proposed: list[int]) -> None:
    assert list(SuffixDrafter(shortest=shortest).start().propose([3, 40, 9, 3], 4, 1).ids) == proposed
    text = SuffixDrafter(SuffixIndex([[3, 40]]), shortest=shortest)
    assert list(text.start().propose([9, 3], 2, 1).ids) == proposed


def test_it_is_loaded_by_name() -> None:
    assert isinstance(load_drafter("suffix"), SuffixDrafter)
    with pytest.raises(ConfigError, match="'Not a Name'"):
        load_drafter("suffix:Not a Name")

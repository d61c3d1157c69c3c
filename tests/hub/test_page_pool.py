"""The page pool against a slow model of it, and its own integrity check against every kind of corruption."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from baru_common.errors import CapacityExhausted, EngineFailure
from baru_hub.page_pool import PageKey, PagePool, page_keys

_NUM_PAGES, _PAGE_SIZE = 8, 2


def keys_of(ids: list[int], identity: str = "a") -> list[PageKey]:
    return list(page_keys(identity, ids, _PAGE_SIZE))


class SlowPool(RuleBasedStateMachine):
    """Sequences come and go; the model keeps lists and searches them."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(_NUM_PAGES, _PAGE_SIZE)
        self.sequences: list[tuple[list[int], list[PageKey]]] = []
        self.published: dict[PageKey, int] = {}
        self.left_at: dict[int, int] = {}
        """When a page was last given up."""
        self.clock = 0

    def held(self) -> list[int]:
        return [page for pages, _ in self.sequences for page in pages]

    @rule(ids=st.lists(st.integers(0, 1), max_size=5), more=st.integers(0, 3))
    def reserve(self, ids: list[int], more: int) -> None:
        """Either all pages are there, the shared ones first, or nothing has changed."""
        keys, held = keys_of(ids), set(self.held())
        shared = self.pool.find(iter(keys))
        num_known = next((i for i, key in enumerate(keys) if key not in self.published), len(keys))
        assert shared == [self.published[key] for key in keys[:num_known]]
        num_pages = len(keys) + more
        if num_pages > _NUM_PAGES - len(held - set(shared)):
            with pytest.raises(CapacityExhausted):
                self.pool.reserve(num_pages, shared)
            return
        pages = self.pool.reserve(num_pages, shared)
        assert len(set(pages)) == num_pages
        assert pages[: len(shared)] == shared
        fresh = set(pages[len(shared) :])
        assert not fresh & held
        self.forget_the_longest_idle(fresh, held | set(shared))
        self.sequences.append((pages, keys))

    def forget_the_longest_idle(self, fresh: set[int], held: set[int]) -> None:
        evicted = {key: page for key, page in self.published.items() if page in fresh}
        kept = [page for page in self.published.values() if page not in fresh | held]
        num_free = _NUM_PAGES - len(held | set(self.published.values()))
        assert len(evicted) == max(0, len(fresh) - num_free)
        for page in evicted.values():
            assert all(self.left_at[page] <= self.left_at[other] for other in kept)
        self.published = {key: page for key, page in self.published.items() if key not in evicted}

    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        """The first page under a key stays the one."""
        for _ in range(min(2, len(self.sequences))):
            pages, keys = data.draw(st.sampled_from(self.sequences))
            for page, key in zip(pages, keys, strict=False):
                self.pool.publish(page, key)
                if key not in self.published and page not in self.published.values():
                    self.published[key] = page

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """Pages come back when the last holder has gone."""
        if self.sequences:
            pages, _ = self.sequences.pop(data.draw(st.integers(0, len(self.sequences) - 1)))
            self.pool.release(pages)
            self.clock += 1
            self.left_at.update(dict.fromkeys(pages, self.clock))

    @invariant()
    def counts_are_right(self) -> None:
        held = set(self.held())
        self.pool.check_integrity()
        assert self.pool.num_held == len(held)
        assert self.pool.num_available == _NUM_PAGES - len(held)
        for key, page in self.published.items():
            assert self.pool.find(iter([key])) == [page]


TestSlowPool = SlowPool.TestCase
TestSlowPool.settings = settings(max_examples=150, stateful_step_count=25, deadline=None)


def a_busy_pool() -> PagePool:
    """Pages 0 and 1 held (0 published), 2 idle, the others free."""
    pool = PagePool(_NUM_PAGES, _PAGE_SIZE)
    first, second = pool.reserve(2), pool.reserve(1)
    pool.publish(first[0], b"held")
    pool.publish(second[0], b"idle")
    pool.release(second)
    pool.check_integrity()
    return pool


_CORRUPTIONS: dict[str, Callable[[PagePool], object]] = {
    "a free page is lost": lambda p: p._free.discard(5),
    "an idle page is lost": lambda p: p._idle.pop(2),
    "a held page is lost": lambda p: p._holders.pop(1),
    "a held page is free": lambda p: p._free.add(1),
    "a held page is idle": lambda p: p._idle.update({0: None}),
    "an idle page is free": lambda p: p._free.add(2),
    "a page from nowhere": lambda p: p._free.add(_NUM_PAGES),
    "held by nobody": lambda p: p._holders.update({1: -1}),
    "a key without a page": lambda p: p._key_of.pop(0),
    "a page without a key": lambda p: p._page_of.pop(b"held"),
    "a key of another page": lambda p: p._page_of.update({b"held": 1}),
    "an idle page that is not published": lambda p: (p._page_of.pop(b"idle"), p._key_of.pop(2)),
    "a free page that is published": lambda p: p.publish(5, b"free"),
    "two pages under one key": lambda p: p._key_of.update({1: b"held", 0: b"held"}),
    "two pages under one key, the other way": lambda p: (
        p._page_of.update({b"held": 1}),
        p._key_of.update({1: b"held"}),
    ),
}


@pytest.mark.parametrize("name", _CORRUPTIONS)
def test_each_corruption_is_seen(name: str) -> None:
    """Whatever is wrong with the books, the integrity check says so."""
    pool = a_busy_pool()
    _CORRUPTIONS[name](pool)
    with pytest.raises(EngineFailure):
        pool.check_integrity()


def test_a_failed_reserve_changes_nothing() -> None:
    """Not even the idle pages that it would have shared or given away."""
    pool = a_busy_pool()
    before = (set(pool._free), dict(pool._holders), list(pool._idle), dict(pool._page_of), dict(pool._key_of))
    with pytest.raises(CapacityExhausted) as refused:
        pool.reserve(_NUM_PAGES, shared=[2, 0])
    assert (set(pool._free), dict(pool._holders), list(pool._idle), dict(pool._page_of), dict(pool._key_of)) == before
    assert refused.value.hint
    assert refused.value.retry_after_s > 0


def test_nobody_gives_back_what_he_does_not_hold() -> None:
    """A second release of the same page would hand it to two sequences."""
    pool = PagePool(_NUM_PAGES, _PAGE_SIZE)
    pages = pool.reserve(2)
    pool.release(pages)
    with pytest.raises(EngineFailure):
        pool.release(pages[:1])
    pool.check_integrity()


def test_what_is_left_of_an_idle_prefix_can_be_found() -> None:
    """Pages of one sequence go from its end: without its first page the others are of no use."""
    pool, keys = PagePool(4, _PAGE_SIZE), keys_of([1, 2, 3, 4, 5, 6])
    pages = pool.reserve(3)
    for page, key in zip(pages, keys, strict=True):
        pool.publish(page, key)
    pool.release(pages)
    pool.reserve(2)
    assert pool.find(iter(keys)) == pages[:2]


@given(
    ids=st.lists(st.integers(0, 2**32 - 1), min_size=2, max_size=9),
    other=st.integers(0, 2**32 - 1),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_a_key_stands_for_the_identity_and_the_whole_prefix(ids: list[int], other: int, data: st.DataObject) -> None:
    """One id changed changes the keys from its page on and none before; another identity changes all."""
    keys = keys_of(ids)
    assert len(keys) == len(ids) // _PAGE_SIZE
    assert keys_of([*ids, other])[: len(keys)] == keys
    assert not set(keys_of(ids, "b")) & set(keys)
    place = data.draw(st.integers(0, len(ids) - 1))
    changed = [*ids[:place], (ids[place] + 1) % 2**32, *ids[place + 1 :]]
    same = [a == b for a, b in zip(keys, keys_of(changed), strict=True)]
    assert same == [i < place // _PAGE_SIZE for i in range(len(keys))]


@pytest.mark.parametrize(
    ("free", "num_pages", "chosen"),
    [
        ({0, 2, 3, 4, 6}, 3, [2, 3, 4]),
        ({0, 1, 3, 4, 5, 7}, 2, [0, 1]),
        ({0, 2, 4, 6}, 2, [0, 2]),
        ({0, 1, 2, 5, 6}, 4, [0, 1, 2, 5]),
        ({6, 7}, 2, [6, 7]),
    ],
)
def test_neighbours_are_chosen_if_there_are_enough(free: set[int], num_pages: int, chosen: list[int]) -> None:
    """The first run that is long enough; else the lowest pages, in order."""
    pool = PagePool(_NUM_PAGES, _PAGE_SIZE)
    pool.reserve(_NUM_PAGES)
    pool.release(sorted(free, reverse=True))
    assert pool.reserve(num_pages) == chosen


@pytest.mark.parametrize(("num_ids", "num_pages"), [(0, 0), (1, 1), (2, 1), (3, 2), (4, 2)])
def test_a_page_begun_is_a_page(num_ids: int, num_pages: int) -> None:
    """Counts of pages are rounded up."""
    assert PagePool(_NUM_PAGES, _PAGE_SIZE).num_pages_for(num_ids) == num_pages

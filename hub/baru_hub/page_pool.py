"""Who holds which page of the KV cache. Plain bookkeeping: no tensors.

Every page is in exactly one place:

    free      nobody holds it, nothing in it is of use
    held      one or more sequences hold it (`_holders` counts them)
    idle      nobody holds it, but it is published: a later sequence with the same prefix may take it up;
              the longest idle page is given away first when free pages run out

A page is published under a key that stands for everything up to its last id, and only once all its ids
are committed: what it holds never changes again.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from itertools import islice

from baru_common.errors import CapacityExhausted, EngineFailure

PageKey = bytes


def page_keys(identity: str, ids: Sequence[int], page_size: int) -> Iterator[PageKey]:
    """Yield the key of each full page of `ids`, in order.

    A key depends on the identity and on all ids up to the page's end, so that pages are shared within
    one identity and by equal prefixes only.
    """
    key = hashlib.sha256(identity.encode()).digest()
    for end in range(page_size, len(ids) + 1, page_size):
        page = b"".join(token.to_bytes(4, "big") for token in ids[end - page_size : end])
        key = hashlib.sha256(key + page).digest()
        yield key


class PagePool:
    """A fixed number of pages of `page_size` ids each."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = set(range(num_pages))
        self._holders: Counter[int] = Counter()
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._page_of: dict[PageKey, int] = {}
        self._key_of: dict[int, PageKey] = {}

    @property
    def num_held(self) -> int:
        """Pages that sequences hold."""
        return len(self._holders)

    @property
    def num_available(self) -> int:
        """Pages that a new sequence could get: free and idle ones."""
        return len(self._free) + len(self._idle)

    def census(self) -> dict[str, int]:
        """Pages by where they are."""
        return {"held": len(self._holders), "idle": len(self._idle), "free": len(self._free)}

    def num_pages_for(self, num_ids: int) -> int:
        """Pages that hold `num_ids` ids."""
        return -(-num_ids // self.page_size)

    def find(self, keys: Iterator[PageKey]) -> list[int]:
        """Return the published pages of the longest prefix of `keys`."""
        pages = []
        for key in keys:
            if key not in self._page_of:
                break
            pages.append(self._page_of[key])
        return pages

    def reserve(self, num_pages: int, shared: Sequence[int] = ()) -> list[int]:
        """Hold `num_pages` pages, the first of them the `shared` ones, and return them in order.

        CapacityExhausted when there are not enough; then nothing has changed.
        """
        fresh = num_pages - len(shared)
        available = self.num_available - sum(page in self._idle for page in shared)
        if fresh > available:
            raise CapacityExhausted(
                f"the KV cache has room for {available * self.page_size} more ids, {fresh * self.page_size} are needed",
                hint="ask for fewer tokens, or try again when other sessions have ended",
            )
        self._hold(shared)
        while len(self._free) < fresh:
            self._forget(next(iter(self._idle)))
        pages = self._choose(fresh)
        self._hold(pages)
        return [*shared, *pages]

    def release(self, pages: Sequence[int]) -> None:
        """Give up one hold on each page; of one sequence the last page goes idle first, and is given away first."""
        for page in reversed(pages):
            if self._holders[page] < 1:
                raise EngineFailure(f"page {page} was released but nobody holds it")
            self._holders[page] -= 1
            if not self._holders[page]:
                del self._holders[page]
                if page in self._key_of:
                    self._idle[page] = None
                else:
                    self._free.add(page)

    def publish(self, page: int, key: PageKey) -> None:
        """Let later sequences find a held page under `key`; the first page under a key stays the one."""
        if key not in self._page_of and page not in self._key_of:
            self._page_of[key] = page
            self._key_of[page] = key

    def check_integrity(self) -> None:
        """EngineFailure when a page is nowhere, in two places, or published inconsistently."""
        places = [*self._free, *self._idle, *self._holders]
        if sorted(places) != list(range(self.num_pages)):
            raise EngineFailure("the page pool lost or doubled a page")
        if any(count < 1 for count in self._holders.values()):
            raise EngineFailure("a held page has no holder")
        if len(self._page_of) != len(self._key_of) or any(self._page_of.get(k) != p for p, k in self._key_of.items()):
            raise EngineFailure("published pages and keys do not match")
        if not self._idle.keys() <= self._key_of.keys() or self._free & self._key_of.keys():
            raise EngineFailure("an idle page is not published, or a free page is")

    def _hold(self, pages: Sequence[int]) -> None:
        for page in pages:
            self._free.discard(page)
            self._idle.pop(page, None)
            self._holders[page] += 1

    def _forget(self, page: int) -> None:
        del self._idle[page]
        del self._page_of[self._key_of.pop(page)]
        self._free.add(page)

    def _choose(self, num_pages: int) -> list[int]:
        """Choose free pages, neighbours if there are enough of them: those are read without a copy."""
        run: list[int] = []
        for page in sorted(self._free):
            run = [*run, page] if run and page == run[-1] + 1 else [page]
            if len(run) == num_pages:
                return run
        return list(islice(sorted(self._free), num_pages))

"""A target that costs nothing: its next id is a function of all ids before it, so that whoever is fed another
session's ids, or the wrong part of its own, says something else."""

from __future__ import annotations

import asyncio
import itertools
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import replace

from baru_common.errors import BaruError, CapacityExhausted
from baru_common.sampling import SamplingContext
from baru_hub.acceptance import Decision, standing
from baru_hub.cost_model import CostModel
from baru_hub.engines import Allocation, EngineSpec, Feed, Want
from baru_hub.engines.simulated import DeviceProfile, SimulatedEngine
from baru_hub.guesses import Guesses

EOS_ID, CONTEXT_LIMIT = 1, 96
ID_BYTES = 1000
"""What a place of a sequence is said to take."""

_SPEC = SimulatedEngine(DeviceProfile("fuzz", (0.0, 0.0), 0.0)).spec
SIZE = _SPEC.vocabulary.size


def own_id(ids: Sequence[int]) -> int:
    """The target's own id after `ids`; the end of the sequence once in two hundred times."""
    number = zlib.crc32(array("I", ids).tobytes())
    return EOS_ID if number % 200 == 0 else 2 + number // 200 % (SIZE - 2)


class HashTarget:
    """An engine. A step under way waits while `may_end` is not set."""

    def __init__(self, max_ids: int, *, drafts: bool) -> None:
        """Has room for `max_ids` ids in all; with `drafts` it also guesses, right two times in three."""
        self.spec: EngineSpec = replace(
            _SPEC, context_limit=CONTEXT_LIMIT, eos_ids=(EOS_ID,), drafter="fuzz" if drafts else None
        )
        self.max_ids = max_ids
        self.held: dict[int, list[int]] = {}
        """Sequence -> ids in its cache."""
        self.room: dict[int, int] = {}
        """Sequence -> ids it may come to hold."""
        self.may_end, self.entered = asyncio.Event(), asyncio.Event()
        self.may_end.set()
        self._handles = itertools.count(1)

    async def calibrate(self) -> CostModel:
        return CostModel()

    def allocate(
        self,
        prompt_ids: Sequence[int],
        max_length: int,
        identity: str | None,  # noqa: ARG002
        sampling: SamplingContext | None = None,  # noqa: ARG002
    ) -> Allocation:
        assert len(prompt_ids) <= max_length <= CONTEXT_LIMIT
        if sum(self.room.values()) + max_length > self.max_ids:
            raise CapacityExhausted("the cache is full")
        handle = next(self._handles)
        self.held[handle], self.room[handle] = [], max_length
        return Allocation(handle, 0, max_length * ID_BYTES)

    def free(self, sequence: int) -> None:
        del self.held[sequence], self.room[sequence]

    async def verify(self, feeds: Sequence[Feed]) -> list[Decision | BaruError]:
        self.entered.set()
        await self.may_end.wait()
        return [self._decide(feed) for feed in feeds]

    def _decide(self, feed: Feed) -> Decision:
        held, block = self.held[feed.sequence], feed.block
        assert feed.num_cached <= len(held), "counts ids as cached that were never fed"
        ids = [*held[: feed.num_cached], *block.pending]
        deepest = 1 + max(block.tree.depths, default=-1)
        assert len(ids) + deepest <= self.room[feed.sequence], "fed past what was reserved"
        assert all(0 <= i < SIZE for i in (*ids, *block.draft)), "fed an id that does not exist"
        if not block.decides:
            self.held[feed.sequence] = ids
            return Decision()
        tree = block.tree
        decision = Decision(tuple(own_id([*ids, *tree.path(node)]) for node in range(-1, len(tree))))
        self.held[feed.sequence] = ids + [tree.ids[node] for node in standing(tree, decision)]
        return decision

    async def draft(self, wants: Sequence[Want]) -> list[Guesses]:
        return [_guess(want) for want in wants]

    async def close(self) -> None:
        """Nothing is held."""


def _guess(want: Want) -> Guesses:
    path: list[int] = []
    leaves: list[list[int]] = []
    while len(path) < len(want.chain) + want.depth:
        right = own_id([*want.committed, *path])
        guess = right if (right + len(path)) % 3 else 2 + right % (SIZE - 2)
        main = want.chain[len(path)] if len(path) < len(want.chain) else guess
        leaves += [[*path, other] for other in {right, guess} - {main} if want.width > 1]
        path.append(main)
    return Guesses(path, leaves)

"""The seam between an engine and what drafts from the target's own state.

A drafter lives in the engine's thread and memory. Its keys and values are extra layers in the pages of the session, at
the same slots as the target's, so that cutting a session back cuts both.

    states      of rows that the target has computed and that stand, in order, without a gap
    draft       from the committed ids on; what it leaves behind past them is void in the next step
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from baru_common.model_files import LoadedModel
from baru_common.sampling.sampler import Sampler
from baru_hub.guesses import Guesses
from baru_hub.kv_cache import KvShape, PagedCache

MOST_UNREAD = 2048
"""States kept of a session for which nothing is drafted; of what was before, the drafter knows less."""


@dataclass
class States:
    """The target's hidden states of one session's rows that a drafter has not read yet.

    rows    [first, end)    positions; the ids at first + 1 and on are committed
    """

    first: int = 0
    end: int = 0
    _parts: list[torch.Tensor] = field(default_factory=list)
    """What each step added: [num, num_taps, width]."""

    def add(self, first: int, rows: torch.Tensor) -> None:
        """Append rows at positions from `first` on; a gap drops what was there before, and so does too much of it."""
        if first != self.end:
            self._parts.clear()
        self._parts.append(rows)
        self.end = first + len(rows)
        while len(self._parts) > 1 and sum(map(len, self._parts)) > MOST_UNREAD:
            del self._parts[0]
        self.first = self.end - sum(map(len, self._parts))

    def take(self) -> torch.Tensor:
        """Return the rows; they count as read."""
        rows = torch.cat(self._parts)
        self._parts.clear()
        self.first = self.end
        return rows


@dataclass(frozen=True)
class DraftAsk:
    """What one session wants drafted."""

    pages: Sequence[int]
    committed: Sequence[int]
    sampler: Sampler
    states: States
    depth: int
    """Positions to draft after `chain`, at least one."""
    width: int = 1
    """Guesses at each position, along one path; the others are leaves beside it."""
    chain: Sequence[int] = ()
    """The node's own draft: the path goes along it, and on from its end."""

    @property
    def is_followed(self) -> bool:
        """There are unread states, and they reach up to the last committed id but one."""
        return self.states.first < self.states.end == len(self.committed) - 1

    @property
    def unread_ids(self) -> Sequence[int]:
        """The ids after each unread state's own position."""
        return self.committed[self.states.first + 1 : self.states.end + 1]


@dataclass(frozen=True)
class TargetParts:
    """What a drafter may use of a target and its engine."""

    loaded: LoadedModel
    cache: PagedCache
    num_pages: int
    group: int
    """Query heads of the target that share a key-value head."""
    row_floor: int

    def cache_of(self, shape: KvShape) -> PagedCache:
        """Return pages of a drafter's own, numbered as the target's are."""
        layer: Any = self.cache.layers[0]
        device = self.loaded.model.device
        return PagedCache(shape, self.num_pages, self.cache.page_size, dtype=layer.keys.dtype, device=device)


class HubDrafter(Protocol):
    """Drafts for sessions of one engine."""

    @property
    def family(self) -> str:
        """Name of the kind, e.g. "eagle3"."""

    @property
    def taps(self) -> tuple[int, ...]:
        """Which of the target's hidden states it reads: 0 is the embedding, i the output of the first i layers, in
        order; none: it needs none."""

    @property
    def num_bytes(self) -> int:
        """Memory of its weights, beside the target's."""

    def forget(self, pages: Sequence[int]) -> None:
        """Clear pages that get another owner: what a stranger's session left there must not colour anybody's drafts."""

    def draft(self, asks: Sequence[DraftAsk]) -> list[Guesses]:
        """Draft for all sessions at once; `states` are read and may be dropped."""

"""One session's draft as it grows at the hub: a main path, and guesses beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from baru_common.sampling import NO_ID
from baru_hub.guesses import Guesses
from baru_hub.ragged_batch import SequenceFeed
from baru_hub.session import Block

from .base import DraftAsk


@dataclass
class Path:
    """Grows by one position a pass: along the node's own draft while there is one, then by the drafter's best guess."""

    ask: DraftAsk
    ids: list[int] = field(default_factory=list)
    """Drafted so far."""
    _leaves: list[list[int]] = field(default_factory=list)
    _ended: bool = False

    @property
    def goes_on(self) -> bool:
        """Another position is wanted."""
        return not self._ended and len(self.ids) < len(self.ask.chain) + self.ask.depth

    def feed(self) -> SequenceFeed:
        """Return the row after the last id: what a drafter without states of its own runs next."""
        last = self.ids[-1] if self.ids else self.ask.committed[-1]
        return self.feed_of(len(self.ask.committed) - 1 + len(self.ids), (last,))

    def feed_of(self, first: int, ids: Sequence[int]) -> SequenceFeed:
        """Return rows of `ids` at positions from `first` on."""
        return SequenceFeed(self.ask.pages, first, Block(tuple(ids)))

    def extend(self, logits: torch.Tensor) -> None:
        """Add the position that `logits` ([1, vocabulary]) decide."""
        ask = self.ask
        ranked = ask.sampler.rank(logits, ask.committed, self.ids, ask.width)
        guesses = [token for token in ranked if token != NO_ID]
        depth = len(self.ids)
        main = ask.chain[depth] if depth < len(ask.chain) else next(iter(guesses), None)
        self._leaves += [[*self.ids, token] for token in guesses if token != main]
        if main is not None:
            self.ids.append(main)
        # Along the node's draft it goes to the end in any case: the path begins with all of it.
        self._ended = main is None or (depth + 1 >= len(ask.chain) and main in ask.sampler.context.stop_ids)

    def guesses(self) -> Guesses:
        """Return what was drafted."""
        return Guesses(self.ids, self._leaves)

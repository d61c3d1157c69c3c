"""Prompt lookup: what followed the last n ids the last time they occurred in this session.

Saxena, "Prompt Lookup Decoding" (2023): the longest n that occurs before wins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from baru_common.errors import ConfigError
from baru_common.sampling import SamplingContext

from .base import Proposal


@dataclass(frozen=True)
class NgramDrafter:
    """Proposes from the session's own committed ids. No model, no torch."""

    longest: int = 3
    """Longest run of ids that is looked up."""
    shortest: int = 1
    """Shortest run; 1 drafts nearly always, 2 and more only on firmer ground."""

    family = "ngram"
    vocabulary = None
    tokens_per_call = 64
    blocking = False

    def __post_init__(self) -> None:
        if not 1 <= self.shortest <= self.longest:
            raise ConfigError(f"n-gram lengths {self.shortest} to {self.longest} are not an ascending range from 1")

    def start(self, sampling: SamplingContext | None = None) -> NgramStream:  # noqa: ARG002
        return NgramStream(self)


@dataclass
class NgramStream:
    """Index of one session: each n-gram of the committed ids -> where it last ended."""

    drafter: NgramDrafter
    _num_indexed: int = 0
    _ends: dict[tuple[int, ...], int] = field(default_factory=dict)

    def propose(self, ids: Sequence[int], num_committed: int, max_tokens: int) -> Proposal:
        """See `DraftStream`. Costs time for the ids committed since the last call, not for all of them."""
        self._index(ids, num_committed)
        for n in range(min(self.drafter.longest, len(ids) - 1), self.drafter.shortest - 1, -1):
            end = self._ends.get(tuple(ids[-n:]))
            if end is not None:
                return Proposal(ids[end : min(end + max_tokens, num_committed)])
        return Proposal()

    def _index(self, ids: Sequence[int], num_committed: int) -> None:
        # An n-gram is entered when an id follows it, so a look-up never finds itself.
        for end in range(max(self._num_indexed, 1), num_committed):
            for n in range(self.drafter.shortest, min(self.drafter.longest, end) + 1):
                self._ends[tuple(ids[end - n : end])] = end
        self._num_indexed = num_committed

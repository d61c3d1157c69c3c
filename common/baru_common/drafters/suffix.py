"""Suffix decoding: what followed the longest run of ids that occurred before, in this session or in the node's texts.

Oliaro et al., "SuffixDecoding" (2024). Of all places where the longest match occurs, the ids that most of them go on
with are proposed. The session itself is nearer to what comes than any text: a text has to match by more ids, where
SuffixDecoding takes whichever promises more accepted ids. No model, no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from baru_common.sampling import SamplingContext

from .base import Proposal
from .suffix_index import SEPARATOR, SuffixIndex

_MOST_PLACES = 8
_AHEAD = 1
"""Ids that a text may match more than the session does and still stand back."""


@dataclass(frozen=True)
class SuffixDrafter:
    """Proposes from the session's own ids and from an index over texts of the node."""

    index: SuffixIndex = field(default_factory=SuffixIndex)
    longest: int = 32
    """Longest run of ids that is looked for."""
    shortest: int = 1
    """Shortest run that is enough."""

    family = "suffix"
    vocabulary = None
    tokens_per_call = 64
    blocking = False

    def start(self, sampling: SamplingContext | None = None) -> SuffixStream:  # noqa: ARG002
        return SuffixStream(self.index, self.longest, self.shortest)


@dataclass
class SuffixStream:
    """Index of one session: each pair of committed ids -> where it last ended."""

    index: SuffixIndex
    longest: int
    shortest: int = 1
    _num_indexed: int = 0
    _ends: dict[tuple[int, ...], list[int]] = field(default_factory=dict)

    def propose(self, ids: Sequence[int], num_committed: int, max_tokens: int) -> Proposal:
        """See `DraftStream`."""
        self._index(ids, num_committed)
        own_length, own_places = self._find(ids, num_committed, max_tokens)
        if own_length + _AHEAD < self.longest:
            length, places = self.index.find(ids, self.longest, _MOST_PLACES, max_tokens)
            further = own_length + _AHEAD < length if own_length else length >= self.shortest
            if further and (proposed := continuation(places, max_tokens)):
                return Proposal(proposed)
        return Proposal(continuation(own_places, max_tokens))

    def _find(self, ids: Sequence[int], num_committed: int, max_tokens: int) -> tuple[int, list[Sequence[int]]]:
        """As `SuffixIndex.find`, in the session itself."""
        for n in (2, 1):
            if ends := self._ends.get(tuple(ids[-n:])):
                lengths = [n + self._agreement(ids, end - n, len(ids) - n) for end in ends]
                longest = max(lengths)
                if longest < self.shortest:
                    break
                followed = (end for end, length in zip(ends, lengths, strict=True) if length == longest)
                return longest, [ids[end : min(end + max_tokens, num_committed)] for end in followed]
        return 0, []

    def _agreement(self, ids: Sequence[int], end: int, other: int) -> int:
        length, most = 0, min(end, self.longest)
        while length < most and ids[end - 1 - length] == ids[other - 1 - length]:
            length += 1
        return length

    def _index(self, ids: Sequence[int], num_committed: int) -> None:
        # A run is entered when an id follows it, so a look-up never finds itself.
        for end in range(max(self._num_indexed, 1), num_committed):
            self._ends[(ids[end - 1],)] = [end]
            if end > 1:
                ends = self._ends.setdefault((ids[end - 2], ids[end - 1]), [])
                ends.append(end)
                del ends[:-_MOST_PLACES]
        self._num_indexed = num_committed


def continuation(places: Sequence[Sequence[int]], max_tokens: int) -> list[int]:
    """Return what most of `places` go on with: at each depth the id of most that agreed so far and have not ended (the
    first such id in a tie)."""
    proposed: list[int] = []
    for depth in range(max_tokens):
        places = [place for place in places if depth < len(place) and place[depth] != SEPARATOR]
        if not places:
            break
        tokens = [place[depth] for place in places]
        token = max(tokens, key=tokens.count)
        proposed.append(token)
        if tokens.count(token) < len(tokens):
            places = [place for place in places if place[depth] == token]
    return proposed

"""The distribution that a drafter drew an id from, as it crosses the wire: few ids, half-precision weights."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property

from baru_common.errors import InvalidDraft

MAX_SUPPORT = 64
"""Most ids with a probability above 0."""


@dataclass(frozen=True)
class SparseProbs:
    """Probabilities of at most 64 ids; every other id's is 0.

    `weights` are what is sent; both sides divide by their sum in the same way, so what the hub reckons with
    is exactly what the node drew from.
    """

    ids: tuple[int, ...]
    weights: bytes
    """An IEEE 754 half, little-endian, for each id; above 0 and finite."""

    def __post_init__(self) -> None:
        if not 1 <= len(self.ids) <= MAX_SUPPORT:
            raise InvalidDraft(f"draft_probs has {len(self.ids)} ids, must have 1 to {MAX_SUPPORT}")
        if len(set(self.ids)) != len(self.ids):
            raise InvalidDraft("draft_probs has an id twice")
        if len(self.weights) != 2 * len(self.ids):
            raise InvalidDraft(f"draft_probs has {len(self.weights)} bytes of weights for {len(self.ids)} ids")
        if not all(0 < weight < float("inf") for weight in self._unpacked):
            raise InvalidDraft("draft_probs has a weight that is not above 0 and finite")

    @classmethod
    def of(cls, pairs: list[tuple[int, float]]) -> SparseProbs:
        """Round (id, probability) pairs to what can be sent; those that round to 0 are left out."""
        kept = [(token, half) for token, prob in pairs if (half := struct.pack("<e", prob)) != b"\0\0"]
        return cls(tuple(token for token, _ in kept), b"".join(half for _, half in kept))

    @cached_property
    def probs(self) -> tuple[float, ...]:
        """Probability of each of `ids`, in their order; they sum to 1."""
        total = sum(self._unpacked)
        return tuple(weight / total for weight in self._unpacked)

    def prob(self, token_id: int) -> float:
        """Probability of `token_id`."""
        return self.probs[self.ids.index(token_id)] if token_id in self.ids else 0.0

    @cached_property
    def _unpacked(self) -> tuple[float, ...]:
        return struct.unpack(f"<{len(self.ids)}e", self.weights)

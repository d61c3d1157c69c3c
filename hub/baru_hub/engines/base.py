"""The seam between the loop and whatever runs the target: feed ids, learn the target's own next ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from baru_common.tokens import TokenizerBundle, Vocabulary
from baru_hub.session import Block


@dataclass(frozen=True)
class EngineSpec:
    """What an engine serves."""

    engine: str
    target_name: str
    fingerprint: bytes
    bundle: TokenizerBundle
    vocabulary: Vocabulary
    eos_ids: tuple[int, ...]
    context_limit: int


@dataclass(frozen=True)
class Feed:
    """One sequence's part of a step."""

    sequence: int
    """Handle from `Engine.allocate`."""
    num_cached: int
    """Ids already in the sequence's cache; anything the cache holds past them is cut off first."""
    block: Block


class Engine(Protocol):
    """Runs the target. `verify` is called from one worker thread; the rest while no `verify` runs."""

    @property
    def spec(self) -> EngineSpec:
        """What is served."""

    def allocate(self, max_length: int) -> int:
        """Reserve a sequence of up to `max_length` ids and return its handle; CapacityExhausted if full."""

    def verify(self, feeds: Sequence[Feed]) -> list[list[int]]:
        """Feed every block and return, per feed, the target's own ids: one for the last pending id and
        one for each draft id, in order; none for a block that does not decide.

        EngineFailure when the target cannot; the sequences fed are then of no further use.
        """

    def free(self, sequence: int) -> None:
        """Give a sequence back."""

"""The seam between the loop and whatever runs the target: feed ids, learn the target's own next ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from baru_common.errors import BaruError
from baru_common.sampling import SamplingContext
from baru_common.tokens import TokenizerBundle, Vocabulary
from baru_hub.acceptance import Decision
from baru_hub.guesses import Guesses
from baru_hub.page_pool import PagePool
from baru_hub.session import Block

if TYPE_CHECKING:
    from baru_hub.cost_model import CostModel  # needs numpy


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
    drafter: str | None = None
    """Family of the engine's own drafter; None: it has none."""
    capacity: int | None = None
    """Most ids that all sequences together may hold; None: no end."""
    drafter_model: str = ""
    """Its name, for people."""
    drafter_digest: bytes = b""
    """32 bytes over what makes it: weights and configuration, or how it is cut from the target."""
    runtime: str = ""
    """What runs target and drafter: versions, numeric type, device."""
    samples: bool = True
    """It serves every `SamplingParams`; False: only plain greedy ones, as a script has no logits."""


@dataclass(frozen=True)
class Allocation:
    """A reserved sequence."""

    sequence: int
    """Handle, for `Feed` and `free`."""
    num_cached: int
    """Leading prompt ids that are in its cache already, because an earlier sequence had the same ones."""
    num_bytes: int = 0
    """Memory that is reserved for it."""


@dataclass(frozen=True)
class Feed:
    """One sequence's part of a step."""

    sequence: int
    num_cached: int
    """Ids already in the sequence's cache; anything the cache holds past them is void."""
    block: Block


@dataclass(frozen=True)
class Want:
    """What the engine's own drafter is asked for, for one sequence."""

    sequence: int
    committed: Sequence[int]
    chain: Sequence[int]
    """The node's draft: the path begins with it."""
    depth: int
    """Positions to draft after `chain`, at least one."""
    width: int
    """Guesses at each position."""


class Engine(Protocol):
    """Runs the target. Nothing else is called while `verify` runs."""

    @property
    def spec(self) -> EngineSpec:
        """What is served."""

    async def calibrate(self) -> CostModel:
        """Take a few steps on nobody's behalf and return what steps cost."""

    def allocate(
        self,
        prompt_ids: Sequence[int],
        max_length: int,
        identity: str | None,
        sampling: SamplingContext | None = None,
    ) -> Allocation:
        """Reserve a sequence of up to `max_length` ids; CapacityExhausted if there is no room.

        `sampling` says how its ids are chosen; None: greedily.

        What earlier sequences of the same `identity`, and of no other, left in the cache may be used;
        with None it shares nothing, either way.
        """

    async def verify(self, feeds: Sequence[Feed]) -> list[Decision | BaruError]:
        """Feed every block and return, per feed, what the target decided: an empty decision for a block that
        does not decide, an error for a sequence that cannot go on.

        EngineFailure when the whole step failed; the sequences fed are then of no further use. When it is
        cancelled it still returns only after the step has ended: memory may be freed then.
        """

    async def draft(self, wants: Sequence[Want]) -> list[Guesses]:
        """Let the engine's own drafter guess on, for sequences that have been verified up to their last committed id
        but one. Only for engines that have one."""

    def free(self, sequence: int) -> None:
        """Give a sequence back."""

    async def close(self) -> None:
        """Stop whatever the engine runs."""


@runtime_checkable
class Paged(Protocol):
    """An engine whose memory is a pool of pages."""

    @property
    def pool(self) -> PagePool:
        """Who holds which page."""

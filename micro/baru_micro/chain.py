"""The node's draft chain: what is committed, what is drafted past it, and when a chain ends.

    ids        [0, num_committed)  [num_committed, end)      the drafted part is `ahead` ids long
    chain      [base, end)                                   base <= num_committed

Pure state; the drafting loop and the transport act on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from baru_common.errors import ProtocolViolation
from baru_common.frames import Draft, Verdict
from baru_common.sampling import SparseProbs


class Outcome(Enum):
    """What a verdict meant for the chain."""

    AGREED = "agreed"
    """Everything decided was drafted: the chain goes on from where it is."""
    PASSED = "passed"
    """The hub went past the end of the chain: a new one starts at the committed length."""
    DIVERGED = "diverged"
    """The target chose otherwise: the drafted rest is void, a new chain starts."""


@dataclass
class DraftChain:
    """One session's committed ids and the growing draft past them."""

    ids: list[int]
    """Committed ids, then drafted ones. Read it, never change it from outside."""
    epoch: int
    num_committed: int
    base: int
    chain_id: int = 1
    _nothing_at: int = -1

    @classmethod
    def start(cls, committed: Sequence[int], epoch: int) -> DraftChain:
        """Begin with what is committed."""
        return cls(list(committed), epoch, len(committed), len(committed))

    @property
    def ahead(self) -> int:
        """Drafted ids past the committed length."""
        return len(self.ids) - self.num_committed

    @property
    def version(self) -> tuple[int, int]:
        """Changes whenever a proposal made before would not fit any more."""
        return self.chain_id, len(self.ids)

    @property
    def wants_answer(self) -> bool:
        """Nothing was sent for the committed length yet, not even that there is nothing."""
        return self.ahead == 0 and self._nothing_at < self.num_committed

    def extend(self, token_ids: Sequence[int], draft_probs: Sequence[SparseProbs] = ()) -> Draft:
        """Append drafted ids, perhaps none, and return the frame that tells the hub."""
        offset = len(self.ids) - self.base
        frame = Draft(self.epoch, self.chain_id, self.base, offset, tuple(token_ids), tuple(draft_probs))
        self.ids.extend(token_ids)
        if not token_ids:
            self._nothing_at = self.num_committed
        return frame

    def apply(self, verdict: Verdict) -> Outcome:
        """Commit what the target decided; ProtocolViolation when it does not follow what is committed."""
        if verdict.base != self.num_committed:
            raise ProtocolViolation(
                f"a verdict for position {verdict.base} came, {self.num_committed} ids are committed"
            )
        decided = list(verdict.token_ids)
        drafted = self.ids[self.num_committed : self.num_committed + len(decided)]
        self.num_committed += len(decided)
        # After a refusal the rest of the chain is void even if the target chose the same id again by itself:
        # under rejection sampling what was refused together must not be offered once more.
        if drafted == decided and verdict.num_accepted == verdict.num_verified:
            return Outcome.AGREED
        passed = drafted == decided[: len(drafted)] and len(drafted) < len(decided)
        outcome = Outcome.PASSED if passed else Outcome.DIVERGED
        self.ids[verdict.base :] = decided
        self.base = self.num_committed
        self.chain_id += 1
        return outcome

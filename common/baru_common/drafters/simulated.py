"""A drafter for simulated targets: right with a given probability, at a given pace."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from baru_common.errors import ConfigError
from baru_common.sampling import SamplingContext
from baru_common.scripted import is_hard, scripted_id

from .base import Proposal


@dataclass(frozen=True)
class SimulatedDrafter:
    """Drafts what a simulated target will say, wrong at each position with probability 1 - acceptance."""

    acceptance: float
    """Chance that a drafted id is the target's, at each position."""
    token_ms: float = 0.0
    """Time to draft one id, milliseconds; it really passes."""
    seed: int = 0
    """Another seed is wrong at other positions."""

    family = "simulated"
    vocabulary = None

    def __post_init__(self) -> None:
        if not 0 <= self.acceptance <= 1:
            raise ConfigError(f"acceptance is {self.acceptance}, must be 0 to 1")
        if not 0 <= self.token_ms < float("inf"):
            raise ConfigError(f"token_ms is {self.token_ms}, must be 0 or more, and finite")

    @classmethod
    def parse(cls, argument: str) -> SimulatedDrafter:
        """Read ACCEPTANCE[:TOKEN_MS[:SEED]]."""
        parts = argument.split(":")
        try:
            acceptance, token_ms, seed = (*parts, *("0", "0")[len(parts) - 1 :])
            return cls(float(acceptance), float(token_ms), int(seed))
        except ValueError as error:
            raise ConfigError(f"{argument!r} is not ACCEPTANCE[:TOKEN_MS[:SEED]]") from error

    @property
    def blocking(self) -> bool:
        return self.token_ms > 0

    @property
    def tokens_per_call(self) -> int:
        """A slow drafter streams id by id; one that takes a fraction of a millisecond sends blocks."""
        return 1 if self.token_ms >= 1 else 16

    def start(self, sampling: SamplingContext | None = None) -> SimulatedDrafter:  # noqa: ARG002
        return self

    def decoder(self, sampling: SamplingContext) -> SimulatedDrafter:  # noqa: ARG002
        """Decode as it drafts: wrong now and then."""
        return self

    def propose(self, ids: Sequence[int], num_committed: int, max_tokens: int) -> Proposal:  # noqa: ARG002
        """See `DraftStream`."""
        if self.token_ms:
            time.sleep(self.token_ms * max_tokens / 1e3)
        return Proposal(self.draft(len(ids), max_tokens))

    def draft(self, position: int, max_tokens: int) -> list[int]:
        """The drafted ids from `position` on, at once."""
        return [scripted_id(p) + is_hard(p, self.acceptance, self.seed) for p in range(position, position + max_tokens)]

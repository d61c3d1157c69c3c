"""How likely each draft position is to be accepted, learned from one session's verdicts."""

from __future__ import annotations

from dataclasses import dataclass, field

_PRIOR = 0.35
_PRIOR_WEIGHT = 2.0
_SLOW, _FAST = 0.995, 0.9
_SURPRISE = 3.0
"""Standard deviations between the fast and the slow estimate that mean a new regime."""


@dataclass
class _Rate:
    """A discounted share of successes."""

    discount: float
    hits: float = 0.0
    tries: float = 0.0

    def observe(self, *, hit: bool) -> None:
        self.hits = self.discount * self.hits + hit
        self.tries = self.discount * self.tries + 1

    def mean(self, prior: float) -> float:
        return (self.hits + _PRIOR_WEIGHT * prior) / (self.tries + _PRIOR_WEIGHT)


@dataclass
class _Position:
    """Acceptance at one draft position, given that those before were accepted.

    The slow estimate is steady; when the fast one contradicts it, the past is forgotten.
    """

    slow: _Rate = field(default_factory=lambda: _Rate(_SLOW))
    fast: _Rate = field(default_factory=lambda: _Rate(_FAST))

    def observe(self, *, hit: bool) -> None:
        self.slow.observe(hit=hit)
        self.fast.observe(hit=hit)
        if self.fast.tries < 4 or self.slow.tries < 8:
            return
        slow, fast = self.slow.mean(_PRIOR), self.fast.hits / self.fast.tries
        if abs(slow - fast) > _SURPRISE * (max(slow * (1 - slow), 0.01) / self.fast.tries) ** 0.5:
            self.slow = _Rate(_SLOW, self.fast.hits, self.fast.tries)


class Survival:
    """Chance that a draft survives up to each position; one per session and drafter."""

    def __init__(self, max_depth: int) -> None:
        self._positions = [_Position() for _ in range(max_depth)]
        self._reach = min(4, max_depth)
        self.ceiling = max_depth
        """Deepest position that may be used, whatever is known of deeper ones."""
        self._gains: list[float] | None = None

    @property
    def reach(self) -> int:
        """Deepest position worth considering: one past what has been tried, at least four.

        A draft that is always short, and always right, says nothing of longer ones.
        """
        return min(self._reach, self.ceiling)

    def observe(self, num_verified: int, num_accepted: int) -> None:
        """Learn from a verdict: positions up to the first refused one were tried."""
        num_tried = min(num_accepted + 1, num_verified, len(self._positions))
        for i in range(num_tried):
            self._positions[i].observe(hit=i < num_accepted)
        self._reach = min(max(self._reach, num_tried + 1), len(self._positions))
        if num_tried:
            self._gains = None

    def restart(self, rate: float) -> None:
        """Forget what was learned: each position is accepted with about this chance now."""
        for position in self._positions:
            position.slow = _Rate(_SLOW, _PRIOR_WEIGHT * rate, _PRIOR_WEIGHT)
            position.fast = _Rate(_FAST)
        self._gains = None

    def gains(self) -> list[float]:
        """Return, for each position up to `reach`, the chance that it is accepted: never rising."""
        if self._gains is None:
            self._gains = self._compute_gains()
        return self._gains[: self.ceiling]

    def _compute_gains(self) -> list[float]:
        gains, chance, prior = [], 1.0, _PRIOR
        for position in self._positions[: self._reach]:
            prior = position.slow.mean(prior)  # what is not known of a position is taken from the one before
            chance *= prior
            gains.append(chance)
        return gains

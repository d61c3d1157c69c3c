"""What the scheduler knows of one session's drafting: what survives, how fast it comes, how deep to go."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from .survival import Survival

_EWMA = 0.15
_PATIENCE_LOSSES = 2
"""After so many waits in vain in a row there is no more waiting until an answer came in time by itself."""
_DEEPER, _SHALLOWER = 1.15, 0.95
"""A depth grows when the next position pays this many times what it costs, and shrinks when the last one
pays less than this. In between expected throughput is so flat that flapping would buy nothing."""
_PROBE_FIRST, _PROBE_LAST = 8, 128
"""Steps between two probes of a drafter that earns nothing: doubled up to the last as it keeps failing."""
_BESIDE_PRIOR, _BESIDE_WEIGHT, _BESIDE_DISCOUNT = 0.2, 4.0, 0.99


@dataclass
class Answers:
    """How long the node takes to answer a verdict with a draft, and how much comes."""

    mean_s: float = 0.005
    deviation_s: float = 0.005
    num_ids: float = 4.0
    ids_per_s: float = 0.0
    """Pace of the ids that follow the first ones; 0 while unknown."""
    num_observed: int = 0
    num_waits: int = 0
    """Times that a step was held back for an answer."""
    num_won: int = 0
    """Times that it came before it was overdue."""
    _waiting: bool = False
    _losses: int = 0

    @property
    def may_wait(self) -> bool:
        """Waiting has not just failed again and again."""
        return self._losses < _PATIENCE_LOSSES

    def wait(self) -> None:
        """A step is held back for this answer."""
        self.num_waits += not self._waiting
        self._waiting = True

    def settle(self, *, answered: bool) -> None:
        """The step is taken; whether the answer is there shows if a wait, or the lack of one, was right."""
        if answered:
            self.num_won += self._waiting
            self._losses = 0
        elif self._waiting:
            self._losses += 1
        self._waiting = False

    def observe(self, latency_s: float, num_ids: int) -> None:
        """Learn from the first frame of a chain: `latency_s` after the verdict that it answers."""
        weight = max(_EWMA, 1 / (self.num_observed + 1))
        self.deviation_s += weight * (abs(latency_s - self.mean_s) - self.deviation_s)
        self.mean_s += weight * (latency_s - self.mean_s)
        if num_ids:
            self.num_ids += weight * (num_ids - self.num_ids)
        self.num_observed += 1

    def observe_pace(self, num_ids: int, interval_s: float) -> None:
        """Learn from a further frame: `num_ids` more, `interval_s` after the one before."""
        if interval_s > 0:
            self.ids_per_s += _EWMA * (num_ids / interval_s - self.ids_per_s)

    @property
    def latest_s(self) -> float:
        """Time after a verdict when an answer is overdue."""
        return self.mean_s + 4 * self.deviation_s

    def num_ids_after(self, spare_s: float) -> float:
        """Ids there `spare_s` after the first answer."""
        return self.num_ids + max(spare_s, 0.0) * self.ids_per_s


@dataclass
class OwnPace:
    """Scheduling state of the hub's own drafter in one session."""

    max_depth: int = 16
    survival: Survival = field(init=False)
    depth: int = 0
    """Positions that its path goes past the node's draft, as of the last plan."""
    width: int = 1
    """Guesses at each position, as of the last plan."""
    _hits: float = 0.0
    _tries: float = 0.0
    _idle: int = 0
    _probe_interval: int = _PROBE_FIRST

    def __post_init__(self) -> None:
        self.survival = Survival(self.max_depth)

    @property
    def beside(self) -> float:
        """Chance that a leaf is right where the path is wrong."""
        return (self._hits + _BESIDE_PRIOR * _BESIDE_WEIGHT) / (self._tries + _BESIDE_WEIGHT)

    @property
    def probing(self) -> bool:
        """It does not pay, but it is time to look again."""
        return self._idle >= self._probe_interval and self.survival.ceiling > 0

    def learn(self, num_tried: int, num_accepted: int) -> None:
        """Learn how many of its path's ids held."""
        if not num_tried:
            return
        self.survival.observe(num_tried, num_accepted)
        in_vain = num_accepted == 0 and self.probing
        self._probe_interval = min(2 * self._probe_interval, _PROBE_LAST) if in_vain else _PROBE_FIRST
        self._idle = 0

    def learn_beside(self, *, hit: bool) -> None:
        """Learn from a leaf where the path was wrong."""
        self._hits = _BESIDE_DISCOUNT * self._hits + hit
        self._tries = _BESIDE_DISCOUNT * self._tries + 1

    def rest(self) -> None:
        """A step is taken without it."""
        self._idle += 1


@dataclass
class Pace:
    """Scheduling state of one session."""

    max_depth: int = 16
    """Most draft ids checked in a step; 0 turns drafting off."""
    survival: Survival = field(init=False)
    answers: Answers = field(default_factory=Answers)
    depth: int = 0
    """Draft ids worth checking in a step, as of the last plan."""
    window: int = 0
    """Drafted ids past the committed length that the node is asked for."""
    asked: int = 0
    """The window that the node was told last; with 0 no draft is to come."""
    most_ahead: int | None = None
    """Largest window that may be asked for; None: any."""
    _probe_interval: int = _PROBE_FIRST
    _until_probe: int = _PROBE_FIRST

    def __post_init__(self) -> None:
        self.survival = Survival(self.max_depth)
        self.restart()

    def restart(self) -> None:
        """Begin anew over another link: what survives of the drafts is still known, how fast they come is not."""
        self.answers = Answers(num_waits=self.answers.num_waits, num_won=self.answers.num_won)
        self.depth = self.survival.reach
        self.window = min(2 * self.depth, self.most_ahead or 2 * self.depth)

    @property
    def probing(self) -> bool:
        """Drafting does not pay, but it is time to look again."""
        return self.depth == 0 and self._until_probe <= 0 and self.survival.ceiling > 0

    @property
    def checked_depth(self) -> int:
        """Most draft ids to check now."""
        return 1 if self.probing else self.depth

    def adjust_depth(self, gains: list[float], price: float) -> None:
        """Move `depth` to where the next position's gain falls below `price` (ids), with hysteresis."""
        self.depth = min(self.depth, len(gains))
        while self.depth < len(gains) and gains[self.depth] > price * _DEEPER:
            self.depth += 1
        while self.depth > 0 and gains[self.depth - 1] < price * _SHALLOWER:
            self.depth -= 1

    def stop_asking(self) -> None:
        """Another drafter earns more without this one's drafts: none are checked or asked for, but for probes."""
        self.depth = self.window = 0

    def adjust_window(self, step_s: float, ids_per_step: float, max_ahead: int) -> None:
        """Ask for what will be checked, past what the hub will have overtaken when it arrives."""
        if self.checked_depth == 0:
            self.window = 0
            return
        overtaken = math.ceil(self.answers.mean_s / max(step_s, 1e-6) * ids_per_step)
        self.window = min(self.checked_depth + overtaken + 1, max_ahead, self.most_ahead or max_ahead)

    def learn(self, num_verified: int, num_accepted: int) -> None:
        """Learn from a verdict."""
        self.survival.observe(num_verified, num_accepted)
        if not num_verified:
            self._until_probe -= self.depth == 0
            return
        in_vain = num_accepted == 0 and self.depth == 0
        self._probe_interval = min(2 * self._probe_interval, _PROBE_LAST) if in_vain else _PROBE_FIRST
        self._until_probe = self._probe_interval

"""Has acceptance changed? A detector over one series of verification steps. Pure: no clock, no I/O.

Drafted ids are checked one after the other up to the first that is refused: a row of trials. Whether their odds have
become `ratio` times what they were is weighed by a chart for each of some ratios, as risk-adjusted CUSUM charts do
(Steiner, Cook, Farewell, Treasure 2000, Biostatistics 1: the risk is here that of the position in the draft, so that
a change of depth is no change). The evidence is summed over all onsets, as Shiryaev and Roberts did (Pollak 1985, Ann.
Statist. 13): while nothing changes its mean grows by one a step, so an alarm within n steps has a probability of at
most n / `RARITY`. Learning what acceptance was adds a little to that; docs/telemetry.md has what was measured.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

RARITY = 60_000
"""Steps between two false alarms, at least, on the average."""
_RATIOS = (0.2, 0.45, 2.2, 5.0)
_EXPECTED_STEPS = 1_000
"""Steps between two true changes, as expected beforehand."""
_LAG = 32
"""The newest steps are not yet part of what was."""
_WARM_TRIALS, _MAX_TRIALS = 200, 4_000
"""Trials that are learned from before anything is judged; past the most, older ones count half."""
_REFRESH_STEPS = 16
_LEAST_RATE = 0.01
_POSITIONS = 4
"""Positions that are told apart; the last stands for all deeper ones."""


@dataclass(frozen=True)
class Change:
    """Acceptance is not what it was."""

    onset: int
    """Step of the series after which it changed, most likely; the first step is 1."""
    seen: int
    """Step at which this was found."""
    before: float
    """Share of checked draft ids that were accepted; those after the first refused one are not counted."""
    after: float
    confidence: float
    """Probability that it has changed, if once in a thousand steps was to be expected."""

    @property
    def size(self) -> float:
        return self.after - self.before


class ChangeDetector:
    """Takes one step after the other; begins anew after each change."""

    def __init__(self, rarity: float = RARITY) -> None:
        self._rarity = rarity
        self.num_steps = 0
        self._restart()

    def _restart(self) -> None:
        self._trials, self._hits = [0.0] * _POSITIONS, [0.0] * _POSITIONS
        self._newest: deque[tuple[int, int]] = deque()
        self._charts = [_Chart(ratio) for ratio in _RATIOS]
        self._until_refresh = 0

    def add(self, num_verified: int, num_accepted: int) -> Change | None:
        """Take a step that checked something; return the change that it makes certain enough."""
        self.num_steps += 1
        self._newest.append((num_verified, num_accepted))
        if len(self._newest) > _LAG:
            self._learn(*self._newest.popleft())
        if sum(self._trials) < _WARM_TRIALS:
            return None
        self._refresh()
        refused = num_accepted < num_verified
        for chart in self._charts:
            chart.add(num_accepted, self.num_steps, refused=refused)
        evidence = sum(chart.evidence for chart in self._charts) / len(self._charts)
        return self._change(evidence) if evidence >= self._rarity else None

    def _learn(self, num_verified: int, num_accepted: int) -> None:
        for position in range(min(num_accepted + 1, num_verified)):
            place = min(position, _POSITIONS - 1)
            self._trials[place] += 1
            self._hits[place] += position < num_accepted
        if sum(self._trials) > _MAX_TRIALS:
            self._trials = [value / 2 for value in self._trials]
            self._hits = [value / 2 for value in self._hits]

    def _refresh(self) -> None:
        self._until_refresh -= 1
        if self._until_refresh > 0:
            return
        self._until_refresh = _REFRESH_STEPS
        whole = self._before()
        rates = [(hits + 8 * whole) / (trials + 8) for hits, trials in zip(self._hits, self._trials, strict=True)]
        for chart in self._charts:
            chart.expect(rates)

    def _before(self) -> float:
        return (sum(self._hits) + 0.5) / (sum(self._trials) + 1)

    def _change(self, evidence: float) -> Change:
        onset = max(self._charts, key=lambda chart: chart.since_onset).onset
        since = list(self._newest)[-max(1, self.num_steps - onset) :]
        hits = sum(num_accepted for _, num_accepted in since)
        trials = sum(min(num_accepted + 1, num_verified) for num_verified, num_accepted in since)
        confidence = evidence / (evidence + _EXPECTED_STEPS)
        change = Change(onset, self.num_steps, self._before(), hits / trials, confidence)
        self._restart()
        return change


class _Chart:
    """One alternative: the odds of acceptance have become `ratio` times what they were."""

    def __init__(self, ratio: float) -> None:
        self._ratio = ratio
        self.evidence = 0.0
        """Likelihood of a change, by that of none, summed over all onsets so far (Shiryaev, Roberts)."""
        self.since_onset = 1.0
        """The same of the likeliest onset (Page 1954)."""
        self.onset = 0

    def expect(self, rates: list[float]) -> None:
        """Compare with these from now on: acceptance at each position."""
        expected = [_bounded(rate) for rate in rates]
        changed = [_bounded(self._ratio * rate / (1 - rate + self._ratio * rate)) for rate in expected]
        self._hit = [after / rate for rate, after in zip(expected, changed, strict=True)]
        self._miss = [(1 - after) / (1 - rate) for rate, after in zip(expected, changed, strict=True)]
        self._hits = [1.0]
        for factor in self._hit[:-1]:
            self._hits.append(self._hits[-1] * factor)

    def add(self, num_accepted: int, step: int, *, refused: bool) -> None:
        """Weigh a step."""
        place = min(num_accepted, _POSITIONS - 1)
        likelihood = self._hits[place]
        if num_accepted > place:
            likelihood *= self._hit[place] ** (num_accepted - place)
        if refused:
            likelihood *= self._miss[place]
        self.evidence = (1 + self.evidence) * likelihood
        self.since_onset *= likelihood
        if self.since_onset <= 1:
            self.since_onset, self.onset = 1.0, step


def _bounded(rate: float) -> float:
    """What is nearly never and what is never are the same scene, and so at the other end."""
    return min(max(rate, _LEAST_RATE), 1 - _LEAST_RATE)

"""Has acceptance changed? A detector over one series of verification steps. Pure: no clock, no I/O.

Drafted ids are checked one after the other up to the first that is refused: a row of trials. Whether their odds have
become `ratio` times what they were is weighed by a chart for each of some ratios, as risk-adjusted CUSUM charts do
(Steiner, Cook, Farewell, Treasure 2000, Biostatistics 1: the risk is here that of the position in the draft, so that
a change of depth is no change). The evidence is summed over all onsets, as Shiryaev and Roberts did (Pollak 1985, Ann.
Statist. 13): while nothing changes its mean grows by one a step, so an alarm within n steps has a probability of at
most n / `RARITY`. Learning what acceptance was adds a little to that; docs/telemetry.md has what was measured.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

RARITY = 50_000
"""Steps between two false alarms, at least, on the average."""
_RATIOS = (0.22, 4.5)
_EXPECTED_STEPS = 1_000
"""Steps between two true changes, as expected beforehand."""
_LAG = 32
"""The newest steps are not yet part of what was."""
_WARM_TRIALS, _MAX_TRIALS = 200, 4_000
"""Trials that are learned from before anything is judged; past the most, older ones count half."""
_REFRESH_STEPS = 16
"""Least time between two looks at what was learned; later it grows with that."""
_LEAST_RATE = 0.01
_POSITIONS = 4
"""Positions that are told apart; the last stands for all deeper ones."""


_Step = tuple[int, bool]
"""Accepted ids, and whether one was refused after them."""


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

    __slots__ = (
        "_before",
        "_charts",
        "_learned",
        "_likelihoods",
        "_newest",
        "_rates",
        "_until_refresh",
        "num_steps",
    )

    def __init__(self) -> None:
        self.num_steps = 0
        self._restart()

    def _restart(self) -> None:
        self._learned: Counter[_Step] = Counter()
        self._newest: deque[_Step] = deque()
        self._charts = _Charts()
        self._likelihoods: dict[_Step, list[float]] = {}
        self._rates: list[float] = []
        self._before = 0.0
        self._until_refresh = _REFRESH_STEPS

    def add(self, num_verified: int, num_accepted: int) -> Change | None:
        """Take a step that checked something; return the change that it makes certain enough."""
        self.num_steps += 1
        step = (num_accepted, num_accepted < num_verified)
        self._newest.append(step)
        if len(self._newest) > _LAG:
            self._learned[self._newest.popleft()] += 1
        self._until_refresh -= 1
        if not self._until_refresh:
            self._refresh()
        if not self._rates:
            return None
        evidence = self._charts.add(self._likelihoods_of(step), self.num_steps)
        return self._change(evidence) if evidence >= RARITY else None

    def _refresh(self) -> None:
        """Take what was learned to be what is expected."""
        self._until_refresh = max(_REFRESH_STEPS, self._learned.total() // 4)
        trials, hits = _tallied(self._learned)
        if sum(trials) < _WARM_TRIALS:
            return
        self._before = (sum(hits) + 0.5) / (sum(trials) + 1)
        self._rates = [
            _bounded((hit + 8 * self._before) / (tried + 8)) for tried, hit in zip(trials, hits, strict=True)
        ]
        self._likelihoods = {}
        if sum(trials) > _MAX_TRIALS:
            self._learned = Counter({step: number // 2 for step, number in self._learned.items()})

    def _likelihoods_of(self, step: _Step) -> list[float]:
        """Return how much likelier a step is by each chart's alternative than by what is expected."""
        if (known := self._likelihoods.get(step)) is None:
            known = self._likelihoods[step] = [_likelihood(step, self._rates, ratio) for ratio in _RATIOS]
        return known

    def _change(self, evidence: float) -> Change:
        onset = self._charts.onset
        since = list(self._newest)[-max(1, self.num_steps - onset) :]
        trials, hits = _tallied(Counter(since))
        confidence = evidence / (evidence + _EXPECTED_STEPS)
        change = Change(onset, self.num_steps, self._before, sum(hits) / sum(trials), confidence)
        self._restart()
        return change


class _Charts:
    """The evidence for each alternative; plain lists, as this is done for each session in each step."""

    __slots__ = ("_evidence", "_onsets", "_since_onset")

    def __init__(self) -> None:
        self._evidence = [0.0] * len(_RATIOS)
        """Likelihood of a change, by that of none, summed over all onsets so far (Shiryaev, Roberts)."""
        self._since_onset = [1.0] * len(_RATIOS)
        """The same of the likeliest onset (Page 1954)."""
        self._onsets = [0] * len(_RATIOS)

    def add(self, likelihoods: list[float], step: int) -> float:
        """Take in a step; return the mean evidence."""
        evidence, since_onset = self._evidence, self._since_onset
        for i, likelihood in enumerate(likelihoods):
            evidence[i] = (1 + evidence[i]) * likelihood
            since_onset[i] *= likelihood
            if since_onset[i] <= 1:
                since_onset[i] = 1.0
                self._onsets[i] = step
        return sum(evidence) / len(evidence)

    @property
    def onset(self) -> int:
        """Of the likeliest alternative."""
        return self._onsets[self._since_onset.index(max(self._since_onset))]


def _tallied(steps: Counter[_Step]) -> tuple[list[int], list[int]]:
    """Return for each position how often an id was checked there, those before it accepted, and how often accepted."""
    trials, hits = [0] * _POSITIONS, [0] * _POSITIONS
    for (num_accepted, refused), number in steps.items():
        for position in range(num_accepted + refused):
            place = min(position, _POSITIONS - 1)
            trials[place] += number
            hits[place] += number * (position < num_accepted)
    return trials, hits


def _likelihood(step: _Step, rates: list[float], ratio: float) -> float:
    """With odds `ratio` times as high a rate p becomes ratio p / (1 - p + ratio p)."""
    num_accepted, refused = step
    likelihood = 1.0
    for position in range(num_accepted + refused):
        rate = rates[min(position, _POSITIONS - 1)]
        changed = _bounded(ratio * rate / (1 - rate + ratio * rate))
        likelihood *= changed / rate if position < num_accepted else (1 - changed) / (1 - rate)
    return likelihood


def _bounded(rate: float) -> float:
    """What is nearly never and what is never are the same scene, and so at the other end."""
    return min(max(rate, _LEAST_RATE), 1 - _LEAST_RATE)

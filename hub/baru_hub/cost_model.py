"""How long a step takes, learned from the steps that were taken."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_FORGETTING = 0.99
"""Weight of an observation per later one: about the last hundred steps count."""
_NOISE = 0.05
"""Spread of a step's time that means nothing, as a share of it."""
_TRUSTED = 8
"""Steps from which on a prediction is believed."""
_CLIP = 0.5
"""A step's surprise counts up to this share of the prediction, so that one hiccup teaches little."""


@dataclass(frozen=True)
class StepShape:
    """What a step's cost depends on."""

    num_rows: int
    """Ids fed: plain ones, draft ones, pieces of prompts."""
    num_sessions: int
    num_context: int
    """Cached ids that the rows attend to, summed over sessions."""

    def features(self) -> NDArray[np.float64]:
        """A step as such, rows past one a session, sessions with one row each, thousands of cached ids."""
        return np.array([1.0, self.num_rows - self.num_sessions, self.num_sessions, self.num_context / 1000])


class CostModel:
    """Seconds of a step as a linear function of rows, sessions and context.

    Least squares over discounted observations, held to a prior where they say nothing: while all steps
    are plain ones, the cost of a draft row stays what the calibration found.
    """

    def __init__(self, prior: tuple[float, float, float, float] = (0.02, 0.0005, 0.0005, 0.0005)) -> None:
        """`prior` is in seconds, one coefficient for each of `StepShape.features`."""
        self._prior = np.maximum(np.array(prior), 1e-7)
        # A prior coefficient may well be off by its own size; an observation by its noise.
        noise_s = _NOISE * float(self._prior @ StepShape(1, 1, 0).features())
        self._ridge = np.diag(np.square(noise_s / self._prior))
        self._moments = np.zeros((4, 4))
        self._sums = np.zeros(4)
        self._weights = self._prior
        self.num_observed = 0

    @classmethod
    def calibrated(cls, observations: Iterable[tuple[StepShape, float]]) -> CostModel:
        """Return a model whose prior is what `observations` (shape, seconds) say."""
        model = cls()
        observed = list(observations)
        for shape, step_s in observed:
            model.observe(shape, step_s)
        calibrated = cls(tuple(float(w) for w in np.maximum(model._weights, 0.0)))  # type: ignore[arg-type]
        for shape, step_s in observed:
            calibrated.observe(shape, step_s)
        calibrated.num_observed = max(calibrated.num_observed, _TRUSTED)  # a hiccup counts no more than later on
        return calibrated

    def predict_s(self, shape: StepShape) -> float:
        """Return the expected time of a step. More work never costs less."""
        return float(np.maximum(self._weights, 0.0) @ shape.features())

    @property
    def row_s(self) -> float:
        """Expected time of one row more."""
        return float(max(self._weights[1], 0.0))

    def observe(self, shape: StepShape, step_s: float) -> None:
        """Learn from a step."""
        features = shape.features()
        if self.num_observed >= _TRUSTED:
            predicted = self.predict_s(shape)
            step_s = min(max(step_s, (1 - _CLIP) * predicted), (1 + _CLIP) * predicted)
        self._moments = _FORGETTING * self._moments + np.outer(features, features)
        self._sums = _FORGETTING * self._sums + features * step_s
        self._weights = np.linalg.solve(self._moments + self._ridge, self._sums + self._ridge @ self._prior)
        self.num_observed += 1

"""Laws computed exactly: what is random branches, and every branch is walked with its probability."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")
H = TypeVar("H", bound=Hashable)


class Dice:
    """Source of all that is random in a run. The same decisions come in the same order, so a run can be repeated."""

    def __init__(self, path: list[tuple[int, int]]) -> None:
        """`path`: what to decide at first, as (option, number of options); it is completed by the run."""
        self.path = path
        self.probability = 1.0
        self._num_done = 0

    def choose(self, weights: Sequence[float]) -> int:
        """Return an index, drawn with these weights; those of weight 0 do not come."""
        options = [i for i, weight in enumerate(weights) if weight > 0]
        if self._num_done == len(self.path):
            self.path.append((0, len(options)))
        place, num_options = self.path[self._num_done]
        assert num_options == len(options), "the run is not a function of its dice"
        self._num_done += 1
        self.probability *= weights[options[place]] / sum(weights)
        return options[place]

    def uniform(self) -> Uniform:
        """Return a number in (0, 1) that is decided as far as it is asked about."""
        return Uniform(self)


class Uniform:
    """Uniform in (0, 1). Each comparison with a number decides which side of it this is on."""

    def __init__(self, dice: Dice) -> None:
        self._dice = dice
        self._low, self._high = 0.0, 1.0

    def __mul__(self, factor: float) -> _Scaled:
        return _Scaled(self, factor)

    __rmul__ = __mul__

    def below(self, limit: float) -> bool:
        """Whether it is less than `limit`; being equal has no probability."""
        if limit <= self._low:
            return False
        if limit >= self._high:
            return True
        inside = (limit - self._low) / (self._high - self._low)
        if self._dice.choose([inside, 1 - inside]) == 0:
            self._high = limit
            return True
        self._low = limit
        return False

    def __lt__(self, limit: float) -> bool:
        return self.below(limit)

    __le__ = __lt__

    def __gt__(self, limit: float) -> bool:
        return not self.below(limit)

    __ge__ = __gt__


class _Scaled:
    """A uniform number times a factor above 0."""

    def __init__(self, uniform: Uniform, factor: float) -> None:
        self._uniform, self._factor = uniform, factor

    def __lt__(self, limit: float) -> bool:
        return self._uniform.below(limit / self._factor)

    __le__ = __lt__

    def __gt__(self, limit: float) -> bool:
        return not self._uniform.below(limit / self._factor)

    __ge__ = __gt__


def outcomes(run: Callable[[Dice], T]) -> Iterator[tuple[float, T]]:
    """Yield each way that `run` may go: its probability, and what it returns."""
    path: list[tuple[int, int]] = []
    while True:
        dice = Dice(path)
        result = run(dice)
        yield dice.probability, result
        while path and path[-1][0] == path[-1][1] - 1:
            path.pop()
        if not path:
            return
        place, num_options = path.pop()
        path.append((place + 1, num_options))


def law(run: Callable[[Dice], H], most: int = 1 << 20) -> dict[H, float]:
    """Return the distribution of what `run` returns; OverflowError when there are more than `most` ways to go."""
    found: dict[H, float] = defaultdict(float)
    for num_ways, (probability, result) in enumerate(outcomes(run)):
        if num_ways == most:
            raise OverflowError(f"more than {most} ways")
        found[result] += probability
    return dict(found)


def distance(one: dict[H, float], other: dict[H, float]) -> float:
    """Return the total variation distance of two distributions."""
    return sum(abs(one.get(key, 0.0) - other.get(key, 0.0)) for key in {*one, *other}) / 2

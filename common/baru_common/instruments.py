"""Instruments as data, and the plain numbers behind them.

The loop only adds to numbers in memory: an OpenTelemetry call takes some 7 us, an addition here a hundredth of that,
and a step of eight sessions makes some hundred. Whoever exports reads them all at one moment (`Ledger.snapshot`).
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

OTHER = "other"
"""Stands for all label values past the limit."""
_MAX_LABEL = 64

Labels = tuple[str, ...]
Cell = list[float]
"""One number, to add to."""
Series = Mapping[Labels, float]


class Kind(Enum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True)
class Instrument:
    """One metric, as OpenTelemetry names it. Prometheus adds the unit and, to a counter, `_total`."""

    name: str
    kind: Kind
    description: str
    labels: tuple[str, ...] = ()
    unit: str = ""
    """"s" for seconds; what is in braces is for people only."""
    buckets: tuple[float, ...] = ()
    """Upper bounds, of a histogram."""
    mirrors: str = ""
    """vLLM's name of the same thing, without suffix."""

    @property
    def exported_name(self) -> str:
        """As Prometheus shows it; a histogram's series have `_bucket`, `_sum` and `_count` after it."""
        unit = "_seconds" if self.unit == "s" else ""
        return self.name + unit + ("_total" if self.kind is Kind.COUNTER else "")

    @property
    def mirrored_name(self) -> str:
        """vLLM's name as Prometheus shows it."""
        return self.mirrors + ("_total" if self.kind is Kind.COUNTER else "")


class Ledger:
    """The numbers of a set of counters. What is done in one `with` block is seen whole by a snapshot, or not at all."""

    def __init__(self, instruments: Sequence[Instrument]) -> None:
        self.instruments = [i for i in instruments if i.kind is Kind.COUNTER]
        self._cells: dict[str, dict[Labels, Cell]] = {i.name: {} for i in self.instruments}
        self._lock = threading.Lock()

    def __enter__(self) -> Ledger:
        self._lock.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def add(self, name: str, amount: float, labels: Labels = ()) -> None:
        """Count; by 0 to make the series known. Within a `with` block only."""
        self.cell(name, labels)[0] += amount

    def cell(self, name: str, labels: Labels = ()) -> Cell:
        """Return the number behind a series, which is known from now on; to be changed within a `with` block only."""
        return self._cells[name].setdefault(labels, [0])

    def snapshot(self) -> dict[str, Series]:
        """Return all counters as of one moment."""
        with self:
            return {name: {labels: cell[0] for labels, cell in cells.items()} for name, cells in self._cells.items()}


class Bounded:
    """The values of one label: what comes from elsewhere must not grow without bound in memory, here or at whoever
    scrapes."""

    def __init__(self, most: int, known: Sequence[str] = ()) -> None:
        self._most = most
        self._known = {value: value for value in known}

    def __call__(self, value: str) -> str:
        """Return the value, or what stands for it."""
        if found := self._known.get(value):
            return found
        label = value if value.isprintable() and len(value) <= _MAX_LABEL else OTHER
        if len(self._known) >= self._most:
            return OTHER
        self._known[value[:_MAX_LABEL]] = label
        return label

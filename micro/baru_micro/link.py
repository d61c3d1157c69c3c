"""The state of the way to a hub: a pure function of what was heard when.

    connecting --heard--> up --quiet--> suspect --silent--> down --attempt--> connecting
                          up <--heard-- suspect
    any of them --broke--> down;  up, suspect --drain--> draining

All of it is in `TRANSITIONS`; docs/link.md draws it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum


class LinkState(Enum):
    """How things stand with a hub."""

    CONNECTING = "connecting"
    """Nothing was heard yet, or not since the last try."""
    UP = "up"
    SUSPECT = "suspect"
    """Nothing was heard for a moment."""
    DOWN = "down"
    DRAINING = "draining"
    """The hub said that it goes down; what runs may end."""


class LinkEvent(Enum):
    """What changes the state."""

    HEARD = "heard"
    """A frame came, whatever it says."""
    QUIET = "quiet"
    """Nothing came for `Timers.suspect_s`."""
    SILENT = "silent"
    """Nothing came for `Timers.down_s`."""
    BROKE = "broke"
    """The transport failed."""
    DRAIN = "drain"
    """The hub said that it goes down."""
    ATTEMPT = "attempt"
    """A connection is tried."""


_S, _E = LinkState, LinkEvent
TRANSITIONS: dict[tuple[LinkState, LinkEvent], LinkState] = {
    (_S.CONNECTING, _E.HEARD): _S.UP,
    (_S.CONNECTING, _E.SILENT): _S.DOWN,
    (_S.CONNECTING, _E.BROKE): _S.DOWN,
    (_S.UP, _E.QUIET): _S.SUSPECT,
    (_S.UP, _E.SILENT): _S.DOWN,
    (_S.UP, _E.BROKE): _S.DOWN,
    (_S.UP, _E.DRAIN): _S.DRAINING,
    (_S.SUSPECT, _E.HEARD): _S.UP,
    (_S.SUSPECT, _E.SILENT): _S.DOWN,
    (_S.SUSPECT, _E.BROKE): _S.DOWN,
    (_S.SUSPECT, _E.DRAIN): _S.DRAINING,
    (_S.DOWN, _E.HEARD): _S.UP,
    (_S.DOWN, _E.ATTEMPT): _S.CONNECTING,
    (_S.DRAINING, _E.SILENT): _S.DOWN,
    (_S.DRAINING, _E.BROKE): _S.DOWN,
}
"""Where each event leads; what is not here changes nothing."""


def after(state: LinkState, event: LinkEvent) -> LinkState:
    """Return the state after an event."""
    return TRANSITIONS.get((state, event), state)


@dataclass(frozen=True)
class Timers:
    """When silence means what, seconds."""

    heartbeat_s: float = 0.2
    """Time between two heartbeats."""
    suspect_s: float = 0.5
    down_s: float = 1.0

    def event_after(self, silence_s: float) -> LinkEvent | None:
        """Return what so long a silence means."""
        if silence_s >= self.down_s:
            return LinkEvent.SILENT
        return LinkEvent.QUIET if silence_s >= self.suspect_s else None


@dataclass
class Link:
    """The way to one hub, as everything that goes over it is heard."""

    timers: Timers = field(default_factory=Timers)
    clock: Callable[[], float] = time.monotonic
    state: LinkState = LinkState.CONNECTING
    since_s: float = 0.0
    """Clock when the state was entered."""
    round_trip_s: float | None = None
    """Latest sample."""
    on_change: Callable[[LinkState], None] = lambda _state: None
    on_sample: Callable[[float], None] = lambda _round_trip_s: None
    _heard_s: float = 0.0

    def __post_init__(self) -> None:
        self.since_s = self._heard_s = self.clock()

    def happen(self, event: LinkEvent) -> None:
        """Take in what happened."""
        if event in (LinkEvent.HEARD, LinkEvent.ATTEMPT):
            self._heard_s = self.clock()
        if (state := after(self.state, event)) is not self.state:
            self.state, self.since_s = state, self.clock()
            self.on_change(state)

    def sample(self, round_trip_s: float) -> None:
        """Take in how long a heartbeat took there and back."""
        self.round_trip_s = round_trip_s
        self.on_sample(round_trip_s)

    def tick(self) -> None:
        """Let silence count, while something is expected to be heard."""
        if event := self.timers.event_after(self.clock() - self._heard_s):
            self.happen(event)

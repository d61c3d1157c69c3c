"""The observer that keeps the node's instruments, and exports the spans of its requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from baru_common import board_state
from baru_common.errors import error_tree
from baru_common.frames import FinishReason
from baru_common.instruments import Bounded, Instrument, Labels, Ledger, Series
from baru_common.telemetry import Span, Telemetry, TelemetryConfig, exporting

from .events import Confirmed, Event, Finish, LinkChanged, Provenance, Retracted, Step
from .instruments import (
    ACCEPTED,
    ATTEMPTS,
    BEGUN,
    DRAFT_TIME,
    DRAFTER,
    ENDED,
    FIRST_TOKEN,
    INSTRUMENTS,
    INTER_TOKEN,
    LINK_STATE,
    OUTAGES,
    PROPOSED,
    ROUND_TRIP,
    ROUND_TRIP_NOW,
    RUNNING,
    SHOWN,
    STEPS,
    VERIFIED,
)
from .link import LinkState
from .observing import NodeObserver, Request
from .request_log import RequestLog

STATES = {
    LinkState.DOWN: 0,
    LinkState.CONNECTING: 1,
    LinkState.SUSPECT: 2,
    LinkState.DRAINING: 3,
    LinkState.UP: 4,
}
"""Values of the gauge, the worst first."""
_MAX_HUBS, _MAX_DRAFTERS = 16, 16
_OK = "ok"


@dataclass
class _Running:
    """What is remembered of a generation while it runs."""

    drafter: str
    began_s: float
    began_ns: int
    shown_s: float = 0.0
    """When ids were shown last."""
    parts: list[Span] = field(default_factory=list)
    away_ns: int = 0
    """Since when no hub answers."""
    num_local: int = 0
    """Ids decoded here since then."""
    outcome: Finish | None = None


class NodeTelemetry(NodeObserver):
    """Keeps the node's counters, gauges and histograms, and exports a span for each generation."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, wall_ns: Callable[[], int] = time.time_ns) -> None:
        self.ledger = Ledger(INSTRUMENTS)
        self._telemetry: Telemetry | None = None
        self._clock, self._wall_ns = clock, wall_ns
        self._hubs, self._drafters = Bounded(_MAX_HUBS), Bounded(_MAX_DRAFTERS)
        self._running: dict[str, _Running] = {}
        self.link_states: dict[Labels, float] = {}
        """As the gauge shows them."""
        self._round_trips_s: dict[Labels, float] = {}
        with self.ledger as ledger:
            for reason in (*(reason.value for reason in FinishReason), "left", *(e.reason for e in error_tree())):
                ledger.add(ENDED.name, 0, (reason,))
            for provenance in ("verified", "provisional", "confirmed", "retracted"):
                ledger.add(SHOWN.name, 0, (provenance,))

    @contextmanager
    def exporting(self, config: TelemetryConfig) -> Iterator[Telemetry]:
        """Export while the block runs."""
        gauges: Mapping[str, Callable[[], Series]] = {
            LINK_STATE.name: lambda: self.link_states,
            ROUND_TRIP_NOW.name: lambda: self._round_trips_s,
            RUNNING.name: lambda: {(): len(self._running)},
            **board_state.gauges(),
        }
        with exporting(
            config, "baru-micro", [*INSTRUMENTS, *board_state.INSTRUMENTS], self.ledger, gauges, {}
        ) as self._telemetry:
            yield self._telemetry

    # -- links

    def hub_known(self, hub: str) -> None:
        """Its series begin."""
        label = self._hubs(hub)
        self.link_states.setdefault((label,), STATES[LinkState.CONNECTING])
        with self.ledger as ledger:
            ledger.add(OUTAGES.name, 0, (label,))
            ledger.add(ATTEMPTS.name, 0, (label, _OK))

    def link_changed(self, hub: str, state: LinkState) -> None:
        """Note it, and count it if the link went down."""
        label = self._hubs(hub)
        self.link_states[label,] = STATES[state]
        if state is LinkState.DOWN:
            with self.ledger as ledger:
                ledger.add(OUTAGES.name, 1, (label,))

    def round_trip(self, hub: str, elapsed_s: float) -> None:
        """Measure it."""
        label = self._hubs(hub)
        self._round_trips_s[label,] = elapsed_s
        self._record(ROUND_TRIP, elapsed_s, {"hub": label})

    # -- generations

    def began(self, request: Request) -> None:
        """Its series begin."""
        drafter = self._drafters(request.drafter or "none")
        self._running[request.trace.span_id] = _Running(drafter, self._clock(), self._wall_ns())
        with self.ledger as ledger:
            for each in ledger.instruments:
                if each.labels == DRAFTER:
                    ledger.add(each.name, int(each is BEGUN), (drafter,))

    def attempted(self, request: Request, hub: str, elapsed_s: float, error: str) -> None:
        """Count it."""
        label, now_ns = self._hubs(hub), self._wall_ns()
        with self.ledger as ledger:
            ledger.add(ATTEMPTS.name, 1, (label, error or _OK))
        begin_ns = now_ns - round(elapsed_s * 1e9)
        self._part(request, Span("attempt", begin_ns, now_ns, {"hub": label}, error))

    def drafted(self, request: Request, num_ids: int, elapsed_s: float) -> None:
        """Count it."""
        drafter = self._running[request.trace.span_id].drafter
        with self.ledger as ledger:
            ledger.add(PROPOSED.name, num_ids, (drafter,))
        self._record(DRAFT_TIME, elapsed_s, {"drafter": drafter})

    def said(self, request: Request, event: Event) -> None:
        """Count what the caller is told."""
        running = self._running[request.trace.span_id]
        if isinstance(event, Step):
            self._step(running, event)
        elif isinstance(event, Confirmed):
            self._shown("confirmed", event.end - event.start)
        elif isinstance(event, Retracted):
            self._shown("retracted", len(event.ids))
        elif isinstance(event, LinkChanged):
            self._link(request, running, event)
        elif isinstance(event, Finish):
            running.outcome = event

    def ended(self, request: Request, error: str) -> None:
        """Count it, and export its spans."""
        running = self._running[request.trace.span_id]
        self._local_part(request, running)
        del self._running[request.trace.span_id]
        finish = running.outcome
        reason = error or (finish.reason.value if finish else "left")
        with self.ledger as ledger:
            ledger.add(ENDED.name, 1, (reason,))
        if self._telemetry and self._telemetry.traces:
            facts: dict[str, str | int] = {"drafter": running.drafter, "reason": reason}
            counts = {"num_emitted": len(finish.ids), "num_steps": finish.usage.num_steps} if finish else {}
            failed = "" if finish or reason == "left" else reason
            whole = Span(
                "generate",
                running.began_ns,
                self._wall_ns(),
                {**facts, "num_prompt": request.num_prompt, **counts},
                failed,
            )
            self._telemetry.trace(whole, running.parts, request.trace, request.parent)

    def _step(self, running: _Running, step: Step) -> None:
        now_s, num_ids = self._clock(), len(step.pieces)
        self._shown(step.provenance.value, num_ids)
        if step.provenance is Provenance.VERIFIED:
            who = (running.drafter,)
            with self.ledger as ledger:
                ledger.add(STEPS.name, 1, who)
                ledger.add(VERIFIED.name, step.stats.num_verified, who)
                ledger.add(ACCEPTED.name, step.stats.num_accepted, who)
        else:
            running.num_local += num_ids
        if running.shown_s:
            self._record(INTER_TOKEN, now_s - running.shown_s)
        else:
            self._record(FIRST_TOKEN, now_s - running.began_s)
        running.shown_s = now_s

    def _link(self, request: Request, running: _Running, change: LinkChanged) -> None:
        if change.state is LinkState.DOWN:
            running.away_ns = running.away_ns or self._wall_ns()
        elif change.state is LinkState.UP:
            self._local_part(request, running)

    def _local_part(self, request: Request, running: _Running) -> None:
        """The time without a hub is over, if there was one."""
        if running.away_ns:
            self._part(request, Span("away", running.away_ns, self._wall_ns(), {"num_provisional": running.num_local}))
        running.away_ns = running.num_local = 0

    def _shown(self, provenance: str, num_ids: int) -> None:
        with self.ledger as ledger:
            ledger.add(SHOWN.name, num_ids, (provenance,))

    def _part(self, request: Request, span: Span) -> None:
        if self._telemetry and self._telemetry.traces:
            self._running[request.trace.span_id].parts.append(span)

    def _record(self, instrument: Instrument, value: float, attributes: Mapping[str, str] | None = None) -> None:
        if self._telemetry:
            self._telemetry.record(instrument.name, value, attributes or {})


class Observing(NamedTuple):
    """What a node's owner needs to have it observed."""

    observers: Sequence[NodeObserver]
    """For `MicroNode.connect`."""
    metrics: str = ""
    """Where it is scraped; empty: nowhere."""
    page: Callable[[], bytes] | None = None
    """What a scrape shows, if that was asked for."""


@contextmanager
def observing(config: TelemetryConfig, *, log: bool = False) -> Iterator[Observing]:
    """Export as `config` says while the block runs, and `log` what happens if that is wanted."""
    observers: list[NodeObserver] = [RequestLog()] if log else []
    if not config.is_on:
        yield Observing(observers)
        return
    keeper = NodeTelemetry()
    with keeper.exporting(config) as telemetry:
        yield Observing([*observers, keeper], telemetry.address, telemetry.page if config.page else None)

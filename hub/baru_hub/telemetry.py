"""The hub's instruments, and the observer that keeps them.

Counters of drafted ids obey `drafted = accepted + rejected + discarded` in every export: an id is counted as drafted
when its fate is known, which is at the step that checks it, or at the end of its session.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

from baru_common.errors import error_tree
from baru_common.instruments import Bounded, Instrument, Labels, Ledger, Series
from baru_common.telemetry import Span, Telemetry, TelemetryConfig, exporting
from baru_common.trace_context import TraceContext

from .instruments import (
    ACCEPTED,
    ACCEPTED_AT,
    BATCH,
    CHECKED_DRAFTS,
    COMPILE_TIME,
    DEPTH,
    DISCARDED,
    DRAFT_TIME,
    DRAFTED,
    DRAINING,
    EMITTED,
    ENDED,
    ERRORS,
    FIRST_TOKEN,
    GUESSED,
    INSTRUMENTS,
    INTER_TOKEN,
    KV_USAGE,
    MAX_SESSIONS,
    OPENED,
    ORPHANED,
    OUTBOX,
    PAGES,
    PREFILLED,
    PREFILLING,
    PREFIX_HITS,
    PREFIX_QUERIES,
    PROMPTED,
    REJECTED,
    RUNNING,
    SESSION_STEPS,
    SESSIONS,
    STALE,
    STEP_TIME,
    STEPS,
    VERIFIED,
    VERIFIED_AT,
    WAITED,
    WAITS,
    WAITS_WON,
    WHO,
)
from .observing import Begin, Ended, HubObserver, Part, Stepped, Who
from .verifier import Verifier

MAX_NODES, MAX_DRAFTERS = 64, 16
"""Nodes and drafter families that have series of their own."""


@dataclass
class _Known:
    """What is remembered of a session while it lives."""

    labels: Labels
    drafter: str
    is_new: bool
    opened_ns: int
    num_verified: int = 0
    num_waits: int = 0
    num_won: int = 0
    first_ns: int = 0
    """When its first ids were decided."""
    own: TraceContext | None = None


class HubTelemetry(HubObserver):
    """Keeps the hub's counters and histograms, and exports a span for each session."""

    def __init__(self, max_depth: int, wall_ns: Callable[[], int] = time.time_ns) -> None:
        self.ledger = Ledger(INSTRUMENTS)
        self._telemetry: Telemetry | None = None
        self._verifier: Verifier | None = None
        self._wall_ns = wall_ns
        self._nodes, self._drafters = Bounded(MAX_NODES), Bounded(MAX_DRAFTERS)
        self._positions = [str(position) for position in range(max_depth + 1)]
        self._known: dict[str, _Known] = {}
        self._model: Mapping[str, str] = {}
        self._begin()

    @contextmanager
    def exporting(self, config: TelemetryConfig, target: str) -> Iterator[str]:
        """Export while the block runs; yield where it is scraped."""
        self._model = {"model": target}
        found = exporting(config, "baru-hub", INSTRUMENTS, self.ledger, self._gauges(), self._model)
        with found as self._telemetry:
            yield self._telemetry.address

    def watch(self, verifier: Verifier) -> None:
        """Read gauges from there."""
        self._verifier = verifier

    def _begin(self) -> None:
        """Make known what may never happen: a rate of nothing is no rate."""
        with self.ledger as ledger:
            for each in (STEPS, WAITED, PREFIX_QUERIES, PREFIX_HITS):
                ledger.add(each.name, 0)
            for begin in Begin:
                ledger.add(OPENED.name, 0, (begin.value,))
            for reason in ("stop", "length", "cancelled", "lost"):
                ledger.add(ENDED.name, 0, (reason,))
            for error in error_tree():
                ledger.add(ERRORS.name, 0, ("open", error.reason))
                ledger.add(ERRORS.name, 0, ("session", error.reason))
            for depth in self._positions:
                ledger.add(DEPTH.name, 0, (depth,))

    # -- what the hub says

    def opened(self, who: Who, begin: Begin, num_known: int, num_cached: int) -> None:
        """Count the stream; a session that is new here gets its series."""
        node, drafter = self._nodes(who.node.rpartition("/")[2]), self._drafters(who.drafter or "none")
        with self.ledger as ledger:
            ledger.add(OPENED.name, 1, (begin.value,))
            if begin is Begin.RESUMED:
                return
            ledger.add(PREFIX_QUERIES.name, num_known)
            ledger.add(PREFIX_HITS.name, num_cached)
            for each in ledger.instruments:
                if each.labels == WHO:
                    ledger.add(each.name, 0, (node, drafter))
                elif each.labels == ("node",):
                    ledger.add(each.name, 0, (node,))
            for position in self._positions[:-1] if who.drafter else ():
                ledger.add(VERIFIED_AT.name, 0, (drafter, position))
                ledger.add(ACCEPTED_AT.name, 0, (drafter, position))
        self._known[who.session_id] = _Known((node, drafter), drafter, begin is Begin.NEW, self._wall_ns())

    def refused(self, reason: str) -> None:
        """Count it."""
        with self.ledger as ledger:
            ledger.add(ERRORS.name, 1, ("open", reason))

    def compiled(self, elapsed_s: float) -> None:
        """Measure it."""
        self._record(COMPILE_TIME, elapsed_s)

    def stepped(self, step: Stepped) -> None:
        """Count a step, and each session's part of it."""
        with self.ledger as ledger:
            ledger.add(STEPS.name, 1)
            ledger.add(WAITED.name, step.waited_s)
            for part in step.parts:
                self._count(ledger, part)
        self._record(STEP_TIME, step.step_s)
        self._record(BATCH, len(step.parts))
        if step.draft_s:
            self._record(DRAFT_TIME, step.draft_s)
        for part in step.parts:
            self._measure(part)

    def _count(self, ledger: Ledger, part: Part) -> None:
        known = self._known[part.who.session_id]
        who = known.labels
        if part.num_prefilled:
            ledger.add(PREFILLED.name, part.num_prefilled, who)
        if not part.num_emitted:
            return
        ledger.add(EMITTED.name, part.num_emitted, who)
        ledger.add(SESSION_STEPS.name, 1, who)
        ledger.add(DEPTH.name, 1, (self._positions[min(part.depth, len(self._positions) - 1)],))
        if part.num_guessed:
            ledger.add(GUESSED.name, part.num_guessed, who)
        if part.num_waits != known.num_waits or part.num_won != known.num_won:
            ledger.add(WAITS.name, part.num_waits - known.num_waits, who)
            ledger.add(WAITS_WON.name, part.num_won - known.num_won, who)
            known.num_waits, known.num_won = part.num_waits, part.num_won
        if part.num_verified:
            self._count_draft(ledger, part, known)

    def _count_draft(self, ledger: Ledger, part: Part, known: _Known) -> None:
        who = known.labels
        known.num_verified += part.num_verified
        ledger.add(CHECKED_DRAFTS.name, 1, who)
        ledger.add(DRAFTED.name, part.num_verified, who)
        ledger.add(VERIFIED.name, part.num_verified, who)
        ledger.add(ACCEPTED.name, part.num_accepted, who)
        ledger.add(REJECTED.name, part.num_verified - part.num_accepted, who)
        for position in self._positions[: min(part.num_verified, len(self._positions) - 1)]:
            ledger.add(VERIFIED_AT.name, 1, (known.drafter, position))
        for position in self._positions[: min(part.num_accepted, len(self._positions) - 1)]:
            ledger.add(ACCEPTED_AT.name, 1, (known.drafter, position))

    def _measure(self, part: Part) -> None:
        known = self._known[part.who.session_id]
        if part.num_emitted and not known.first_ns:
            known.first_ns = self._wall_ns()
            if known.is_new:
                self._record(FIRST_TOKEN, part.interval_s)
        elif part.num_emitted:
            self._record(INTER_TOKEN, part.interval_s)

    def orphaned(self, who: Who) -> None:
        """Count it."""
        with self.ledger as ledger:
            ledger.add(ORPHANED.name, 1, (self._known[who.session_id].labels[0],))

    def ended(self, end: Ended) -> None:
        """Count what is known only now, and export its spans."""
        known = self._known.pop(end.who.session_id)
        usage, who = end.usage, known.labels
        with self.ledger as ledger:
            ledger.add(DRAFTED.name, usage.num_drafted - known.num_verified, who)
            ledger.add(DISCARDED.name, usage.num_discarded, who)
            ledger.add(STALE.name, usage.num_stale_frames, who[:1])
            if known.first_ns and known.is_new:
                ledger.add(PROMPTED.name, usage.num_prompt, who)
            ledger.add(ENDED.name, 1, (end.reason,))
            if end.failed:
                ledger.add(ERRORS.name, 1, ("session", end.reason))
        if self._telemetry and self._telemetry.traces:
            self._trace(self._telemetry, end, known)

    # -- gauges: read when somebody looks, in an exporter's thread

    def _gauges(self) -> Mapping[str, Callable[[], Series]]:
        return {
            SESSIONS.name: self._read(lambda hub: {(state.value,): num for state, num in hub.census().states.items()}),
            RUNNING.name: self._read(lambda hub: {(): hub.census().num_running}),
            PREFILLING.name: self._read(lambda hub: {(): hub.census().num_prefilling}),
            OUTBOX.name: self._read(lambda hub: {(): hub.census().num_unread}),
            MAX_SESSIONS.name: self._read(lambda hub: {(): hub.describe().limits.max_sessions}),
            DRAINING.name: self._read(lambda hub: {(): int(hub.draining)}),
            PAGES.name: self._read(lambda hub: {(k,): n for k, n in hub.pool.census().items()} if hub.pool else {}),
            KV_USAGE.name: self._read(lambda hub: {(): hub.pool.num_held / hub.pool.num_pages} if hub.pool else {}),
        }

    def _read(self, look: Callable[[Verifier], Series]) -> Callable[[], Series]:
        return lambda: look(self._verifier) if self._verifier else {}

    # -- where it goes

    def _record(self, instrument: Instrument, value: float) -> None:
        if self._telemetry:
            self._telemetry.record(instrument.name, value, self._model)

    def _trace(self, telemetry: Telemetry, end: Ended, known: _Known) -> None:
        """One span for the session, one for its prompt, one for all its steps."""
        now_ns, usage, parent = self._wall_ns(), end.usage, end.who.trace
        counts = {name: getattr(usage, name) for name in _USAGE}
        attributes = {
            "session.id": end.who.session_id,
            "node": known.labels[0],
            "drafter": known.drafter,
            **self._model,
        }
        whole = Span(
            "session", known.opened_ns, now_ns, {**attributes, "reason": end.reason}, end.reason if end.failed else ""
        )
        first_ns = known.first_ns or now_ns
        parts = [Span("prefill", known.opened_ns, first_ns, {"num_prompt": usage.num_prompt})]
        if known.first_ns:
            parts.append(Span("decode", first_ns, now_ns, counts))
        telemetry.trace(whole, parts, replace(TraceContext.new(), trace_id=parent.trace_id), parent)


_USAGE = ("num_emitted", "num_steps", "num_drafted", "num_accepted", "num_rejected", "num_discarded", "num_guessed")

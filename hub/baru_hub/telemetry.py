"""The hub's instruments, and the observer that keeps them.

Counters of drafted ids obey `drafted = accepted + rejected + discarded` in every export: an id is counted as drafted
when its fate is known, which is at the step that checks it, or at the end of its session.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

from baru_common import board_state
from baru_common.errors import error_tree
from baru_common.frames import FinishReason
from baru_common.instruments import Bounded, Instrument, Labels, Ledger, Series
from baru_common.telemetry import Span, Telemetry, TelemetryConfig, exporting
from baru_common.trace_context import TraceContext

from .instruments import (
    ACCEPTED,
    ACCEPTED_AT,
    BATCH,
    CHANGES,
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
)
from .live import ABANDONED
from .observing import Begin, Ended, HubObserver, Part, Stepped, Who
from .scene import SceneChange, Scope
from .verifier import Verifier

MAX_NODES, MAX_DRAFTERS = 64, 16
"""Nodes and drafter families that have series of their own."""


class _Cells:
    """The numbers that sessions of one node with one drafter add to."""

    def __init__(self, ledger: Ledger, node: str, drafter: str, positions: list[str]) -> None:
        who = (node, drafter)
        self.emitted, self.guessed = ledger.cell(EMITTED.name, who), ledger.cell(GUESSED.name, who)
        self.steps, self.checked = ledger.cell(SESSION_STEPS.name, who), ledger.cell(CHECKED_DRAFTS.name, who)
        self.drafted, self.verified = ledger.cell(DRAFTED.name, who), ledger.cell(VERIFIED.name, who)
        self.accepted, self.rejected = ledger.cell(ACCEPTED.name, who), ledger.cell(REJECTED.name, who)
        self.discarded, self.stale = ledger.cell(DISCARDED.name, who), ledger.cell(STALE.name, (node,))
        self.prefilled, self.prompted = ledger.cell(PREFILLED.name, who), ledger.cell(PROMPTED.name, who)
        self.waits, self.waits_won = ledger.cell(WAITS.name, who), ledger.cell(WAITS_WON.name, who)
        self.lost = ledger.cell(ORPHANED.name, (node,))
        for scope in Scope:
            for direction in ("up", "down"):
                ledger.cell(CHANGES.name, (node, scope.value, direction))
        self.verified_at = [ledger.cell(VERIFIED_AT.name, (drafter, position)) for position in positions]
        self.accepted_at = [ledger.cell(ACCEPTED_AT.name, (drafter, position)) for position in positions]


@dataclass
class _Known:
    """What is remembered of a session while it lives."""

    cells: _Cells
    labels: Labels
    is_new: bool
    opened_ns: int
    num_verified: int = 0
    num_waits: int = 0
    num_won: int = 0
    first_ns: int = 0
    """When its first ids were decided."""


class HubTelemetry(HubObserver):
    """Keeps the hub's counters and histograms, and exports a span for each session."""

    def __init__(self, max_depth: int, wall_ns: Callable[[], int] = time.time_ns) -> None:
        self.ledger = Ledger(INSTRUMENTS)
        self._telemetry: Telemetry | None = None
        self._verifier: Verifier | None = None
        self._wall_ns = wall_ns
        self._nodes, self._drafters = Bounded(MAX_NODES), Bounded(MAX_DRAFTERS)
        self._positions = [str(position) for position in range(max_depth)]
        self._cells: dict[Labels, _Cells] = {}
        self._turn = 0
        self._known: dict[str, _Known] = {}
        self._model: Mapping[str, str] = {}
        self._begin(max_depth)

    @contextmanager
    def exporting(self, config: TelemetryConfig, target: str) -> Iterator[str]:
        """Export while the block runs; yield where it is scraped."""
        self._model = {"model": target}
        instruments, gauges = [*INSTRUMENTS, *board_state.INSTRUMENTS], {**self._gauges(), **board_state.gauges()}
        found = exporting(config, "baru-hub", instruments, self.ledger, gauges, self._model)
        with found as self._telemetry:
            yield self._telemetry.address

    def watch(self, verifier: Verifier) -> None:
        """Read gauges from there."""
        self._verifier = verifier

    def _begin(self, max_depth: int) -> None:
        """Make known what may never happen: a rate of nothing is no rate."""
        with self.ledger as ledger:
            for each in (PREFIX_QUERIES, PREFIX_HITS):
                ledger.add(each.name, 0)
            for begin in Begin:
                ledger.add(OPENED.name, 0, (begin.value,))
            for reason in (*(reason.value for reason in FinishReason), ABANDONED):
                ledger.add(ENDED.name, 0, (reason,))
            for error in error_tree():
                ledger.add(ERRORS.name, 0, ("open", error.reason))
                ledger.add(ERRORS.name, 0, ("session", error.reason))
            self._depths = [ledger.cell(DEPTH.name, (str(depth),)) for depth in range(max_depth + 1)]
            self._steps, self._waited = ledger.cell(STEPS.name), ledger.cell(WAITED.name)

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
            if (node, drafter) not in self._cells:
                positions = self._positions if who.drafter else []
                self._cells[node, drafter] = _Cells(ledger, node, drafter, positions)
        cells = self._cells[node, drafter]
        self._known[who.session_id] = _Known(cells, (node, drafter), begin is Begin.NEW, self._wall_ns())

    def refused(self, reason: str) -> None:
        """Count it."""
        with self.ledger as ledger:
            ledger.add(ERRORS.name, 1, ("open", reason))

    def compiled(self, elapsed_s: float) -> None:
        """Measure it."""
        self._record(COMPILE_TIME, elapsed_s)

    def stepped(self, step: Stepped) -> None:
        """Count a step, and each session's part of it."""
        with self.ledger:
            self._steps[0] += 1
            self._waited[0] += step.waited_s
            for part in step.parts:
                self._count(part, self._known[part.who.session_id])
        self._record(STEP_TIME, step.step_s)
        self._record(BATCH, len(step.parts))
        if step.draft_s:
            self._record(DRAFT_TIME, step.draft_s)
        decided = [part for part in step.parts if part.num_emitted]
        for part in decided:
            self._note_first(part, self._known[part.who.session_id])
        if decided:  # one session a step, in turn: a value costs as much as all the counting
            self._turn += 1
            part = decided[self._turn % len(decided)]
            if part.num_steps > 1:
                self._record(INTER_TOKEN, part.interval_s)

    def _count(self, part: Part, known: _Known) -> None:
        cells = known.cells
        cells.prefilled[0] += part.num_prefilled
        if not part.num_emitted:
            return
        cells.emitted[0] += part.num_emitted
        cells.guessed[0] += part.num_guessed
        cells.steps[0] += 1
        self._depths[min(part.depth, len(self._depths) - 1)][0] += 1
        cells.waits[0] += part.num_waits - known.num_waits
        cells.waits_won[0] += part.num_won - known.num_won
        known.num_waits, known.num_won = part.num_waits, part.num_won
        if part.num_verified:
            known.num_verified += part.num_verified
            cells.checked[0] += 1
            cells.drafted[0] += part.num_verified
            cells.verified[0] += part.num_verified
            cells.accepted[0] += part.num_accepted
            cells.rejected[0] += part.num_verified - part.num_accepted
            for cell in cells.verified_at[: part.num_verified]:
                cell[0] += 1
            for cell in cells.accepted_at[: part.num_accepted]:
                cell[0] += 1

    def _note_first(self, part: Part, known: _Known) -> None:
        if not known.first_ns:
            known.first_ns = self._wall_ns()
            if known.is_new:
                self._record(FIRST_TOKEN, part.interval_s)

    def changed(self, found: SceneChange) -> None:
        """Count it."""
        direction = "up" if found.change.size > 0 else "down"
        with self.ledger as ledger:
            ledger.add(CHANGES.name, 1, (self._nodes(found.who.node.rpartition("/")[2]), found.scope.value, direction))

    def orphaned(self, who: Who) -> None:
        """Count it."""
        with self.ledger:
            self._known[who.session_id].cells.lost[0] += 1

    def ended(self, end: Ended) -> None:
        """Count what is known only now, and export its spans."""
        known = self._known.pop(end.who.session_id)
        usage, cells = end.usage, known.cells
        with self.ledger as ledger:
            cells.drafted[0] += usage.num_drafted - known.num_verified
            cells.discarded[0] += usage.num_discarded
            cells.stale[0] += usage.num_stale_frames
            if known.first_ns and known.is_new:
                cells.prompted[0] += usage.num_prompt
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
            "drafter": known.labels[1],
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

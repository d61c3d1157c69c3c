"""What `baru-hub top` shows: one view of a kit, from what its programs show to be scraped. Pure.

The metrics are what every operator can reach anyway, a hub needs to do nothing more for it, and two readings give
rates over any time. Sessions one by one are not among them, on purpose: their number has no bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from baru_common.scrape import Scrape

SCHEMA = 1
"""Of `--json`; another number when a name or a meaning changes, not when one is added."""
_LINK_STATES = {0: "down", 1: "connecting", 2: "suspect", 3: "draining", 4: "up"}


@dataclass(frozen=True)
class HubRow:
    """One hub. What is None could not be told: nothing happened yet, or there was one reading only."""

    address: str
    target: str
    draining: bool
    sessions: Mapping[str, int]
    """By state: attached, unread, orphaned, ending."""
    max_sessions: int
    prefilling_sessions: int
    """Those of them whose ids are not all fed yet; a hub has no other queue: what it has no room for it refuses."""
    refused: int
    """So far."""
    waiting_frames: int
    """For their nodes to read them."""
    pages: Mapping[str, int]
    kv_cache_usage: float
    tokens_per_s: float | None
    steps_per_s: float | None
    batch: float | None
    """Mean number of sessions in a step."""
    step_ms: float | None
    depth: float | None
    """Mean of the most draft ids that plans would check."""
    waits_per_s: float | None
    waits_won: float | None
    """Share of them."""
    changes: int
    """Changes of acceptance so far."""


@dataclass(frozen=True)
class NodeRow:
    """What one node with one drafter gets from one hub."""

    node: str
    drafter: str
    hub: str
    tokens: int
    """So far."""
    tokens_per_s: float | None
    acceptance: float | None
    """Accepted of the checked ids."""
    mean_accepted_length: float | None
    streams_lost: int


@dataclass(frozen=True)
class LinkRow:
    """A node's link to a hub, as the node sees it."""

    node: str
    """Where it is scraped."""
    hub: str
    state: str
    round_trip_ms: float | None
    outages: int


@dataclass(frozen=True)
class View:
    """All of it."""

    hubs: Sequence[HubRow]
    nodes: Sequence[NodeRow]
    links: Sequence[LinkRow]
    schema: int = SCHEMA


@dataclass(frozen=True)
class Readings:
    """Two of one program; the rates are of the time between them, or where there is one only, means of all so far."""

    now: Scrape
    before: Scrape | None = None

    @property
    def elapsed_s(self) -> float | None:
        return self.now.at_s - self.before.at_s if self.before else None

    def grown(self, name: str, *labels: str) -> dict[tuple[str, ...], float]:
        """Return by how much counters grew; a program that was restarted begins anew."""
        before = self.before.values(name, *labels) if self.before else {}
        pairs = ((key, value, before.get(key, 0.0)) for key, value in self.now.values(name, *labels).items())
        return {key: value - known if value >= known else value for key, value, known in pairs}

    def total(self, name: str) -> float:
        """The same, summed."""
        return sum(self.grown(name).values())

    def mean(self, histogram: str) -> float | None:
        """Return the mean of what a histogram took in."""
        return _ratio(self.total(f"{histogram}_sum"), self.total(f"{histogram}_count"))

    def rate(self, amount: float) -> float | None:
        """Return it for each second between the readings."""
        return _ratio(amount, self.elapsed_s or 0.0)


def view(programs: Iterable[Readings]) -> View:
    """Return what these programs show, hubs and nodes in any order."""
    all_readings = list(programs)
    hubs = [each for each in all_readings if "baru_hub_steps_total" in each.now.series]
    nodes = [each for each in all_readings if "baru_node_running_generations" in each.now.series]
    return View(
        [_hub(each) for each in hubs],
        sorted((row for each in hubs for row in _nodes(each)), key=lambda row: (row.hub, row.node, row.drafter)),
        [row for each in nodes for row in _links(each)],
    )


def _hub(readings: Readings) -> HubRow:
    now = readings.now
    targets = {labels.get("model", "") for labels, _ in now.series["baru_hub_steps_total"]}
    grown = readings.grown("baru_hub_depth_steps_total", "depth").items()
    depths = {int(depth): number for (depth,), number in grown if depth.isdecimal()}
    waits = readings.total("baru_hub_waits_total")
    step_s = readings.mean("baru_hub_step_time_seconds")
    return HubRow(
        address=now.address,
        target=", ".join(sorted(targets)),
        draining=bool(now.value("baru_hub_draining")),
        sessions={state: int(number) for (state,), number in now.values("baru_hub_sessions", "state").items()},
        max_sessions=int(now.value("baru_hub_max_sessions")),
        prefilling_sessions=int(now.value("baru_hub_prefilling_sessions")),
        refused=int(now.values("baru_hub_errors_total", "at").get(("open",), 0)),
        waiting_frames=int(now.value("baru_hub_outbox_frames")),
        pages={state: int(number) for (state,), number in now.values("baru_hub_pages", "state").items()},
        kv_cache_usage=now.value("baru_hub_kv_cache_usage"),
        tokens_per_s=readings.rate(readings.total("baru_hub_emitted_tokens_total")),
        steps_per_s=readings.rate(readings.total("baru_hub_steps_total")),
        batch=readings.mean("baru_hub_batch_size"),
        step_ms=None if step_s is None else step_s * 1e3,
        depth=_ratio(sum(depth * number for depth, number in depths.items()), sum(depths.values())),
        waits_per_s=readings.rate(waits),
        waits_won=_ratio(readings.total("baru_hub_waits_won_total"), waits),
        changes=int(now.value("baru_hub_acceptance_changes_total")),
    )


def _nodes(readings: Readings) -> Iterable[NodeRow]:
    who = ("node", "drafter")
    totals = readings.now.values("baru_hub_emitted_tokens_total", *who)
    emitted, steps, verified, accepted = (
        readings.grown(f"baru_hub_{name}_total", *who)
        for name in ("emitted_tokens", "session_steps", "verified_tokens", "accepted_tokens")
    )
    lost = readings.now.values("baru_hub_streams_lost_total", "node")
    for node, drafter in totals:
        key = (node, drafter)
        yield NodeRow(
            node,
            drafter,
            readings.now.address,
            tokens=int(totals[key]),
            tokens_per_s=readings.rate(emitted[key]),
            acceptance=_ratio(accepted.get(key, 0.0), verified.get(key, 0.0)),
            mean_accepted_length=_ratio(emitted[key], steps.get(key, 0.0)),
            streams_lost=int(lost.get((node,), 0)),
        )


def _links(readings: Readings) -> Iterable[LinkRow]:
    now = readings.now
    round_trips_s = now.values("baru_node_link_round_trip_seconds", "hub")
    outages = now.values("baru_node_link_outages_total", "hub")
    for (hub,), state in now.values("baru_node_link_state", "hub").items():
        round_trip_s = round_trips_s.get((hub,))
        yield LinkRow(
            now.address,
            hub,
            _LINK_STATES.get(int(state), "unknown"),
            None if round_trip_s is None else round_trip_s * 1e3,
            int(outages.get((hub,), 0)),
        )


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None

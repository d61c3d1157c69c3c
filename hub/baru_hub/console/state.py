"""What the console knows: the near past of sessions and nodes, bounded, without a word of what they say."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from baru_hub.observing import Begin, Ended, HubObserver, Part, Stepped, Who
from baru_hub.scene import SceneChange, Scope

MAX_NODES, MAX_SESSIONS, MAX_EVENTS = 32, 32, 24
"""Of more the longest silent, or the oldest, are left out."""
MAX_CELLS = 160
"""Ids of a session that are shown, the latest ones."""
HISTORY_S, SPAN_S = 300, 5
"""Length of the plots, and of what alerts are judged by; time between two points."""
_CUTS_S = 900
_ENOUGH_S = 240
"""Acceptance is not judged before a node has drafted for so long."""
_TARGET_FAILS = ("ENGINE_FAILURE", "PROTOCOL_VIOLATION")


@dataclass
class Tally:
    """What a node got within a second, or a few."""

    at_s: int
    tokens: int = 0
    steps: int = 0
    verified: int = 0
    accepted: int = 0

    def add(self, part: Part) -> None:
        """Count a step's part in."""
        self.tokens += part.num_emitted
        self.steps += 1
        self.verified += part.num_verified
        self.accepted += part.num_accepted

    @classmethod
    def total(cls, tallies: Iterable[Tally]) -> Tally:
        """Return the sum of them."""
        total = cls(0)
        for tally in tallies:
            total.tokens += tally.tokens
            total.steps += tally.steps
            total.verified += tally.verified
            total.accepted += tally.accepted
        return total

    @property
    def acceptance(self) -> float | None:
        """Share of the drafts that was right; None without any."""
        return self.accepted / self.verified if self.verified else None

    @property
    def length(self) -> float | None:
        """Mean accepted length; None without a step."""
        return self.tokens / self.steps if self.steps else None


@dataclass
class Node:
    """One node, all its sessions together."""

    name: str
    drafter: str = ""
    seen_s: float = 0.0
    """When it was last heard of."""
    num_lost: int = 0
    """Streams of it that broke."""
    cuts: deque[float] = field(default_factory=lambda: deque(maxlen=64))
    """When they did, the latest."""
    seconds: deque[Tally] = field(default_factory=lambda: deque(maxlen=8))
    spans: deque[Tally] = field(default_factory=lambda: deque(maxlen=HISTORY_S // SPAN_S))

    def count(self, part: Part, now_s: float) -> None:
        """Add a step's part to the present second and span."""
        for tallies, length_s in ((self.seconds, 1), (self.spans, SPAN_S)):
            at_s = int(now_s // length_s) * length_s
            if not tallies or tallies[-1].at_s != at_s:
                tallies.append(Tally(at_s))
            tallies[-1].add(part)

    def recent(self, now_s: float) -> Tally:
        """Return what came in the last five whole seconds, the present one left out."""
        return Tally.total(tally for tally in self.seconds if now_s - 6 <= tally.at_s < int(now_s))

    def told(self, now_s: float, sessions: list[Session]) -> dict[str, Any]:
        """Return it for the page."""
        recent = self.recent(now_s)
        return {
            "name": self.name,
            "drafter": self.drafter,
            "link": _link(sessions),
            "sessions": len(sessions),
            "idle_s": round(now_s - self.seen_s, 1),
            "lost": self.num_lost,
            "cuts_15min": sum(now_s - at_s <= _CUTS_S for at_s in self.cuts),
            "tokens_per_s": recent.tokens / 5,
            "acceptance": recent.acceptance,
            "acceptance_5min": self._acceptance(now_s),
            "length": recent.length,
            "plot": list(self._plot(now_s)),
        }

    def _plot(self, now_s: float) -> Iterator[tuple[float, float, float | None]]:
        """Yield points: when, tokens/s, acceptance. The present span is told as soon as it says something."""
        for span in self.spans:
            past_s = now_s - span.at_s
            if 1 <= past_s <= HISTORY_S:
                right = span.acceptance
                yield (
                    -round(max(0.0, past_s - SPAN_S), 1),
                    round(span.tokens / min(past_s, SPAN_S), 1),
                    None if right is None else round(right, 3),
                )

    def _acceptance(self, now_s: float) -> float | None:
        """Return what was right of the drafts of the last five minutes; None while that is too little to judge by."""
        drafted = [span for span in self.spans if span.verified and now_s - span.at_s <= HISTORY_S]
        total = Tally.total(drafted)
        if total.verified < HISTORY_S or now_s - drafted[0].at_s <= _ENOUGH_S:
            return None
        return total.acceptance


def _link(sessions: list[Session]) -> str:
    if not sessions:
        return "idle"
    return "up" if any(session.attached for session in sessions) else "cut"


@dataclass
class Session:
    """One session."""

    session_id: str
    node: str
    began_s: float
    attached: bool = True
    end: str = ""
    ended_s: float = 0.0
    tokens: int = 0
    steps: int = 0
    depth: int = 0
    cells: deque[str] = field(default_factory=lambda: deque(maxlen=MAX_CELLS))
    """A letter for each id: accepted, guessed, correction, bonus, plain; x is a refused draft id."""

    def count(self, part: Part) -> None:
        """Take in its part of a step."""
        if not part.num_emitted:
            return
        refused = part.num_verified - part.num_accepted
        self.tokens += part.num_emitted
        self.steps += 1
        self.depth = part.depth
        self.cells.extend("a" * part.num_accepted + "x" * refused + "g" * part.num_guessed)
        if part.num_emitted > part.num_accepted + part.num_guessed:
            self.cells.append("c" if refused else "b" if part.num_verified else "p")

    def told(self, now_s: float) -> dict[str, Any]:
        """Return it for the page."""
        return {
            "id": self.session_id[:8],
            "node": self.node,
            "state": self.end or ("up" if self.attached else "cut"),
            "age_s": round((self.ended_s or now_s) - self.began_s, 1),
            "tokens": self.tokens,
            "length": self.tokens / self.steps if self.steps else None,
            "depth": self.depth,
            "cells": "".join(self.cells),
        }


@dataclass(frozen=True)
class Happened:
    """Something that a person may want to know later."""

    at_s: float
    what: str


class ConsoleState(HubObserver):
    """Keeps it. In the loop's thread only."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._nodes: OrderedDict[str, Node] = OrderedDict()
        self._sessions: dict[str, Session] = {}
        self._ended: deque[Session] = deque(maxlen=8)
        self._happened: deque[Happened] = deque(maxlen=MAX_EVENTS)
        self._steps: deque[tuple[float, float, int]] = deque(maxlen=200)
        """When, how long, how many sessions."""
        self._refused: deque[tuple[float, str]] = deque(maxlen=200)
        self._failed: deque[tuple[float, str]] = deque(maxlen=200)

    # -- what the hub says

    def opened(self, who: Who, begin: Begin, num_known: int, num_cached: int) -> None:  # noqa: ARG002
        """A stream has a session."""
        now_s, node = self._clock(), self._node(who)
        known = self._sessions.get(who.session_id)
        if known and not known.attached:
            self._note(f"{node.name} is back, and goes on")
        if known:
            known.attached = True
            return
        if begin is Begin.REBUILT:
            self._note(f"{node.name} is back; its session was made again")
        if len(self._sessions) < 4 * MAX_SESSIONS:
            self._sessions[who.session_id] = Session(who.session_id, node.name, now_s)

    def refused(self, reason: str) -> None:
        """A session was not admitted."""
        self._refused.append((self._clock(), reason))

    def stepped(self, step: Stepped) -> None:
        """A step was taken."""
        now_s = self._clock()
        self._steps.append((now_s, step.step_s, len(step.parts)))
        for part in step.parts:
            self._node(part.who).count(part, now_s)
            if session := self._sessions.get(part.who.session_id):
                session.count(part)

    def orphaned(self, who: Who) -> None:
        """A stream broke."""
        node = self._node(who)
        node.num_lost += 1
        node.cuts.append(self._clock())
        if session := self._sessions.get(who.session_id):
            session.attached = False
        self._note(f"the link to {node.name} is cut")

    def ended(self, end: Ended) -> None:
        """A session is over."""
        if session := self._sessions.pop(end.who.session_id, None):
            session.end, session.ended_s = end.reason, self._clock()
            self._ended.append(session)
        if end.reason in _TARGET_FAILS:
            self._failed.append((self._clock(), end.reason))
        if end.failed:
            self._note(f"a session of {self._node(end.who).name} failed: {end.reason}")

    def changed(self, found: SceneChange) -> None:
        """Acceptance has changed somewhere; a session's change is shown as its node's is, so only these are noted."""
        if found.scope is Scope.NODE:
            change = found.change
            self._note(f"acceptance of {_name(found.who)} went from {change.before:.0%} to {change.after:.0%}")

    def _node(self, who: Who) -> Node:
        name = _name(who)
        if (node := self._nodes.get(name)) is None:
            node = self._nodes[name] = Node(name)
            if len(self._nodes) > MAX_NODES:
                self._nodes.popitem(last=False)
        self._nodes.move_to_end(name)
        node.drafter, node.seen_s = who.drafter, self._clock()
        return node

    def _note(self, what: str) -> None:
        self._happened.append(Happened(self._clock(), what))

    # -- what the page is told

    def told(self) -> dict[str, Any]:
        """Return all of it, ready for JSON."""
        now_s = self._clock()
        sessions = list(islice(self._sessions.values(), MAX_SESSIONS))
        by_node: dict[str, list[Session]] = {}
        for session in self._sessions.values():
            by_node.setdefault(session.node, []).append(session)
        steps = [(step_s, num) for at_s, step_s, num in self._steps if now_s - at_s <= 5]
        return {
            "nodes": [node.told(now_s, by_node.get(node.name, [])) for _, node in sorted(self._nodes.items())],
            "sessions": [session.told(now_s) for session in sessions],
            "num_sessions": len(self._sessions),
            "ended": [session.told(now_s) for session in reversed(self._ended)],
            "events": [{"ago_s": round(now_s - h.at_s, 1), "what": h.what} for h in reversed(self._happened)],
            "acceptance": Tally.total(node.recent(now_s) for node in self._nodes.values()).acceptance,
            "step_ms": 1e3 * sum(step_s for step_s, _ in steps) / len(steps) if steps else None,
            "batch": sum(num for _, num in steps) / len(steps) if steps else None,
            "slow_step_s": _high([step_s for _, step_s, _ in self._steps]),
            "refused": _recent(self._refused, now_s),
            "failed": _recent(self._failed, now_s),
        }


def _recent(noted: Iterable[tuple[float, str]], now_s: float) -> dict[str, int]:
    """Return how often each reason was noted in the last five minutes."""
    return dict(Counter(reason for at_s, reason in noted if now_s - at_s <= HISTORY_S))


def _high(times_s: list[float]) -> float:
    """Return the 95th percentile; 0 of fewer than twenty."""
    return sorted(times_s)[int(0.95 * len(times_s))] if len(times_s) >= 20 else 0.0


def _name(who: Who) -> str:
    return who.node.rpartition("/")[2]

"""Scene stability: a change of acceptance in a session, or over all sessions of a node, is an event.

It says that what is asked or answered has become another, or the drafter: an observation first. Whether drafting
follows it is a setting (`HubConfig.follow_changes`).
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from enum import Enum

from .observing import Ended, HubObserver, Stepped, Who
from .stability import Change, ChangeDetector

MAX_NODES = 256
"""Nodes, with each of their drafters, that are followed; of more, those that were silent longest are forgotten."""

_log = logging.getLogger(__name__)


class Scope(Enum):
    SESSION = "session"
    NODE = "node"
    """All sessions of one node with one drafter, step by step as they come."""


@dataclass(frozen=True)
class SceneChange:
    """Acceptance has changed, and where."""

    scope: Scope
    who: Who
    """The session; of a node's change the one in whose step it was found."""
    change: Change


class SceneStability(HubObserver):
    """Follows acceptance, and tells `listeners` when it changes."""

    def __init__(self, listeners: Iterable[Callable[[SceneChange], None]] = ()) -> None:
        self.listeners = [log_change, *listeners]
        self._sessions: dict[str, ChangeDetector] = {}
        self._nodes: OrderedDict[tuple[str, str], ChangeDetector] = OrderedDict()

    def stepped(self, step: Stepped) -> None:
        """Look at the parts that checked drafted ids."""
        for part in step.parts:
            if part.num_verified:
                found = (
                    (Scope.SESSION, self._of_session(part.who).add(part.num_verified, part.num_accepted)),
                    (Scope.NODE, self._of_node(part.who).add(part.num_verified, part.num_accepted)),
                )
                for scope, change in found:
                    if change:
                        self._tell(SceneChange(scope, part.who, change))

    def ended(self, end: Ended) -> None:
        """Forget the session."""
        self._sessions.pop(end.who.session_id, None)

    def _of_session(self, who: Who) -> ChangeDetector:
        if (detector := self._sessions.get(who.session_id)) is None:
            detector = self._sessions[who.session_id] = ChangeDetector()
        return detector

    def _of_node(self, who: Who) -> ChangeDetector:
        key = (who.node, who.drafter)
        if (detector := self._nodes.get(key)) is None:
            detector = self._nodes[key] = ChangeDetector()
            if len(self._nodes) > MAX_NODES:
                self._nodes.popitem(last=False)
        self._nodes.move_to_end(key)
        return detector

    def _tell(self, change: SceneChange) -> None:
        for listener in self.listeners:
            listener(change)


def log_change(found: SceneChange) -> None:
    """Log it."""
    facts = {"scope": found.scope.value, "node": found.who.node, "drafter": found.who.drafter}
    if found.scope is Scope.SESSION:
        facts |= {"session_id": found.who.session_id, "trace_id": found.who.trace.trace_id}
    _log.info("acceptance changed", extra={**facts, **asdict(found.change), "size": found.change.size})

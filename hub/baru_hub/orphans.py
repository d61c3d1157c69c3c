"""Sessions whose node is gone: how long they run on, and which of them must go. Pure decisions; the clock is told.

An orphan decodes on, so that what it decided meanwhile is ready when its node comes back. What it may take is bounded:

    time      it is dropped once `orphan_grace_s` are over
    ids       it stops decoding after `orphan_tokens`, and keeps its place
    memory    all orphans together hold at most `orphan_bytes`; the oldest is dropped first
    places    whoever needs its place or its pages gets them; the oldest is dropped first
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class LinkPolicy:
    """What the hub makes of links that break or stall."""

    node_silence_s: float = 3.0
    """A node that has sent heartbeats and then nothing for so long is gone."""
    slow_reader_s: float = 10.0
    """A node that leaves its frames unread for so long is gone."""
    orphan_grace_s: float = 30.0
    """Time that a session is kept without its node; 0: it ends with its stream."""
    orphan_tokens: int = 512
    """Ids that it decodes meanwhile; the step that reaches them may go past them."""
    orphan_bytes: int = 512 << 20
    """Memory that all of them may hold."""


@dataclass(frozen=True)
class Orphan:
    """A session without its node."""

    since_s: float
    num_committed: int
    """When the node went."""
    num_bytes: int

    def may_decode(self, num_committed: int, policy: LinkPolicy) -> bool:
        """True while it has ids left to decode."""
        return num_committed - self.num_committed < policy.orphan_tokens


def by_age(orphans: Mapping[str, Orphan]) -> list[str]:
    """Return their names, oldest first."""
    return sorted(orphans, key=lambda name: orphans[name].since_s)


def to_drop(orphans: Mapping[str, Orphan], policy: LinkPolicy, now_s: float) -> list[str]:
    """Return whose grace is over, and then the oldest as long as those that are left hold too much."""
    num_bytes = sum(orphan.num_bytes for orphan in orphans.values())
    dropped = []
    for name in by_age(orphans):
        if now_s - orphans[name].since_s < policy.orphan_grace_s and num_bytes <= policy.orphan_bytes:
            break
        dropped.append(name)
        num_bytes -= orphans[name].num_bytes
    return dropped

"""What the hub tells those who look at it: plain facts, one call a step, after what they are about has been done.

An observer derives from `HubObserver` and takes what interests it. It is called in the loop's thread: it should be
quick. It never changes what the loop does: what it raises is logged, and it is given values only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import NamedTuple

from baru_common.frames import Usage
from baru_common.trace_context import TraceContext


class Who(NamedTuple):
    """A session, as observers know it."""

    session_id: str
    node: str
    """Identity of its node."""
    drafter: str
    """Family of its node's drafter; empty: it has none."""
    trace: TraceContext
    """The request that it serves; the span is the node's, or where none came, the hub's own."""


class Begin(Enum):
    """How a stream got its session."""

    NEW = "new"
    RESUMED = "resumed"
    """It was still here."""
    REBUILT = "rebuilt"
    """Made again from the node's ids."""


class Part(NamedTuple):
    """One session's part of a step."""

    who: Who
    num_prefilled: int
    """Committed ids that were fed before the last one: a prompt's, or those of a session that was made again."""
    depth: int
    """Draft ids of the node that it could have checked at most, as planned."""
    num_verified: int
    num_accepted: int
    num_guessed: int
    num_emitted: int
    """0 for a piece of a prompt with more to come."""
    num_steps: int
    """Of the session so far, this one included."""
    num_waits: int
    """Times that a step was held back for its node so far, and how often that was right."""
    num_won: int
    interval_s: float
    """Since its ids before, or since it began."""


class Stepped(NamedTuple):
    """One verification step."""

    parts: Sequence[Part]
    step_s: float
    draft_s: float
    """Time of the hub's own drafter before it."""
    waited_s: float
    """Time that the step was held back for drafts."""


class Ended(NamedTuple):
    """A session gave its memory back."""

    who: Who
    reason: str
    """`stop`, `length` or `cancelled`; the reason of an error; `ABANDONED`: its node did not come back."""
    failed: bool
    """The reason is an error's."""
    usage: Usage


class Place(Enum):
    """Where a session that holds memory stands."""

    ATTACHED = "attached"
    """Its node is there."""
    UNREAD = "unread"
    """It is paused: its node leaves its frames unread."""
    ORPHANED = "orphaned"
    """Its node is gone."""
    ENDING = "ending"
    """There is nothing left to decide."""


class Census(NamedTuple):
    """The sessions at a moment."""

    states: Mapping[Place, int]
    num_running: int
    """Those that the next step may have."""
    num_prefilling: int
    """Those of them whose ids are not all fed yet."""
    num_unread: int
    """Frames that wait for nodes to read them."""


class HubObserver:
    """Takes nothing."""

    def opened(self, who: Who, begin: Begin, num_known: int, num_cached: int) -> None:
        """A stream has a session: `num_known` ids stand, the cache had `num_cached` of them."""

    def refused(self, reason: str) -> None:
        """A session was not admitted, for the error of this reason."""

    def compiled(self, elapsed_s: float) -> None:
        """A grammar was compiled."""

    def stepped(self, step: Stepped) -> None:
        """A step was taken and committed."""

    def orphaned(self, who: Who) -> None:
        """A session's stream broke; it runs on."""

    def ended(self, end: Ended) -> None:
        """A session is over."""

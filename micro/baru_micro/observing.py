"""What the node tells those who look at it: plain facts, after what they are about has been done.

An observer derives from `NodeObserver` and takes what interests it. It is called in the loop's thread: it should be
quick. It never changes what the loop does: what it raises is logged, and it is given values only.
"""

from __future__ import annotations

from typing import NamedTuple

from baru_common.trace_context import TraceContext

from .events import Event
from .link import LinkState


class Request(NamedTuple):
    """One generation, as observers know it."""

    trace: TraceContext
    """The span is the node's own; hubs are told it."""
    drafter: str
    """Family of the drafter; empty: there is none."""
    num_prompt: int
    parent: TraceContext | None = None
    """The caller's span, if it has one."""


class NodeObserver:
    """Takes nothing."""

    def hub_known(self, hub: str) -> None:
        """The node may use the hub at this address."""

    def link_changed(self, hub: str, state: LinkState) -> None:
        """The link to a hub is in another state."""

    def round_trip(self, hub: str, elapsed_s: float) -> None:
        """A heartbeat came back."""

    def began(self, request: Request) -> None:
        """A generation begins."""

    def attempted(self, request: Request, hub: str, elapsed_s: float, error: str) -> None:
        """A hub was asked to take the session; `error`: the reason that it did not, empty if it did."""

    def drafted(self, request: Request, num_ids: int, elapsed_s: float) -> None:
        """The drafter was asked, and proposed so many ids."""

    def said(self, request: Request, event: Event) -> None:
        """The caller is told this."""

    def ended(self, request: Request, error: str) -> None:
        """A generation is over; `error`: the reason that it did not finish well, `left`: its caller went away."""

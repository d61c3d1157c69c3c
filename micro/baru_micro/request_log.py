"""A log line for each generation that begins and ends, and each change of a link; never what was asked or said."""

from __future__ import annotations

import logging
from dataclasses import asdict

from .events import Event, Finish, Started
from .link import LinkState
from .observing import NodeObserver, Request

_log = logging.getLogger(__name__)


class RequestLog(NodeObserver):
    """Writes them."""

    def link_changed(self, hub: str, state: LinkState) -> None:
        """The link to a hub is in another state."""
        _log.info("link changed", extra={"hub": hub, "state": state.value})

    def attempted(self, request: Request, hub: str, elapsed_s: float, error: str) -> None:
        """A hub was asked to take the session."""
        facts = {"hub": hub, "elapsed_s": round(elapsed_s, 4), "result": error or "ok"}
        _log.info("hub asked", extra={"trace_id": request.trace.trace_id, **facts})

    def said(self, request: Request, event: Event) -> None:
        """It begins, or has finished."""
        named = {"trace_id": request.trace.trace_id}
        if isinstance(event, Started):
            facts = {"session_id": event.session_id, "drafter": request.drafter, "num_prompt": event.num_prompt}
            _log.info("generation began", extra={**named, **facts})
        elif isinstance(event, Finish):
            counts = {name: value for name, value in asdict(event.usage).items() if name != "seed"}
            _log.info("generation finished", extra={**named, "reason": event.reason.value, **counts})

    def ended(self, request: Request, error: str) -> None:
        """It did not finish."""
        if error:
            _log.info("generation ended", extra={"trace_id": request.trace.trace_id, "reason": error})

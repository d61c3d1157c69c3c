"""A log line for each session that begins and ends: who, why, how much, and never what it said."""

from __future__ import annotations

import logging
from dataclasses import asdict

from .observing import Begin, Ended, HubObserver, Who

_log = logging.getLogger(__name__)


class SessionLog(HubObserver):
    """Writes them."""

    def opened(self, who: Who, begin: Begin, num_known: int, num_cached: int) -> None:
        """A stream has a session."""
        facts = {"begin": begin.value, "num_known": num_known, "num_cached": num_cached}
        _log.info("session opened", extra={**_named(who), **facts})

    def refused(self, reason: str) -> None:
        """A session was not admitted."""
        _log.info("session refused", extra={"reason": reason})

    def orphaned(self, who: Who) -> None:
        """A stream broke."""
        _log.info("session orphaned", extra=_named(who))

    def ended(self, end: Ended) -> None:
        """A session is over."""
        counts = {name: value for name, value in asdict(end.usage).items() if name != "seed"}
        _log.info("session ended", extra={**_named(end.who), "reason": end.reason, **counts})


def _named(who: Who) -> dict[str, str]:
    return {"session_id": who.session_id, "trace_id": who.trace.trace_id, "node": who.node, "drafter": who.drafter}

"""Which of what was decided stands: for those who show text that they cannot take back, or want to tell it apart."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import zip_longest

from .events import Confirmed, Event, Finish, Piece, Provenance, Retracted, Step


@dataclass
class Standing:
    """The pieces of one answer that can be shown for good, as events come."""

    keeps: bool
    """Provisional ids stand."""
    held: list[Piece] = field(default_factory=list)
    """Provisional: the target may yet say otherwise."""

    def take(self, event: Event) -> list[Piece]:
        """Return what stands since this event."""
        if isinstance(event, Step):
            if event.provenance is Provenance.VERIFIED or self.keeps:
                return list(event.pieces)
            self.held += event.pieces
        elif isinstance(event, Confirmed):
            confirmed = self.held[: event.end - event.start]
            del self.held[: event.end - event.start]
            return [replace(piece, logprobs=found) for piece, found in zip_longest(confirmed, event.logprobs)]
        elif isinstance(event, Retracted):
            self.held.clear()
        elif isinstance(event, Finish):
            held, self.held = self.held, []
            return held
        return []

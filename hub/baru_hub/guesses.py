"""What the hub's own drafter says. Plain values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Guesses:
    """What the hub's drafter makes of a session."""

    path: Sequence[int]
    """Begins with the node's draft, if there is one, and goes on from it."""
    leaves: Sequence[Sequence[int]] = ()
    """Other paths, each of which leaves `path` with its last id."""

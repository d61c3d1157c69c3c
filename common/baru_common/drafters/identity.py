"""Which drafter this is, exactly: its measured acceptance holds for these weights and what runs them, and no others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from baru_common.fingerprint import fingerprint


@dataclass(frozen=True)
class DrafterIdentity:
    """A drafter's model. All empty: it has none, it repeats what it has seen."""

    model: str = ""
    """For people."""
    digest: bytes = b""
    """32 bytes over weights, configuration, numeric type and vocabulary."""
    engine: str = ""
    """What runs it, with versions, numeric type and device."""


@runtime_checkable
class HasModel(Protocol):
    """A drafter with weights of its own."""

    def identify(self) -> DrafterIdentity:
        """Say which; may read the whole weights once, so call it in a thread."""


def identity_of(drafter: object) -> DrafterIdentity:
    """Return the identity of a drafter, or of what has weights in a cascade."""
    parts: Sequence[object] = getattr(drafter, "parts", (drafter,))
    found = [part.identify() for part in parts if isinstance(part, HasModel)]
    if len(found) < 2:
        return found[0] if found else DrafterIdentity()
    return DrafterIdentity(
        "+".join(one.model for one in found),
        fingerprint({str(i): one.digest.hex() for i, one in enumerate(found)}),
        "+".join(one.engine for one in found),
    )

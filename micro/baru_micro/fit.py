"""Whether hub, node and drafter fit each other: asked when connecting, and by the doctor."""

from __future__ import annotations

import asyncio
from enum import Enum

from baru_common.drafters import Drafter, TextDrafter
from baru_common.errors import Incompatible, ProtocolMismatch
from baru_common.frames import PROTOCOL_REVISION, HubDescription, TrafficShape
from baru_common.tokens import Tokenizer


class Shaping(Enum):
    """Whether streams are of constant size and pace, so that they say nothing of what is said (docs/security.md)."""

    AUTO = "auto"
    """If the hub requires it."""
    ON = "on"
    """Always; a hub that cannot is not used."""
    OFF = "off"
    """Never; a hub that requires it is not used."""


def agreed_shape(wanted: Shaping, offered: TrafficShape | None) -> TrafficShape | None:
    """Return how streams are to look, None: as they come. Incompatible when the two sides do not agree."""
    if wanted is Shaping.ON and offered is None:
        raise Incompatible(
            "this node shapes its traffic, and the hub does not", hint="start the hub with --traffic-shape allowed"
        )
    if wanted is Shaping.OFF and offered and offered.required:
        raise Incompatible("the hub requires that traffic is shaped", hint="let the node do so: --traffic-shape auto")
    shaped = wanted is Shaping.ON or (offered is not None and wanted is Shaping.AUTO and offered.required)
    return offered if shaped else None


def require_protocol(hub: HubDescription) -> None:
    """Raise ProtocolMismatch unless the hub speaks this node's revision."""
    if hub.protocol_revision != PROTOCOL_REVISION:
        raise ProtocolMismatch(
            f"the hub speaks protocol revision {hub.protocol_revision}, this node {PROTOCOL_REVISION}",
            hint="use the same release on hub and node",
        )


async def fitted(found: Drafter | TextDrafter | None, target: Tokenizer) -> Drafter | None:
    """Return the drafter that drafts for targets with this tokenizer.

    VocabularyMismatch unless its ids mean what the target's do; some have none of their own.
    """
    drafter = await asyncio.to_thread(found.bound, target) if isinstance(found, TextDrafter) else found
    if drafter and drafter.vocabulary:
        drafter.vocabulary.require_same(target.vocabulary, ours=f"the {drafter.family} drafter", theirs="the target")
    return drafter

"""Whether hub, node and drafter fit each other: asked when connecting, and by the doctor."""

from __future__ import annotations

import asyncio

from baru_common.drafters import Drafter, TextDrafter
from baru_common.errors import ProtocolMismatch
from baru_common.frames import PROTOCOL_REVISION, HubDescription
from baru_common.tokens import Tokenizer


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

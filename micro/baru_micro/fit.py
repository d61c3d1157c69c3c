"""Whether hub, node and drafter fit each other: asked when connecting, and by the doctor."""

from __future__ import annotations

from baru_common.drafters import Drafter
from baru_common.errors import ProtocolMismatch
from baru_common.frames import PROTOCOL_REVISION, HubDescription
from baru_common.tokens import Vocabulary


def require_protocol(hub: HubDescription) -> None:
    """Raise ProtocolMismatch unless the hub speaks this node's revision."""
    if hub.protocol_revision != PROTOCOL_REVISION:
        raise ProtocolMismatch(
            f"the hub speaks protocol revision {hub.protocol_revision}, this node {PROTOCOL_REVISION}",
            hint="use the same release on hub and node",
        )


def require_vocabulary(drafter: Drafter | None, target: Vocabulary) -> None:
    """Raise VocabularyMismatch unless the drafter's ids mean what the target's do; some have none of their own."""
    if drafter and drafter.vocabulary:
        drafter.vocabulary.require_same(target, ours=f"the {drafter.family} drafter", theirs="the target")

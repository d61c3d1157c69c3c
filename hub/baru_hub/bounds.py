"""Keeping sessions within the posture, and telling their nodes when it has changed."""

from __future__ import annotations

from collections.abc import Collection

from baru_common.frames import Posture, PostureChange

from .live import Resident
from .posture_keeper import PostureKeeper


def keep_within(residents: Collection[Resident], keeper: PostureKeeper) -> None:
    """Bound the drafting of everyone with work to do; nodes hear of it where that is new."""
    working = [resident for resident in residents if resident.has_work]
    for resident in working:
        before, posture = resident.posture, obey(resident, keeper, len(working))
        if posture != before and resident.stream:
            resident.stream.send(PostureChange(posture))


def obey(resident: Resident, keeper: PostureKeeper, batch: int) -> Posture:
    """Bound one session's drafting, while `batch` sessions are decoded; return what its node may do."""
    posture = keeper.for_node(resident.tier, resident.drafter, batch)
    drafts = resident.drafter is not None and resident.stream is not None
    resident.state.obey(posture, keeper.own_depth(batch), drafts=drafts)
    resident.posture = posture
    return posture

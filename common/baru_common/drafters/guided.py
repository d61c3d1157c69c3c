"""Any drafter, kept to the request's grammar: what it may not say is cut off, what must come is said for it."""

from __future__ import annotations

from collections.abc import Sequence

from baru_common.sampling import SamplingContext
from baru_common.sampling.guide import Guide

from .base import Drafter, DraftStream, Proposal


def started(drafter: Drafter, sampling: SamplingContext | None) -> DraftStream:
    """Begin a session of a drafter, kept to the request's grammar."""
    stream = drafter.start(sampling)
    if sampling and sampling.guide and drafter.vocabulary is None:
        return GuidedStream(stream, sampling.guide, sampling.num_prompt)
    return stream


class GuidedStream:
    """Wraps the stream of a drafter that repeats ids and knows nothing of grammars."""

    def __init__(self, stream: DraftStream, guide: Guide, num_prompt: int) -> None:
        self._stream = stream
        self._cursor = guide.start()
        self._num_prompt = num_prompt

    def propose(self, ids: Sequence[int], num_committed: int, max_tokens: int) -> Proposal:
        """See `DraftStream`. Ids that the grammar leaves no choice about come first: they cost nothing."""
        if not self._cursor.seek(ids[self._num_prompt :]):
            return Proposal()
        if forced := self._cursor.forced()[:max_tokens]:
            return Proposal(forced)
        proposal = self._stream.propose(ids, num_committed, max_tokens)
        return Proposal(self._cursor.allowed(proposal.ids))

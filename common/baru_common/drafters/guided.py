"""Any drafter, as a generation uses it: kept to the request's grammar, and no reason to fail when memory runs out."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from baru_common.out_of_memory import is_out_of_memory
from baru_common.sampling import SamplingContext
from baru_common.sampling.guide import Guide

from .base import Drafter, DraftStream, Proposal

_log = logging.getLogger(__name__)


def started(drafter: Drafter, sampling: SamplingContext | None) -> DraftStream:
    """Begin a session of a drafter, kept to the request's grammar. When it runs out of memory it drafts no more in this
    session, which is logged: another drafter beside it, or the hub alone, goes on."""
    stream: DraftStream = SparingStream(drafter.start(sampling), drafter.family)
    if sampling and sampling.guide and drafter.vocabulary is None:
        return GuidedStream(stream, sampling.guide, sampling.num_prompt)
    return stream


class SparingStream:
    """Wraps the stream of any drafter: it ends where memory does."""

    def __init__(self, stream: DraftStream, family: str) -> None:
        self._stream: DraftStream | None = stream
        self._family = family

    def propose(self, ids: Sequence[int], num_committed: int, max_tokens: int) -> Proposal:
        """See `DraftStream`."""
        if self._stream is None:
            return Proposal()
        try:
            return self._stream.propose(ids, num_committed, max_tokens)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            _log.warning("the %s drafter has run out of memory; this answer goes on without it", self._family)
            self._stream = None  # what it holds is free again
            return Proposal()


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

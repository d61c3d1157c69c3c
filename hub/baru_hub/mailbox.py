"""What a node has drafted and the hub has not yet used. The newest chain wins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from baru_common.errors import InvalidDraft
from baru_common.frames import Draft
from baru_common.sampling import SparseProbs


@dataclass
class Mailbox:
    """One session's newest draft chain, kept from the part on that may still be of use.

        overtaken   [base, start)               agreed with what was committed there, and forgotten
        tail        [start, end)                not yet compared; end is where the chain ends so far

    Everything that arrives is checked here: a frame breaks no other session, and nothing is kept beyond
    `max_ahead` ids.
    """

    vocabulary_size: int
    max_ahead: int
    chain_id: int = 0
    num_drafted: int = 0
    """Draft ids received, stale frames left out."""
    num_stale_frames: int = 0
    num_provisional: int = 0
    """Leading ids of the tail that the node decoded by itself while the link was down; picked, not drawn."""
    _alive: bool = False
    _start: int = 0
    _tail: list[int] = field(default_factory=list)
    _probs: list[SparseProbs] = field(default_factory=list)
    """What each id of the tail after the provisional ones was drawn from; empty when they were picked, not drawn."""
    _nothing_at: int = -1

    def restart(self, base: int, provisional: Sequence[int] = ()) -> None:
        """Begin anew for another stream, whose chains count from 1 again.

        What the node decoded by itself after the ids committed at `base` is the start of chain 1. It may be longer
        than any draft: whoever admits the session bounds it.
        """
        self.chain_id, self._alive = (1, True) if provisional else (0, False)
        self._start, self._tail, self._probs = base, list(provisional), []
        self.num_provisional, self._nothing_at = len(provisional), -1
        self.num_drafted += len(provisional)

    def put(self, draft: Draft, num_committed: int) -> None:
        """Take in a frame. A late or repeated one is counted and dropped; a wrong one is InvalidDraft."""
        self._check(draft, num_committed)
        if draft.chain_id > self.chain_id:
            if draft.offset:
                raise InvalidDraft(f"chain {draft.chain_id} starts at offset {draft.offset}, must start at 0")
            self.chain_id, self._alive, self._start, self._tail = draft.chain_id, True, draft.base, []
            self._probs, self.num_provisional = [], 0
        elif draft.chain_id < self.chain_id or (self._alive and draft.token_ids and draft.end <= self._end):
            self.num_stale_frames += 1
            return
        if self._alive:
            self._extend(draft)
        else:  # the chain was refuted, and the node does not know yet
            self.num_drafted += len(draft.token_ids)

    def usable(self, committed: Sequence[int]) -> Sequence[int]:
        """Return the drafted ids that continue `committed`; none when the chain contradicts it."""
        overtaken = min(max(len(committed) - self._start, 0), len(self._tail))
        if self._tail[:overtaken] != list(committed[self._start : self._start + overtaken]):
            self.refute()
        else:
            del self._tail[:overtaken], self._probs[: max(overtaken - self.num_provisional, 0)]
            self.num_provisional = max(self.num_provisional - overtaken, 0)
            self._start += overtaken
        return self._tail if self._start == len(committed) else ()

    def draft_probs(self, num_ids: int) -> tuple[SparseProbs, ...]:
        """Return what each of the first `num_ids` usable ids was drawn from; none when they were picked.

        Provisional ids and others are never asked for together.
        """
        return () if self.num_provisional else tuple(self._probs[:num_ids])

    def refute(self) -> None:
        """Drop the chain: what it still holds was drawn past an id that does not stand."""
        self._alive, self._tail, self._probs, self.num_provisional = False, [], [], 0

    def answered(self, committed: Sequence[int]) -> bool:
        """True when the node has sent something for `committed`, be it that it has nothing."""
        return bool(self.usable(committed)) or self._nothing_at >= len(committed)

    @property
    def _end(self) -> int:
        return self._start + len(self._tail)

    def _extend(self, draft: Draft) -> None:
        if draft.start > self._end:
            raise InvalidDraft(f"chain {draft.chain_id} has a gap: {self._end} was next, {draft.start} came")
        if (
            draft.token_ids
            and len(self._tail) > self.num_provisional
            and bool(draft.draft_probs) is not bool(self._probs)
        ):
            raise InvalidDraft(f"chain {draft.chain_id} has draft_probs for some of its ids only")
        num_known = self._end - draft.start
        fresh = draft.token_ids[num_known:]
        self._tail.extend(fresh)
        self._probs.extend(draft.draft_probs[num_known:])
        self.num_drafted += len(fresh)
        if not draft.token_ids:
            self._nothing_at = draft.end

    def _check(self, draft: Draft, num_committed: int) -> None:
        if draft.chain_id < 1:
            raise InvalidDraft("chain_id is 0, chains count from 1")
        if draft.base > num_committed:
            raise InvalidDraft(f"base is {draft.base}, only {num_committed} ids are committed")
        if draft.end > num_committed + self.max_ahead:
            raise InvalidDraft(
                f"the draft reaches position {draft.end}, at most {num_committed + self.max_ahead} is allowed",
                hint="draft no further than max_draft_ahead past the committed length",
            )
        if len(draft.draft_probs) not in (0, len(draft.token_ids)):
            raise InvalidDraft(f"{len(draft.draft_probs)} draft_probs came for {len(draft.token_ids)} draft ids")
        for token, probs in zip(draft.token_ids, draft.draft_probs, strict=False):
            if token not in probs.ids:
                raise InvalidDraft(f"draft id {token} has no probability in its draft_probs")
        for token in (*draft.token_ids, *(i for probs in draft.draft_probs for i in probs.ids)):
            if token >= self.vocabulary_size:
                raise InvalidDraft(
                    f"draft id {token} is outside the vocabulary of {self.vocabulary_size}",
                    details={"token_id": str(token)},
                )

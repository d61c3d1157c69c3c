"""Several drafters in order of trust: the first with anything to say says it.

What repeats is cheapest and surest to look up; where nothing matches, a model drafts on. Blocks and single ids mix
within a chain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baru_common.sampling import SamplingContext, SparseProbs
from baru_common.tokens import Tokenizer, Vocabulary

from .base import Drafter, DraftStream, Proposal, TextDrafter
from .guided import started


@dataclass(frozen=True)
class CascadeDrafter:
    """Drafters for the same target, the first choice first."""

    parts: tuple[Drafter, ...]

    @property
    def family(self) -> str:
        return "+".join(part.family for part in self.parts)

    @property
    def vocabulary(self) -> Vocabulary | None:
        return next((part.vocabulary for part in self.parts if part.vocabulary), None)

    @property
    def tokens_per_call(self) -> int:
        return max(part.tokens_per_call for part in self.parts)

    @property
    def blocking(self) -> bool:
        return any(part.blocking for part in self.parts)

    def start(self, sampling: SamplingContext | None = None) -> CascadeStream:
        """See `Drafter.start`. Each part is kept to the request's grammar by itself."""
        streams = [(started(part, sampling), part.tokens_per_call) for part in self.parts]
        return CascadeStream(streams, drawn=bool(sampling and sampling.params.by_rejection))


@dataclass(frozen=True)
class UnboundCascade:
    """A cascade with parts that draft from texts."""

    parts: tuple[Drafter | TextDrafter, ...]

    def bound(self, tokenizer: Tokenizer) -> CascadeDrafter:
        """See `TextDrafter`."""
        bound = (part.bound(tokenizer) if isinstance(part, TextDrafter) else part for part in self.parts)
        return CascadeDrafter(tuple(bound))


@dataclass
class CascadeStream:
    """One session's streams."""

    streams: Sequence[tuple[DraftStream, int]]
    drawn: bool
    """Every id of a chain must have been drawn: one that was picked is drawn from a distribution of one."""

    def propose(self, ids: Sequence[int], num_committed: int, max_tokens: int) -> Proposal:
        """See `DraftStream`."""
        for stream, most in self.streams:
            proposal = stream.propose(ids, num_committed, min(max_tokens, most))
            if proposal.ids:
                return _drawn(proposal) if self.drawn and not proposal.draft_probs else proposal
        return Proposal()


def _drawn(proposal: Proposal) -> Proposal:
    return Proposal(proposal.ids, [SparseProbs.of([(token, 1.0)]) for token in proposal.ids])

"""A causal language model with a tokenizer of its own, as a drafter: target and drafter meet in text.

After universal assisted decoding (transformers, 2024; Timor et al., "Lossless Speculative Decoding Algorithms for
Heterogeneous Vocabularies", 2025: string-level exact match), which aligns ids behind a window of ten; here bytes are
aligned, at places where tokenizers split anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from baru_common.model_files import LoadedModel
from baru_common.sampling import SamplingContext
from baru_common.tokens import Tokenizer

from .base import DraftStream, Proposal
from .causal_lm import CausalLmDrafter
from .identity import DrafterIdentity
from .retokenised import OpenText, RetokenisedContext, Retokeniser

_MOST_OWN = 4
"""Ids that are drafted at most for each one that was asked for."""


@dataclass(frozen=True)
class ForeignLmDrafter:
    """A loaded model, to be bound to a target's tokenizer."""

    drafter: CausalLmDrafter

    @classmethod
    def load(cls, spec: str, *, dtype: str = "bfloat16", device: str = "cpu") -> ForeignLmDrafter:
        """Load a local model as a drafter; ModelFileError as `model_files.load`."""
        return cls(CausalLmDrafter.load(spec, dtype=dtype, device=device))

    def bound(self, tokenizer: Tokenizer) -> BoundForeignLmDrafter:
        """See `TextDrafter`; Incompatible for a tokenizer whose ids have no bytes of their own."""
        retokeniser = Retokeniser(tokenizer, Tokenizer(self.drafter.loaded.bundle))
        _ = retokeniser.controls  # read both vocabularies now, not in the first session
        return BoundForeignLmDrafter(self.drafter, retokeniser)


@dataclass(frozen=True)
class BoundForeignLmDrafter:
    """Drafts greedily, whatever the request says: another tokenizer has other ids to draw from."""

    drafter: CausalLmDrafter
    retokeniser: Retokeniser

    family = "foreign_lm"
    vocabulary = None
    tokens_per_call = 4
    blocking = True

    def identify(self) -> DrafterIdentity:
        """See `HasModel`."""
        return self.drafter.identify()

    def start(self, sampling: SamplingContext | None = None) -> ForeignLmStream:
        """See `Drafter.start`."""
        return ForeignLmStream(
            self.retokeniser,
            self.drafter.loaded,
            self.drafter.start(),
            eos_ids=sampling.eos_ids if sampling else (),
            stop_ids=sampling.stop_ids if sampling else frozenset(),
        )


@dataclass
class ForeignLmStream:
    """One session. What it drafts goes on past what it proposes, and is what the next call begins with."""

    retokeniser: Retokeniser
    loaded: LoadedModel
    stream: DraftStream
    """The drafter's own, in its own ids."""
    eos_ids: tuple[int, ...]
    stop_ids: frozenset[int]
    _context: RetokenisedContext = field(init=False)
    _known: list[int] = field(default_factory=list)
    """The drafter's ids of an earlier context, then how it went on: greedily, so the same from anywhere on the way."""
    _num_read: int = 0
    """Ids of `_known` that were context."""

    def __post_init__(self) -> None:
        self._context = RetokenisedContext(self.retokeniser)

    def propose(self, ids: Sequence[int], num_committed: int, max_tokens: int) -> Proposal:
        """See `DraftStream`. Proposes nothing past the drafter's own context, or past what ends the output."""
        if len(ids) > num_committed and ids[-1] in self.stop_ids:
            return Proposal()
        context = self._context.follow(ids)
        num_own = len(context.own_ids)
        if not num_own:
            return Proposal()
        if num_own < self._num_read or self._known[:num_own] != context.own_ids:
            self._known, self._num_read = context.own_ids, num_own
        while True:
            found, is_over = self._written(context, self._known[num_own:])
            is_long = len(self._known) - num_own >= _MOST_OWN * max_tokens
            # One id more than asked for settles where the last one ends.
            if is_over or is_long or len(found) > max_tokens or not self._draft_on(num_own):
                return Proposal(found[:max_tokens])

    def _draft_on(self, num_own: int) -> bool:
        drafted = self.stream.propose(self._known, num_own, 1).ids
        self._known = [*self._known, *drafted]
        return bool(drafted)

    def _written(self, context: OpenText, drafted: Sequence[int]) -> tuple[list[int], bool]:
        """Return what is drafted in the target's ids, and whether no more can follow."""
        end = next((n for n, own_id in enumerate(drafted) if self._is_control(own_id)), len(drafted))
        is_over = end < len(drafted)
        text = b"".join(map(self.loaded.vocabulary.text_bytes, drafted[:end]))
        if not text.startswith(context.held):
            return [], is_over or not context.held.startswith(text)
        text = text[len(context.held) :]
        found = self.retokeniser.written(context.behind, text)
        if is_over and (found or not text):
            found += self._end(drafted[end])
        return found, is_over

    def _is_control(self, own_id: int) -> bool:
        return own_id in self.loaded.vocabulary.control_ids or own_id in self.loaded.eos_ids

    def _end(self, own_id: int) -> list[int]:
        """The target's end of sequence that a control id of the drafter stands for, if one."""
        same = [i for i in self.eos_ids if self.retokeniser.controls.get(i) == [own_id]]
        return (same or list(self.eos_ids if own_id in self.loaded.eos_ids else ()))[:1]

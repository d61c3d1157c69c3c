"""Any small causal language model as a drafter, choosing ids as the target does, with its own KV cache."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from baru_common.model_files import LoadedModel, load, require_truncatable
from baru_common.prefixes import common_prefix
from baru_common.sampling import NO_ID, SamplingContext, SamplingParams, SparseProbs
from baru_common.sampling.sampler import Sampler, within
from baru_common.tokens import Vocabulary

from .base import Proposal
from .identity import DrafterIdentity


@dataclass(frozen=True)
class CausalLmDrafter:
    """A loaded model that drafts; one set of weights for all sessions."""

    loaded: LoadedModel
    min_confidence: float = 0.0
    """A chain ends where its ids' probabilities, by the drafter's own reckoning, come to less all multiplied."""

    def __post_init__(self) -> None:
        require_truncatable(self.loaded)

    family = "causal_lm"
    tokens_per_call = 1
    blocking = True

    @classmethod
    def load(
        cls, spec: str, *, dtype: str = "bfloat16", device: str = "cpu", min_confidence: float = 0.1
    ) -> CausalLmDrafter:
        """Load a local model as a drafter; ModelFileError as `model_files.load`."""
        return cls(load(spec, dtype=dtype, device=device), min_confidence)

    @property
    def vocabulary(self) -> Vocabulary:
        return self.loaded.vocabulary

    def identify(self) -> DrafterIdentity:
        """See `HasModel`."""
        return DrafterIdentity(self.loaded.files.name, self.loaded.fingerprint, self.loaded.runtime)

    def decoder(self, sampling: SamplingContext) -> CausalLmStream:
        """Begin a text of the model's own: ids are never withheld for being unsure."""
        return CausalLmStream(self.loaded, Sampler(sampling, self.loaded.model.device))

    def start(self, sampling: SamplingContext | None = None) -> CausalLmStream:
        loaded = self.loaded
        if sampling is None:
            sampling = SamplingContext(SamplingParams(), 0, loaded.vocabulary, loaded.eos_ids)
        return CausalLmStream(loaded, Sampler(sampling, loaded.model.device), self.min_confidence)


@dataclass
class CausalLmStream:
    """One session's cache. It is always put in step with the ids it is asked to continue:

    cached      [0, common)  [common, cached)     common prefix with `ids`; the rest is cut off
    ids         [0, common)  [common, end)        fed in one pass; the last row proposes
    """

    loaded: LoadedModel
    sampler: Sampler
    min_confidence: float = 0.0
    _cached: list[int] = field(default_factory=list)
    _cache: Any = None
    _origin: int = 0
    """Where the chain forked: with it draws are repeated for the same chain, and independent for another."""
    _chain: list[int] = field(default_factory=list)
    _confidence: dict[int, float] = field(default_factory=dict)
    """Position of each id of the chain -> how sure it was."""

    @torch.inference_mode()
    def propose(self, ids: Sequence[int], num_committed: int, max_tokens: int) -> Proposal:
        """See `DraftStream`. Proposes nothing past the drafter's own context, past what ends the output, or past where
        it is too unsure of its chain."""
        if list(ids[: len(self._chain)]) != self._chain:
            self._origin = num_committed
            self._confidence.clear()
        context = list(ids)
        draft_probs: list[SparseProbs] = []
        confidence = math.prod(self._confidence.get(i, 1.0) for i in range(num_committed, len(ids)))
        room = self.loaded.context_limit - len(ids)
        while len(context) < len(ids) + min(max_tokens, room):
            if len(context) > num_committed and context[-1] in self.sampler.context.stop_ids:
                break
            logits = self._logits(context)
            # Judged before an id is drawn, and by the distribution alone: to withhold an id for what it is would
            # change the distribution.
            sure = float(logits.softmax(-1).max())
            confidence *= sure
            if confidence < self.min_confidence:
                break
            token, probs = self._pick(logits, context, num_committed)
            if token == NO_ID:
                break
            self._confidence[len(context)] = sure
            context.append(token)
            draft_probs += [probs] if probs else []
        self._chain = context
        return Proposal(context[len(ids) :], draft_probs)

    def _pick(self, logits: torch.Tensor, ids: list[int], num_committed: int) -> tuple[int, SparseProbs | None]:
        if self.sampler.context.params.by_rejection:
            return self.sampler.draft(logits, ids, num_committed, self._origin)
        return self.sampler.choose(logits, ids, len(ids), num_committed)[0], None

    def _logits(self, ids: list[int]) -> torch.Tensor:
        """Put the cache in step with `ids`; return what may follow: [1, vocabulary]."""
        self._rewind(min(common_prefix(self._cached, ids), len(ids) - 1))
        todo = ids[len(self._cached) :]
        device = self.loaded.model.device
        output = self.loaded.model(
            input_ids=torch.tensor([todo], device=device), cache=self._cache, use_cache=True, logits_to_keep=1
        )
        self._cache = output.cache
        self._cached = list(ids)
        return within(output.logits[0, -1:].float(), self.loaded.vocabulary)

    def _rewind(self, length: int) -> None:
        if self._cache is not None and length < len(self._cached):
            self._cache.crop(length - len(self._cached))
        self._cached = self._cached[:length]

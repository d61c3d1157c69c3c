"""Any small causal language model as a drafter, greedy, with its own KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from baru_common.model_files import LoadedModel, load, require_truncatable
from baru_common.tokens import Vocabulary


@dataclass(frozen=True)
class CausalLmDrafter:
    """A loaded model that drafts; one set of weights for all sessions."""

    loaded: LoadedModel

    def __post_init__(self) -> None:
        require_truncatable(self.loaded)

    family = "causal_lm"
    tokens_per_call = 1
    blocking = True

    @classmethod
    def load(cls, spec: str, *, dtype: str = "bfloat16", device: str = "cpu") -> CausalLmDrafter:
        """Load a local model as a drafter; ModelFileError as `model_files.load`."""
        return cls(load(spec, dtype=dtype, device=device))

    @property
    def vocabulary(self) -> Vocabulary:
        return self.loaded.vocabulary

    def start(self) -> CausalLmStream:
        return CausalLmStream(self.loaded)


@dataclass
class CausalLmStream:
    """One session's cache. It is always put in step with the ids it is asked to continue:

    cached      [0, common)  [common, cached)     common prefix with `ids`; the rest is cut off
    ids         [0, common)  [common, end)        fed in one pass; the last row proposes
    """

    loaded: LoadedModel
    _cached: list[int] = field(default_factory=list)
    _cache: Any = None

    @torch.inference_mode()
    def propose(self, ids: Sequence[int], num_committed: int, max_tokens: int) -> list[int]:  # noqa: ARG002
        """See `DraftStream`. Proposes nothing past the drafter's own context."""
        room = self.loaded.context_limit - len(ids)
        proposed: list[int] = []
        for _ in range(min(max_tokens, room)):
            proposed.append(self._next([*ids, *proposed]))
        return proposed

    def _next(self, ids: list[int]) -> int:
        self._rewind(min(_common_prefix(self._cached, ids), len(ids) - 1))
        todo = ids[len(self._cached) :]
        device = self.loaded.model.device
        output = self.loaded.model(
            input_ids=torch.tensor([todo], device=device), cache=self._cache, use_cache=True, logits_to_keep=1
        )
        self._cache = output.cache
        self._cached = ids
        # [vocabulary]: what the embedding was padded with is never drafted, and neither are holes.
        logits = output.logits[0, -1, : self.loaded.vocabulary.size]
        if holes := self.loaded.vocabulary.holes:
            logits = logits.index_fill(0, torch.tensor(holes, device=logits.device), float("-inf"))
        return int(logits.argmax())

    def _rewind(self, length: int) -> None:
        if self._cache is not None and length < len(self._cached):
            self._cache.crop(length - len(self._cached))
        self._cached = self._cached[:length]


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))

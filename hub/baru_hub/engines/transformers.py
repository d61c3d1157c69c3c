"""Embedded engine: any causal language model that transformers runs, one sequence a forward pass."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from transformers import DynamicCache

from baru_common.errors import EngineFailure
from baru_common.model_files import LoadedModel, require_truncatable
from baru_hub.acceptance import decide

from .base import EngineSpec, Feed


class TransformersEngine:
    """Serves a loaded model. Rollback is truncation of the sequence's cache."""

    def __init__(self, loaded: LoadedModel) -> None:
        require_truncatable(loaded)
        self._loaded = loaded
        self._handles = itertools.count(1)
        self._caches: dict[int, DynamicCache] = {}
        self._spec = EngineSpec(
            engine="transformers",
            target_name=loaded.files.name,
            fingerprint=loaded.fingerprint,
            bundle=loaded.bundle,
            vocabulary=loaded.vocabulary,
            eos_ids=loaded.eos_ids,
            context_limit=loaded.context_limit,
        )

    @property
    def spec(self) -> EngineSpec:
        return self._spec

    def allocate(self, max_length: int) -> int:  # noqa: ARG002
        """See `Engine.allocate`. The cache grows with the sequence; nothing is reserved yet."""
        handle = next(self._handles)
        self._caches[handle] = DynamicCache(config=self._loaded.model.config)
        return handle

    def free(self, sequence: int) -> None:
        del self._caches[sequence]

    def verify(self, feeds: Sequence[Feed]) -> list[list[int]]:
        """See `Engine.verify`."""
        try:
            return [self._verify(feed) for feed in feeds]
        except (RuntimeError, IndexError) as error:
            raise EngineFailure(f"the target failed: {error}") from error

    @torch.inference_mode()
    def _verify(self, feed: Feed) -> list[int]:
        cache, block = self._caches[feed.sequence], feed.block
        cache.crop(feed.num_cached - cache.get_seq_length())
        ids = torch.tensor([[*block.pending, *block.draft]], device=self._loaded.model.device)  # [1, num_tokens]
        num_rows = len(block.draft) + 1
        output = self._loaded.model(input_ids=ids, cache=cache, use_cache=True, logits_to_keep=num_rows)
        if not block.decides:
            return []
        vocabulary = self._spec.vocabulary
        return decide(output.logits[0].float(), vocabulary.size, vocabulary.holes)  # [num_rows, width]

"""Keys and values in pages, behind transformers' `Cache`, and the attention that reads them.

Both are used through transformers' public extension points: a `Cache` whose layers write the rows of
the pass to their slots, and a registered attention function that attends segment by segment.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface, Cache, PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin

from baru_common.errors import EngineFailure

from .ragged_batch import SCRATCH_SLOTS, RaggedBatch, Segment

ATTENTION = "baru_ragged"
QUERY_ROWS = 16
"""Queries of an attention call are padded to a multiple of this, so that one row is computed as many are."""


@dataclass(frozen=True)
class KvShape:
    """Shape of one id's keys (and values) in one layer."""

    num_layers: int
    num_kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, config: PreTrainedConfig) -> KvShape:
        """Read it from a model's configuration."""
        text = config.get_text_config(decoder=True)
        heads = text.num_attention_heads
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
        return cls(text.num_hidden_layers, getattr(text, "num_key_value_heads", None) or heads, head_dim)

    def bytes_per_id(self, dtype: torch.dtype) -> int:
        """Memory of one cached id over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype.itemsize


def _zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros, not empty: a masked key still meets its weight of zero, and 0 * NaN is NaN. On a CPU they take no memory
    before they are written (calloc)."""
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(size) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(size)


class _PagedLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]  # transformers is only partly typed
    """One layer's pages: keys and values, each [num_slots, num_kv_heads, head_dim]."""

    def __init__(self, shape: KvShape, num_slots: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        size = (num_slots, shape.num_kv_heads, shape.head_dim)
        self.keys: torch.Tensor = _zeros(size, dtype, device)
        self.values: torch.Tensor = _zeros(size, dtype, device)
        self.is_initialized = True
        self.slots: torch.Tensor | None = None
        self.num_written = 0
        """Passes that wrote their rows."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the pass's rows ([1, num_kv_heads, num_rows, head_dim]) to their slots; return all pages."""
        if self.slots is None:
            raise EngineFailure("a forward pass ran outside a batch")
        self.num_written += 1
        self.keys.index_copy_(0, self.slots, key_states[0].transpose(0, 1).to(self.keys.dtype))
        self.values.index_copy_(0, self.slots, value_states[0].transpose(0, 1).to(self.values.dtype))
        return self.keys, self.values

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the pages are there from the start."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0  # many sequences share the pages; positions are passed with the ids

    def get_max_length(self) -> int:
        return -1


class PagedCache(Cache):
    """The pages of all layers. `num_pages` of `page_size` ids, one spare page after them, and scratch slots."""

    def __init__(
        self, shape: KvShape, num_pages: int, page_size: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        num_slots = (num_pages + 1) * page_size + SCRATCH_SLOTS
        self.spare_page = num_pages
        self.page_size = page_size
        self._pages = [_PagedLayer(shape, num_slots, dtype, device) for _ in range(shape.num_layers)]
        super().__init__(layers=list(self._pages))

    def begin(self, slots: torch.Tensor) -> None:
        """Say where the rows of the next pass go ([num_rows])."""
        for layer in self._pages:
            layer.slots = slots

    def move(self, slots: list[tuple[int, int]]) -> None:
        """Copy keys and values from slot to slot, all at once."""
        device = self._pages[0].keys.device
        sources, targets = torch.tensor(slots, device=device).unbind(1)
        for layer in self._pages:
            layer.keys[targets] = layer.keys[sources]
            layer.values[targets] = layer.values[sources]

    def check_used(self) -> None:
        """EngineFailure unless every layer has written as often as the first: a model that keeps its state elsewhere,
        whatever its configuration says, would go on from nothing."""
        counts = [layer.num_written for layer in self._pages]
        if counts[0] == 0 or len(set(counts)) > 1:
            raise EngineFailure("the model does not keep its state in the cache in every layer")

    def wipe(self, pages: list[int]) -> None:
        """Zero pages that hold what is not finite, before anybody else gets them."""
        for layer in self._pages:
            for page in pages:
                rows = slice(page * self.page_size, (page + 1) * self.page_size)
                layer.keys[rows] = 0
                layer.values[rows] = 0


@dataclass(frozen=True)
class AttentionPlan:
    """A batch's segments as tensors, made once and used by every layer."""

    segments: tuple[_SegmentPlan, ...]

    @classmethod
    def of(cls, batch: RaggedBatch, page_size: int, group: int, device: torch.device) -> AttentionPlan:
        """Prepare `batch` for a model with `group` query heads to each key-value head."""
        return cls(tuple(_SegmentPlan.of(segment, page_size, group, device) for segment in batch.segments))

    def seeing_all(self) -> AttentionPlan:
        """Return the plan in which a segment's rows see each other whole, not only those before them."""
        return AttentionPlan(tuple(replace(s, mask=s.mask | s.mask.any(dim=0)) for s in self.segments))


@dataclass(frozen=True)
class _SegmentPlan:
    rows: slice
    num_rows: int
    """Query rows of the call: the segment's, times the heads that share keys."""
    padding: int
    keys: slice | torch.Tensor
    """Slots of the keys: a slice where the pages are neighbours, which copies nothing."""
    mask: torch.Tensor
    """[padded rows, num_keys], true where a row attends."""

    @classmethod
    def of(cls, segment: Segment, page_size: int, group: int, device: torch.device) -> _SegmentPlan:
        pages = segment.pages
        num_rows = segment.end - segment.start
        padding = -num_rows * group % QUERY_ROWS
        if not segment.moved and all(b == a + 1 for a, b in pairwise(pages)):
            keys: slice | torch.Tensor = slice(pages[0] * page_size, (pages[-1] + 1) * page_size)
        else:
            offsets = torch.arange(page_size, device=device)
            keys = (torch.tensor(pages, device=device)[:, None] * page_size + offsets).flatten()
            for position, slot in segment.moved:
                keys[position] = slot
        last = torch.arange(segment.first_position, segment.first_position + num_rows, device=device).repeat(group)
        last = pad(last, (0, padding))  # a padding row attends to the first key: something finite
        mask = torch.arange(len(pages) * page_size, device=device) <= last[:, None]
        return cls(slice(segment.start, segment.end), num_rows, padding, keys, mask)


def ragged_attention(
    module: torch.nn.Module,  # noqa: ARG001
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    attention_plan: AttentionPlan,
    scaling: float | None = None,
    **unsupported: Any,
) -> tuple[torch.Tensor, None]:
    """Attend every segment of the batch to its own keys.

    `query` is [1, num_heads, num_rows, head_dim]; `key` and `value` are a layer's pages; the result is
    [1, num_rows, num_heads, head_dim]. Heads that share keys become rows of one call. EngineFailure for
    a model that wants what this does not do (soft capping, sliding windows, sinks).
    """
    wanted = [name for name in ("softcap", "sliding_window", "s_aux") if unsupported.get(name) is not None]
    if attention_mask is not None or wanted:
        raise EngineFailure(f"the model's attention needs what the paged cache does not do: {wanted or 'a mask'}")
    _, num_heads, _, head_dim = query.shape
    num_kv_heads = key.shape[1]
    output = torch.zeros_like(query.transpose(1, 2))  # [1, num_rows, num_heads, head_dim]
    for segment in attention_plan.segments:
        # [num_heads, rows, d] -> [1, num_kv_heads, group * rows (+ padding), d]
        rows = query[0, :, segment.rows].reshape(1, num_kv_heads, -1, head_dim)
        attended = scaled_dot_product_attention(
            pad(rows.to(key.dtype), (0, 0, 0, segment.padding)),
            key[segment.keys].transpose(0, 1)[None],
            value[segment.keys].transpose(0, 1)[None],
            attn_mask=segment.mask,
            scale=scaling,
        )
        heads = attended[0, :, : rows.shape[2]].reshape(num_heads, segment.num_rows, head_dim)
        output[0, segment.rows] = heads.transpose(0, 1).to(output.dtype)
    return output, None


AttentionInterface.register(ATTENTION, ragged_attention)

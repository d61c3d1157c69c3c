"""Embedded engine: any causal language model that transformers runs, all sessions in one forward pass."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from baru_common.errors import ConfigError, EngineFailure, ModelFileError
from baru_common.model_files import LoadedModel, require_truncatable
from baru_hub.acceptance import decide
from baru_hub.cost_model import CostModel, StepShape
from baru_hub.kv_cache import ATTENTION, AttentionPlan, KvShape, PagedCache
from baru_hub.numerics import row_floor
from baru_hub.page_pool import PagePool, page_keys
from baru_hub.ragged_batch import RaggedBatch, SequenceFeed, lay_out
from baru_hub.session import Block

from .base import Allocation, EngineSpec, Feed

PAGE_SIZE = 64
DEFAULT_KV_CACHE_MB = 1024

_log = logging.getLogger(__name__)


@dataclass
class _Sequence:
    """One sequence: its pages, and the ids whose keys and values are in them.

    ids     [0, num_cached)     committed, as of the last feed; full pages of them are published
            [num_cached, ...)   fed in the last step; void unless a later feed counts them as cached
    """

    pages: list[int]
    identity: str | None
    """Who may use its pages later; None: nobody."""
    ids: list[int]
    num_published: int


class TransformersEngine:
    """Serves a loaded model from a paged cache. Rollback is truncation: what is past `num_cached` is void."""

    def __init__(self, loaded: LoadedModel, *, kv_cache_mb: int = DEFAULT_KV_CACHE_MB) -> None:
        """ModelFileError for a model that the paged cache cannot serve, ConfigError for too small a cache."""
        require_truncatable(loaded)
        self._loaded = loaded
        self._model = loaded.model
        self._device = loaded.model.device
        try:
            self._model.set_attn_implementation(ATTENTION)
            shape = KvShape.of(loaded.model.config)
        except (AttributeError, ValueError) as error:
            raise ModelFileError(
                f"{loaded.files.name} cannot be served from a paged cache: {error}",
                hint="use a model whose attention transformers lets others provide",
            ) from error
        self._group = loaded.model.config.get_text_config(decoder=True).num_attention_heads // shape.num_kv_heads
        # On a CPU attention in fp32 is twice as fast as in bf16, and its rows do not depend on their company.
        dtype = torch.float32 if self._device.type == "cpu" else loaded.model.dtype
        num_pages = (kv_cache_mb << 20) // (PAGE_SIZE * shape.bytes_per_id(dtype))
        if num_pages < 1:
            needed_mb = -(-PAGE_SIZE * shape.bytes_per_id(dtype) >> 20)
            raise ConfigError(f"a KV cache of {kv_cache_mb} MB holds no page, at least {needed_mb} MB are needed")
        self._pool = PagePool(num_pages, PAGE_SIZE)
        self._cache = PagedCache(shape, num_pages, PAGE_SIZE, dtype=dtype, device=self._device)
        self._row_floor = row_floor(loaded.model)
        self._handles = itertools.count(1)
        self._sequences: dict[int, _Sequence] = {}
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="baru-engine")
        self._spec = EngineSpec(
            engine="transformers",
            target_name=loaded.files.name,
            fingerprint=loaded.fingerprint,
            bundle=loaded.bundle,
            vocabulary=loaded.vocabulary,
            eos_ids=loaded.eos_ids,
            context_limit=loaded.context_limit,
        )
        _log.info("%d pages of %d ids; rows are computed alike from %d rows on", num_pages, PAGE_SIZE, self._row_floor)

    @property
    def spec(self) -> EngineSpec:
        return self._spec

    @property
    def pool(self) -> PagePool:
        """Who holds which page; for gauges and integrity checks."""
        return self._pool

    def allocate(self, prompt_ids: Sequence[int], max_length: int, identity: str | None) -> Allocation:
        """See `Engine.allocate`. All pages are reserved now, so that a session admitted can end."""
        # The last prompt id is always fed: its row decides the first id.
        shared = self._pool.find(page_keys(identity, prompt_ids[:-1], PAGE_SIZE)) if identity is not None else []
        pages = self._pool.reserve(self._pool.num_pages_for(max_length), shared)
        num_cached = len(shared) * PAGE_SIZE
        sequence = _Sequence(pages, identity, list(prompt_ids[:num_cached]), len(shared))
        handle = next(self._handles)
        self._sequences[handle] = sequence
        return Allocation(handle, num_cached)

    def free(self, sequence: int) -> None:
        """See `Engine.free`. Published pages stay until their room is needed."""
        self._pool.release(self._sequences.pop(sequence).pages)

    async def verify(self, feeds: Sequence[Feed]) -> list[list[int]]:
        """See `Engine.verify`. The pass runs in a thread of its own: the event loop never waits for it.

        Pages and sequences are touched here only, never in that thread.
        """
        sequences = [self._sequences[feed.sequence] for feed in feeds]
        for sequence, feed in zip(sequences, feeds, strict=True):
            self._publish(sequence, feed.num_cached)
            sequence.ids[feed.num_cached :] = [*feed.block.pending, *feed.block.draft]
        paged = [SequenceFeed(s.pages, f.num_cached, f.block) for s, f in zip(sequences, feeds, strict=True)]
        batch = lay_out(paged, PAGE_SIZE, self._row_floor, self._cache.spare_page)
        private = [page for s in sequences for page in s.pages[s.num_published :]]
        future = asyncio.get_running_loop().run_in_executor(self._worker, self._run, batch, private)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            while not future.done():  # the thread cannot be interrupted, however often this is cancelled
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([future])
            raise

    async def close(self) -> None:
        """See `Engine.close`."""
        self._worker.shutdown()

    def _run(self, batch: RaggedBatch, private: list[int]) -> list[list[int]]:
        try:
            return self._forward(batch)
        except EngineFailure:
            # Numbers that are not finite must not outlive their sequence.
            self._cache.wipe([*private, self._cache.spare_page])
            raise
        except (RuntimeError, IndexError, TypeError) as error:
            raise EngineFailure(f"the target failed: {error}") from error

    @torch.inference_mode()
    def _forward(self, batch: RaggedBatch) -> list[list[int]]:
        device = self._device
        self._cache.begin(torch.tensor(batch.slots, device=device))
        # A piece of a prompt decides nothing, but its last row shows whether what it left in the cache is finite.
        checked = [rows or range(rows.start - 1, rows.stop) for rows in batch.deciding]
        deciding = [row for rows in checked for row in rows]
        # Padded like the batch itself: the head is a linear layer, too.
        kept = deciding + [batch.num_rows - 1] * (self._row_floor - len(deciding))
        output = self._model(
            input_ids=torch.tensor([batch.ids], device=device),
            position_ids=torch.tensor([batch.positions], device=device),
            cache=self._cache,
            use_cache=True,
            logits_to_keep=torch.tensor(kept, device=device),
            attention_plan=AttentionPlan.of(batch, PAGE_SIZE, self._group, device),
        )
        vocabulary = self._spec.vocabulary
        logits = output.logits[0, : len(deciding)]  # [num_deciding, width]
        decided = iter(decide(logits, vocabulary.size, vocabulary.holes))
        ids = [list(itertools.islice(decided, len(rows))) for rows in checked]
        return [own if rows else [] for own, rows in zip(ids, batch.deciding, strict=True)]

    def _publish(self, sequence: _Sequence, num_committed: int) -> None:
        """Let later sequences of the same identity use the pages that are full of committed ids."""
        num_full = num_committed // PAGE_SIZE
        if sequence.identity is None or num_full <= sequence.num_published:
            return
        keys = page_keys(sequence.identity, sequence.ids[: num_full * PAGE_SIZE], PAGE_SIZE)
        for page, key in itertools.islice(zip(sequence.pages, keys, strict=False), sequence.num_published, None):
            self._pool.publish(page, key)
        sequence.num_published = num_full

    async def calibrate(self) -> CostModel:
        """See `Engine.calibrate`. Uses a sequence of its own, as any session would."""
        length = min(self._spec.context_limit, 513, self._pool.num_available * PAGE_SIZE)
        allocation = self.allocate([0] * length, length, None)
        observations = []
        try:
            for num_rows, num_cached in ((1, 0), (1, 0), (16, 0), (4, 16), (1, 16), (16, 16), (1, length - 17)):
                block = Block((0,) * num_rows, decides=True)
                start_s = time.perf_counter()
                await self.verify([Feed(allocation.sequence, num_cached, block)])
                observations.append((StepShape(num_rows, 1, num_cached), time.perf_counter() - start_s))
        finally:
            self.free(allocation.sequence)
        self._cache.check_used()
        return CostModel.calibrated(observations[1:])  # the first one also warmed things up

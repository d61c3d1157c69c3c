"""Embedded engine: any causal language model that transformers runs, all sessions in one forward pass."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from baru_common.errors import BaruError, CapacityExhausted, ConfigError, EngineFailure, ModelFileError
from baru_common.model_files import LoadedModel, require_truncatable
from baru_common.out_of_memory import OUT_OF_MEMORY, is_out_of_memory
from baru_common.sampling import SamplingContext, SamplingParams
from baru_common.sampling.sampler import Sampler, lowest_argmax, within
from baru_hub.acceptance import Decision, standing
from baru_hub.cost_model import CostModel, StepShape
from baru_hub.deciding import decide
from baru_hub.drafters import DraftAsk, HubDrafter, States, TargetParts, drafter_digest, hub_drafter
from baru_hub.guesses import Guesses
from baru_hub.kv_cache import ATTENTION, AttentionPlan, KvShape, PagedCache
from baru_hub.numerics import row_floor
from baru_hub.page_pool import PagePool, page_keys
from baru_hub.ragged_batch import RaggedBatch, SequenceFeed, lay_out
from baru_hub.session import Block

from .base import Allocation, EngineSpec, Feed, Want

PAGE_SIZE = 64
DEFAULT_KV_CACHE_MB = 1024

_T = TypeVar("_T")

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
    sampler: Sampler
    states: States
    """What the hub's drafter has not read yet."""


class TransformersEngine:
    """Serves a loaded model from a paged cache. Rollback is truncation: what is past `num_cached` is void."""

    def __init__(
        self, loaded: LoadedModel, *, kv_cache_mb: int = DEFAULT_KV_CACHE_MB, drafter: str | None = None
    ) -> None:
        """`drafter` names one of `baru_hub.drafters.DRAFTERS`, to draft at the hub.

        ModelFileError for a model that the paged cache cannot serve, ConfigError for too small a cache.
        """
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
        bytes_per_id = shape.bytes_per_id(dtype)
        make_drafter, head = (None, None) if drafter is None else hub_drafter(drafter, loaded)
        bytes_per_id += head.kv_shape.bytes_per_id(dtype) if head else 0
        num_pages = (kv_cache_mb << 20) // (PAGE_SIZE * bytes_per_id)
        if num_pages < 1:
            needed_mb = -(-PAGE_SIZE * bytes_per_id >> 20)
            raise ConfigError(f"a KV cache of {kv_cache_mb} MB holds no page, at least {needed_mb} MB are needed")
        self._pool = PagePool(num_pages, PAGE_SIZE)
        self._page_bytes = PAGE_SIZE * bytes_per_id
        self._cache = PagedCache(shape, num_pages, PAGE_SIZE, dtype=dtype, device=self._device)
        self._row_floor = row_floor(loaded.model)
        self._drafter: HubDrafter | None = None
        if make_drafter is not None:
            self._drafter = make_drafter(TargetParts(loaded, self._cache, num_pages, self._group, self._row_floor))
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
            drafter=None if self._drafter is None else self._drafter.family,
            capacity=num_pages * PAGE_SIZE,
            drafter_model=drafter.rpartition("/")[2] if drafter else "",
            drafter_digest=drafter_digest(drafter, loaded) if drafter else b"",
            runtime=loaded.runtime,
        )
        _log.info("%d pages of %d ids; rows are computed alike from %d rows on", num_pages, PAGE_SIZE, self._row_floor)

    @property
    def spec(self) -> EngineSpec:
        return self._spec

    @property
    def pool(self) -> PagePool:
        """Who holds which page; for gauges and integrity checks."""
        return self._pool

    def allocate(
        self,
        prompt_ids: Sequence[int],
        max_length: int,
        identity: str | None,
        sampling: SamplingContext | None = None,
    ) -> Allocation:
        """See `Engine.allocate`. All pages are reserved now, so that a session admitted can end."""
        # The last prompt id is always fed: its row decides the first id.
        shared = self._pool.find(page_keys(identity, prompt_ids[:-1], PAGE_SIZE)) if identity is not None else []
        pages = self._pool.reserve(self._pool.num_pages_for(max_length), shared)
        if self._drafter:
            self._drafter.forget(pages[len(shared) :])
        num_cached = len(shared) * PAGE_SIZE
        if sampling is None:
            sampling = SamplingContext(SamplingParams(), len(prompt_ids), self._spec.vocabulary, self._spec.eos_ids)
        sampler = Sampler(sampling, self._device)
        sequence = _Sequence(pages, identity, list(prompt_ids[:num_cached]), len(shared), sampler, States())
        handle = next(self._handles)
        self._sequences[handle] = sequence
        return Allocation(handle, num_cached, len(pages) * self._page_bytes)

    def free(self, sequence: int) -> None:
        """See `Engine.free`. Published pages stay until their room is needed."""
        self._pool.release(self._sequences.pop(sequence).pages)

    async def verify(self, feeds: Sequence[Feed]) -> list[Decision | BaruError]:
        """See `Engine.verify`. The pass runs in a thread of its own: the event loop never waits for it.

        Pages and sequences are touched here only, never in that thread.
        """
        sequences = [self._sequences[feed.sequence] for feed in feeds]
        for sequence, feed in zip(sequences, feeds, strict=True):
            self._publish(sequence, feed.num_cached)
            sequence.ids[feed.num_cached :] = [*feed.block.pending, *feed.block.draft]
        paged = [SequenceFeed(s.pages, f.num_cached, f.block) for s, f in zip(sequences, feeds, strict=True)]
        batch = lay_out(paged, PAGE_SIZE, self._row_floor, self._cache.spare_page)
        work = list(zip(sequences, (feed.block for feed in feeds), strict=True))
        return await self._in_thread(self._run, batch, work)

    async def draft(self, wants: Sequence[Want]) -> list[Guesses]:
        """See `Engine.draft`."""
        if self._drafter is None:
            raise EngineFailure("the engine has no drafter of its own")
        asks = []
        for want in wants:
            sequence = self._sequences[want.sequence]
            asks.append(
                DraftAsk(
                    sequence.pages,
                    want.committed,
                    sequence.sampler,
                    sequence.states,
                    want.depth,
                    want.width,
                    want.chain,
                )
            )
        return await self._in_thread(self._guess, self._drafter, asks)

    def _guess(self, drafter: HubDrafter, asks: Sequence[DraftAsk]) -> list[Guesses]:
        try:
            return drafter.draft(asks)
        except Exception as error:
            raise EngineFailure(f"the {drafter.family} drafter failed: {error!r}") from error

    async def close(self) -> None:
        """See `Engine.close`."""
        self._worker.shutdown()

    async def _in_thread(self, work: Callable[..., _T], *arguments: Any) -> _T:
        future = asyncio.get_running_loop().run_in_executor(self._worker, work, *arguments)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            while not future.done():  # the thread cannot be interrupted, however often this is cancelled
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([future])
            raise

    def _run(self, batch: RaggedBatch, work: list[tuple[_Sequence, Block]]) -> list[Decision | BaruError]:
        try:
            logits, taps = self._forward(batch)
            return self._decide(batch, logits, taps, work)
        except (RuntimeError, MemoryError, IndexError, TypeError) as error:
            if is_out_of_memory(error):
                raise CapacityExhausted(
                    "the hub has run out of memory",
                    hint="try again; if it stays so, give the hub a smaller --kv-cache-mb",
                    details={"cause": OUT_OF_MEMORY},
                ) from error
            raise EngineFailure(f"the target failed: {error}") from error

    @torch.inference_mode()
    def _forward(self, batch: RaggedBatch) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the logits of the checked rows, see `_checked_rows`: [num_checked, vocabulary]; and the hidden states
        that the drafter reads, if it does, of all rows: [num_rows, num_taps, width]."""
        device = self._device
        self._cache.begin(torch.tensor(batch.slots, device=device))
        rows = [row for rows in _checked_rows(batch) for row in rows]
        # Padded like the batch itself: the head is a linear layer, too.
        kept = rows + [batch.num_rows - 1] * (self._row_floor - len(rows))
        output = self._model(
            input_ids=torch.tensor([batch.ids], device=device),
            position_ids=torch.tensor([batch.positions], device=device),
            cache=self._cache,
            use_cache=True,
            logits_to_keep=torch.tensor(kept, device=device),
            attention_plan=AttentionPlan.of(batch, PAGE_SIZE, self._group, device),
            output_hidden_states=bool(self._taps),
        )
        logits = within(output.logits[0, : len(rows)], self._spec.vocabulary)
        taps = torch.stack([output.hidden_states[i][0] for i in self._taps], 1) if self._taps else None
        return logits, taps

    @property
    def _taps(self) -> tuple[int, ...]:
        return self._drafter.taps if self._drafter else ()

    @torch.inference_mode()
    def _decide(
        self,
        batch: RaggedBatch,
        logits: torch.Tensor,
        taps: torch.Tensor | None,
        work: list[tuple[_Sequence, Block]],
    ) -> list[Decision | BaruError]:
        finite = logits.amax(dim=1).isfinite().tolist()
        likeliest = lowest_argmax(logits) if any(sequence.sampler.is_plain for sequence, _ in work) else []
        results: list[Decision | BaruError] = []
        start = 0
        for (sequence, block), rows in zip(work, _checked_rows(batch), strict=True):
            mine = slice(start, start + len(rows))
            start += len(rows)
            if not all(finite[mine]):
                # Numbers that are not finite must not outlive their sequence.
                self._cache.wipe([*sequence.pages[sequence.num_published :], self._cache.spare_page])
                results.append(
                    EngineFailure("the target's logits are not finite", hint="check the weights and the numeric type")
                )
            elif not block.decides:
                results.append(Decision())
            elif sequence.sampler.is_plain and sequence.sampler.context.params.logprobs is None:
                results.append(Decision(tuple(likeliest[mine])))
            else:
                committed = sequence.ids[: len(sequence.ids) - len(block.draft)]
                results.append(_decide_one(logits[mine], sequence.sampler, committed, block))
        for (sequence, block), rows, result in zip(work, batch.deciding, results, strict=True):
            if isinstance(result, Decision):
                self._keep(batch, taps, sequence, block, rows, result)
        return results

    def _keep(
        self,
        batch: RaggedBatch,
        taps: torch.Tensor | None,
        sequence: _Sequence,
        block: Block,
        deciding: range,
        decision: Decision,
    ) -> None:
        """Make what stands of a block look as if nothing else had been fed: keys and values at their own positions,
        and the drafter's states in order."""
        first_draft = deciding.stop - len(block.draft)
        rows = [first_draft + node for node in (standing(block.tree, decision) if block.decides else ())]
        first = len(sequence.ids) - len(block.draft)
        homes = [sequence.pages[p // PAGE_SIZE] * PAGE_SIZE + p % PAGE_SIZE for p in range(first, first + len(rows))]
        sequence.ids[first:] = [batch.ids[row] for row in rows]
        moves = [(batch.slots[row], home) for row, home in zip(rows, homes, strict=True) if batch.slots[row] != home]
        if moves:
            self._cache.move(moves)
        if taps is not None:
            pending = range(first_draft - len(block.pending), first_draft)
            sequence.states.add(first - len(block.pending), taps[[*pending, *rows]])

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


def _checked_rows(batch: RaggedBatch) -> list[range]:
    """Return each feed's rows that are looked at: those that decide, or the last row of a piece of a prompt.

    That one decides nothing, but shows whether what it left in the cache is finite.
    """
    return [rows or range(rows.start - 1, rows.stop) for rows in batch.deciding]


def _decide_one(logits: torch.Tensor, sampler: Sampler, committed: list[int], block: Block) -> Decision | BaruError:
    try:
        return decide(logits, sampler, committed, block)
    except BaruError as error:  # a request that cannot go on costs nobody else anything
        return error

"""Heads that draft id by id from the target's states and then from their own: EAGLE-3 and MTP share this loop.

One session at committed length n, states f_0 ... f_(n-2) of which the last few are unread:

    catch up    rows at positions j of the unread states: f_j beside the id at j + 1; one pass for all of them
    draft       the last row, n - 2, predicts the id at n; its output beside that id makes the row at n - 1; and so on
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from baru_hub.guesses import Guesses
from baru_hub.kv_cache import AttentionPlan, KvShape, PagedCache, ragged_attention
from baru_hub.ragged_batch import SequenceFeed, lay_out

from .base import DraftAsk, TargetParts
from .layers import Attend
from .paths import Path


class RecurrentHead(Protocol):
    """The weights: from embeddings and states to the next states and logits."""

    @property
    def kv_shape(self) -> KvShape:
        """Shape of its keys and values."""

    @property
    def group(self) -> int:
        """Query heads that share a key-value head."""

    @property
    def num_bytes(self) -> int:
        """Memory of its weights, beside the target's."""

    def fused(self, taps: torch.Tensor) -> torch.Tensor:
        """Return the states that rows of the target make: [num_rows, num_taps, width] -> [1, num_rows, width]."""

    def step(
        self, ids: torch.Tensor, state: torch.Tensor, positions: torch.Tensor, cache: PagedCache, plan: AttentionPlan
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run rows of ids ([num_rows]) beside states ([1, num_rows, width]).

        Returns what goes on to the next rows, and what `logits` reads: [1, num_rows, width] each.
        """

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        """Return logits over the target's vocabulary: [num_rows, width] -> [num_rows, vocabulary], -inf for ids that
        the head does not know."""


class RecurrentDrafter:
    """Drafts with a recurrent head, whose cache has the same pages as the target's."""

    def __init__(self, head: RecurrentHead, family: str, taps: tuple[int, ...], target: TargetParts) -> None:
        self.family, self.taps = family, taps
        self.num_bytes = head.num_bytes
        self._head = head
        self._device = target.loaded.model.device
        self._cache = target.cache_of(head.kv_shape)

    def forget(self, pages: Sequence[int]) -> None:
        """See `HubDrafter.forget`."""
        self._cache.wipe(list(pages))

    @torch.inference_mode()
    def draft(self, asks: Sequence[DraftAsk]) -> list[Guesses]:
        """See `HubDrafter.draft`."""
        # Without the states up to the last id, as after a prompt that was all in the cache, there is nothing to say.
        known = {i: Path(ask) for i, ask in enumerate(asks) if ask.is_followed}
        self._grow(list(known.values()))
        return [known[i].guesses() if i in known else Guesses(ask.chain) for i, ask in enumerate(asks)]

    def _grow(self, paths: Sequence[Path]) -> None:
        if not paths:
            return
        feeds = [path.feed_of(path.ask.states.first, path.ask.unread_ids) for path in paths]
        state, normed = self._pass(feeds, self._head.fused(torch.cat([path.ask.states.take() for path in paths])))
        lasts = torch.tensor([len(feed.block.pending) for feed in feeds], device=self._device).cumsum(0) - 1
        state, normed = state[:, lasts], normed[:, lasts]
        active = list(paths)
        while True:
            logits = self._head.logits(normed[0])
            for path, row in zip(active, torch.split(logits, 1), strict=True):
                path.extend(row)
            going_on = [row for row, path in enumerate(active) if path.goes_on]
            if not going_on:
                return
            active = [active[row] for row in going_on]
            # A state belongs to the id after it, so a drafted id is fed one position before its own.
            feeds = [path.feed_of(len(path.ask.committed) - 2 + len(path.ids), path.ids[-1:]) for path in active]
            state, normed = self._pass(feeds, state[:, going_on])

    def _pass(self, feeds: Sequence[SequenceFeed], state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the head over the feeds' rows, one feed after the other."""
        batch = lay_out(feeds, self._cache.page_size, 1, self._cache.spare_page)
        ids, positions, slots = (
            torch.tensor(row, device=self._device) for row in (batch.ids, batch.positions, batch.slots)
        )
        self._cache.begin(slots)
        plan = AttentionPlan.of(batch, self._cache.page_size, self._head.group, self._device)
        return self._head.step(ids, state, positions, self._cache, plan)


def attend_through(cache: PagedCache, plan: AttentionPlan) -> Attend:
    """Return how a layer of ours attends: its keys and values into the pages, then over them."""

    def attend(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        keys, values = cache.update(key, value, layer)
        return ragged_attention(torch.nn.Identity(), query, keys, values, None, attention_plan=plan)[0]

    return attend

"""Early exit: the target drafts with its own first layers, in its own cache.

What the first layers leave in the cache for drafted ids is what verification writes there again, so nothing is kept
twice. After the last of them comes the target's final norm, or a norm that was trained for this exit, then its head.
An ordinary target says little before most of its layers (LayerSkip, Elhoushi et al. 2024, trains targets for it).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from baru_common.errors import ConfigError
from baru_common.sampling.sampler import within
from baru_hub.guesses import Guesses
from baru_hub.kv_cache import AttentionPlan
from baru_hub.ragged_batch import SequenceFeed, lay_out

from .base import DraftAsk, TargetParts
from .layers import num_bytes_of
from .paths import Path


class EarlyExitDrafter:
    """Drafts with the first layers of the target."""

    family = "early_exit"
    taps: tuple[int, ...] = ()

    def __init__(self, target: TargetParts, num_layers: int, exit_norm: nn.Module | None = None) -> None:
        """ConfigError unless the target has at least `num_layers` layers."""
        model: Any = target.loaded.model
        most = model.config.get_text_config(decoder=True).num_hidden_layers
        if not 1 <= num_layers <= most:
            raise ConfigError(f"an exit after {num_layers} layers is not possible, the target has {most}")
        self._target = target
        self._model = shallow(model, num_layers, exit_norm)
        self.num_bytes = num_bytes_of(exit_norm) if exit_norm else 0

    def forget(self, pages: Sequence[int]) -> None:
        """See `HubDrafter.forget`. It keeps nothing of its own."""

    @torch.inference_mode()
    def draft(self, asks: Sequence[DraftAsk]) -> list[Guesses]:
        """See `HubDrafter.draft`."""
        paths = [Path(ask) for ask in asks]
        active = list(paths)
        while active:
            logits = self._pass([path.feed() for path in active])
            for path, row in zip(active, torch.split(logits, 1), strict=True):
                path.extend(row)
            active = [path for path in active if path.goes_on]
        return [path.guesses() for path in paths]

    def _pass(self, feeds: Sequence[SequenceFeed]) -> torch.Tensor:
        """Return the logits after each feed's last row: [num_feeds, vocabulary]."""
        target = self._target
        device = target.loaded.model.device
        batch = lay_out(feeds, target.cache.page_size, target.row_floor, target.cache.spare_page)
        target.cache.begin(torch.tensor(batch.slots, device=device))
        ends = [rows.stop - 1 for rows in batch.deciding]
        kept = ends + [batch.num_rows - 1] * (target.row_floor - len(ends))
        output = self._model(
            input_ids=torch.tensor([batch.ids], device=device),
            position_ids=torch.tensor([batch.positions], device=device),
            cache=target.cache,
            use_cache=True,
            logits_to_keep=torch.tensor(kept, device=device),
            attention_plan=AttentionPlan.of(batch, target.cache.page_size, target.group, device),
        )
        return within(output.logits[0, : len(ends)].float(), target.loaded.vocabulary)


def shallow(model: Any, num_layers: int, norm: nn.Module | None = None) -> Any:
    """Return a model of `model`'s own first layers, that shares its weights and leaves it as it is."""
    outer, inner = _sharing(model), _sharing(model.model)
    inner.layers = model.model.layers[:num_layers]
    if norm is not None:
        inner.norm = norm
    outer.model = inner
    return outer


def _sharing(module: nn.Module) -> Any:
    """Return a copy with the same children, whose list of children is its own."""
    copied = copy.copy(module)
    copied.__dict__["_modules"] = dict(module._modules)  # noqa: SLF001
    return copied

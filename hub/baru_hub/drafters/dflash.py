"""DFlash: a block of ids drafted in one parallel pass, from several of the target's hidden states.

z-lab, "DFlash" (2026), and its published code's layout. The target's states of all committed positions are context,
fused once; the block is the last committed id and mask ids, which see the context and each other:

    c       hidden_norm(fc(taps side by side)), one row for each position before the block
    layer   queries of the block's rows; keys and values of c (no layer norm) and of the block's rows, same weights,
            keys normed and rotated at their positions; no causal mask within the block
    slot i  predicts the id at its own position; slot 0 is the committed id and is left out
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig

from baru_common.errors import ModelFileError
from baru_common.model_files import LoadedModel
from baru_common.sampling.sampler import within
from baru_hub.guesses import Guesses
from baru_hub.kv_cache import AttentionPlan, KvShape
from baru_hub.ragged_batch import SequenceFeed, lay_out
from baru_hub.session import Block

from .base import DraftAsk, TargetParts
from .checkpoint import fill, read_folder
from .layers import Attend, DecoderLayer, Rotary, norm_of, num_bytes_of
from .recurrent import attend_through


class DFlashHead(nn.Module):
    """The weights, under the names of the published layout."""

    def __init__(self, config: LlamaConfig, num_taps: int, target_width: int) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(num_taps * target_width, config.hidden_size, bias=False)
        self.hidden_norm = norm_of(config)
        self.layers = nn.ModuleList(DecoderLayer(config, i, qk_norm=True) for i in range(config.num_hidden_layers))
        self.norm = norm_of(config)
        self.rotary = Rotary(config)

    def context(self, taps: torch.Tensor, positions: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return each layer's keys and values of rows of states ([num_rows, num_taps, width])."""
        fused = self.hidden_norm(self.fc(taps.flatten(1)))[None]
        rotation = self.rotary(positions, fused)
        attentions: list[Any] = [layer.self_attn for layer in self.layers]
        return [attention.keys_and_values(fused, rotation) for attention in attentions]

    def forward(self, embedded: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Return what the target's head reads, for the rows of blocks: [1, num_rows, width] in and out."""
        rotation = self.rotary(positions, embedded)
        hidden = embedded
        for layer in self.layers:
            hidden = layer(hidden, rotation, attend)
        out: torch.Tensor = self.norm(hidden)
        return out


class DFlash:
    """A loaded head and how it reads its target."""

    def __init__(self, head: DFlashHead, taps: tuple[int, ...], block_size: int, mask_id: int) -> None:
        self.head, self.taps, self.block_size, self.mask_id = head, taps, block_size, mask_id
        self.kv_shape = KvShape.of(head.config)
        self.num_bytes = num_bytes_of(head)

    @classmethod
    def load(cls, path: str, target: LoadedModel) -> DFlash:
        """Load a published head for a target; ModelFileError if it is of another kind or does not fit."""
        model: Any = target.model
        text = model.config.get_text_config(decoder=True)
        raw, tensors = read_folder(path)
        options = raw.get("dflash_config") or {}
        unknown = [key for key in ("use_swa", "attention_sink_bias", "causal") if options.get(key)]
        if unknown or "sliding_attention" in (raw.get("layer_types") or ()):
            raise ModelFileError(f"{path} is a DFlash variant that is not built: {', '.join(unknown) or 'sliding'}")
        config = LlamaConfig.from_dict(
            {key: value for key, value in raw.items() if key not in ("architectures", "layer_types")}
            | {"model_type": "llama"}
        )
        layers = options.get("target_layer_ids") or default_layers(text.num_hidden_layers, config.num_hidden_layers)
        mask_id = options.get("mask_token_id")
        rows = model.get_input_embeddings().weight.shape[0]
        if config.hidden_size != text.hidden_size or not isinstance(mask_id, int) or not 0 <= mask_id < rows:
            raise ModelFileError(
                f"{path} was made for another target: width {config.hidden_size}, mask id {mask_id};"
                f" {target.files.name} has {text.hidden_size} and ids below {rows}"
            )
        known = range(text.num_hidden_layers)
        if not isinstance(layers, list) or not all(isinstance(i, int) and i in known for i in layers):
            raise ModelFileError(f"target_layer_ids is {layers!r}, the target has {text.num_hidden_layers} layers")
        block_size = raw.get("block_size", 16)
        if not isinstance(block_size, int) or block_size < 2:
            raise ModelFileError(f"{path}: block_size is {block_size!r}, must be 2 or more")
        head = DFlashHead(config, len(layers), text.hidden_size)
        fill(head, tensors, path)
        head.eval().requires_grad_(False).to(model.device, model.dtype)
        return cls(head, tuple(layer + 1 for layer in layers), block_size, mask_id)


def default_layers(num_target_layers: int, num_layers: int) -> list[int]:
    """Return which of the target's layers are read when the configuration does not say: spread evenly."""
    if num_layers == 1:
        return [num_target_layers // 2]
    return [round(1 + i * (num_target_layers - 4) / (num_layers - 1)) for i in range(num_layers)]


class DFlashDrafter:
    """Drafts blocks, for sessions whose pages it shares."""

    family = "dflash"

    def __init__(self, dflash: DFlash, target: TargetParts) -> None:
        model: Any = target.loaded.model
        self.taps, self.num_bytes = dflash.taps, dflash.num_bytes
        self._dflash, self._target = dflash, target.loaded
        self._device = model.device
        config = dflash.head.config
        self._group = config.num_attention_heads // dflash.kv_shape.num_kv_heads
        self._cache = target.cache_of(dflash.kv_shape)

    def forget(self, pages: Sequence[int]) -> None:
        """See `HubDrafter.forget`."""
        self._cache.wipe(list(pages))

    @torch.inference_mode()
    def draft(self, asks: Sequence[DraftAsk]) -> list[Guesses]:
        """See `HubDrafter.draft`. A block that leaves the node's draft is a path beside it."""
        known = {i: ask for i, ask in enumerate(asks) if ask.is_followed}
        if not known:
            return [Guesses(ask.chain) for ask in asks]
        self._read(list(known.values()))
        blocks = dict(zip(known, self._blocks(list(known.values())), strict=True))
        return [_beside(ask, blocks[i]) if i in blocks else Guesses(ask.chain) for i, ask in enumerate(asks)]

    def _read(self, asks: Sequence[DraftAsk]) -> None:
        """Put the keys and values of unread states into the pages."""
        for ask in asks:
            first, rows = ask.states.first, ask.states.take()
            positions = range(first, first + len(rows))
            size = self._cache.page_size
            slots = [ask.pages[p // size] * size + p % size for p in positions]
            self._cache.begin(torch.tensor(slots, device=self._device))
            at = torch.tensor(positions, device=self._device)
            for layer, (key, value) in enumerate(self._dflash.head.context(rows, at)):
                self._cache.update(key, value, layer)

    def _blocks(self, asks: Sequence[DraftAsk]) -> list[list[int]]:
        sizes = [min(ask.depth + len(ask.chain) + 1, self._dflash.block_size) for ask in asks]
        feeds = [
            SequenceFeed(
                ask.pages,
                len(ask.committed) - 1,
                Block((ask.committed[-1], *[self._dflash.mask_id] * (size - 1)), decides=False),
            )
            for ask, size in zip(asks, sizes, strict=True)
        ]
        batch = lay_out(feeds, self._cache.page_size, 1, self._cache.spare_page)
        self._cache.begin(torch.tensor(batch.slots, device=self._device))
        whole = replace(batch, segments=batch.whole_segments(sizes))
        plan = AttentionPlan.of(whole, self._cache.page_size, self._group, self._device).seeing_all()
        model: Any = self._target.model
        embedded = model.get_input_embeddings()(torch.tensor(batch.ids, device=self._device))[None]
        positions = torch.tensor(batch.positions, device=self._device)
        hidden = self._dflash.head(embedded, positions, attend_through(self._cache, plan))[0]
        logits = within(model.get_output_embeddings()(hidden).float(), self._target.vocabulary)
        blocks, start = [], 0
        for ask, size in zip(asks, sizes, strict=True):
            drafted: list[int] = []
            for row in logits[start + 1 : start + size]:
                best = ask.sampler.rank(row[None], ask.committed, drafted, 1)
                if not best:
                    break
                drafted += best
            blocks.append(drafted)
            start += size
        return blocks


def _beside(ask: DraftAsk, block: list[int]) -> Guesses:
    """Join a block and the node's draft: one path while they agree, the node's first where they part."""
    chain = list(ask.chain)
    if block[: len(chain)] == chain:
        return Guesses(block)
    parting = next((i for i, (a, b) in enumerate(zip(block, chain, strict=False)) if a != b), None)
    # A block may also end within the node's draft, and say nothing new.
    return Guesses(chain, [] if parting is None else [block[: parting + 1]])

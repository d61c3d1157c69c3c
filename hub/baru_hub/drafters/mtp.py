"""Multi-token prediction: a layer that ships with the target and predicts one id further than the target does.

DeepSeek-V3 technical report (2024), section 2.2. Row j joins the target's state at position j with the embedding of the
id after it, runs one of the target's own layers, and predicts the id after that:

    x_j = proj([norm(embedding of id j+1) ; norm(h_j)])         h_j the target's last state, or the row before's output
    y_j = block(x_j);  id j+2 from the target's head, of norm(y_j)

Published checkpoints name the parts differently; `LAYOUTS` has what each is called. The block is the target family's
own class, so whatever it does, it does here. What is uncertain (docs/drafters.md): whether the state that goes on is
taken before or after the last norm; `recycle_normed` says which.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from baru_common.errors import ModelFileError
from baru_common.model_files import LoadedModel
from baru_common.sampling.sampler import within
from baru_hub.kv_cache import ATTENTION, AttentionPlan, KvShape, PagedCache

from .checkpoint import fill
from .layers import num_bytes_of


@dataclass(frozen=True)
class Layout:
    """Where one family of checkpoints keeps the parts; {layer} is the number of the target's layers."""

    embedding_norm: str
    hidden_norm: str
    projection: str
    block: str
    final_norm: str
    hidden_first: bool = False
    """The state comes before the embedding in the projection's input."""


LAYOUTS = {
    "qwen": Layout("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.layers.0", "mtp.norm"),
    "deepseek": Layout(
        "model.layers.{layer}.enorm",
        "model.layers.{layer}.hnorm",
        "model.layers.{layer}.eh_proj",
        "model.layers.{layer}",
        "model.layers.{layer}.shared_head.norm",
    ),
    "mimo": Layout(
        "model.mtp_layers.0.token_layernorm",
        "model.mtp_layers.0.hidden_layernorm",
        "model.mtp_layers.0.input_proj",
        "model.mtp_layers.0",
        "model.mtp_layers.0.final_layernorm",
        hidden_first=True,
    ),
}
_DUPLICATES = ("embed_tokens.weight", "shared_head.head.weight")
"""Copies of the target's own tensors that some checkpoints carry."""


class MtpHead(nn.Module):
    """The parts, under names of our own."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        config = copy.deepcopy(model.config.get_text_config(decoder=True))
        config._attn_implementation = ATTENTION  # noqa: SLF001
        width, norm = config.hidden_size, type(model.model.norm)
        self.embedding_norm = norm(width, config.rms_norm_eps)
        self.hidden_norm = norm(width, config.rms_norm_eps)
        self.projection = nn.Linear(2 * width, width, bias=False)
        self.block = type(model.model.layers[-1])(config, 0)
        self.final_norm = norm(width, config.rms_norm_eps)


class Mtp:
    """A head beside its target, as `RecurrentDrafter` drives it."""

    def __init__(self, head: MtpHead, target: LoadedModel, layout: Layout, *, recycle_normed: bool = True) -> None:
        model: Any = target.model
        config = model.config.get_text_config(decoder=True)
        # The state after the target's last norm, as these heads were trained on.
        self.taps = (config.num_hidden_layers,)
        self.kv_shape = replace(KvShape.of(config), num_layers=1)
        self.group = config.num_attention_heads // self.kv_shape.num_kv_heads
        self.num_bytes = num_bytes_of(head)
        self._head, self._target, self._layout = head, target, layout
        self._recycle_normed = recycle_normed

    @classmethod
    def load(cls, tensors: Mapping[str, torch.Tensor], target: LoadedModel, *, recycle_normed: bool = True) -> Mtp:
        """Take the head's tensors out of a checkpoint's; ModelFileError if there are none of a known layout."""
        model: Any = target.model
        number = str(model.config.get_text_config(decoder=True).num_hidden_layers)
        for layout in LAYOUTS.values():
            prefixes = {
                layout.embedding_norm: "embedding_norm",
                layout.hidden_norm: "hidden_norm",
                layout.projection: "projection",
                layout.final_norm: "final_norm",
                layout.block: "block",
            }
            named = {key.replace("{layer}", number): own for key, own in prefixes.items()}
            found = dict(_renamed(tensors, named))
            if "projection.weight" in found:
                head = MtpHead(model)
                fill(head, found, "the checkpoint's MTP head")
                head.eval().requires_grad_(False).to(model.device, model.dtype)
                return cls(head, target, layout, recycle_normed=recycle_normed)
        raise ModelFileError(
            f"{target.files.name} ships no MTP head of a known layout", hint=f"known: {', '.join(LAYOUTS)}"
        )

    def fused(self, taps: torch.Tensor) -> torch.Tensor:
        """See `RecurrentHead.fused`."""
        return taps[None, :, -1]

    def step(
        self, ids: torch.Tensor, state: torch.Tensor, positions: torch.Tensor, cache: PagedCache, plan: AttentionPlan
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `RecurrentHead.step`."""
        model: Any = self._target.model
        parts = (
            self._head.embedding_norm(model.get_input_embeddings()(ids)[None]),
            self._head.hidden_norm(state),
        )
        joined = self._head.projection(torch.cat(parts[::-1] if self._layout.hidden_first else parts, -1))
        hidden = self._head.block(
            joined,
            position_ids=positions[None],
            cache=cache,
            use_cache=True,
            position_embeddings=model.model.rotary_emb(joined, positions[None]),
            attention_plan=plan,
        )
        normed = self._head.final_norm(hidden)
        return (normed if self._recycle_normed else hidden), normed

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        """See `RecurrentHead.logits`."""
        model: Any = self._target.model
        return within(model.get_output_embeddings()(normed).float(), self._target.vocabulary)


def _renamed(tensors: Mapping[str, torch.Tensor], prefixes: Mapping[str, str]) -> Any:
    """Yield the head's tensors under our own names; the longest prefix that fits counts."""
    longest_first = sorted(prefixes, key=len, reverse=True)
    for name, tensor in tensors.items():
        prefix = next((p for p in longest_first if name.startswith(f"{p}.")), None)
        rest = name.removeprefix(f"{prefix}.") if prefix else ""
        if prefix is not None and rest not in _DUPLICATES and not rest.startswith("shared_head.head"):
            yield f"{prefixes[prefix]}.{rest}", tensor

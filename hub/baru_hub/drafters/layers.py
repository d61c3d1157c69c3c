"""A decoder layer that is told how to attend, so that training, serving and a plain reference share its weights.

Norms, rotary embedding and feed-forward are transformers' own; what differs between published draft heads is what
goes in and what comes out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(layer, query, key, value) -> attended. Query [1, num_heads, num_rows, head_dim], key and value the same with the
key-value heads, both rotated; the result is [1, num_rows, num_heads, head_dim]."""
Rotation = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines of the rows' positions: [1, num_rows, head_dim] each."""


def head_dim_of(config: PreTrainedConfig) -> int:
    """Width of one attention head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


class Rotary(nn.Module):
    """Rotary positions of a head, by its own configuration, not the target's."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        self._config: Any = config  # has what every such configuration has
        self._embedding: Any = LlamaRotaryEmbedding(self._config)  # type: ignore[arg-type]

    def forward(self, positions: torch.Tensor, like: torch.Tensor) -> Rotation:
        """Return the rotation of `positions` ([num_rows]) in the numeric type of `like`."""
        rotation: Rotation = self._embedding(like, positions[None])
        return rotation

    def _apply(self, fn: Any, recurse: bool = True) -> Rotary:  # torch's own signature
        """Move to another device; the frequencies keep their precision, whatever type the weights are turned into."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._embedding = LlamaRotaryEmbedding(self._config).to(self._embedding.inv_freq.device)
        return self


class SelfAttention(nn.Module):
    """Attention of one layer; `num_inputs` hidden states side by side go in, one comes out."""

    def __init__(self, config: PreTrainedConfig, layer: int, *, num_inputs: int = 1, qk_norm: bool = False) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = head_dim_of(config)
        width, heads, kv_heads = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
        bias = bool(getattr(config, "attention_bias", False))
        self.q_proj = nn.Linear(num_inputs * width, heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(num_inputs * width, kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(num_inputs * width, kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(heads * self.head_dim, width, bias=bias)
        norm = LlamaRMSNorm(self.head_dim, config.rms_norm_eps) if qk_norm else None
        self.q_norm: nn.Module | None = norm
        self.k_norm: nn.Module | None = LlamaRMSNorm(self.head_dim, config.rms_norm_eps) if qk_norm else None

    def forward(self, x: torch.Tensor, rotation: Rotation, attend: Attend) -> torch.Tensor:
        """Attend from rows `x` ([1, num_rows, num_inputs * width])."""
        query = self._heads(self.q_proj(x), self.q_norm)
        key, value = self._heads(self.k_proj(x), self.k_norm), self._heads(self.v_proj(x), None)
        query, key = apply_rotary_pos_emb(query, key, *rotation)
        attended = attend(self.layer, query, key, value)
        out: torch.Tensor = self.o_proj(attended.flatten(2))
        return out

    def keys_and_values(self, x: torch.Tensor, rotation: Rotation) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rotated keys and the values of rows that are attended to, and attend to nothing."""
        key, value = self._heads(self.k_proj(x), self.k_norm), self._heads(self.v_proj(x), None)
        _, key = apply_rotary_pos_emb(key, key, *rotation)
        return key, value

    def _heads(self, x: torch.Tensor, norm: nn.Module | None) -> torch.Tensor:
        heads = x.view(*x.shape[:2], -1, self.head_dim)
        normed: torch.Tensor = heads if norm is None else norm(heads)
        return normed.transpose(1, 2)


class DecoderLayer(nn.Module):
    """An ordinary layer: norm, attention, norm, feed-forward, each added to what went in."""

    def __init__(self, config: PreTrainedConfig, layer: int, *, qk_norm: bool = False) -> None:
        super().__init__()
        self.input_layernorm = norm_of(config)
        self.self_attn = SelfAttention(config, layer, qk_norm=qk_norm)
        self.post_attention_layernorm = norm_of(config)
        self.mlp = LlamaMLP(config)  # type: ignore[no-untyped-call]

    def forward(self, hidden: torch.Tensor, rotation: Rotation, attend: Attend) -> torch.Tensor:
        """Return the rows after the layer: [1, num_rows, width], as they went in."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), rotation, attend)
        out: torch.Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


def norm_of(config: PreTrainedConfig) -> nn.Module:
    norm: nn.Module = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
    return norm


def num_bytes_of(module: nn.Module) -> int:
    """Return the memory of a module's weights."""
    return sum(tensor.numel() * tensor.element_size() for tensor in module.state_dict().values())

"""Plain layers for references: dense attention over all rows, no cache, nothing shared with what is tested."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Shape:
    """What a layer's weights do not say."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    rope_theta: float


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root mean square normalisation."""
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def rotated(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotate [num_rows, heads, head_dim]: the first half of a head pairs with the second."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, dtype=torch.double) / half)
    angles = (positions.double()[:, None] * frequencies)[:, None]
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def projected(
    weights: Tensors, shape: Shape, part: str, x: torch.Tensor, positions: torch.Tensor | None
) -> torch.Tensor:
    """Heads of queries, keys or values: [num_rows, heads, head_dim]; `positions` None: values."""
    heads = (x @ weights[f"self_attn.{part}_proj.weight"].T).view(len(x), -1, shape.head_dim)
    if positions is None:
        return heads
    norm = weights.get(f"self_attn.{part}_norm.weight")
    return rotated(heads if norm is None else rms(heads, norm, shape.eps), positions, shape.rope_theta)


def attended(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, shape: Shape
) -> torch.Tensor:
    """Softmax attention, [num_queries, width] out; `mask` [num_queries, num_keys] is true where a row attends."""
    group = shape.num_heads // shape.num_kv_heads
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * shape.head_dim**-0.5
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value).flatten(1)


def attention(weights: Tensors, shape: Shape, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Causal self-attention of a layer whose tensors start with `self_attn.`."""
    query, key = (projected(weights, shape, part, x, positions) for part in "qk")
    value = projected(weights, shape, "v", x, None)
    mask = positions <= positions[:, None]
    return attended(query, key, value, mask, shape) @ weights["self_attn.o_proj.weight"].T


def feed_forward(weights: Tensors, x: torch.Tensor) -> torch.Tensor:
    gate, up = (x @ weights[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    return (gate * gate.sigmoid() * up) @ weights["mlp.down_proj.weight"].T


def layer(weights: Tensors, shape: Shape, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """An ordinary decoder layer."""
    x = x + attention(weights, shape, rms(x, weights["input_layernorm.weight"], shape.eps), positions)
    return x + feed_forward(weights, rms(x, weights["post_attention_layernorm.weight"], shape.eps))


def under(tensors: Tensors, prefix: str) -> dict[str, torch.Tensor]:
    """The tensors whose names start with `prefix`, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def layer_tensors(
    generator: torch.Generator, shape: Shape, width: int, inner: int, *, inputs: int = 1, qk_norm: bool = False
) -> dict[str, torch.Tensor]:
    """Random weights of a layer, norms included."""
    sizes = {
        "self_attn.q_proj": (shape.num_heads * shape.head_dim, inputs * width),
        "self_attn.k_proj": (shape.num_kv_heads * shape.head_dim, inputs * width),
        "self_attn.v_proj": (shape.num_kv_heads * shape.head_dim, inputs * width),
        "self_attn.o_proj": (width, shape.num_heads * shape.head_dim),
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
    }
    tensors = {f"{name}.weight": matrix(generator, *size) for name, size in sizes.items()}
    norms = {"input_layernorm": width, "post_attention_layernorm": width}
    norms |= {"self_attn.q_norm": shape.head_dim, "self_attn.k_norm": shape.head_dim} if qk_norm else {}
    return tensors | {f"{name}.weight": norm_weight(generator, size) for name, size in norms.items()}


def matrix(generator: torch.Generator, num_out: int, num_in: int) -> torch.Tensor:
    """Random and of a scale at which every part of a head has a say."""
    scale: float = 1.5 / num_in**0.5
    return torch.randn(num_out, num_in, generator=generator) * scale


def norm_weight(generator: torch.Generator, size: int) -> torch.Tensor:
    return 1 + 0.3 * torch.randn(size, generator=generator)

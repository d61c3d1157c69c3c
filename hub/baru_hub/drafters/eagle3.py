"""EAGLE-3: one layer that reads three of the target's hidden states and drafts on from its own.

Li et al., "EAGLE-3" (2025). Row j holds the target's state f_j at position j beside the embedding of the id after it,
and predicts the id after that:

    g_j = fc(taps at j)          for rows that the target has computed; for drafted rows the row before's output
    h_j = layer([norm(embedding of id j+1) ; norm(g_j)]) + g_j
    id j+2 from head(norm(h_j)), over the reduced vocabulary; h_j before the norm goes on to the next row

Layout of published checkpoints and what is uncertain about them: docs/drafters.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, PreTrainedConfig

from baru_common.errors import ModelFileError
from baru_common.model_files import LoadedModel
from baru_hub.kv_cache import AttentionPlan, KvShape, PagedCache

from .checkpoint import fill, read_folder, tap_layers
from .layers import Attend, DecoderLayer, Rotary, Rotation, SelfAttention, norm_of, num_bytes_of
from .recurrent import attend_through


@dataclass(frozen=True)
class Eagle3Options:
    """What published heads differ in; the keys are those of their config.json."""

    num_taps: int = 3
    target_width: int = 0
    draft_vocab_size: int | None = None
    """None: the head predicts over the target's whole vocabulary."""
    uses_taps: bool = True
    """False: no `fc`; the row is the target's last state itself."""
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    """One norm over the taps side by side."""
    fc_norm: bool = False
    """One norm for each tap."""
    norm_output: bool = False
    """What goes on to the next row is the state after the final norm."""
    own_embedding: bool = False
    own_head: bool = True
    qk_norm: bool = False


class Eagle3Layer(nn.Module):
    """The first layer: embedding and state side by side."""

    def __init__(self, config: PreTrainedConfig, options: Eagle3Options) -> None:
        super().__init__()
        self.options = options
        self.input_layernorm = norm_of(config)
        self.hidden_norm = norm_of(config)
        self.self_attn = SelfAttention(config, 0, num_inputs=2, qk_norm=options.qk_norm)
        self.post_attention_layernorm = norm_of(config)
        self.mlp: nn.Module = DecoderLayer(config, 0).mlp

    def forward(self, embedded: torch.Tensor, state: torch.Tensor, rotation: Rotation, attend: Attend) -> torch.Tensor:
        """Return h for rows of embeddings and states, [1, num_rows, width] each."""
        normed = self.hidden_norm(state)
        residual = normed if self.options.norm_before_residual else state
        hidden = residual + self.self_attn(torch.cat((self.input_layernorm(embedded), normed), -1), rotation, attend)
        out: torch.Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class Eagle3Head(nn.Module):
    """The head's weights, under the names of the published layout."""

    d2t: torch.Tensor

    def __init__(self, config: LlamaConfig, options: Eagle3Options) -> None:
        super().__init__()
        self.config, self.options = config, options
        width, vocabulary = config.hidden_size, config.vocab_size
        target_width = options.target_width or width
        if options.own_embedding:
            self.embed_tokens = nn.Embedding(vocabulary, width)
        if options.uses_taps:
            self.fc = nn.Linear(options.num_taps * target_width, width, bias=False)
        if options.norm_before_fc:
            self.input_norm = nn.RMSNorm(options.num_taps * target_width, config.rms_norm_eps)
        if options.fc_norm:
            norms = (nn.RMSNorm(target_width, config.rms_norm_eps) for _ in range(options.num_taps))
            self.fc_norm = nn.ModuleList(norms)
        self.midlayer = Eagle3Layer(config, options)
        later = (DecoderLayer(config, i, qk_norm=options.qk_norm) for i in range(1, config.num_hidden_layers))
        self.later = nn.ModuleList(later)
        self.norm = norm_of(config)
        size = options.draft_vocab_size or vocabulary
        if options.own_head:
            self.lm_head = nn.Linear(width, size, bias=False)
        self.register_buffer("d2t", torch.zeros(size, dtype=torch.long))
        self.rotary = Rotary(config)

    def fused(self, taps: torch.Tensor) -> torch.Tensor:
        """Return g for rows of the target's states ([num_rows, num_taps, target_width]): [1, num_rows, width]."""
        if not self.options.uses_taps:
            return taps[None, :, -1]
        if self.options.fc_norm:
            taps = taps.to(self.fc.weight.dtype)  # in training the head is in another type than the target
            taps = torch.stack([norm(tap) for norm, tap in zip(self.fc_norm, taps.unbind(1), strict=True)], 1)
        flat = taps.flatten(1)
        if self.options.norm_before_fc:
            flat = self.input_norm(flat)
        state: torch.Tensor = self.fc(flat)
        return state[None]

    def forward(
        self, embedded: torch.Tensor, state: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return, for rows of embeddings and states ([1, num_rows, width]), what goes on to the next rows, and what
        the head reads: both [1, num_rows, width]."""
        rotation = self.rotary(positions, state)
        hidden = self.midlayer(embedded, state, rotation, attend)
        for layer in self.later:
            hidden = layer(hidden, rotation, attend)
        normed = self.norm(hidden)
        return (normed if self.options.norm_output else hidden), normed

    def target_ids(self) -> torch.Tensor:
        """Return the target's id of each draft id: [draft_vocab_size]. `d2t` holds the differences."""
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t


def options_from(raw: dict[str, Any], names: frozenset[str], target_width: int, num_taps: int = 3) -> Eagle3Options:
    """Read the options from config.json and from what tensors there are."""
    nested = raw.get("eagle_config") or {}

    def flag(key: str, *, default: bool) -> bool:
        return bool(raw.get(key, nested.get(key, default)))

    uses_taps = flag("use_aux_hidden_state", default=True)
    size = raw.get("draft_vocab_size")
    return Eagle3Options(
        num_taps=num_taps,
        target_width=int(raw.get("target_hidden_size") or target_width),
        draft_vocab_size=None if size is None else int(size),
        uses_taps=uses_taps,
        norm_before_residual=flag("norm_before_residual", default=False),
        norm_before_fc=flag("norm_before_fc", default=False) or "input_norm.weight" in names,
        fc_norm=flag("fc_norm", default=False) or "fc_norm.0.weight" in names,
        norm_output=flag("norm_output", default=False),
        own_embedding="embed_tokens.weight" in names,
        own_head="lm_head.weight" in names or size is not None,
        qk_norm="midlayer.self_attn.q_norm.weight" in names,
    )


def load_eagle3(path: str, target_width: int, num_layers: int) -> tuple[Eagle3Head, tuple[int, ...]]:
    """Load a head from a folder of the published layout, for a target of this width and so many layers; return it with
    the target's states that it reads.

    ModelFileError for a layout that this does not know.
    """
    raw, tensors = read_folder(path)
    tensors = {_own_name(name): tensor for name, tensor in tensors.items() if not name.endswith("t2d")}
    settings = dict(raw.get("transformer_layer_config") or {}) | {k: v for k, v in raw.items() if k != "architectures"}
    taps = tap_layers(raw, num_layers)
    options = options_from(raw, frozenset(tensors), target_width, len(taps))
    config = LlamaConfig.from_dict(settings | {"model_type": "llama"})
    head = Eagle3Head(config, options)
    tensors.setdefault("d2t", torch.zeros_like(head.d2t))
    fill(head, tensors, path)
    return head.eval().requires_grad_(False), taps if options.uses_taps else (num_layers,)


def _own_name(name: str) -> str:
    """The published name without the prefixes that differ: midlayer and layers.0 are the same."""
    name = name.removeprefix("model.")
    first, _, rest = name.partition(".")
    if first != "layers":
        return name
    number, _, rest = rest.partition(".")
    return f"midlayer.{rest}" if number == "0" else f"later.{int(number) - 1}.{rest}"


class Eagle3:
    """A loaded head beside its target, as `RecurrentDrafter` drives it."""

    def __init__(self, head: Eagle3Head, target: LoadedModel, taps: tuple[int, ...]) -> None:
        model: Any = target.model
        self.taps = taps
        self._head = head
        self._embedding = head.embed_tokens if head.options.own_embedding else model.get_input_embeddings()
        self._output = head.lm_head if head.options.own_head else model.get_output_embeddings()
        self._width = target.vocabulary.size
        self._target_ids = head.target_ids()
        self.kv_shape = KvShape.of(head.config)
        self.group = head.config.num_attention_heads // self.kv_shape.num_kv_heads
        self.num_bytes = num_bytes_of(head)

    @classmethod
    def load(cls, path: str, target: LoadedModel) -> Eagle3:
        """Load a published head for a target; ModelFileError if it does not fit."""
        model: Any = target.model
        text = model.config.get_text_config(decoder=True)
        head, taps = load_eagle3(path, text.hidden_size, text.num_hidden_layers)
        options, ids = head.options, head.target_ids()
        if options.target_width != text.hidden_size or int(ids.min()) < 0 or int(ids.max()) >= text.vocab_size:
            raise ModelFileError(
                f"{path} was made for another target: width {options.target_width}, ids from {int(ids.min())} and"
                f" ids below {int(ids.max()) + 1}; {target.files.name} has {text.hidden_size} and {text.vocab_size}"
            )
        shares = not (options.own_embedding and options.own_head and options.uses_taps)
        if shares and head.config.hidden_size != text.hidden_size:
            raise ModelFileError(
                f"{path} has width {head.config.hidden_size}, {target.files.name} {text.hidden_size}:"
                " it needs an fc, an embedding and an output of its own"
            )
        if options.own_embedding and head.embed_tokens.num_embeddings < target.vocabulary.size:
            size = target.vocabulary.size
            raise ModelFileError(
                f"{path} embeds {head.embed_tokens.num_embeddings} ids, {target.files.name} has {size}"
            )
        return cls(head.to(model.device, model.dtype), target, taps)

    def fused(self, taps: torch.Tensor) -> torch.Tensor:
        """See `RecurrentHead.fused`."""
        return self._head.fused(taps)

    def step(
        self, ids: torch.Tensor, state: torch.Tensor, positions: torch.Tensor, cache: PagedCache, plan: AttentionPlan
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `RecurrentHead.step`."""
        embedded = self._embedding(ids)[None].to(state.dtype)
        following: tuple[torch.Tensor, torch.Tensor] = self._head(
            embedded, state, positions, attend_through(cache, plan)
        )
        return following

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        """See `RecurrentHead.logits`."""
        drafted: torch.Tensor = self._output(normed).float()  # [num_rows, draft_vocab_size]
        known = self._target_ids < self._width
        logits = drafted.new_full((len(drafted), self._width), float("-inf"))
        logits[:, self._target_ids[known]] = drafted[:, : len(self._target_ids)][:, known]
        return logits

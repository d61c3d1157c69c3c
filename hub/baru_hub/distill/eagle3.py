"""Training an EAGLE-3 head: it learns to say what the target will say, from the target's own states and then its own.

Li et al., "EAGLE-3" (2025), "training-time test": the head is unrolled as it will be used. Unrolled step s at row n
reads its own output of step s - 1 and the id after it (the text's, which is what was drafted as long as drafts are
right), and attends to the rows up to n made of the target's states, and to its own of steps 1 to s:

    step s, row n     query at position n + s;  keys: step 0 at rows 0 to n, then steps 1 to s at row n alone
    predicts          the id at n + 2 + s;  loss: cross-entropy to the target's own distribution over the draft
                      vocabulary, renormalised, weight decay^s, where the target's likeliest id can be drafted
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig

from baru_common.model_files import LoadedModel
from baru_hub.drafters.eagle3 import Eagle3Head, Eagle3Options

from .observed import Batch


@dataclass
class _Unrolled:
    """Keys and values of the unrolled steps of one layer."""

    steps: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def attend(self, _layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Attend as a chain drafted from each row would; [num_texts, heads, length, head_dim] in."""
        group = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        self.steps.append((key, value))
        (first_key, first_value), own = self.steps[0], self.steps[1:]
        length = query.shape[2]
        scale = query.shape[3] ** -0.5
        causal = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
        scores = (query @ first_key.transpose(2, 3)).float().mul(scale).masked_fill(~causal, float("-inf"))
        diagonal = [(query * k).sum(-1, keepdim=True).float() * scale for k, _ in own]
        weights = torch.cat((scores, *diagonal), -1).softmax(-1).to(query.dtype)
        attended = weights[..., :length] @ first_value
        for step, (_, v) in enumerate(own):
            attended = attended + weights[..., length + step : length + step + 1] * v
        return attended.transpose(1, 2)


class Trainee(nn.Module):
    """A head being trained beside its target."""

    def __init__(self, head: Eagle3Head, embedding: nn.Module, decay: float = 0.8) -> None:
        super().__init__()
        self.head = head
        self.decay = decay
        self._embedding = [embedding]  # in a list: the target's weights are not the trainee's
        places = torch.full((head.config.vocab_size,), -1)
        places[head.target_ids()] = torch.arange(len(head.d2t))
        self.places: torch.Tensor
        """Draft id of each of the target's ids, -1 for those that cannot be drafted."""
        self.register_buffer("places", places)

    def unroll(self, batch: Batch, num_steps: int) -> list[torch.Tensor]:
        """Return what the head reads at each unrolled step: [num_texts, length, width]; row n of step s predicts the
        id at n + 2 + s, and counts while that is within the text."""
        num_texts, length = batch.ids.shape
        attention = _Unrolled()
        state = self.head.fused(batch.taps.flatten(0, 1))[0].view(num_texts, length, -1)
        normed = []
        for step in range(num_steps):
            following = torch.roll(batch.ids, -1 - step, 1)
            embedded = self._embedding[0](following).to(state.dtype)
            positions = torch.arange(step, length + step, device=state.device)
            state, read = self.head(embedded, state, positions, attention.attend)
            normed.append(read)
        return normed

    def loss(self, batch: Batch, num_steps: int) -> tuple[torch.Tensor, list[float]]:
        """Return the loss of a batch, and for each step the share of rows where the head's best guess is the
        target's likeliest id."""
        total, hits = batch.taps.new_zeros((), dtype=torch.float), []
        for step, read in enumerate(self.unroll(batch, num_steps)):
            probs, likeliest, counted = self._wanted(batch, step)
            logits = self.head.lm_head(read[:, : probs.shape[1]][counted]).float()
            wanted = probs[counted].float()
            best = self.places[likeliest[counted]]
            known = best >= 0
            losses = logits.logsumexp(-1) - (wanted * logits).sum(-1)
            total = total + self.decay**step * (losses * known).sum() / max(len(losses), 1)
            hits.append(float((logits.argmax(-1) == best).float().mean()))
        return total, hits

    def _wanted(self, batch: Batch, step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The target's side of a step: row n is about the id at n + 2 + s, so what stands at row n + 1 + s."""
        shift = 1 + step
        return batch.target_probs[:, shift:], batch.likeliest[:, shift:], batch.counts[:, shift:]

    @torch.inference_mode()
    def accepted(self, batch: Batch, depth: int) -> tuple[int, int]:
        """Return (emitted ids, steps) if the target's answers had been drafted by the head alone, `depth` at a time.

        `batch` must hold the target's own greedy answers.
        """
        right = []
        for step, read in enumerate(self.unroll(batch, depth)):
            _, likeliest, counted = self._wanted(batch, step)
            guessed = self.head.lm_head(read[:, : likeliest.shape[1]]).argmax(-1)
            agrees = (guessed == self.places[likeliest]) & counted
            right.append(nn.functional.pad(agrees, (0, batch.ids.shape[1] - agrees.shape[1])))
        # [num_texts, length]: how many ids in a row are right from each row on
        runs = torch.stack(right).long().cumprod(0).sum(0)
        num_emitted = num_steps = 0
        for row in range(len(batch.ids)):
            places = batch.counts[row].nonzero()[:, 0].tolist()
            # The first id comes with the prompt; after it row n drafts the id at n + 2.
            at, end = places[0], places[-1]
            while at < end:
                emitted = min(int(runs[row, at]) + 1, end - at)
                num_emitted, num_steps, at = num_emitted + emitted, num_steps + 1, at + emitted
        return num_emitted, num_steps


_LARGEST = 3.0
"""Most that one dimension of a tapped state counts at first, where the average one counts 1."""


def new_head(
    target: LoadedModel, vocabulary: Sequence[int], taps: torch.Tensor, intermediate_size: int | None = None
) -> Eagle3Head:
    """Return an untrained head for a target. It begins as the target's last layer and output, reading the state that
    it taps last; the other inputs count for little yet.

    `taps` ([num_rows, num_taps, width]) are examples. A few dimensions of a model's states are hundreds of times
    larger than the rest (Sun et al., "Massive Activations", 2024), so each is brought to the same size first.
    """
    model: Any = target.model
    text = model.config.get_text_config(decoder=True)
    heads = text.num_attention_heads
    config = LlamaConfig(
        hidden_size=text.hidden_size,
        intermediate_size=intermediate_size or text.intermediate_size,
        num_attention_heads=heads,
        num_key_value_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        num_hidden_layers=1,
        rms_norm_eps=1e-5,
        max_position_embeddings=text.max_position_embeddings,
        vocab_size=text.vocab_size,
        rope_parameters=getattr(text, "rope_parameters", None),
    )
    config.draft_vocab_size = len(vocabulary)
    options = Eagle3Options(
        num_taps=taps.shape[1], target_width=text.hidden_size, draft_vocab_size=len(vocabulary), fc_norm=True
    )
    head = Eagle3Head(config, options)
    ids = torch.tensor(vocabulary)
    with torch.no_grad():
        for weight in head.parameters():
            if weight.dim() == 2:
                weight.copy_(torch.randn_like(weight) * 0.1 / weight.shape[1] ** 0.5)
        head.lm_head.weight.copy_(model.get_output_embeddings().weight[ids])
        head.d2t.copy_(ids - torch.arange(len(ids)))
        scaled = nn.functional.rms_norm(taps.float(), taps.shape[-1:]).abs().mean(0)
        for norm, size in zip(head.fc_norm, scaled, strict=True):
            norm.load_state_dict({"weight": 1 / size.clamp(min=1e-3)})
        head.fc.weight[:, -head.fc.out_features :].add_(torch.diag(scaled[-1].clamp(max=_LARGEST)))
        _begin_as_last_layer(head, model.get_decoder())
    return head.to(model.device)


def _begin_as_last_layer(head: Eagle3Head, decoder: Any) -> None:
    """Copy what has the same name and shape; what reads two states takes the target's weights for the second."""
    last = {name: weight.detach() for name, weight in decoder.layers[-1].named_parameters()}
    last["hidden_norm.weight"] = last.pop("input_layernorm.weight", torch.empty(0))
    for name, weight in head.midlayer.named_parameters():
        theirs = last.get(name, torch.empty(0)).to(weight)
        if theirs.shape == weight.shape:
            weight.copy_(theirs)
        elif theirs.dim() == 2 and theirs.shape == (weight.shape[0], weight.shape[1] // 2):
            weight[:, weight.shape[1] // 2 :].copy_(theirs)
    if isinstance(getattr(decoder, "norm", None), nn.Module):
        head.norm.load_state_dict(decoder.norm.state_dict())

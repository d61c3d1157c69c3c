"""A model that knows only some of its tokenizer's ids, as if it knew them all.

A small drafter spends most of its weights on ids that hardly ever occur (FR-Spec, Zhao et al. 2025). Its folder then
holds, beside the plain model over V ids, `vocab_map.safetensors`:

    draft_to_target   [V] int64    the tokenizer's id of each of the model's
    target_to_draft   [size] int64 the model's id that stands in for each of the tokenizer's
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from .errors import ModelFileError
from .model_files import VOCAB_MAP


class _Read(nn.Module):
    """Embeds an id by the one that stands in for it."""

    def __init__(self, embedding: nn.Module, target_to_draft: torch.Tensor) -> None:
        super().__init__()
        self.embedding = embedding
        self.target_to_draft: torch.Tensor
        self.register_buffer("target_to_draft", target_to_draft)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = self.embedding(self.target_to_draft[ids])
        return embedded


class _Written(nn.Module):
    """Logits over all ids; those the model does not know are impossible."""

    def __init__(self, head: nn.Module, draft_to_target: torch.Tensor, size: int) -> None:
        super().__init__()
        self.head, self.size = head, size
        self.draft_to_target: torch.Tensor
        self.register_buffer("draft_to_target", draft_to_target)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        known: torch.Tensor = self.head(hidden)
        logits = known.new_full((*known.shape[:-1], self.size), float("-inf"))
        logits[..., self.draft_to_target] = known
        return logits


def expand(model: Any, folder: Path) -> None:
    """Make `model` read and predict its tokenizer's ids, if its folder has a map; ModelFileError if that is wrong."""
    path = folder / VOCAB_MAP
    if not path.is_file():
        return
    try:
        tensors = load_file(path)
        draft_to_target, target_to_draft = tensors["draft_to_target"].long(), tensors["target_to_draft"].long()
    except Exception as error:
        raise ModelFileError(f"{path} cannot be read: {error!r}") from error
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    num_known, size = model.config.vocab_size, len(target_to_draft)
    if draft_to_target.shape != (num_known,) or len(set(draft_to_target.tolist())) != num_known:
        raise ModelFileError(f"{path} does not name {num_known} different ids, one for each of the model's")
    if not (_within(draft_to_target, size) and _within(target_to_draft, num_known)):
        raise ModelFileError(f"{path} names ids that do not exist")
    device = embedding.weight.device
    model.set_input_embeddings(_Read(embedding, target_to_draft.to(device)))
    model.set_output_embeddings(_Written(head, draft_to_target.to(device), size))
    model.config.vocab_size = size


def _within(ids: torch.Tensor, size: int) -> bool:
    return ids.dim() == 1 and len(ids) > 0 and int(ids.min()) >= 0 and int(ids.max()) < size

"""What the target makes of a text: run once, kept on the disk for later epochs.

Files in the folder, a row per id of the texts in their order: `states.bin` (the tapped states and the last one, as the
target computes them), `likeliest.bin` (int32), `ids.bin` (int32, the id plus one; written last, so that a row is whole
where its id stands).
Texts may be added at the end between runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from baru_common.model_files import LoadedModel

from .texts import Text


@dataclass(frozen=True)
class Batch:
    """Texts beside what the target makes of them; shorter ones are padded at the end."""

    ids: torch.Tensor
    """[num_texts, length]"""
    taps: torch.Tensor
    """[num_texts, length, num_taps, width]; row j is the target's state at position j"""
    target_probs: torch.Tensor
    """[num_texts, length, draft_vocab_size]; row j: of the id at j + 1, over the draft vocabulary, renormalised"""
    likeliest: torch.Tensor
    """[num_texts, length]; the target's likeliest id at j + 1, as an id of the target"""
    counts: torch.Tensor
    """[num_texts, length]; true where the id at j + 1 is of the answer"""


@torch.no_grad()
def states_of(target: LoadedModel, taps: Sequence[int], ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the target over `ids` ([num_texts, length]); return its tapped states and its last one
    ([num_texts, length, num_taps + 1, width]), and its likeliest next ids ([num_texts, length])."""
    model: Any = target.model
    output = model(input_ids=ids, use_cache=False, output_hidden_states=True, logits_to_keep=1)
    head = model.get_output_embeddings()
    # The head in pieces: all logits of a batch at once would take more memory than anything else here.
    pieces = torch.split(output.hidden_states[-1], 4)
    likeliest = torch.cat([head(piece)[:, :, : target.vocabulary.size].argmax(-1) for piece in pieces])
    return torch.stack([output.hidden_states[i] for i in (*taps, -1)], 2), likeliest


def observe(target: LoadedModel, taps: Sequence[int], vocabulary: torch.Tensor, texts: Sequence[Text]) -> Batch:
    """Run the target over `texts`."""
    ids = _padded(texts).to(target.model.device)
    return _batch(target, vocabulary, texts, ids, *states_of(target, taps, ids))


def _padded(texts: Sequence[Text]) -> torch.Tensor:
    ids = torch.zeros(len(texts), max(len(text.ids) for text in texts), dtype=torch.long)
    for row, text in enumerate(texts):
        ids[row, : len(text.ids)] = torch.tensor(text.ids)
    return ids


@torch.no_grad()
def _batch(
    target: LoadedModel,
    vocabulary: torch.Tensor,
    texts: Sequence[Text],
    ids: torch.Tensor,
    states: torch.Tensor,
    likeliest: torch.Tensor,
) -> Batch:
    counts = torch.zeros(ids.shape, dtype=torch.bool)
    for row, text in enumerate(texts):
        counts[row, text.num_prompt - 1 : len(text.ids) - 1] = True
    model: Any = target.model
    rows = model.get_output_embeddings().weight[vocabulary]
    pieces = torch.split(states[:, :, -1], 4)
    probs = [(piece @ rows.T).float().softmax(-1).bfloat16() for piece in pieces]
    return Batch(ids, states[:, :, :-1], torch.cat(probs), likeliest, counts.to(ids.device))


class Observed:
    """The target's states over texts, from the disk where they were seen before."""

    def __init__(self, target: LoadedModel, taps: Sequence[int], texts: Sequence[Text], folder: Path) -> None:
        self._target, self._taps = target, tuple(taps)
        ends = [0]
        self._begins: dict[tuple[int, ...], int] = {}
        for text in texts:
            self._begins[text.ids] = ends[-1]
            ends.append(ends[-1] + len(text.ids))
        self.num_ids = ends[-1]
        width = target.model.config.get_text_config(decoder=True).hidden_size
        folder.mkdir(parents=True, exist_ok=True)

        def rows(name: str, dtype: torch.dtype, *shape: int) -> torch.Tensor:
            size = self.num_ids
            for length in shape:
                size *= length
            path = folder / f"{name}.bin"
            with path.open("ab") as file:
                file.truncate(max(size * dtype.itemsize, file.tell()))
            return torch.from_file(str(path), shared=True, size=size, dtype=dtype).view(self.num_ids, *shape)

        self._states = rows("states", target.model.dtype, len(self._taps) + 1, width)
        self._likeliest = rows("likeliest", torch.int32)
        self._ids = rows("ids", torch.int32)

    def batch(self, vocabulary: torch.Tensor, texts: Sequence[Text]) -> Batch:
        """Return what the target makes of `texts` (of those given at the start, whole)."""
        self.see([text for text in texts if not self._seen(text)])
        device = self._target.model.device
        ids = _padded(texts)
        states = torch.zeros(*ids.shape, *self._states.shape[1:], dtype=self._states.dtype)
        likeliest = torch.zeros_like(ids)
        for row, text in enumerate(texts):
            at = self._rows(text)
            states[row, : len(text.ids)] = self._states[at]
            likeliest[row, : len(text.ids)] = self._likeliest[at]
        return _batch(self._target, vocabulary, texts, ids.to(device), states.to(device), likeliest.to(device))

    def see(self, texts: Sequence[Text]) -> None:
        """Run the target over texts not seen before, and keep what it makes of them."""
        if not texts:
            return
        ids = _padded(texts)
        states, likeliest = states_of(self._target, self._taps, ids.to(self._target.model.device))
        for row, text in enumerate(texts):
            at, length = self._rows(text), len(text.ids)
            self._states[at] = states[row, :length].to("cpu", self._states.dtype)
            self._likeliest[at] = likeliest[row, :length].to("cpu", torch.int32)
            self._ids[at] = torch.tensor(text.ids, dtype=torch.int32) + 1

    def _rows(self, text: Text) -> slice:
        begin = self._begins[text.ids]
        return slice(begin, begin + len(text.ids))

    def _seen(self, text: Text) -> bool:
        return self._ids[self._rows(text)].tolist() == [token + 1 for token in text.ids]

"""Text that a target wrote: prompts and its own answers, as ids.

A file is an .npz archive with `ids` (all sequences, one after the other), `lengths` and `prompt_lengths` (of each).
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from baru_common.errors import ConfigError


@dataclass(frozen=True)
class Text:
    """One prompt and its answer."""

    ids: tuple[int, ...]
    num_prompt: int


def read_texts(paths: Iterable[Path]) -> list[Text]:
    """Read every file; ConfigError names one that is not of this kind."""
    texts: list[Text] = []
    for path in paths:
        try:
            with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
                ids, lengths, prompts = archive["ids"], archive["lengths"], archive["prompt_lengths"]
        except (OSError, EOFError, KeyError, ValueError, TypeError, BadZipFile) as error:
            raise ConfigError(f"{path} holds no text of a target: {error}") from error
        if any(array.ndim != 1 or array.dtype.kind not in "iu" for array in (ids, lengths, prompts)):
            raise ConfigError(f"{path} holds no text of a target: its arrays are not lists of whole numbers")
        if int(lengths.sum(dtype=np.int64)) != len(ids) or len(lengths) != len(prompts):
            raise ConfigError(f"{path} contradicts itself: its lengths do not sum to its ids")
        if (prompts < 1).any() or (prompts > lengths).any() or (ids.astype(np.int64) < 0).any():
            raise ConfigError(f"{path} contradicts itself: a prompt is empty or too long, or an id negative")
        ends = np.cumsum(lengths, dtype=np.int64)
        for end, length, num_prompt in zip(ends.tolist(), lengths.tolist(), prompts.tolist(), strict=True):
            texts.append(Text(tuple(ids[end - length : end].tolist()), num_prompt))
    if not texts:
        raise ConfigError("there is no text to learn from")
    return texts


def split(texts: Sequence[Text], share: float, seed: int = 0) -> tuple[list[Text], list[Text]]:
    """Hold out a share of the prompts, with all their answers: (to learn from, to judge by)."""
    prompts = sorted({text.ids[: text.num_prompt] for text in texts})
    held = set(random.Random(seed).sample(prompts, round(share * len(prompts))))  # noqa: S311
    groups: tuple[list[Text], list[Text]] = ([], [])
    for text in texts:
        groups[text.ids[: text.num_prompt] in held].append(text)
    return groups


def cut(texts: Iterable[Text], longest: int) -> list[Text]:
    """Cut texts to `longest` ids, and leave out those with nothing left to learn."""
    short = (Text(text.ids[:longest], text.num_prompt) for text in texts)
    return [text for text in short if text.num_prompt < len(text.ids) - 1]


def batches(texts: Sequence[Text], num_ids: int, seed: int) -> Iterator[list[Text]]:
    """Yield batches of some `num_ids` ids each, of texts of like length; one pass over all."""
    chance = random.Random(seed)  # noqa: S311
    shuffled = list(texts)
    chance.shuffle(shuffled)
    pools = [sorted(shuffled[i : i + 512], key=lambda text: len(text.ids)) for i in range(0, len(shuffled), 512)]
    made: list[list[Text]] = []
    for pool in pools:
        batch: list[Text] = []
        for text in pool:
            if batch and max(len(t.ids) for t in (*batch, text)) * (len(batch) + 1) > num_ids:
                made.append(batch)
                batch = []
            batch.append(text)
        made += [batch] if batch else []
    chance.shuffle(made)
    yield from made


def draft_vocabulary(texts: Iterable[Text], size: int) -> list[int]:
    """Return the `size` most frequent ids of the answers, ascending (FR-Spec, Zhao et al. 2025)."""
    counts = np.zeros(1 << 20, dtype=np.int64)
    for text in texts:
        np.add.at(counts, np.array(text.ids[text.num_prompt :], dtype=np.int64), 1)
    order = np.argsort(-counts, kind="stable")[:size]
    return sorted(int(token) for token in order)

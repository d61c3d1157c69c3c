"""Targets whose distribution is known by heart: real models, but for a head that says the same after every text."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from baru_common.model_files import LoadedModel
from baru_common.tokens import Vocabulary

from .tiny import tiny_target, twin

FIRST_ID = 65
"""The ids with a probability stand from here on."""


def toy_vocabulary(size: int) -> Vocabulary:
    """One letter each, no control ids."""
    return Vocabulary(tuple(chr(65 + i).encode() for i in range(size)), frozenset())


def toy_target(probs: Sequence[float], *, context_limit: int = 512) -> LoadedModel:
    """A target that says `FIRST_ID + i` with probability `probs[i]`, whatever came before, and nothing else."""
    toy = twin(tiny_target(context_limit=context_limit))
    old = toy.model.lm_head
    head = torch.nn.Linear(old.in_features, old.out_features).requires_grad_(False)
    head.weight.zero_()
    head.bias.fill_(float("-inf"))
    head.bias[FIRST_ID : FIRST_ID + len(probs)] = torch.tensor(probs).log()
    toy.model.lm_head = head
    return toy


def distance(counts: Sequence[int], probs: Sequence[float]) -> float:
    """Total-variation distance of what was counted from a distribution."""
    total = sum(counts)
    return sum(abs(count / total - prob) for count, prob in zip(counts, probs, strict=True)) / 2


def chi_square_p(tables: Sequence[tuple[Sequence[float], Sequence[float]]]) -> float:
    """p-value of Pearson's goodness-of-fit test over several tables of counts and probabilities at a time.

    An outcome that cannot be must not have been counted: AssertionError.
    """
    statistic, freedom = 0.0, 0
    for counts, probs in tables:
        assert not any(count for count, prob in zip(counts, probs, strict=True) if prob == 0)
        expected = [(count, sum(counts) * prob) for count, prob in zip(counts, probs, strict=True) if prob > 0]
        statistic += sum((count - mean) ** 2 / mean for count, mean in expected)
        freedom += len(expected) - 1
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.double)
    return float(torch.special.gammaincc(half[0], half[1]))

"""Which ids a drafter thinks likeliest: the first is the one that the request's own choice falls on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from baru_common.sampling.sampler import Sampler
from support.sampling import context

_SIZE = 12


def sampler_of(**params: Any) -> Sampler:
    return Sampler(context(1, **params), torch.device("cpu"))


def logits_of(seed: int) -> torch.Tensor:
    return torch.randn(1, 300, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize("num", [1, 2, 5])
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 1.0, "seed": 4},
        {"temperature": 0.7, "seed": 4, "top_k": 40, "repetition_penalty": 1.5},
        {"presence_penalty": 2.0, "banned_ids": range(0, 300, 2)},
    ],
    ids=["greedy", "sampled", "filtered", "penalised"],
)
def test_the_ranks_are_what_would_be_chosen_were_the_better_ones_not_there(
    params: dict[str, Any], seed: int, num: int
) -> None:
    """Choosing again and again, each time without what was chosen before."""
    logits, committed, drafted = logits_of(seed), [5, 6, 7], [8, 9]
    ids = [*committed, *drafted]
    wanted: list[int] = []
    for _ in range(num):
        left = sampler_of(**params).adjusted(logits.clone(), ids, len(ids), len(committed))
        left[:, wanted] = float("-inf")
        plain = {key: params[key] for key in ("temperature", "seed") if key in params}
        wanted += sampler_of(**plain).choose(left, ids, len(ids), len(committed))
    if "top_k" in params:  # what is cut off depends on what is left: only the first is defined so
        assert sampler_of(**params).rank(logits, committed, drafted, num)[0] == wanted[0]
    else:
        assert sampler_of(**params).rank(logits, committed, drafted, num) == wanted


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "seed": 4}], ids=["greedy", "sampled"])
def test_only_what_is_possible_is_ranked(params: dict[str, Any]) -> None:
    """Fewer than asked for where fewer are left, none where none is."""
    allowed = sampler_of(allowed_ids=[7, 9], **params)
    assert sorted(allowed.rank(logits_of(0), [5], [], 4)) == [7, 9]
    nothing = logits_of(0).fill_(float("-inf"))
    assert sampler_of(**params).rank(nothing, [5], [], 1) == []
    assert sampler_of(**params).rank(nothing, [5], [], 3) == []


def test_a_tie_goes_to_the_lowest_id() -> None:
    """The first place is the same as the choice's, however the ties are sorted."""
    ranked = sampler_of().rank(torch.zeros(1, 300), [5], [], 3)
    assert ranked[0] == 0
    assert len(set(ranked)) == 3


@pytest.mark.parametrize("num", [1, 3])
def test_a_top_k_of_one_leaves_one(num: int) -> None:
    sampler = sampler_of(temperature=1.0, seed=1, top_k=1)
    assert sampler.rank(logits_of(3), [5], [], num) == [int(logits_of(3).argmax())]

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from baru_common.sampling import SamplingParams
from baru_common.sampling.filters import filtered_weights, penalised

INF = float("inf")


def params(**values: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 1.0} | values))


def rows(num_rows: int, size: int, scale: float, seed: int = 0, share_out: float = 0.0) -> torch.Tensor:
    """Random logits; about `share_out` of them are -inf, but not all of a row."""
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(num_rows, size, generator=generator)
    out = torch.rand(num_rows, size, generator=generator) < share_out
    out[:, seed % size] = False
    return logits.masked_fill(out, -INF)


def kept(logits: list[float], **values: Any) -> list[int]:
    weights = filtered_weights(torch.tensor([logits]), params(**values))
    return weights[0].nonzero().flatten().tolist()


def transformers_probs(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """What transformers draws from with the same parameters."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(float(params.temperature))])
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        warpers.append(MinPLogitsWarper(params.min_p))
    none: Any = torch.zeros(len(logits), 0, dtype=torch.long)
    scores: torch.Tensor = warpers(none, logits)
    return scores.softmax(dim=1)


@pytest.mark.parametrize("size", [2, 300, 2047, 49152])
def test_weights_are_those_of_transformers(size: int) -> None:
    """For parameters of every kind, alone and together, rows from flat to peaked, ids that are out of the question."""
    rng = random.Random(size)
    num_sets = {49152: 12, 2047: 60}.get(size, 150)
    for i in range(num_sets):
        wanted = params(
            temperature=rng.choice([0.2, 0.7, 1.0, 1.3, 5.0]),
            top_k=rng.choice([0, 0, 1, 2, 40, 1000, 1 << 31]),
            top_p=rng.choice([1.0, 1.0, 0.05, 0.5, 0.9, 0.99]),
            min_p=rng.choice([0.0, 0.0, 0.02, 0.3, 1.0]),
        )
        scales = [0.3, 3.0, 12.0] if size < 40_000 else [3.0, 12.0]
        logits = torch.cat([rows(1, size, scale, i, rng.choice([0.0, 0.3])) for scale in scales])
        weights = filtered_weights(logits.clone(), wanted)
        assert weights.amax(dim=1).tolist() == [1.0] * len(logits)
        probs = weights / weights.sum(dim=1, keepdim=True)
        assert torch.allclose(probs, transformers_probs(logits, wanted), rtol=0, atol=1e-5), (i, wanted)


@pytest.mark.parametrize("top_p", [0.004, 0.05, 0.3, 0.9, 0.999, 1 - 2**-53])
@pytest.mark.parametrize("size", [255, 256, 257, 2049, 20_000])
def test_a_nucleus_may_be_wide(size: int, top_p: float) -> None:
    """As many of a nearly flat row as are needed, however many that is, and none that is not."""
    logits = rows(2, size, 0.01, seed=size)
    weights = filtered_weights(logits, params(top_p=top_p))
    for row, kept_ones in zip(logits.double().softmax(dim=1), weights > 0, strict=True):
        likeliest = row.sort(descending=True).values
        num_needed = min(int((likeliest.cumsum(0) < top_p).sum()) + 1, size)
        assert abs(int(kept_ones.sum()) - num_needed) <= (size if top_p > 0.9999 else 0) * 1e-3
        assert row[kept_ones].min() >= likeliest[int(kept_ones.sum()) - 1]


def test_a_small_nucleus_and_a_wide_one_fit_in_one_call() -> None:
    logits = torch.cat((rows(1, 5000, 0.01), rows(1, 5000, 12.0), rows(1, 5000, 1.0)))
    both = filtered_weights(logits, params(top_p=0.95))
    assert (both > 0).sum(dim=1).tolist() == [
        int((filtered_weights(row[None], params(top_p=0.95)) > 0).sum()) for row in logits
    ]


# -- ties


def test_those_tied_with_the_last_of_top_k_are_kept() -> None:
    assert kept([1, 3, 2, 2, 2, 0], top_k=1) == [1]
    assert kept([1, 3, 2, 2, 2, 0], top_k=2) == [1, 2, 3, 4]
    assert kept([1, 3, 2, 2, 2, 0], top_k=4) == [1, 2, 3, 4]
    assert kept([1, 3, 2, 2, 2, 0], top_k=5) == [0, 1, 2, 3, 4]
    assert kept([7] * 300, top_k=1) == list(range(300))


def test_those_tied_with_the_last_of_a_nucleus_are_kept() -> None:
    """Powers of two, whose sums are exact."""
    logits = torch.tensor([0.125, 0.5, 0.125, 0.125, 0.125]).log2().mul(0.6931471805599453).tolist()
    assert kept(logits, top_p=0.1) == [1]
    assert kept(logits, top_p=0.5) == [1]
    assert kept(logits, top_p=0.501) == [0, 1, 2, 3, 4]
    assert kept([0.0] * 4, top_p=0.25) == [0, 1, 2, 3]
    assert kept([0.0] * 4 + [-20.0], top_p=0.26) == [0, 1, 2, 3]
    assert kept([0.0] * 3000, top_p=1e-9) == list(range(3000))


def test_those_at_the_limit_of_min_p_are_kept() -> None:
    assert kept([0.0, 0.0, -1e-3], min_p=1.0) == [0, 1]
    assert kept([5.0, 5.0 - 0.6931, 5.0 - 0.6932], min_p=0.5) == [0, 1]


def test_a_nucleus_of_near_ties_has_the_probability_it_should() -> None:
    """Logits that differ by less than their probabilities can: whichever are kept, it is enough of them."""
    for seed in range(10):
        logits = torch.full((1, 5000), -60.0)
        near = torch.randperm(5000, generator=torch.Generator().manual_seed(seed))[:300]
        logits[0, near] = rows(1, 300, 1e-8, seed)[0]
        weights = filtered_weights(logits, params(top_p=0.5))
        assert float((weights > 0).sum()) / 300 > 0.499


# -- rows


@pytest.mark.parametrize(
    "values", [{}, {"top_k": 7}, {"top_p": 0.5}, {"top_p": 0.999, "temperature": 0.3}, {"min_p": 0.2}]
)
def test_the_bits_of_a_row_do_not_depend_on_the_others(values: dict[str, Any]) -> None:
    """Rows next to wider and narrower ones, alone, and in another order; near ties included."""
    for size in (7, 300, 1023, 5000):
        near_ties = torch.full((1, size), -60.0)
        near_ties[:, : size // 8 + 1] = rows(1, size // 8 + 1, 1e-8, 1)
        logits = torch.cat([rows(1, size, scale, 3) for scale in (1e-7, 0.01, 1, 30)] + [near_ties])
        logits = torch.cat((logits, rows(2, size, 5, 4, share_out=0.5)))
        together = filtered_weights(logits, params(**values))
        reverse = filtered_weights(logits.flip(0), params(**values)).flip(0)
        assert torch.equal(together, reverse)
        for row in range(len(logits)):
            assert torch.equal(filtered_weights(logits[row : row + 1].clone(), params(**values))[0], together[row])


def test_what_is_out_stays_out() -> None:
    """Rows with few ids left, down to one: fewer than top_k, and a nucleus of 1 that rounding cannot reach."""
    logits = torch.full((3, 400), -INF)
    logits[0, 17] = -3.0
    logits[1, [5, 300]] = torch.tensor([-2.0, -2.0])
    logits[2, 100:200] = rows(1, 100, 1.0)
    for values in ({}, {"top_k": 250}, {"top_p": 1 - 2**-53}, {"min_p": 1e-9}, {"top_k": 250, "top_p": 0.999999999}):
        weights = filtered_weights(logits, params(**values))
        assert not weights.isnan().any()
        assert torch.equal(weights > 0, logits > -INF)


def test_extreme_temperatures() -> None:
    """The coldest takes the likeliest and what equals it; the hottest is flat, and nothing overflows on the way."""
    logits = torch.tensor([[3.0, 5.0, 5.0, 4.0, -INF]])
    assert filtered_weights(logits, params(temperature=0.01)).tolist() == [
        [0, 1, 1, pytest.approx(3.8e-44, rel=0.1), 0]
    ]
    hot = filtered_weights(logits, params(temperature=100))
    assert hot[0].tolist() == pytest.approx([0.98020, 1, 1, 0.99005, 0], abs=1e-5)
    huge = torch.tensor([[1e30, 2e30, -3e30], [-1e30, -2e30, -1e30]])
    assert filtered_weights(huge, params(temperature=0.01)).tolist() == [[0, 1, 0], [1, 0, 1]]
    for temperature in (0.01, 0.1, 10.0, 100.0):
        logits = rows(3, 1000, 5.0)
        weights = filtered_weights(logits, params(temperature=temperature))
        expected = ((logits.double() - logits.double().amax(1, keepdim=True)) / temperature).exp()
        assert torch.allclose(weights.double(), expected, atol=1e-5)


# -- penalties


def penalised_plainly(logits: list[float], prompt: list[int], output: list[int], params: SamplingParams) -> list[float]:
    """One row, id by id."""
    result = []
    for token, logit in enumerate(logits):
        value = logit
        if token in prompt or token in output:
            value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        if token in output:
            value -= params.presence_penalty
        result.append(value - params.frequency_penalty * output.count(token))
    return result


def penalise(logits: torch.Tensor, prompt: list[int], outputs: list[list[int]], params: SamplingParams) -> torch.Tensor:
    size = logits.shape[1]
    counts = torch.stack([torch.tensor(output, dtype=torch.long).bincount(minlength=size) for output in outputs])
    in_prompt = torch.zeros(size, dtype=torch.bool)
    in_prompt[prompt] = True
    return penalised(logits, counts.float(), in_prompt, params)


@pytest.mark.parametrize("penalty", [0.01, 0.5, 1.2, 100.0])
def test_the_repetition_penalty_is_that_of_transformers(penalty: float) -> None:
    """Over prompt and output, once per id, whatever its sign."""
    for size in (300, 49152):
        logits = rows(3, size, 5.0, share_out=0.1)
        logits[:, 5] = 0.0
        rng = random.Random(size)
        prompt = [5, *rng.choices(range(size), k=50)]
        outputs = [rng.choices(range(size), k=40) for _ in range(3)]
        expected = RepetitionPenaltyLogitsProcessor(penalty)(
            torch.tensor([[*prompt, *output] for output in outputs]), logits
        )
        assert torch.equal(penalise(logits, prompt, outputs, params(repetition_penalty=penalty)), expected)


@pytest.mark.parametrize(
    "values",
    [
        {"presence_penalty": 1.5},
        {"presence_penalty": -2.0},
        {"frequency_penalty": 0.3},
        {"frequency_penalty": -0.7},
        {"presence_penalty": 0.4, "frequency_penalty": -0.2, "repetition_penalty": 1.3},
        {"presence_penalty": -1.0, "frequency_penalty": 2.0, "repetition_penalty": 0.8},
    ],
)
def test_penalties_equal_a_plain_loop(values: dict[str, Any]) -> None:
    """Presence and frequency count the output only; the order of the three is fixed."""
    logits = rows(3, 40, 5.0, share_out=0.2)
    prompt = [1, 2, 3, 3, 9]
    outputs = [[], [3, 4, 4, 4], list(range(40)) * 3]
    result = penalise(logits, prompt, outputs, params(**values))
    for row, output, given in zip(result.tolist(), outputs, logits.tolist(), strict=True):
        assert row == pytest.approx(penalised_plainly(given, prompt, output, params(**values)), rel=1e-5, abs=1e-5)


def test_nothing_is_changed_in_place() -> None:
    """The rows belong to who asks: the plain ones are needed for log-probabilities."""
    logits = rows(2, 50, 5.0)
    before = logits.clone()
    wanted = params(
        repetition_penalty=1.3,
        presence_penalty=1.0,
        frequency_penalty=1.0,
        top_k=5,
        top_p=0.5,
        min_p=0.1,
        temperature=0.5,
    )
    penalise(logits, [1], [[2], [3]], wanted)
    filtered_weights(logits, wanted)
    filtered_weights(logits, params())
    assert torch.equal(logits, before)

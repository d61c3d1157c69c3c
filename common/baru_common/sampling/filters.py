"""Which ids may be drawn, and with what weight. Pure functions of whole rows: [num_rows, vocabulary] in and out.

A row's result depends on that row alone. Where ids are tied at a limit, all of them are kept: no order among
equals has a say.
"""

from __future__ import annotations

import torch

from .params import SamplingParams


def penalised(
    logits: torch.Tensor, counts: torch.Tensor, in_prompt: torch.Tensor, params: SamplingParams
) -> torch.Tensor:
    """Return `logits` with the penalties for ids that are there already.

    `counts` ([num_rows, vocabulary]): how often each id is in the output before the row;
    `in_prompt` ([vocabulary]): whether it is in the prompt.
    """
    in_output = counts > 0
    if params.repetition_penalty != 1:
        factor = params.repetition_penalty
        repeated = torch.where(logits > 0, logits / factor, logits * factor)
        logits = torch.where(in_output | in_prompt, repeated, logits)
    if params.presence_penalty:
        logits = logits - params.presence_penalty * in_output
    if params.frequency_penalty:
        logits = logits - params.frequency_penalty * counts
    return logits


def filtered_weights(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Return the weight of each id at a temperature above 0, up to a factor: 0 for what the filters leave out.

    The largest weight of a row is 1. Temperature, top_k, top_p and min_p, in this order, each on what the one
    before left, as in Hugging Face transformers.
    """
    logits = logits / params.temperature
    if 0 < params.top_k < logits.shape[1]:
        logits = _keep(logits, logits.topk(params.top_k).values[:, -1:])
    if params.top_p < 1:
        logits = _keep(logits, _nucleus_limit(logits, params.top_p))
    weights = (logits - logits.amax(dim=1, keepdim=True)).exp()
    if params.min_p > 0:
        weights = weights.masked_fill(weights < params.min_p, 0)
    return weights


def _keep(logits: torch.Tensor, limit: torch.Tensor) -> torch.Tensor:
    return logits.masked_fill(logits < limit, float("-inf"))


def _nucleus_limit(logits: torch.Tensor, top_p: float) -> torch.Tensor:
    """Return the logit of the last id that is needed to reach `top_p`: [num_rows, 1] (Holtzman et al. 2020)."""
    probs = logits.softmax(dim=1)
    width = min(256, logits.shape[1])  # sorting all of a vocabulary takes longer than most models' last layer
    while True:
        # In the order of the logits: where probabilities round to one, these still differ.
        likeliest, ids = logits.topk(width)
        reached = probs.gather(1, ids).double().cumsum(dim=1) >= top_p
        if width == logits.shape[1] or bool(reached[:, -1].all()):
            break
        width = min(8 * width, logits.shape[1])
    # The first place where the sum is reached; the last one if rounding keeps it from that.
    place = torch.where(reached.any(dim=1), reached.int().argmax(dim=1), width - 1)
    return likeliest.gather(1, place[:, None])

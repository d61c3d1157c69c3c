"""Rejection sampling of a block of drafts. Pure: distributions and uniform numbers in, what stands out.

    draft_probs     what each draft id was drawn from: Q(. | draft before it); one-hot for an id that was picked
    target_probs    the target's distribution at each position of the block and the one after: P(. | draft before it)
    accepted        a prefix of the draft; the id after it is drawn from `residual`, unnormalised

One by one (Leviathan et al. 2023, algorithm 1; Chen et al. 2023): id x stands with probability min(1, P(x) / Q(x));
after the first that does not, the target's id is drawn from (P - Q)+.

As a block (Sun et al., "Block Verification Accelerates Speculative Decoding", ICLR 2025, algorithm 2):

    w_0 = 1,  w_i = min(1, w_(i-1) P(x_i) / Q(x_i))
    h_i = S_i / (S_i + 1 - w_i)  with S_i = sum of (w_i P - Q)+ at position i + 1;  h_k = w_k at the end of the block

The longest prefix i with u_i <= h_i stands; after it the target's id is drawn from (w_i P - Q)+. At every length it
accepts at least as often as one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from baru_common.sampling import SparseProbs

_WHOLE = 1 - 1e-9
"""A weight that is 1 but for rounding is 1: what is left of it would decide, where target and drafter agree."""


@dataclass(frozen=True)
class Rejection:
    """How much of a draft stands, and the weights of the target's own id after it."""

    num_accepted: int
    residual: torch.Tensor
    """[vocabulary], double, 0 or more; not all 0 unless the target's own row was."""


def check_singly(
    draft: Sequence[int], draft_probs: Sequence[SparseProbs], target_probs: torch.Tensor, uniforms: Sequence[float]
) -> Rejection:
    """Check draft ids one by one; `target_probs` is [num_draft + 1, vocabulary], `uniforms` one for each draft id."""
    for i, (token, uniform) in enumerate(zip(draft, uniforms, strict=True)):
        drawn = _dense(draft_probs, draft, i, target_probs)
        if uniform * float(drawn[token]) >= float(target_probs[i, token]):
            return Rejection(i, _residual(target_probs[i], drawn))
    return Rejection(len(draft), target_probs[len(draft)])


def check_block(
    draft: Sequence[int], draft_probs: Sequence[SparseProbs], target_probs: torch.Tensor, uniforms: Sequence[float]
) -> Rejection:
    """Check the draft as a whole; arguments as for `check_singly`."""
    weight, accepted = 1.0, Rejection(0, target_probs[0])
    for i in range(len(draft) + 1):
        if i > 0:
            drawn_prob = float(_dense(draft_probs, draft, i - 1, target_probs)[draft[i - 1]])
            weight *= float(target_probs[i - 1, draft[i - 1]]) / drawn_prob
            weight = weight if weight < _WHOLE else 1.0
        if i == len(draft):
            stands, residual = weight, target_probs[i]
        else:
            drawn = _dense(draft_probs, draft, i, target_probs)
            residual = (weight * target_probs[i] - drawn).clamp_min(0)
            # Where no id is left, all of the target's probability is beside what the drafter may draw.
            spare = float(residual.sum()) if float(target_probs[i].sum()) > 0 else weight
            stands = spare / (spare + 1 - weight) if weight < 1 else 1.0
        if i == 0 or uniforms[i - 1] <= stands:
            accepted = Rejection(i, residual if float(residual.sum()) > 0 else target_probs[i])
    return accepted


def _residual(target: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
    """(P - Q)+; P itself where rounding leaves nothing of it."""
    residual = (target - drawn).clamp_min(0)
    return residual if float(residual.sum()) > 0 else target


def _dense(draft_probs: Sequence[SparseProbs], draft: Sequence[int], position: int, like: torch.Tensor) -> torch.Tensor:
    """Q at one position of the block: [vocabulary]."""
    dense = torch.zeros_like(like[0])
    if draft_probs:
        sparse = draft_probs[position]
        dense[list(sparse.ids)] = torch.tensor(sparse.probs, dtype=like.dtype, device=like.device)
    else:
        dense[draft[position]] = 1.0
    return dense

"""The noise of sampling: a pure function of (seed, position, id), equal bit for bit on every machine.

    key         from seed, stream and position, see `noise_key`
    bits        output number `id` of the SplitMix64 sequence that starts at the key, its upper 52 bits
    v           (bits + 1/2) / 2^52, uniform in (0, 1)
    E           -ln v, exponential with mean 1

The id drawn from weights w is the one with the largest w / E: an exponential race, which is the Gumbel-max
trick (argmax of ln w + G with G = -ln E, a standard Gumbel) with one logarithm less. Everything is made of
integer operations and single IEEE 754 ones in double precision, so no library's `log` has a say.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import torch

from baru_common.splitmix64 import GAMMA, MASK, mix

_UNIT = 2.0**-52
_LN2 = 0.6931471805599453
_SQRT_HALF = 0.7071067811865476
_HOPELESS = 1e-18
"""E is between 2^-53 and 37: an id with this share of the largest weight cannot win."""


class Stream(IntEnum):
    """What a draw is for; draws of different streams are independent."""

    CHOICE = 0
    """The target's own id, and a coupled drafter's guess at it."""
    DRAFT = 1
    """A drafter's own sample, for rejection sampling."""
    ACCEPT = 2
    """Whether a draft id is accepted."""
    RESIDUAL = 3
    """The target's id where a draft was rejected, or after a block."""


def noise_key(seed: int, stream: Stream, position: int, origin: int = 0) -> int:
    """Return the state that the noise at `position` starts from.

    `origin` sets apart draws for one position that must be independent: the committed length at which a
    chain or a step began.
    """
    key = mix(seed)
    for word in (stream, position, origin):
        key = mix(key ^ mix(word))
    return key


def uniform(key: int) -> float:
    """Return one number in (0, 1)."""
    return ((mix(key) >> 12) + 0.5) * _UNIT


def uniforms(keys: Sequence[int], ids: torch.Tensor) -> torch.Tensor:
    """Return v for each key and each of `ids` ([num_ids]): [num_keys, num_ids], double."""
    states = torch.tensor([_signed(key) for key in keys], dtype=torch.long, device=ids.device)[:, None]
    x = ids * _signed(GAMMA) + (states + _signed(GAMMA))  # wraps modulo 2^64
    # `>>` keeps the sign, so what it shifts in is masked away.
    x.bitwise_xor_((x >> 30).bitwise_and_((1 << 34) - 1)).mul_(_signed(0xBF58476D1CE4E5B9))
    x.bitwise_xor_((x >> 27).bitwise_and_((1 << 37) - 1)).mul_(_signed(0x94D049BB133111EB))
    x.bitwise_xor_((x >> 31).bitwise_and_((1 << 33) - 1))
    return (x >> 12).bitwise_and_((1 << 52) - 1).double().add_(0.5).mul_(_UNIT)


def exponential(v: torch.Tensor) -> torch.Tensor:
    """Return -ln v for doubles in (0, 1), to 13 digits: 2 artanh((m - 1) / (m + 1)) + e ln 2 with v = m 2^e."""
    mantissa, exponent = torch.frexp(v)
    low = mantissa < _SQRT_HALF
    mantissa = torch.where(low, mantissa * 2, mantissa)
    s = (mantissa - 1) / (mantissa + 1)
    square = s * s
    series = torch.full_like(s, 1 / 15)
    for divisor in (13, 11, 9, 7, 5, 3, 1):
        series = series * square + 1 / divisor
    scaled = (exponent - low.to(exponent.dtype)).double() * _LN2
    return -(scaled + 2 * s * series)


def race(weights: torch.Tensor, keys: Sequence[int]) -> list[int]:
    """Draw one id from each row of `weights` ([num_rows, vocabulary], 0 or more, not all 0) by its own key.

    The lowest id wins a tie. Only ids that can win are raced in full: with the likeliest one at w / E, another
    needs E <= w' E / w, and E is at least 1 - v; a weight below any that could do is not looked at.
    """
    best_weight, best = weights.max(dim=1, keepdim=True)
    chances = (weights > best_weight * _HOPELESS).any(dim=0).nonzero()[:, 0]
    best = torch.searchsorted(chances, best)
    weights = weights[:, chances].double()
    v = uniforms(keys, chances)  # [num_rows, num_chances]
    bar = exponential(v.gather(1, best)) / best_weight * (1 + 1e-9)
    rows, places = torch.nonzero(1 - v <= weights * bar, as_tuple=True)
    scores = weights[rows, places] / exponential(v[rows, places])
    won: list[tuple[float, int]] = [(-1.0, 0)] * len(keys)
    for row, score, token in zip(rows.tolist(), scores.tolist(), chances[places].tolist(), strict=True):
        if score > won[row][0]:  # ids come in ascending order
            won[row] = score, token
    return [token for _, token in won]


def race_scores(weights: torch.Tensor, keys: Sequence[int]) -> torch.Tensor:
    """Return ln(w / E) of every id: as `race` compares them, -inf for those that cannot be drawn."""
    v = uniforms(keys, torch.arange(weights.shape[1], device=weights.device))
    return (weights.double() / exponential(v)).log()


def _signed(value: int) -> int:
    value &= MASK
    return value - (1 << 64) if value >> 63 else value

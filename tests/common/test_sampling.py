from __future__ import annotations

import math
from typing import Any

import pytest

from baru_common.errors import InvalidRequest
from baru_common.sampling import SamplingParams
from baru_common.sampling.params import MAX_STOP_IDS


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("temperature", 0.009),
        ("temperature", 100.1),
        ("temperature", -1.0),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("seed", -1),
        ("seed", 1 << 64),
        ("stop_ids", (3, -1)),
        ("stop_ids", tuple(range(MAX_STOP_IDS + 1))),
    ],
)
def test_a_wrong_value_is_refused_by_name(param: str, value: Any) -> None:
    """Both the message and the machine-readable details name the parameter."""
    with pytest.raises(InvalidRequest, match=param) as caught:
        SamplingParams(**{param: value})
    assert caught.value.details == {"param": param}


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("max_tokens", 1),
        ("max_tokens", None),
        ("temperature", 0.0),
        ("temperature", -0.0),
        ("temperature", 0.01),
        ("temperature", 100.0),
        ("seed", 0),
        ("seed", (1 << 64) - 1),
        ("stop_ids", tuple(range(MAX_STOP_IDS))),
    ],
)
def test_the_ends_of_the_ranges_are_allowed(param: str, value: Any) -> None:
    assert getattr(SamplingParams(**{param: value}), param) == value


def test_the_defaults_are_greedy_and_open_ended() -> None:
    assert SamplingParams() == SamplingParams(None, 0.0, None, ignore_eos=False, stop_ids=())

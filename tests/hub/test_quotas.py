"""What one identity may take, and how fast it may talk: pure, so no hub runs here."""

from __future__ import annotations

from typing import Any

import pytest

from baru_common.errors import CapacityExhausted, ConfigError, InvalidRequest
from baru_common.frames import Open
from baru_common.sampling import Grammar, SamplingParams
from baru_common.signatures import ANYBODY
from baru_hub.quotas import Load, Quotas, check_request, over_own, over_total
from baru_hub.rates import Bucket, CallGate, FrameRate

QUOTAS = Quotas(
    max_sessions=4,
    max_identity_sessions=2,
    max_tokens_in_flight=400,
    max_identity_tokens_in_flight=200,
    max_prompt_tokens=10,
    max_output_tokens=100,
    max_stops=2,
    max_grammar_bytes=8,
    max_draft_ahead=2,
    max_frame_bytes=2048,
    max_frames_per_s=100.0,
    max_calls_per_s=10.0,
    max_identity_calls=3,
)


@pytest.mark.parametrize(
    ("load", "limit"),
    [
        (Load(3, 3), "max_identity_sessions"),
        (Load(1, 201), "max_identity_tokens_in_flight"),
        (Load(2, 200), None),
    ],
)
def test_an_identity_holds_so_much_and_no_more(load: Load, limit: str | None) -> None:
    """The error names the limit and what to do; nobody is anybody's neighbour where there are no identities."""
    error = over_own(load, "node-1", QUOTAS)
    assert (error and error.details["limit"]) == limit
    assert error is None or (error.hint and "node-1" in error.message)
    assert over_own(load, ANYBODY, QUOTAS) is None


@pytest.mark.parametrize(
    ("load", "limit"),
    [(Load(5, 5), "max_sessions"), (Load(1, 401), "max_tokens_in_flight"), (Load(4, 400), None)],
)
def test_all_together_hold_so_much_and_no_more(load: Load, limit: str | None) -> None:
    error = over_total(load, QUOTAS)
    assert (error and error.details["limit"]) == limit


@pytest.mark.parametrize(
    ("num_prompt", "params", "param"),
    [
        (10, {}, None),
        (11, {}, "prompt_ids"),
        (1, {"max_tokens": 100}, None),
        (1, {"max_tokens": 101}, "max_tokens"),
        (1, {"stop_ids": (1,), "stop_strings": ("a",)}, None),
        (1, {"stop_ids": (1, 2, 3)}, "stop_ids"),
        (1, {"stop_ids": (1, 2), "stop_strings": ("a",)}, "stop_strings"),
        (1, {"grammar": Grammar.regex("a" * 8)}, None),
        (1, {"grammar": Grammar.regex("é" * 5)}, "grammar"),
    ],
)
def test_a_request_has_sizes(num_prompt: int, params: dict[str, Any], param: str | None) -> None:
    request = Open((1,) * num_prompt, SamplingParams(**params), b"", b"")
    if param is None:
        check_request(request, QUOTAS)
        return
    with pytest.raises(InvalidRequest) as refused:
        check_request(request, QUOTAS)
    assert refused.value.details["param"] == param
    assert refused.value.hint


@pytest.mark.parametrize(
    "setting",
    [
        {"max_sessions": 0},
        {"max_frames_per_s": float("inf")},
        {"grammar_cpu_s": 0.0},
        {"max_frame_bytes": 1 << 14, "max_draft_ahead": 65},
    ],
)
def test_a_limit_that_makes_no_sense_is_named(setting: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(setting))):
        Quotas(**setting)


def test_a_bucket_gives_a_burst_and_then_its_rate() -> None:
    bucket = Bucket(rate=10, burst=5)
    assert [bucket.take(1, 0.0) for _ in range(7)] == [0, 0, 0, 0, 0, 0.1, 0.2]
    assert bucket.take(1, 0.2) == pytest.approx(0.1)
    assert bucket.take(5, 100.0) == 0


def test_frames_are_throttled_and_a_flood_is_cut_off() -> None:
    """A burst is only slowed; who never rests is ended, and large frames count as many."""
    rate, now_s = FrameRate(QUOTAS), 0.0
    waits = [rate.admit(100, now_s) for _ in range(150)]
    assert waits[:100] == [0] * 100
    assert waits[-1] == pytest.approx(0.5)
    assert rate.admit(100, 30.0) == 0  # after a rest
    rate, num_frames = FrameRate(QUOTAS), 0

    def flood() -> None:
        nonlocal now_s, num_frames
        while True:
            now_s += rate.admit(100, now_s)
            num_frames += 1

    with pytest.raises(CapacityExhausted, match="frames a second"):
        flood()
    assert num_frames == pytest.approx(100 + 100 * 5, abs=5)
    large = FrameRate(QUOTAS)
    assert large.admit(2048, 0.0) == 0
    assert sum(large.admit(2047, 0.0) > 0 for _ in range(60)) == 60 - 48
    with pytest.raises(InvalidRequest, match="2049 bytes"):
        large.admit(2049, 0.0)


def test_calls_have_a_number_and_a_rate_for_each_identity() -> None:
    """One that asks too often waits, then is refused; its neighbours do neither."""
    gate = CallGate(QUOTAS)
    for _ in range(3):
        gate.enter("bad")
    with pytest.raises(CapacityExhausted, match="bad has 3 calls"):
        gate.enter("bad")
    gate.enter("good")
    gate.leave("bad")
    gate.enter("bad")
    waits = []

    def flood() -> None:
        while True:
            waits.append(gate.wait_s("bad", 1, 0.0))

    with pytest.raises(CapacityExhausted, match="10 calls a second") as refused:
        flood()
    assert refused.value.retry_after_s > 2
    assert (len(waits), waits[49], waits[50]) == (70, 0, 0.1)
    assert gate.wait_s("good", 10, 0.0) == 0


def test_what_is_remembered_of_identities_is_bounded() -> None:
    gate = CallGate(QUOTAS)
    for number in range(1000):
        gate.wait_s(f"node-{number}", 1, float(number))
    assert len(gate._buckets) < 300
    assert not gate._running

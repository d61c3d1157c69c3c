from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baru_common import wire
from baru_common.errors import InvalidRequest
from baru_common.frames import Open
from baru_common.sampling import Grammar, GrammarKind, SamplingContext, SamplingMode, SamplingParams
from baru_common.sampling.params import MAX_IDS, MAX_STOP_BYTES, MAX_STOP_IDS, MAX_STOP_STRINGS
from baru_common.tokens import Vocabulary
from support.sampling import context, letters

UINT32, UINT64 = (1 << 32) - 1, (1 << 64) - 1
RANGES: dict[str, tuple[float, float]] = {
    "max_tokens": (1, UINT32),
    "temperature": (0.0, 100.0),
    "seed": (0, UINT64),
    "top_k": (0, UINT32),
    "top_p": (math.ulp(0.0), 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (math.ulp(0.0), 100.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "min_tokens": (0, UINT32),
    "logprobs": (0, 20),
}
WHOLE = {name for name, (low, _) in RANGES.items() if isinstance(low, int)}
OPTIONAL = {"max_tokens", "seed", "logprobs"}
ID_LISTS = ("stop_ids", "banned_ids", "allowed_ids", "forced_ids")
REGEX = Grammar(GrammarKind.REGEX, "a")


def made(**params: Any) -> SamplingParams:
    return SamplingParams(**params)


def refused(param: str, **params: Any) -> str:
    """Check that it is refused under the name of `param`; return what was said."""
    with pytest.raises(InvalidRequest, match=param) as caught:
        made(**params)
    assert caught.value.details == {"param": param}
    return str(caught.value)


# -- ranges and types


def test_the_defaults_are_plain_greedy() -> None:
    params = SamplingParams()
    assert (params.max_tokens, params.seed, params.logprobs, params.grammar) == (None, None, None, None)
    assert params.is_greedy
    assert not params.adjustments
    assert params.sampling_mode is SamplingMode.COUPLED
    every = {field.name for field in dataclasses.fields(SamplingParams)}
    assert every == {*RANGES, *ID_LISTS} | {
        *("ignore_eos", "logit_bias", "stop_strings", "sampling_mode", "verify_blocks", "grammar")
    }, "a parameter that these tests do not know"


@pytest.mark.parametrize("name", RANGES)
def test_the_ends_of_a_range_are_in_it(name: str) -> None:
    for value in RANGES[name]:
        assert getattr(made(**{name: value}), name) == value


@pytest.mark.parametrize("name", RANGES)
def test_what_is_outside_of_a_range_is_refused_by_name(name: str) -> None:
    """Infinity, NaN and whole numbers that no float can hold included."""
    low, high = RANGES[name]
    if name in WHOLE:
        outside: list[float] = [int(low) - 1, int(high) + 1, -(10**400), 10**400]
    else:
        outside = [math.nextafter(low, -math.inf), math.nextafter(high, math.inf), 10**400]
    for value in [*outside, math.inf, -math.inf, math.nan]:
        refused(name, **{name: value})


@pytest.mark.parametrize("name", RANGES)
def test_what_is_no_number_is_refused_by_name(name: str) -> None:
    """A bool is none, and a fraction is no whole number."""
    wrong = ["1", True, False, [1], 1j, *([1.0] if name in WHOLE else []), *([] if name in OPTIONAL else [None])]
    for value in wrong:
        refused(name, **{name: value})


@pytest.mark.parametrize("temperature", [math.ulp(0.0), 1e-3, math.nextafter(0.01, 0)])
def test_a_temperature_is_none_or_not_tiny(temperature: float) -> None:
    assert "0.01" in refused("temperature", temperature=temperature)
    assert not SamplingParams(temperature=0.01).is_greedy
    assert SamplingParams(temperature=-0.0).is_greedy


@pytest.mark.parametrize("name", ["top_p", "repetition_penalty"])
@pytest.mark.parametrize("zero", [0, 0.0, -0.0])
def test_a_factor_is_above_zero(name: str, zero: float) -> None:
    assert "above 0" in refused(name, **{name: zero})


@pytest.mark.parametrize("name", ["ignore_eos", "verify_blocks", "grammar"])
@pytest.mark.parametrize("value", ["no", 1, ()])
def test_a_switch_is_true_or_false_and_a_grammar_is_one(name: str, value: Any) -> None:
    refused(name, sampling_mode="rejection", **{name: value})


@pytest.mark.parametrize("mode", ["greedy", "COUPLED", None, 0, []])
def test_an_unknown_mode_is_refused_with_those_there_are(mode: Any) -> None:
    assert "coupled, rejection" in refused("sampling_mode", sampling_mode=mode)


# -- lists of ids, biases and texts


@pytest.mark.parametrize("name", [*ID_LISTS, "logit_bias"])
def test_ids_are_whole_numbers_of_32_bits(name: str) -> None:
    def holding(*ids: Any) -> dict[str, Any]:
        return {name: dict.fromkeys(ids, 1.0) if name == "logit_bias" else ids}

    for wrong in (-1, UINT32 + 1, 1.0, True, "1", None):
        refused(name, **holding(wrong))
        refused(name, **holding(7, wrong))
    assert list(SamplingParams(**holding(0, UINT32)).ids_by_name()[name]) == [0, UINT32]


@pytest.mark.parametrize("name", [*ID_LISTS, "logit_bias", "stop_strings"])
def test_what_is_no_list_is_refused_by_name(name: str) -> None:
    """A text is one of characters, which is not what was meant."""
    for wrong in (None, 5, "ab", b"ab"):
        refused(name, **{name: wrong})


@pytest.mark.parametrize(
    ("name", "most"),
    [("stop_ids", MAX_STOP_IDS), ("banned_ids", MAX_IDS), ("allowed_ids", MAX_IDS), ("forced_ids", MAX_IDS)],
)
def test_lists_of_ids_are_bounded(name: str, most: int) -> None:
    enough: Any = range(most)
    assert len(getattr(SamplingParams(**{name: enough}), name)) == most
    assert str(most) in refused(name, **{name: range(most + 1)})


def test_biases_are_bounded_in_number_and_size() -> None:
    assert len(SamplingParams(logit_bias=dict.fromkeys(range(MAX_IDS), 1)).biases) == MAX_IDS
    refused("logit_bias", logit_bias=dict.fromkeys(range(MAX_IDS + 1), 1))
    assert SamplingParams(logit_bias={1: -100, 2: 100}).biases == ((1, -100), (2, 100))
    for wrong in (math.nextafter(100, 101), -100.5, math.nan, math.inf, 10**400, True, "1", None):
        refused("logit_bias", logit_bias={3: wrong})


@pytest.mark.parametrize("pairs", [[1, 2], [(1, 2.0, 3.0)], [(1,)], {1: 1.0, "a": 2.0}, ((1, 2.0), (1, 3.0))])
def test_biases_are_one_number_for_each_id(pairs: Any) -> None:
    """Two for one id would leave open which of them counts."""
    refused("logit_bias", logit_bias=pairs)


def test_stop_strings_are_bounded_in_number_and_bytes() -> None:
    at_most = ["é" * (MAX_STOP_BYTES // 2)] * MAX_STOP_STRINGS
    assert SamplingParams(stop_strings=at_most).stop_strings == tuple(at_most)
    refused("stop_strings", stop_strings=[*at_most, "x"])
    for wrong in ("", at_most[0] + "x", "\ud800", b"x", 1, None):
        refused("stop_strings", stop_strings=["fine", wrong])


def test_ids_outside_a_vocabulary_are_refused_by_name() -> None:
    SamplingParams().require_ids_below(1)
    for name in [*ID_LISTS, "logit_bias"]:
        ids: Any = {2: 1.0, 9: 1.0} if name == "logit_bias" else [2, 9]
        params = SamplingParams(**{name: ids})
        params.require_ids_below(10)
        with pytest.raises(InvalidRequest, match=f"{name} holds 9") as caught:
            params.require_ids_below(9)
        assert caught.value.details == {"param": name}


# -- contradictions


@pytest.mark.parametrize(
    ("param", "params"),
    [
        ("min_tokens", {"min_tokens": 6, "max_tokens": 5}),
        ("verify_blocks", {"verify_blocks": True}),
        ("verify_blocks", {"verify_blocks": True, "sampling_mode": "coupled", "temperature": 1.0}),
        ("allowed_ids", {"allowed_ids": [1, 2], "banned_ids": [2, 3, 1]}),
        ("forced_ids", {"forced_ids": [4, 5], "banned_ids": [5]}),
        ("forced_ids", {"forced_ids": [4, 5], "allowed_ids": [4]}),
        ("forced_ids", {"forced_ids": [4], "grammar": REGEX}),
        ("min_tokens", {"min_tokens": 1, "grammar": REGEX}),
        ("ignore_eos", {"ignore_eos": True, "grammar": REGEX}),
    ],
)
def test_contradictions_are_refused_by_name(param: str, params: dict[str, Any]) -> None:
    refused(param, **params)


@pytest.mark.parametrize(
    "params",
    [
        {"min_tokens": 5, "max_tokens": 5},
        {"verify_blocks": True, "sampling_mode": "rejection"},
        {"allowed_ids": [1, 2], "banned_ids": [2, 3]},
        {"forced_ids": [4, 5, 4], "allowed_ids": [4, 5], "banned_ids": [6]},
        {"allowed_ids": [1], "stop_ids": [1], "grammar": REGEX},
    ],
)
def test_what_can_be_had_together_is_allowed(params: dict[str, Any]) -> None:
    assert dataclasses.asdict(SamplingParams(**params)).keys() > params.keys()


# -- normalisation


def test_every_way_to_write_it_is_one_value() -> None:
    """Lists, tuples, iterators, mappings and names: what is equal has equal hashes and can be a key."""
    tuples = SamplingParams(
        stop_ids=(3, 1),
        logit_bias=((1, 0.5), (7, -1.0)),
        stop_strings=("b", "a"),
        sampling_mode=SamplingMode.REJECTION,
    )
    lists = SamplingParams(
        stop_ids=[3, 1],  # type: ignore[arg-type]
        logit_bias=[[7, -1.0], [1, 0.5]],  # type: ignore[arg-type]
        stop_strings=["b", "a"],
        sampling_mode="rejection",  # type: ignore[arg-type]
    )
    assert lists == tuples
    assert len({lists, tuples}) == 1
    mapping: Mapping[int, float] = {7: -1.0, 1: 0.5}
    assert SamplingParams(logit_bias=mapping).biases == tuples.biases
    assert tuples.stop_ids == (3, 1)
    assert tuples.stop_strings == ("b", "a")


numbers = {
    name: st.integers(int(low), int(high)) if name in WHOLE else st.floats(low, high, exclude_min=low > 0)
    for name, (low, high) in RANGES.items()
} | {"temperature": st.just(0.0) | st.floats(0.01, 100)}
few_ids = st.lists(st.integers(0, UINT32), max_size=5)
texts = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)
entries: dict[str, Any] = dict.fromkeys(("stop_ids", "banned_ids"), few_ids) | {
    "logit_bias": st.dictionaries(st.integers(0, UINT32), st.floats(-100, 100), max_size=5),
    "stop_strings": st.lists(texts, max_size=3),
    "grammar": st.none() | st.builds(Grammar, st.sampled_from(GrammarKind), texts),
    "ignore_eos": st.booleans(),
    "sampling_mode": st.sampled_from(SamplingMode),
}


@st.composite
def valid(draw: st.DrawFn) -> SamplingParams:
    params = draw(st.fixed_dictionaries({}, optional=numbers | entries))
    if params.get("grammar"):
        params = {name: value for name, value in params.items() if name not in ("min_tokens", "ignore_eos")}
    if "max_tokens" in params and "min_tokens" in params:
        params["min_tokens"] = min(params["min_tokens"], params["max_tokens"])
    if params.get("sampling_mode") is SamplingMode.REJECTION:
        params["verify_blocks"] = draw(st.booleans())
    return SamplingParams(**params)


@given(valid())
def test_it_comes_out_as_it_went_in(params: SamplingParams) -> None:
    """Taken apart and put together again, and sent over the wire."""
    assert SamplingParams(**vars(params)) == params
    assert dataclasses.replace(params) == params
    frame = Open((1,), params, b"", b"", protocol_revision=1)
    back = wire.decode_request(wire.encode_request(frame))
    assert isinstance(back, Open)
    assert back.params == params
    assert hash(back.params) == hash(params)


# -- what follows from it


@pytest.mark.parametrize(
    "params",
    [
        {"repetition_penalty": 1.1},
        {"presence_penalty": -0.1},
        {"frequency_penalty": 0.1},
        {"min_tokens": 1},
        {"grammar": REGEX},
        {"logit_bias": {1: 1.0}},
        {"banned_ids": [1]},
        {"allowed_ids": [1]},
        {"forced_ids": [1]},
    ],
)
def test_what_changes_logits_may_change_the_likeliest(params: dict[str, Any]) -> None:
    assert SamplingParams(**params).adjustments


def test_the_filters_keep_the_likeliest() -> None:
    filters: dict[str, Any] = {"temperature": 0.5, "top_k": 3, "top_p": 0.5, "min_p": 0.1, "stop_ids": (1,)}
    assert not SamplingParams(**filters, stop_strings=("a",), max_tokens=3, logprobs=1).adjustments


def test_a_seed_is_drawn_only_for_a_request_that_draws_and_has_none() -> None:
    drawing = SamplingParams(temperature=1.0, top_k=3)
    assert drawing.with_seed(7) == SamplingParams(temperature=1.0, top_k=3, seed=7)
    assert drawing.seed is None
    assert SamplingParams(temperature=1.0, seed=0).with_seed(7).seed == 0
    assert SamplingParams().with_seed(7).seed is None
    with pytest.raises(InvalidRequest, match="seed"):
        drawing.with_seed(UINT64 + 1)


def test_a_context_that_draws_needs_its_seed() -> None:
    with pytest.raises(ValueError, match="with_seed"):
        context(temperature=1.0)
    assert context(temperature=1.0, seed=5).seed == 5
    assert context(seed=None).seed == 0


def test_ids_that_stand_for_nothing_are_not_forced() -> None:
    """No row has a logit for them, so they could not be masked like others."""
    vocabulary = Vocabulary((b"a", None, b"b"), frozenset())
    assert SamplingContext(SamplingParams(forced_ids=(0, 2), banned_ids=(1,)), 1, vocabulary, ()).num_prompt == 1
    with pytest.raises(InvalidRequest, match="forced_ids holds 1") as caught:
        SamplingContext(SamplingParams(forced_ids=(0, 1)), 1, vocabulary, ())
    assert caught.value.details == {"param": "forced_ids"}


def test_a_context_says_what_ends_the_output() -> None:
    def stops(**params: Any) -> frozenset[int]:
        return SamplingContext(SamplingParams(**params), 1, letters(), (2, 3)).stop_ids

    assert stops() == {2, 3}
    assert stops(stop_ids=(5, 2)) == {2, 3, 5}
    assert stops(stop_ids=(5,), ignore_eos=True) == {5}

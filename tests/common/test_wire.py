from __future__ import annotations

import math
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import fields
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from baru.drafting.v1 import drafting_pb2 as pb
from baru_common import wire
from baru_common.errors import (
    BaruError,
    CapacityExhausted,
    HubTimeout,
    HubUnavailable,
    Incompatible,
    InvalidDraft,
    InvalidRequest,
    NotFound,
    PermissionDenied,
    ProtocolMismatch,
    ProtocolViolation,
    error_tree,
)
from baru_common.frames import (
    Cancel,
    Draft,
    DrafterInfo,
    Drain,
    Finished,
    FinishReason,
    Heartbeat,
    HubDescription,
    Limits,
    Open,
    Opened,
    Posture,
    PostureChange,
    Resume,
    TokenLogprobs,
    Usage,
    Verdict,
)
from baru_common.sampling import Grammar, GrammarKind, SamplingMode, SamplingParams, SparseProbs
from baru_common.sampling.params import MAX_IDS, MAX_STOP_IDS
from baru_common.sampling.sparse import MAX_SUPPORT

MAX_ID = 151_999
MAX_POSITION = 2_000_000
TREE = list(error_tree())

uint32 = st.integers(0, (1 << 32) - 1)
uint64 = st.integers(0, (1 << 64) - 1)
ids = st.lists(uint32, max_size=20).map(tuple)
digests = st.binary(min_size=32, max_size=32)
texts = st.text(st.characters(codec="utf-8"), min_size=1, max_size=64)
float32 = st.floats(width=32, allow_nan=False)
grammars = st.builds(Grammar, st.sampled_from(GrammarKind), texts)
penalties = st.floats(-2, 2)


@st.composite
def sampling_params(draw: st.DrawFn) -> SamplingParams:
    """Any that contradict nothing; each parameter takes every value that it may have."""
    grammar = draw(st.none() | grammars)
    max_tokens = draw(st.none() | st.integers(1, (1 << 32) - 1))
    allowed = draw(ids)
    banned = tuple(i for i in draw(ids) if i not in allowed)
    mode = draw(st.sampled_from(SamplingMode))
    free: dict[str, Any] = (
        {}
        if grammar
        else {
            "min_tokens": draw(st.integers(0, max_tokens or (1 << 32) - 1)),
            "forced_ids": draw(st.lists(st.sampled_from(allowed), max_size=4)) if allowed else (),
            "ignore_eos": draw(st.booleans()),
        }
    )
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=draw(st.just(0.0) | st.floats(0.01, 100)),
        seed=draw(st.none() | uint64),
        stop_ids=draw(st.lists(uint32, max_size=MAX_STOP_IDS).map(tuple)),
        top_k=draw(uint32),
        top_p=draw(st.floats(0, 1, exclude_min=True)),
        min_p=draw(st.floats(0, 1)),
        repetition_penalty=draw(st.floats(0, 100, exclude_min=True)),
        presence_penalty=draw(penalties),
        frequency_penalty=draw(penalties),
        logit_bias=draw(st.dictionaries(uint32, st.floats(-100, 100), max_size=5)),
        banned_ids=banned,
        allowed_ids=allowed,
        stop_strings=draw(st.lists(texts, max_size=16)),
        logprobs=draw(st.none() | st.integers(0, 20)),
        sampling_mode=mode,
        verify_blocks=mode is SamplingMode.REJECTION and draw(st.booleans()),
        grammar=grammar,
        **free,
    )


@st.composite
def sparse_probs(draw: st.DrawFn) -> SparseProbs:
    """Any weights that a half can hold, above 0 and finite."""
    some = tuple(draw(st.lists(uint32, min_size=1, max_size=MAX_SUPPORT, unique=True)))
    halves = draw(st.lists(st.integers(1, 0x7BFF), min_size=len(some), max_size=len(some)))
    return SparseProbs(some, struct.pack(f"<{len(some)}H", *halves))


@st.composite
def drafts(draw: st.DrawFn) -> Draft:
    """With a distribution for each id, or with none at all."""
    token_ids = draw(ids)
    one_each = st.lists(sparse_probs(), min_size=len(token_ids), max_size=len(token_ids)).map(tuple)
    probs = draw(st.just(()) | one_each) if len(token_ids) <= 4 else ()
    return Draft(draw(uint32), draw(uint32), draw(uint32), draw(uint32), token_ids, probs)


token_logprobs = st.builds(TokenLogprobs, float32, st.lists(st.tuples(uint32, float32), max_size=20).map(tuple))
no_digest = st.just(b"")
drafters = st.builds(
    DrafterInfo,
    st.text("abcdefgh_", min_size=1, max_size=64),
    no_digest | digests,
    st.text(max_size=128),
    no_digest | digests,
    st.text(max_size=128),
)
postures = st.builds(
    Posture,
    drafting=st.booleans(),
    max_depth=st.none() | uint32,
    max_ahead=st.none() | uint32,
    drafters=st.lists(texts, max_size=4).map(tuple),
    fallback=st.sampled_from(["", "local", "wait", "fail"]),
    reason=texts,
    rule=texts,
    document_version=uint32,
    document_digest=digests,
    probation=st.booleans(),
)
posture_changes = st.builds(PostureChange, postures)
heartbeats = st.builds(Heartbeat, uint32, uint64)
resumes = st.builds(Resume, st.text(max_size=64), st.binary(max_size=32), uint32, ids, ids)
opens = st.builds(
    Open,
    ids,
    sampling_params(),
    digests,
    digests,
    st.none() | drafters,
    st.none() | resumes,
    st.text(max_size=64),
    st.text(max_size=64),
    protocol_revision=uint32,
)
openeds = st.builds(
    Opened,
    st.text(max_size=64),
    uint32,
    uint32,
    uint32,
    st.binary(max_size=32),
    continued=st.booleans(),
    posture=st.none() | postures,
)
drains = st.builds(Drain, st.integers(0, (1 << 32) - 1).map(lambda ms: ms / 1000))
usages = st.builds(Usage, *[uint32] * 9, seed=st.none() | uint64)
finisheds = st.builds(Finished, st.sampled_from(FinishReason), usages)


@st.composite
def verdicts(draw: st.DrawFn) -> Verdict:
    num_verified = draw(st.integers(0, 16))
    num_accepted = draw(st.integers(0, num_verified))
    num_guessed = draw(st.integers(0, 4))
    num_drafted = num_accepted + num_guessed
    num_emitted = draw(st.integers(max(num_drafted, 1), num_drafted + 1))
    tokens = tuple(draw(st.lists(uint32, min_size=num_emitted, max_size=num_emitted)))
    chain_id = draw(st.integers(1, (1 << 32) - 1)) if num_verified else 0
    one_each = st.lists(token_logprobs, min_size=num_emitted, max_size=num_emitted).map(tuple)
    logprobs = draw(st.just(()) | one_each) if num_emitted <= 4 else ()
    hint = draw(uint32)
    return Verdict(
        draw(uint32), draw(uint32), num_verified, num_accepted, tokens, chain_id, hint, num_guessed, logprobs
    )


# -- frames


@given(opens | drafts() | heartbeats | st.just(Cancel()))
def test_every_frame_of_a_node_comes_back(frame: Open | Draft | Heartbeat | Cancel) -> None:
    """Encoded, sent as bytes and decoded, a frame equals itself."""
    data = wire.encode_request(frame).SerializeToString()
    assert wire.decode_request(pb.DecodeRequest.FromString(data)) == frame


@given(openeds | drains | verdicts() | heartbeats | finisheds)
def test_every_frame_of_a_hub_comes_back(frame: Opened | Verdict | Heartbeat | Finished) -> None:
    """Encoded, sent as bytes and decoded, a frame equals itself."""
    data = wire.encode_response(frame).SerializeToString()
    assert wire.decode_response(pb.DecodeResponse.FromString(data)) == frame


@given(
    st.builds(
        HubDescription,
        protocol_revision=uint32,
        hub_version=st.text(),
        engine=st.text(),
        target_name=st.text(),
        target_fingerprint=digests,
        tokenizer_digest=digests,
        vocabulary_digest=digests,
        vocabulary_size=uint32,
        eos_ids=ids,
        context_limit=uint32,
        limits=st.builds(Limits, uint32, uint32, uint32, uint32),
    )
)
def test_a_description_comes_back(hub: HubDescription) -> None:
    data = wire.encode_description(hub).SerializeToString()
    assert wire.decode_description(pb.DescribeResponse.FromString(data)) == hub


def test_what_is_absent_stays_absent() -> None:
    """An optional value that was not given is not 0 or "" on the other side."""
    frame = wire.decode_request(wire.encode_request(Open((1,), SamplingParams(), b"t" * 32, b"k" * 32)))
    assert isinstance(frame, Open)
    assert frame.params == SamplingParams()
    assert frame.params.max_tokens is None
    assert frame.params.seed is None
    assert frame.params.logprobs is None
    assert frame.params.grammar is None
    assert frame.drafter is None
    usage = Usage(0, 0, 0, 0, 0, 0, 0, 0, 0)
    finished = wire.decode_response(wire.encode_response(Finished(FinishReason.LENGTH, usage)))
    assert isinstance(finished, Finished)
    assert finished.usage.seed is None


def test_params_that_say_nothing_are_the_defaults() -> None:
    """A node of another language may leave out whatever it does not need."""
    frame = wire.decode_request(pb.DecodeRequest(open=pb.Open(prompt_ids=[1])))
    assert isinstance(frame, Open)
    assert frame.params == SamplingParams()


def params_over_the_wire(params: SamplingParams) -> SamplingParams:
    data = wire.encode_request(Open((1,), params, b"", b"")).SerializeToString()
    frame = wire.decode_request(pb.DecodeRequest.FromString(data))
    assert isinstance(frame, Open)
    return frame.params


MOST = (1 << 32) - 1
ENDS: dict[str, tuple[Any, ...]] = {
    "max_tokens": (1, MOST),
    "temperature": (0.01, 100.0),
    "seed": (0, (1 << 64) - 1),
    "ignore_eos": (True,),
    "stop_ids": ((0,), (MOST,) * MAX_STOP_IDS),
    "top_k": (1, MOST),
    "top_p": (5e-324, math.nextafter(1, 0)),
    "min_p": (5e-324, 1.0),
    "repetition_penalty": (5e-324, 100.0),
    "presence_penalty": (-2.0, 5e-324, 2.0),
    "frequency_penalty": (-2.0, 5e-324, 2.0),
    "logit_bias": ({0: -100.0, MOST: 100.0}, {5: 0.0}, dict.fromkeys(range(MAX_IDS), 0.1)),
    "banned_ids": ((0, MOST), tuple(range(MAX_IDS))),
    "allowed_ids": ((0,), (MOST,) * MAX_IDS),
    "forced_ids": ((0,), (MOST,) * MAX_IDS),
    "min_tokens": (1, MOST),
    "stop_strings": (("x",), ("é" * 128,) * 16, ("\0",)),
    "logprobs": (0, 20),
    "sampling_mode": ("rejection", SamplingMode.REJECTION),
    "verify_blocks": (True,),
    "grammar": (Grammar.json_schema({"type": "object"}), Grammar.regex("a*"), Grammar.lark("x" * (1 << 16))),
}
"""For each parameter the ends of its range, none of them the default."""


@pytest.mark.parametrize(("param", "value"), [(param, value) for param, values in ENDS.items() for value in values])
def test_the_ends_of_the_ranges_come_back(param: str, value: Any) -> None:
    """Exactly, whatever the number of bytes; and with nothing else changed."""
    others: dict[str, Any] = {"sampling_mode": SamplingMode.REJECTION} if param == "verify_blocks" else {}
    params = SamplingParams(**{param: value}, **others)
    assert getattr(params, param) != getattr(SamplingParams(), param)
    assert params_over_the_wire(params) == params


def test_no_parameter_is_left_out() -> None:
    """Neither of the table above nor of the contract."""
    names = {field.name for field in fields(SamplingParams)}
    assert set(ENDS) == names
    assert {field.name for field in pb.SamplingParams.DESCRIPTOR.fields} == names


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("max_tokens", 1 << 32),
        ("min_tokens", 1 << 32),
        ("top_k", 1 << 32),
        ("seed", 1 << 64),
        ("logprobs", -1),
        ("stop_ids", (1 << 32,)),
        ("banned_ids", (-1,)),
        ("allowed_ids", (1 << 32,)),
        ("forced_ids", (1 << 32,)),
        ("logit_bias", {1 << 32: 1.0}),
        ("stop_strings", ("\ud800",)),
        ("temperature", "1"),
    ],
)
def test_a_value_that_the_wire_cannot_carry_is_refused_by_name(param: str, value: Any) -> None:
    """A request that was accepted can be sent; protobuf's own ValueError reaches nobody."""
    with pytest.raises(InvalidRequest, match=param):
        wire.encode_request(Open((1,), SamplingParams(**{param: value}), b"", b""))


@pytest.mark.parametrize("num_tokens", [0, 1, 8, 16])
def test_a_draft_is_small(num_tokens: int) -> None:
    """At most 24 bytes and 4 per id, at the far end of every range that occurs."""
    frame = Draft((1 << 32) - 1, (1 << 32) - 1, MAX_POSITION, 64, (MAX_ID,) * num_tokens)
    assert wire.encode_request(frame).ByteSize() <= 24 + 4 * num_tokens


@pytest.mark.parametrize("num_tokens", [1, 2, 8, 16])
def test_a_verdict_is_small(num_tokens: int) -> None:
    """At most 48 bytes and 4 per id, at the far end of every range that occurs."""
    emitted = (MAX_ID,) * num_tokens
    frame = Verdict((1 << 32) - 1, MAX_POSITION, 64, num_tokens - 1, emitted, (1 << 32) - 1, 64)
    assert wire.encode_response(frame).ByteSize() <= 48 + 4 * num_tokens


@pytest.mark.parametrize("support", [1, 8, MAX_SUPPORT])
def test_a_draft_distribution_is_small(support: int) -> None:
    """At most 8 bytes and 6 per id of it, at the far end of every range that occurs."""
    some = tuple(range(MAX_ID - support, MAX_ID))
    probs = SparseProbs.of([(i, 1 / support) for i in some])
    plain, drawn = Draft(1, 1, 9, 0, some[:1]), Draft(1, 1, 9, 0, some[:1], (probs,))
    size = wire.encode_request(drawn).ByteSize() - wire.encode_request(plain).ByteSize()
    assert size <= 8 + 6 * support


# -- frames that make no sense

# Field 15, a message: a frame of a later revision.
UNKNOWN_FRAME = bytes([15 << 3 | 2, 0])


@pytest.mark.parametrize("data", [b"", UNKNOWN_FRAME])
def test_an_unknown_frame_of_a_node_is_refused(data: bytes) -> None:
    """Never ignored: the node would wait for an answer for ever."""
    with pytest.raises(BaruError, match="kind"):
        wire.decode_request(pb.DecodeRequest.FromString(data))


def test_an_unknown_frame_ends_the_stream_with_the_status_of_the_contract() -> None:
    """drafting.proto, "Versioning": the receiver ends the stream with UNIMPLEMENTED."""
    with pytest.raises(BaruError) as caught:
        wire.decode_request(pb.DecodeRequest.FromString(UNKNOWN_FRAME))
    assert wire.to_status(caught.value).code is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("data", [b"", UNKNOWN_FRAME])
def test_an_unknown_frame_of_a_hub_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolViolation, match="kind"):
        wire.decode_response(pb.DecodeResponse.FromString(data))


@pytest.mark.parametrize(
    ("num_verified", "num_accepted", "num_emitted"),
    [
        pytest.param(0, 0, 0, id="nothing emitted"),
        pytest.param(3, 3, 0, id="accepted, but nothing emitted"),
        pytest.param(2, 3, 4, id="more accepted than verified"),
        pytest.param(2, 1, 3, id="two ids of the target's own"),
        pytest.param(4, 2, 4, id="more emitted than decided"),
        pytest.param(4, 3, 2, id="fewer emitted than accepted"),
    ],
)
def test_a_verdict_that_contradicts_itself_is_refused(num_verified: int, num_accepted: int, num_emitted: int) -> None:
    verdict = pb.Verdict(
        epoch=1,
        base=9,
        num_verified=num_verified,
        num_accepted=num_accepted,
        token_ids=range(num_emitted),
        chain_id=1 if num_verified else 0,
    )
    with pytest.raises(ProtocolViolation):
        wire.decode_response(pb.DecodeResponse(verdict=verdict))


@pytest.mark.parametrize("num_logprobs", [1, 3])
def test_a_verdict_with_log_probabilities_for_some_ids_only_is_refused(num_logprobs: int) -> None:
    """For each id or for none; a caller could not tell whose they are."""
    verdict = pb.Verdict(num_verified=1, num_accepted=1, token_ids=[1, 2], chain_id=1)
    verdict.logprobs.extend([pb.TokenLogprobs(logprob=-1)] * num_logprobs)
    with pytest.raises(ProtocolViolation, match=f"{num_logprobs} log-probabilities for 2 ids"):
        wire.decode_response(pb.DecodeResponse(verdict=verdict))


def test_likeliest_ids_without_their_log_probabilities_are_refused() -> None:
    """As many of the one as of the other."""
    entry = pb.TokenLogprobs(logprob=-1, top_ids=[1, 2], top_logprobs=[-1])
    verdict = pb.Verdict(token_ids=[1], logprobs=[entry])
    with pytest.raises(ProtocolViolation, match="log-probabilities"):
        wire.decode_response(pb.DecodeResponse(verdict=verdict))


@pytest.mark.parametrize("reason", [0, 99])
def test_a_finish_without_a_known_reason_is_refused(reason: int) -> None:
    """UNSPECIFIED is never sent, and a number from a later revision is not known."""
    message = pb.DecodeResponse()
    message.finished.SetInParent()
    message.finished.MergeFromString(bytes([1 << 3, reason]))
    with pytest.raises(ProtocolViolation):
        wire.decode_response(message)


@pytest.mark.parametrize("family", ["", "x" * 65])
def test_a_drafter_without_a_proper_name_is_refused(family: str) -> None:
    message = pb.DecodeRequest(open=pb.Open(drafter=pb.DrafterInfo(family=family)))
    with pytest.raises(InvalidRequest, match="family"):
        wire.decode_request(message)


@pytest.mark.parametrize(
    ("param", "params"),
    [
        ("max_tokens", pb.SamplingParams(max_tokens=0)),
        ("temperature", pb.SamplingParams(temperature=0.005)),
        ("temperature", pb.SamplingParams(temperature=100.5)),
        ("temperature", pb.SamplingParams(temperature=-1)),
        ("temperature", pb.SamplingParams(temperature=float("nan"))),
        ("stop_ids", pb.SamplingParams(stop_ids=range(MAX_STOP_IDS + 1))),
        ("top_p", pb.SamplingParams(top_p=0)),
        ("top_p", pb.SamplingParams(top_p=1.5)),
        ("min_p", pb.SamplingParams(min_p=-0.1)),
        ("repetition_penalty", pb.SamplingParams(repetition_penalty=0)),
        ("presence_penalty", pb.SamplingParams(presence_penalty=2.5)),
        ("frequency_penalty", pb.SamplingParams(frequency_penalty=float("nan"))),
        ("logit_bias", pb.SamplingParams(logit_bias=[pb.LogitBias(token_id=1, bias=101)])),
        ("logit_bias", pb.SamplingParams(logit_bias=[pb.LogitBias(token_id=i) for i in range(MAX_IDS + 1)])),
        ("banned_ids", pb.SamplingParams(banned_ids=range(MAX_IDS + 1))),
        ("allowed_ids", pb.SamplingParams(allowed_ids=[1], banned_ids=[1])),
        ("forced_ids", pb.SamplingParams(forced_ids=[1], banned_ids=[1])),
        ("min_tokens", pb.SamplingParams(min_tokens=2, max_tokens=1)),
        ("stop_strings", pb.SamplingParams(stop_strings=[""])),
        ("stop_strings", pb.SamplingParams(stop_strings=["x"] * 17)),
        ("logprobs", pb.SamplingParams(logprobs=21)),
        ("verify_blocks", pb.SamplingParams(verify_blocks=True)),
        ("grammar", pb.SamplingParams(grammar=pb.Grammar(kind=pb.GRAMMAR_KIND_REGEX))),
    ],
)
def test_a_wrong_parameter_is_refused_where_it_enters(param: str, params: Message) -> None:
    """Whoever wrote the node, the hub checks for itself."""
    request = pb.DecodeRequest()
    request.open.params.MergeFromString(params.SerializeToString())
    with pytest.raises(InvalidRequest) as caught:
        wire.decode_request(request)
    assert caught.value.details["param"] == param


# Field 90, a number: what a later revision may add to any message.
LATER = bytes([0xD0, 0x05, 1])
LATER_VALUE: Any = 9
LATER_BIAS = pb.LogitBias.FromString(pb.LogitBias(token_id=5, bias=1).SerializeToString() + LATER)
LATER_GRAMMAR = pb.Grammar.FromString(pb.Grammar(kind=pb.GRAMMAR_KIND_REGEX, text="a").SerializeToString() + LATER)


@pytest.mark.parametrize(
    ("param", "params"),
    [
        pytest.param("params", pb.SamplingParams.FromString(LATER), id="a parameter"),
        pytest.param("logit_bias", pb.SamplingParams(logit_bias=[LATER_BIAS]), id="a field of logit_bias"),
        pytest.param("grammar", pb.SamplingParams(grammar=LATER_GRAMMAR), id="a field of grammar"),
        pytest.param("sampling_mode", pb.SamplingParams(sampling_mode=LATER_VALUE), id="a mode"),
        pytest.param(
            "grammar", pb.SamplingParams(grammar=pb.Grammar(kind=LATER_VALUE, text="a")), id="a kind of grammar"
        ),
        pytest.param("grammar", pb.SamplingParams(grammar=pb.Grammar(text="a")), id="a grammar without a kind"),
    ],
)
def test_what_this_revision_does_not_know_is_refused_by_name(param: str, params: pb.SamplingParams) -> None:
    """Never passed over: the output would not be what was asked for."""
    data = pb.DecodeRequest(open=pb.Open(prompt_ids=[1], params=params)).SerializeToString()
    with pytest.raises(InvalidRequest, match="does not know") as caught:
        wire.decode_request(pb.DecodeRequest.FromString(data))
    assert caught.value.details["param"] == param


def test_the_unspecified_sampling_mode_is_the_coupled_one() -> None:
    """As the contract says."""
    params = pb.SamplingParams(sampling_mode=pb.SAMPLING_MODE_UNSPECIFIED)
    frame = wire.decode_request(pb.DecodeRequest(open=pb.Open(params=params)))
    assert isinstance(frame, Open)
    assert frame.params.sampling_mode is SamplingMode.COUPLED


@pytest.mark.parametrize(
    ("token_ids", "weights", "words"),
    [
        ([], b"", "0 ids"),
        (range(MAX_SUPPORT + 1), b"\0\x3c" * (MAX_SUPPORT + 1), "65 ids"),
        ([1, 1], b"\0\x3c" * 2, "twice"),
        ([1, 2], b"\0\x3c", "2 bytes"),
        ([1], b"\x3c", "1 bytes"),
        ([1, 2], b"\0\x3c\0\0", "not above 0"),
        ([1, 2], b"\0\x3c\0\x80", "not above 0"),
        ([1, 2], b"\0\x3c\0\xbc", "not above 0"),
        ([1], b"\0\x7c", "finite"),
        ([1], b"\0\x7e", "finite"),
    ],
)
def test_a_draft_distribution_that_is_none_is_refused(token_ids: list[int], weights: bytes, words: str) -> None:
    """Nothing, too much, an id twice, weights that do not fit, or are 0, negative, infinite or NaN."""
    probs = pb.SparseProbs(token_ids=token_ids, weights=weights)
    message = pb.DecodeRequest(draft=pb.Draft(epoch=1, chain_id=1, token_ids=[1], draft_probs=[probs]))
    with pytest.raises(InvalidDraft, match=words):
        wire.decode_request(message)


@pytest.mark.parametrize("where", ["logprob", "top_logprobs"])
def test_a_log_probability_that_is_no_number_is_a_violation(where: str) -> None:
    """Found by fuzzing: it equals nothing, not even itself, and is no JSON."""
    entry = pb.TokenLogprobs(logprob=-1.0, top_ids=[5], top_logprobs=[-1.0])
    if where == "logprob":
        entry.logprob = math.nan
    else:
        entry.top_logprobs[0] = math.nan
    with pytest.raises(ProtocolViolation, match="not a number"):
        wire.decode_response(pb.DecodeResponse(verdict=pb.Verdict(base=3, token_ids=[5], logprobs=[entry])))


# -- errors


@asynccontextmanager
async def failing_server(failure: list[BaruError]) -> AsyncIterator[Any]:
    """A real gRPC server whose only method fails with `failure[0]`; yields the call."""

    async def fail(request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        status = wire.to_status(failure[0])
        await context.abort(status.code, status.details, status.trailing_metadata)
        raise AssertionError("abort raises")

    server = grpc.aio.server()
    methods: Any = {"Fail": grpc.unary_unary_rpc_method_handler(fail)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call: Any = channel.unary_unary("/test/Fail")
            yield call
    finally:
        await server.stop(None)


def an_error(cls: type[BaruError]) -> BaruError:
    """An instance with everything that can travel."""
    message, hint, details = f"{cls.__name__} happened: 50 % of “é”\n", "mend it – now", {"param": "seed", "é": "ü"}
    if issubclass(cls, CapacityExhausted):
        return cls(message, hint=hint, details=details, retry_after_s=12.345)
    return cls(message, hint=hint, details=details)


async def test_every_error_of_the_tree_crosses_a_real_connection() -> None:
    """Class, status, message, hint, details and time to wait arrive as they left."""
    failure: list[BaruError] = [BaruError("unused")]
    async with failing_server(failure) as call:
        for cls in TREE:
            failure[0] = an_error(cls)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(b"")
            found = wire.from_rpc_error(caught.value)
            assert type(found) is cls
            assert caught.value.code().name == cls.status
            assert vars(found) == vars(failure[0])
            assert str(found) == str(failure[0])


@pytest.mark.parametrize("cls", TREE)
def test_every_error_comes_back_without_hint_and_details(cls: type[BaruError]) -> None:
    """The shortest form of an error is still that error."""
    status = wire.to_status(cls("it failed"))
    assert status.code is grpc.StatusCode[cls.status]
    found = wire.from_rpc_error(rpc_error(status.code, status.details, status.trailing_metadata))
    assert type(found) is cls
    assert vars(found) == vars(cls("it failed"))


def rpc_error(code: grpc.StatusCode, details: str | None, metadata: Any = ()) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*metadata), details=details)


@pytest.mark.parametrize(
    ("code", "cls"),
    [
        (grpc.StatusCode.UNAVAILABLE, HubUnavailable),
        (grpc.StatusCode.DEADLINE_EXCEEDED, HubTimeout),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, CapacityExhausted),
        (grpc.StatusCode.INVALID_ARGUMENT, InvalidRequest),
        (grpc.StatusCode.NOT_FOUND, NotFound),
        (grpc.StatusCode.FAILED_PRECONDITION, Incompatible),
        (grpc.StatusCode.UNIMPLEMENTED, ProtocolMismatch),
        (grpc.StatusCode.INTERNAL, ProtocolViolation),
        (grpc.StatusCode.PERMISSION_DENIED, PermissionDenied),
        (grpc.StatusCode.ABORTED, BaruError),
    ],
)
def test_a_bare_status_is_the_nearest_error(code: grpc.StatusCode, cls: type[BaruError]) -> None:
    """gRPC itself, or a proxy, knows nothing of our details."""
    found = wire.from_rpc_error(rpc_error(code, "it is so"))
    assert type(found) is cls
    assert found.message == "it is so"
    assert wire.from_rpc_error(rpc_error(code, "")).message == code.name


def test_details_that_cannot_be_read_leave_the_bare_status() -> None:
    """What a broken proxy put there hides nothing, and raises nothing else."""
    metadata = [("grpc-status-details-bin", b"\xff\xff")]
    found = wire.from_rpc_error(rpc_error(grpc.StatusCode.UNAVAILABLE, "gone", metadata))
    assert type(found) is HubUnavailable
    assert found.message == "gone"


def test_an_error_of_a_later_version_keeps_its_message() -> None:
    """A reason that is not known here still says what happened and what to do."""
    status = wire.to_status(InvalidRequest("too blue", hint="less blue"))
    (_, data), *_ = status.trailing_metadata or ()
    assert isinstance(data, bytes)
    newer = data.replace(b"INVALID_REQUEST", b"INVALID_COLOURS")
    found = wire.from_rpc_error(rpc_error(status.code, status.details, [("grpc-status-details-bin", newer)]))
    assert isinstance(found, BaruError)
    assert str(found) == "too blue (less blue)"

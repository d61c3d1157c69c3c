from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
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
    InvalidRequest,
    NotFound,
    ProtocolMismatch,
    ProtocolViolation,
    error_tree,
)
from baru_common.frames import (
    Cancel,
    Draft,
    DrafterInfo,
    Finished,
    FinishReason,
    Heartbeat,
    HubDescription,
    Limits,
    Open,
    Opened,
    Usage,
    Verdict,
)
from baru_common.sampling import MAX_STOP_IDS, SamplingParams

MAX_ID = 151_999
MAX_POSITION = 2_000_000
TREE = list(error_tree())

uint32 = st.integers(0, (1 << 32) - 1)
uint64 = st.integers(0, (1 << 64) - 1)
ids = st.lists(uint32, max_size=20).map(tuple)
digests = st.binary(min_size=32, max_size=32)
sampling_params = st.builds(
    SamplingParams,
    max_tokens=st.none() | st.integers(1, (1 << 32) - 1),
    seed=st.none() | uint64,
    ignore_eos=st.booleans(),
    stop_ids=st.lists(uint32, max_size=MAX_STOP_IDS).map(tuple),
)
drafters = st.builds(DrafterInfo, st.text("abcdefgh_", min_size=1, max_size=64), st.just(b"") | digests)
heartbeats = st.builds(Heartbeat, uint32, uint64)
drafts = st.builds(Draft, uint32, uint32, uint32, uint32, ids)
opens = st.builds(Open, ids, sampling_params, digests, digests, st.none() | drafters, uint32)
openeds = st.builds(Opened, st.text(max_size=64), uint32, uint32, uint32)
usages = st.builds(Usage, *[uint32] * 9)
finisheds = st.builds(Finished, st.sampled_from(FinishReason), usages)


@st.composite
def verdicts(draw: st.DrawFn) -> Verdict:
    num_verified = draw(st.integers(0, 16))
    num_accepted = draw(st.integers(0, num_verified))
    num_emitted = draw(st.integers(max(num_accepted, 1), num_accepted + 1))
    tokens = tuple(draw(st.lists(uint32, min_size=num_emitted, max_size=num_emitted)))
    chain_id = draw(st.integers(1, (1 << 32) - 1)) if num_verified else 0
    return Verdict(draw(uint32), draw(uint32), num_verified, num_accepted, tokens, chain_id, draw(uint32))


# -- frames


@given(opens | drafts | heartbeats | st.just(Cancel()))
def test_every_frame_of_a_node_comes_back(frame: Open | Draft | Heartbeat | Cancel) -> None:
    """Encoded, sent as bytes and decoded, a frame equals itself."""
    data = wire.encode_request(frame).SerializeToString()
    assert wire.decode_request(pb.DecodeRequest.FromString(data)) == frame


@given(openeds | verdicts() | heartbeats | finisheds)
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
    assert frame.params.max_tokens is None
    assert frame.params.seed is None
    assert frame.drafter is None


@pytest.mark.parametrize(
    "params",
    [SamplingParams(seed=0), SamplingParams(seed=(1 << 64) - 1), SamplingParams(max_tokens=(1 << 32) - 1)],
)
def test_the_ends_of_the_ranges_come_back(params: SamplingParams) -> None:
    frame = wire.decode_request(wire.encode_request(Open((1,), params, b"", b"")))
    assert isinstance(frame, Open)
    assert frame.params == params


@pytest.mark.parametrize(("param", "value"), [("max_tokens", 1 << 32), ("stop_ids", (1 << 32,))])
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
        pytest.param(0, 0, 2, id="two ids of the target's own"),
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
        ("temperature", pb.SamplingParams(temperature=0.5)),
        ("temperature", pb.SamplingParams(temperature=float("nan"))),
        ("stop_ids", pb.SamplingParams(stop_ids=range(MAX_STOP_IDS + 1))),
    ],
)
def test_a_wrong_parameter_is_refused_where_it_enters(param: str, params: Message) -> None:
    """Whoever wrote the node, the hub checks for itself."""
    request = pb.DecodeRequest()
    request.open.params.MergeFromString(params.SerializeToString())
    with pytest.raises(InvalidRequest) as caught:
        wire.decode_request(request)
    assert caught.value.details["param"] == param


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
        (grpc.StatusCode.PERMISSION_DENIED, BaruError),
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

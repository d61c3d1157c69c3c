"""The gRPC face of a real hub on loopback, seen from a client that breaks the rules one by one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest

from baru.drafting.v1 import drafting_pb2 as pb
from baru.drafting.v1 import drafting_pb2_grpc
from baru_common import errors, wire
from baru_common.channel_options import CLIENT_OPTIONS, MAX_MESSAGE_BYTES
from baru_common.errors import BaruError
from baru_common.frames import (
    Cancel,
    Draft,
    DrafterInfo,
    FinishReason,
    Heartbeat,
    NodeFrame,
    Open,
    Opened,
    Resume,
    Verdict,
)
from baru_common.sampling import SamplingParams
from baru_hub import servicer
from baru_hub.server import Hub
from support.hubs import hub_of
from support.lockstep import Lockstep, free_running
from support.tiny import plain_greedy, tiny_target

_WAIT_S = 10.0
_METHOD = "/baru.drafting.v1.DraftingService/Decode"
_TARGET = tiny_target()
_OPEN = Open(
    prompt_ids=(1, 5, 9),
    params=SamplingParams(max_tokens=8, ignore_eos=True),
    target_fingerprint=_TARGET.fingerprint,
    tokenizer_digest=_TARGET.bundle.digest,
)
_LONG = replace(_OPEN, params=SamplingParams(max_tokens=60, ignore_eos=True))
_ENDLESS = replace(_OPEN, params=SamplingParams(ignore_eos=True), drafter=DrafterInfo("test"))
"""Runs as long as the context lasts, and waits for a draft in each step: a patient hub hardly gets on with it."""

Call = grpc.aio.StreamStreamCall[Any, Any]


@asynccontextmanager
async def connected(**settings: Any) -> AsyncIterator[tuple[Hub, grpc.aio.Channel]]:
    async with (
        hub_of(_TARGET, **settings) as hub,
        grpc.aio.insecure_channel(hub.address, options=CLIENT_OPTIONS) as channel,
    ):
        yield hub, channel


def decode(channel: grpc.aio.Channel, *frames: NodeFrame | bytes, stay: bool = True) -> Call:
    """Send frames, or raw bytes; then keep the stream open, or end the sending side."""

    async def requests() -> AsyncIterator[bytes]:
        for frame in frames:
            yield frame if isinstance(frame, bytes) else wire.encode_request(frame).SerializeToString()
        if stay:
            await asyncio.sleep(4 * _WAIT_S)

    method: Any = channel.stream_stream(
        _METHOD, request_serializer=lambda data: data, response_deserializer=pb.DecodeResponse.FromString
    )
    return method(requests(), timeout=_WAIT_S)  # type: ignore[no-any-return]


async def error_of(call: Call) -> tuple[grpc.StatusCode, BaruError]:
    """Read the stream to its end, which must be an error."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    return caught.value.code(), wire.from_rpc_error(caught.value)


async def until(holds: Callable[[], bool]) -> None:
    async def poll() -> None:
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    await asyncio.wait_for(poll(), _WAIT_S)


async def gone(hub: Hub) -> None:
    """Wait until no session is left."""
    await until(lambda: not hub.verifier.num_sessions)


INVALID = grpc.StatusCode.INVALID_ARGUMENT
PRECONDITION = grpc.StatusCode.FAILED_PRECONDITION


@pytest.mark.parametrize(
    ("frames", "code", "error"),
    [
        ((Heartbeat(1, 1),), INVALID, errors.InvalidRequest),
        ((Cancel(),), INVALID, errors.InvalidRequest),
        ((Draft(1, 1, 3, 0, (1,)), _OPEN), INVALID, errors.InvalidRequest),
        ((_ENDLESS, _ENDLESS), INVALID, errors.InvalidRequest),
        ((_ENDLESS, Draft(1, 1, 9, 0, (1,))), INVALID, errors.InvalidDraft),
        ((_ENDLESS, Draft(1, 1, 3, 0, (300,))), INVALID, errors.InvalidDraft),
        ((replace(_OPEN, prompt_ids=()),), INVALID, errors.EmptyPrompt),
        ((replace(_OPEN, prompt_ids=(1,) * 512),), INVALID, errors.PromptTooLong),
        ((replace(_OPEN, prompt_ids=(300,)),), INVALID, errors.InvalidRequest),
        ((replace(_OPEN, drafter=DrafterInfo("")),), INVALID, errors.InvalidRequest),
        ((replace(_OPEN, drafter=DrafterInfo("x" * 65)),), INVALID, errors.InvalidRequest),
        ((replace(_OPEN, protocol_revision=2),), PRECONDITION, errors.ProtocolMismatch),
        ((replace(_OPEN, target_fingerprint=b"x" * 32),), PRECONDITION, errors.TargetMismatch),
        ((replace(_OPEN, tokenizer_digest=b"x" * 32),), PRECONDITION, errors.TokenizerMismatch),
        ((replace(_OPEN, drafter=DrafterInfo("x", b"x" * 32)),), PRECONDITION, errors.VocabularyMismatch),
    ],
)
async def test_what_breaks_the_contract_ends_that_stream(
    frames: Sequence[NodeFrame], code: grpc.StatusCode, error: type[BaruError]
) -> None:
    """With its own status and class; nothing of it stays, and the next session is served as ever."""
    async with connected(scheduler=free_running()) as (hub, channel):
        got_code, got = await error_of(decode(channel, *frames))
        assert (got_code, type(got)) == (code, error)
        assert got.message
        await gone(hub)
        ids = [t async for r in decode(channel, _OPEN) for t in r.verdict.token_ids]
        assert ids == plain_greedy(_TARGET, [1, 5, 9], 8)


@pytest.mark.parametrize("data", [b"\xff\xff\xff", b"\x0a\xff", b"\x12\x05\x08"])
@pytest.mark.parametrize("before", [(), (_ENDLESS,)])
async def test_bytes_that_are_no_message_end_that_stream(data: bytes, before: Sequence[NodeFrame]) -> None:
    """At the start or later: an error reaches the client, the session is gone, others go on."""
    async with connected(scheduler=free_running()) as (hub, channel):
        code, _ = await error_of(decode(channel, *before, data))
        assert code in {INVALID, grpc.StatusCode.INTERNAL}
        await gone(hub)
        assert [t async for r in decode(channel, _OPEN) for t in r.verdict.token_ids]


@pytest.mark.parametrize("before", [(), (_ENDLESS,)])
async def test_a_frame_of_an_unknown_kind_is_unimplemented(before: Sequence[NodeFrame]) -> None:
    """The contract: such a frame, from a later revision, ends the stream with UNIMPLEMENTED."""
    later = b"\x9a\x06\x02\x08\x01"  # field 99, a message
    async with connected(scheduler=free_running()) as (hub, channel):
        code, error = await error_of(decode(channel, *before, later))
        assert code is grpc.StatusCode.UNIMPLEMENTED
        assert "kind" in error.message
        await gone(hub)


async def test_a_stream_without_open_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that stays silent after a while; one that ends its sending side at once."""
    monkeypatch.setattr(servicer, "_OPEN_TIMEOUT_S", 0.1)
    async with connected() as (hub, channel):
        for stay in (True, False):
            code, error = await error_of(decode(channel, stay=stay))
            assert (code, type(error)) == (INVALID, errors.InvalidRequest)
            assert "no Open" in error.message
        assert hub.verifier.num_sessions == 0


async def test_a_message_too_large_is_refused() -> None:
    """The transport's limit holds; other streams of the same connection go on."""
    async with connected() as (_, channel):
        code, _ = await error_of(decode(channel, b"\x0a" + bytes(MAX_MESSAGE_BYTES)))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert [t async for r in decode(channel, _OPEN) for t in r.verdict.token_ids]


def _cancel(call: Call, channel: grpc.aio.Channel) -> Any:
    call.cancel()


def _close(call: Call, channel: grpc.aio.Channel) -> Any:
    return asyncio.ensure_future(channel.close())


@pytest.mark.parametrize("disappear", [_cancel, _close])
@pytest.mark.parametrize("num_read", [0, 1, 3])
async def test_a_client_that_disappears_leaves_nothing(
    disappear: Callable[[Call, grpc.aio.Channel], Any], num_read: int
) -> None:
    """Before the first answer, after it, in mid-stream: no session stays, where none is kept for its return."""
    async with connected(scheduler=free_running(), orphan_grace_s=0) as (hub, channel):
        call = decode(channel, _ENDLESS)
        for _ in range(num_read):
            await call.read()
        if (waiting := disappear(call, channel)) is not None:
            await waiting
        await gone(hub)


async def opened_by(call: Any) -> pb.Opened:
    return (await anext(aiter(call))).opened  # type: ignore[no-any-return]


def resumed(told: pb.Opened, ids: Sequence[int], **changes: Any) -> Open:
    ticket = Resume(told.session_id, told.session_key, told.epoch, tuple(ids))
    return replace(_LONG, resume=replace(ticket, **changes))


@pytest.mark.parametrize("disappear", [_cancel, _close])
async def test_a_broken_stream_is_resumed_over_another_connection(
    disappear: Callable[[Call, grpc.aio.Channel], Any],
) -> None:
    """The session was kept; what it decided meanwhile comes at once, and the rest of the output after it."""
    async with connected(scheduler=free_running()) as (hub, channel):
        async with grpc.aio.insecure_channel(hub.address, options=CLIENT_OPTIONS) as first:
            call: Any = decode(first, _LONG)
            told = await opened_by(call)
            ids = list((await anext(aiter(call))).verdict.token_ids)
            if (waiting := disappear(call, first)) is not None:
                await waiting
        await until(lambda: hub.verifier.num_orphans == 1)
        frames = [wire.decode_response(m) async for m in decode(channel, resumed(told, ids))]
        opened = frames[0]
        assert isinstance(opened, Opened)
        assert (opened.session_id, opened.epoch, opened.num_committed) == (told.session_id, 2, 3 + len(ids))
        assert (opened.session_key, opened.continued) == (told.session_key, True)
        ids += [t for f in frames if isinstance(f, Verdict) for t in f.token_ids]
        assert ids == plain_greedy(_TARGET, [1, 5, 9], 60)
        await gone(hub)


async def test_who_may_not_resume_is_told_by_status() -> None:
    """PERMISSION_DENIED for a wrong key; the stream that another one took the place of: FAILED_PRECONDITION."""
    async with connected(scheduler=Lockstep(patience_s=4 * _WAIT_S)) as (hub, channel):
        call: Any = decode(channel, _ENDLESS)
        told = await opened_by(call)
        code, error = await error_of(decode(channel, resumed(told, (), session_key=b"x" * 32)))
        assert (code, type(error)) == (grpc.StatusCode.PERMISSION_DENIED, errors.PermissionDenied)
        later = decode(channel, replace(_ENDLESS, resume=resumed(told, ()).resume), Heartbeat(1, 1))
        code, error = await error_of(call)
        assert (code, type(error)) == (PRECONDITION, errors.Superseded)
        assert (await opened_by(later)).epoch == 2
        assert (await anext(aiter(later))).heartbeat.sequence == 1
        code, error = await error_of(decode(channel, replace(_ENDLESS, resume=resumed(told, ()).resume)))
        assert (code, type(error)) == (PRECONDITION, errors.Superseded)
        assert hub.verifier.num_sessions == 1


async def test_a_silent_node_is_taken_for_gone() -> None:
    """Though its connection is fine: its stream ends, and the session is kept for its return."""
    async with connected(scheduler=Lockstep(patience_s=4 * _WAIT_S), node_silence_s=0.5) as (hub, channel):
        code, error = await error_of(decode(channel, _ENDLESS, Heartbeat(1, 1)))
        assert (code, type(error)) == (grpc.StatusCode.DEADLINE_EXCEEDED, errors.HubTimeout)
        assert "nothing comes" in error.message
        assert hub.verifier.num_orphans == 1


async def test_a_node_that_does_not_read_costs_no_memory() -> None:
    """Its session is paused once the transport takes no more, others go on, and in the end it is taken for gone."""
    narrow = (*CLIENT_OPTIONS, ("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1 << 14))
    params = SamplingParams(ignore_eos=True, logprobs=20)
    async with connected(scheduler=free_running(), slow_reader_s=0.5, orphan_tokens=0) as (hub, channel):
        async with grpc.aio.insecure_channel(hub.address, options=narrow) as other:
            call = decode(other, replace(_OPEN, params=params))
            await until(lambda: hub.verifier.num_orphans == 1)
            (resident,) = hub.verifier.roster.residents.values()
            num_committed = len(resident.state.committed)
            assert num_committed < _TARGET.context_limit
            assert [t async for r in decode(channel, _OPEN) for t in r.verdict.token_ids]
            assert len(resident.state.committed) == num_committed
            code, error = await error_of(call)
        assert (code, type(error)) == (grpc.StatusCode.DEADLINE_EXCEEDED, errors.HubTimeout)
        assert "unread" in error.message


async def test_a_drain_is_told() -> None:
    """With the time that is left; a cancelled session needs none of it."""
    async with connected(scheduler=Lockstep(patience_s=4 * _WAIT_S)) as (hub, channel):
        calls: list[Any] = [decode(channel, _ENDLESS), decode(channel, _ENDLESS)]
        for call in calls:
            await opened_by(call)
        calls[1].cancel()
        await until(lambda: hub.verifier.num_orphans == 1)
        draining = asyncio.create_task(hub.drain(1.5))
        assert (await anext(aiter(calls[0]))).drain.grace_ms == 1500
        await until(lambda: hub.verifier.num_sessions == 1)
        code, error = await error_of(decode(channel, _OPEN))
        assert (code, type(error)) == (grpc.StatusCode.UNAVAILABLE, errors.HubUnavailable)
        await asyncio.wait_for(draining, _WAIT_S)
        hub.verifier.dismiss()
        code, error = await error_of(calls[0])
        assert (code, type(error)) == (grpc.StatusCode.UNAVAILABLE, errors.HubUnavailable)


async def test_cancel_ends_well_and_heartbeats_come_back() -> None:
    """Unchanged and at once; then `Finished` says CANCELLED and is the last message."""
    async with connected(scheduler=free_running()) as (hub, channel):
        call = decode(channel, _ENDLESS, Heartbeat(1, 123), Heartbeat(2, (1 << 64) - 1), Cancel(), Heartbeat(3, 1))
        frames = [wire.decode_response(message) async for message in call]
        assert [f for f in frames if isinstance(f, Heartbeat)] == [Heartbeat(1, 123), Heartbeat(2, (1 << 64) - 1)]
        assert getattr(frames[-1], "reason", None) is FinishReason.CANCELLED
        await gone(hub)


async def test_a_client_that_has_said_all_is_still_answered() -> None:
    """Ending the sending side ends no session."""
    async with connected() as (_, channel):
        frames = [wire.decode_response(m) async for m in decode(channel, _OPEN, stay=False)]
        emitted = [t for f in frames if isinstance(f, Verdict) for t in f.token_ids]
        assert emitted == plain_greedy(_TARGET, [1, 5, 9], 8)


async def test_a_full_hub_tells_the_client_when_to_come_back() -> None:
    """RESOURCE_EXHAUSTED with RetryInfo; who runs is not disturbed, and room is room as soon as there is some."""
    async with connected(max_sessions=1, scheduler=free_running(), orphan_grace_s=0) as (hub, channel):
        first: Any = decode(channel, _ENDLESS)
        assert (await first.read()).HasField("opened")
        code, error = await error_of(decode(channel, _OPEN))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert isinstance(error, errors.CapacityExhausted)
        assert error.retry_after_s > 0
        assert error.hint
        assert hub.verifier.num_sessions == 1
        assert (await first.read()).HasField("verdict")
        first.cancel()
        await gone(hub)
        assert [t async for r in decode(channel, _OPEN) for t in r.verdict.token_ids]


async def test_the_tokenizer_comes_whole_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """In pieces within the limit that add up to the bundle; NOT_FOUND for another digest."""
    assert servicer._CHUNK_BYTES <= 1 << 18  # as the contract says
    monkeypatch.setattr(servicer, "_CHUNK_BYTES", 1000)
    async with connected() as (_, channel):
        stub: Any = drafting_pb2_grpc.DraftingServiceStub(channel)
        digest = _TARGET.bundle.digest
        pieces = [p async for p in stub.FetchTokenizer(pb.FetchTokenizerRequest(tokenizer_digest=digest))]
        assert b"".join(piece.chunk for piece in pieces) == _TARGET.bundle.data
        assert {piece.total_bytes for piece in pieces} == {len(_TARGET.bundle.data)}
        assert [len(piece.chunk) for piece in pieces[:-1]] == [1000] * (len(_TARGET.bundle.data) // 1000)
        code, error = await error_of(stub.FetchTokenizer(pb.FetchTokenizerRequest(tokenizer_digest=b"x" * 32)))
        assert (code, type(error)) == (grpc.StatusCode.NOT_FOUND, errors.NotFound)

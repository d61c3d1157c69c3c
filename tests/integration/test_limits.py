"""Limits from outside, through a real hub: each once, many at once, and misbehaving nodes beside honest ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest

from baru.drafting.v1 import drafting_pb2 as pb
from baru_common import wire
from baru_common.channel_options import CLIENT_OPTIONS
from baru_common.frames import Draft, DrafterInfo, Open
from baru_common.sampling import Grammar, SamplingParams
from baru_hub.engines.transformers import TransformersEngine
from baru_hub.scheduler import Scheduler
from baru_hub.server import Hub, running_hub
from support.hubs import LOOPBACK
from support.lockstep import Lockstep, free_running
from support.misbehaviour import ENDS, KINDS, METADATA, identify, misbehave
from support.tiny import plain_greedy, tiny_target, twin

_TARGET = tiny_target()
_OPEN = Open(
    prompt_ids=(1, 5, 9),
    params=SamplingParams(max_tokens=8, ignore_eos=True),
    target_fingerprint=_TARGET.fingerprint,
    tokenizer_digest=_TARGET.bundle.digest,
    drafter=DrafterInfo("test"),
)
_MANY = {"type": "object", "properties": {f"p{i}": {} for i in range(700)}}
_LONG = replace(_OPEN, params=SamplingParams(max_tokens=400, ignore_eos=True))


def _params(**changes: Any) -> Open:
    return replace(_OPEN, params=SamplingParams(**changes))


@asynccontextmanager
async def serving(scheduler: Scheduler | None = None, **settings: Any) -> AsyncIterator[tuple[Hub, grpc.aio.Channel]]:
    engine = TransformersEngine(twin(_TARGET), kv_cache_mb=2)
    config = replace(LOOPBACK, **settings)
    try:
        async with (
            running_hub(engine, config, scheduler=scheduler or free_running(), identify=identify) as hub,
            grpc.aio.insecure_channel(hub.address, options=CLIENT_OPTIONS) as channel,
        ):
            yield hub, channel
            assert hub.verifier.roster.opening == {}
    finally:
        await engine.close()


async def run(channel: grpc.aio.Channel, *frames: Any, who: bool = True) -> list[int]:
    """Run one call to its end; return the ids."""

    async def requests() -> AsyncIterator[bytes]:
        for frame in frames:
            yield wire.encode_request(frame).SerializeToString()
        await asyncio.sleep(3600)

    method: Any = channel.stream_stream(
        "/baru.drafting.v1.DraftingService/Decode", response_deserializer=pb.DecodeResponse.FromString
    )
    call = method(requests(), metadata=METADATA if who else None, timeout=30)
    try:
        return [token async for message in call for token in message.verdict.token_ids]
    finally:
        call.cancel()


INVALID, EXHAUSTED = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize(
    ("settings", "frames", "code", "says"),
    [
        ({"max_prompt_tokens": 2}, (_OPEN,), INVALID, "at most 2"),
        ({"max_output_tokens": 7}, (_OPEN,), INVALID, "max_tokens is 8"),
        ({"max_stops": 1}, (_params(stop_ids=(7, 8)),), INVALID, "at most 1"),
        ({"max_grammar_bytes": 3}, (_params(grammar=Grammar.regex("abcd")),), INVALID, "4 bytes"),
        ({"max_identity_tokens_in_flight": 10}, (_OPEN,), EXHAUSTED, "offender would come to 11"),
        ({"max_tokens_in_flight": 10}, (_OPEN,), EXHAUSTED, "11 tokens, at most 10"),
        ({"max_frame_bytes": 1 << 15}, (_LONG, Draft(1, 1, 3, 0, (5,) * 40_000)), INVALID, "32768"),
        ({"max_draft_ahead": 16}, (_LONG, Draft(9, 1, 3, 0, (5,) * 17)), INVALID, "17 ids"),
        ({"max_session_age_s": 1.0, "scheduler": Lockstep(patience_s=60.0)}, (_LONG,), EXHAUSTED, "1 s old"),
        ({}, (_params(grammar=Grammar.json_schema(_MANY)),), INVALID, "grammar"),
    ],
)
async def test_each_limit_has_its_error(
    settings: dict[str, Any], frames: tuple[Any, ...], code: grpc.StatusCode, says: str
) -> None:
    """It says which, and honest nodes are served as ever."""
    async with serving(**settings) as (_, channel):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await run(channel, *frames)
        assert caught.value.code() is code
        assert says in (caught.value.details() or "")
        assert wire.from_rpc_error(caught.value).message
        if len(frames) > 1 or "grammar" in says:
            assert await run(channel, _OPEN, who=False) == plain_greedy(_TARGET, [1, 5, 9], 8)


async def test_many_opens_at_once_do_not_all_pass() -> None:
    """While their grammars are tried they count as sessions; one node's limit is not another's."""
    async with serving(max_identity_sessions=2, max_calls_per_s=1000.0) as (_, channel):
        request = _params(max_tokens=4, grammar=Grammar.regex("[a-z]{2,9}"))
        results = await asyncio.gather(*(run(channel, request) for _ in range(40)), return_exceptions=True)
        refused = [r for r in results if isinstance(r, grpc.aio.AioRpcError)]
        assert len(refused) == 38
        assert {r.code() for r in refused} == {EXHAUSTED}
        assert all("offender has all 2 sessions" in (r.details() or "") for r in refused)
        assert await run(channel, _OPEN, who=False) == plain_greedy(_TARGET, [1, 5, 9], 8)


async def test_a_request_that_never_fits_drops_no_orphan() -> None:
    """It is refused before anybody gives place."""
    async with serving() as (hub, channel):
        capacity = hub.verifier.spec.capacity
        assert capacity is not None
        engine = hub.verifier._engine
        object.__setattr__(engine, "_spec", replace(engine.spec, capacity=10))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await run(channel, _OPEN)
        assert caught.value.code() is EXHAUSTED
        assert "KV cache holds 10" in (caught.value.details() or "")


@pytest.mark.parametrize("kind", [k for k in KINDS if k not in ("connections", "unread")])
async def test_a_misbehaving_node_hurts_only_itself(kind: str) -> None:
    """Honest streams are exact meanwhile, the offender is refused, and nothing of it stays."""
    ENDS.clear()
    async with serving(max_frames_per_s=50.0) as (hub, channel):
        offender = asyncio.create_task(misbehave(kind, hub.address, hub.verifier.describe()))
        try:
            await asyncio.sleep(0.5)
            for _ in range(3):
                assert await run(channel, _OPEN, who=False) == plain_greedy(_TARGET, [1, 5, 9], 8)
            assert not offender.done()
        finally:
            offender.cancel()
            await asyncio.gather(offender, return_exceptions=True)
        if kind in ("giant", "garbage"):
            assert any(end.startswith("INVALID_ARGUMENT") for end in ENDS), ENDS

"""The hub service as a whole: its address, its health, what it says of itself, and how it ends."""

from __future__ import annotations

import asyncio
import socket
import threading
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from baru_common.errors import BaruError, ConfigError, HubUnavailable
from baru_common.frames import PROTOCOL_REVISION
from baru_common.sampling import SamplingParams
from baru_hub.acceptance import Decision
from baru_hub.engines.transformers import TransformersEngine
from baru_hub.ragged_batch import RaggedBatch
from baru_hub.server import Hub, running_hub
from baru_hub.servicer import SERVICE
from baru_hub.verifier import LiveSession
from baru_micro import Event, Fallback, Finish, FinishReason, LinkOptions, MicroNode, Step
from support.hubs import LOOPBACK, hub_of
from support.lockstep import Lockstep
from support.tiny import plain_greedy, tiny_target, twin

_WAIT_S = 10.0
_PROMPT = [1, 5, 9]
_TARGET = tiny_target()
_NO_FALLBACK = LinkOptions(fallback=Fallback.FAIL)


class GatedEngine(TransformersEngine):
    """The real engine, whose steps wait until they may run."""

    def __init__(self) -> None:
        super().__init__(twin(_TARGET), kv_cache_mb=64)
        self.entered, self.may_run = threading.Event(), threading.Event()

    def _run(self, batch: RaggedBatch, work: list[Any]) -> list[Decision | BaruError]:
        self.entered.set()
        assert self.may_run.wait(_WAIT_S)
        return super()._run(batch, work)


async def run(address: str, max_tokens: int = 8) -> Finish:
    async with MicroNode.connect(address, drafter=None, options=_NO_FALLBACK) as node:
        async for event in node.generate(_PROMPT, SamplingParams(max_tokens=max_tokens, ignore_eos=True)):
            if isinstance(event, Finish):
                return event
    raise AssertionError("no Finish came")


async def health_of(hub: Hub, service: str = "") -> int:
    async with grpc.aio.insecure_channel(hub.address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=_WAIT_S)
        return int(answer.status)


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "[::1]:0", "localhost:0"])
async def test_port_zero_takes_a_free_port_and_says_which(listen: str) -> None:
    """The address that the hub reports is one that a node can use as it is."""
    async with hub_of(_TARGET, listen=listen) as hub:
        host, _, port = hub.address.rpartition(":")
        assert host == listen.rpartition(":")[0]
        assert int(port) > 0
        assert list((await run(hub.address)).ids) == plain_greedy(_TARGET, _PROMPT, 8)


async def test_a_port_that_is_taken_is_a_config_error() -> None:
    """By another program or by a second hub: said in one sentence, and nothing keeps running."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"cannot listen on {address}"):
            async with hub_of(_TARGET, listen=address):
                pass
    async with hub_of(_TARGET) as hub:
        with pytest.raises(ConfigError, match="cannot listen"):
            async with hub_of(_TARGET, listen=hub.address):
                pass
        assert (await run(hub.address)).reason is FinishReason.LENGTH


async def test_a_hub_describes_itself() -> None:
    """What the target is, and the limits that it was started with."""
    async with (
        hub_of(_TARGET, max_sessions=3, max_depth=11, max_draft_ahead=11) as hub,
        MicroNode.connect(hub.address) as node,
    ):
        told = node.hub
    assert (told.protocol_revision, told.engine, told.target_name) == (PROTOCOL_REVISION, "transformers", "tiny-0-0.0")
    assert (told.target_fingerprint, told.tokenizer_digest) == (_TARGET.fingerprint, _TARGET.bundle.digest)
    assert (told.vocabulary_digest, told.vocabulary_size) == (_TARGET.vocabulary.digest, 300)
    assert (told.eos_ids, told.context_limit) == ((2,), 512)
    limits = told.limits
    assert (limits.max_sessions, limits.max_prompt_tokens, limits.max_draft_ahead) == (3, 511, 11)


@pytest.mark.parametrize("service", ["", SERVICE])
async def test_health_says_serving_until_the_drain(service: str) -> None:
    """For the server as a whole and for the service by name."""
    async with hub_of(_TARGET) as hub:
        assert await health_of(hub, service) == health_pb2.HealthCheckResponse.SERVING
        await hub.drain(0.0)
        assert await health_of(hub, service) == health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.mark.parametrize("served", [True, False])
async def test_reflection_is_served_when_asked_for(served: bool) -> None:
    """It names our service; without the setting it is not there at all."""
    async with hub_of(_TARGET, reflection=served) as hub, grpc.aio.insecure_channel(hub.address) as channel:
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        if served:
            names = {s.name for s in (await call.read()).list_services_response.service}
            assert SERVICE in names
        else:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call.read()
            assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_draining_hub_admits_nobody_and_lets_the_running_end() -> None:
    """The session that runs ends with all its ids; a new one is told to go elsewhere."""
    engine = GatedEngine()
    async with hub_of(engine) as hub:
        running = asyncio.create_task(run(hub.address))
        await asyncio.to_thread(engine.entered.wait, _WAIT_S)
        draining = asyncio.create_task(hub.drain(_WAIT_S))
        await asyncio.sleep(0.05)
        with pytest.raises(HubUnavailable, match="draining"):
            await run(hub.address)
        assert not draining.done()
        engine.may_run.set()
        assert list((await running).ids) == plain_greedy(_TARGET, _PROMPT, 8)
        await asyncio.wait_for(draining, _WAIT_S)


async def test_what_ended_in_the_drain_still_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub stops right after the drain, which may see the end of a session in the moment it happens:
    its last verdict and `Finished` must be out all the same.
    """
    engine, ended, finish = GatedEngine(), asyncio.Event(), LiveSession.finish

    def finish_and_tell(live: LiveSession, reason: FinishReason) -> None:
        finish(live, reason)
        ended.set()

    monkeypatch.setattr(LiveSession, "finish", finish_and_tell)
    async with hub_of(engine) as hub:
        running = asyncio.create_task(run(hub.address))
        await asyncio.to_thread(engine.entered.wait, _WAIT_S)
        engine.may_run.set()
        await ended.wait()
        await hub.drain(_WAIT_S)
    finished = await asyncio.wait_for(running, _WAIT_S)
    assert list(finished.ids) == plain_greedy(_TARGET, _PROMPT, 8)


async def test_the_drain_ends_when_the_grace_is_over() -> None:
    """A session that takes too long is cut off, and its node is told that the hub went away."""
    engine = GatedEngine()
    async with hub_of(engine) as hub:
        running = asyncio.create_task(run(hub.address))
        await asyncio.to_thread(engine.entered.wait, _WAIT_S)
        await asyncio.wait_for(hub.drain(0.1), _WAIT_S)
        engine.may_run.set()
        engine.may_run.clear()
        threading.Timer(0.1, engine.may_run.set).start()
    with pytest.raises(BaruError) as told:
        await asyncio.wait_for(running, _WAIT_S)
    assert isinstance(told.value, HubUnavailable)


async def test_a_hub_stops_while_its_sessions_wait_for_drafts() -> None:
    """Sessions in mid-stream, a patient hub: it ends within a moment all the same."""
    hub_context = running_hub(TransformersEngine(twin(_TARGET), kv_cache_mb=64), LOOPBACK, scheduler=Lockstep())
    hub = await hub_context.__aenter__()
    events: list[Event] = []
    async with MicroNode.connect(hub.address, drafter="ngram", options=_NO_FALLBACK) as node:
        generation = node.generate(_PROMPT, SamplingParams(max_tokens=400, ignore_eos=True))
        while not any(isinstance(event, Step) for event in events):
            events.append(await anext(generation))
        await asyncio.wait_for(hub_context.__aexit__(None, None, None), _WAIT_S)
        with pytest.raises(HubUnavailable):
            async for _ in generation:
                pass

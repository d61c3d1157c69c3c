"""A hub as it is run, in a process of its own, and frames that no node of ours would send, over real gRPC."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
import psutil

from baru.drafting.v1 import drafting_pb2 as pb
from baru_common import wire
from baru_common.channel_options import CLIENT_OPTIONS
from baru_common.frames import Cancel, Draft, DrafterInfo, Heartbeat, NodeFrame, Open, Resume
from baru_common.sampling import SamplingParams
from baru_common.scripted import scripted_id
from baru_hub.engines.simulated import DeviceProfile, SimulatedEngine, devices

MAX_SESSIONS = 16
_PROFILE = min(devices()["targets"], key=lambda name: devices()["targets"][name]["plain_ms"])
_METHOD = "/baru.drafting.v1.DraftingService/Decode"
_FRAMES_A_STREAM = 25
_AT_A_TIME = 12
_WAIT_S = 60.0
_PROMPT = (40, 50, 60)
_NUM_HONEST = 12
"""Ids of an honest request."""


@dataclass
class LiveHub:
    """A hub process, and what it takes."""

    address: str
    process: asyncio.subprocess.Process
    num_frames: int = 0
    num_honest: int = 0
    statuses: dict[str, int] = field(default_factory=dict)
    """How often each status ended a stream."""

    @property
    def is_alive(self) -> bool:
        return self.process.returncode is None

    @property
    def rss_bytes(self) -> int:
        return int(psutil.Process(self.process.pid).memory_info().rss)


@asynccontextmanager
async def live_hub() -> AsyncIterator[LiveHub]:
    """Start `baru-hub serve` with a simulated target, and stop it as an operator would: it must report no session."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "baru_hub.cli", "serve", "--listen", "127.0.0.1:0", "--engine", "simulated",
        "--profile", _PROFILE, "--max-sessions", str(MAX_SESSIONS), "--orphan-grace-s", "0", "--json",
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout
    events = process.stdout
    try:
        while (event := json.loads(await asyncio.wait_for(events.readline(), _WAIT_S)))["event"] != "ready":
            pass
        hub = LiveHub(event["address"], process)
        yield hub
        assert hub.is_alive, "the hub is dead"
        process.send_signal(signal.SIGTERM)
        told = [json.loads(line) for line in (await asyncio.wait_for(events.read(), _WAIT_S)).splitlines()]
        assert {"event": "draining", "sessions": "0"} in told, told
        assert await asyncio.wait_for(process.wait(), _WAIT_S) == 0
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def flood(hub: LiveHub, num_frames: int, seed: int) -> None:
    """Send frames of every wrong kind on several streams at a time, while an honest node is served over and over."""
    chance = random.Random(seed)
    async with grpc.aio.insecure_channel(hub.address, options=CLIENT_OPTIONS) as channel:
        done = asyncio.Event()
        honest = asyncio.create_task(_honest(hub, channel, done))
        enough = hub.num_frames + num_frames
        while hub.num_frames < enough:
            streams = [list(_stream(chance)) for _ in range(_AT_A_TIME)]
            await asyncio.gather(*(_send(hub, channel, frames) for frames in streams))
            assert hub.is_alive, "the hub is dead"
            if honest.done():
                honest.result()
        done.set()
        await asyncio.wait_for(honest, _WAIT_S)


async def _honest(hub: LiveHub, channel: grpc.aio.Channel, done: asyncio.Event) -> None:
    while not done.is_set() or not hub.num_honest:
        start = len(_PROMPT)
        params = SamplingParams(max_tokens=_NUM_HONEST, ignore_eos=True)
        right = tuple(scripted_id(start + i) for i in range(6))
        drafts = [Draft(1, 1, start, 0, right[:3]), Draft(1, 1, start, 3, right[3:])]
        frames: list[NodeFrame] = [_open(params), *drafts, Heartbeat(1, 1)]
        data = [wire.encode_request(frame).SerializeToString() for frame in frames]
        ids: list[int] = []
        async for answer in _decode(channel)(_each(data, stay=True), timeout=_WAIT_S):
            ids += answer.verdict.token_ids
        assert ids == [scripted_id(start + i) for i in range(_NUM_HONEST)], "the honest node got something else"
        hub.num_honest += 1


async def _send(hub: LiveHub, channel: grpc.aio.Channel, frames: list[bytes]) -> None:
    status = "OK"
    try:
        async for _ in _decode(channel)(_each(frames, hub=hub), timeout=_WAIT_S):
            pass
    except grpc.aio.AioRpcError as error:
        status = error.code().name
    assert status != "DEADLINE_EXCEEDED", "the hub left a node waiting"
    hub.statuses[status] = hub.statuses.get(status, 0) + 1


def _decode(channel: grpc.aio.Channel) -> Any:
    return channel.stream_stream(
        _METHOD, request_serializer=lambda data: data, response_deserializer=pb.DecodeResponse.FromString
    )


async def _each(frames: list[bytes], *, stay: bool = False, hub: LiveHub | None = None) -> AsyncIterator[bytes]:
    for frame in frames:
        if hub:
            hub.num_frames += 1
        yield frame
    if stay:
        await asyncio.sleep(_WAIT_S)


def _open(params: SamplingParams, **changes: Any) -> Open:
    spec = _spec()
    return replace(Open(_PROMPT, params, spec.fingerprint, spec.bundle.digest, DrafterInfo("fuzz")), **changes)


_SPECS: list[Any] = []


def _spec() -> Any:
    if not _SPECS:
        _SPECS.append(SimulatedEngine(DeviceProfile.load(_PROFILE)).spec)
    return _SPECS[0]


def _stream(chance: random.Random) -> Iterator[bytes]:
    """Yield the frames of one stream: mostly a session that begins well, and goes on for a while before it breaks."""
    if chance.random() < 0.1:
        yield chance.randbytes(chance.randrange(1, 200))
        return
    params = SamplingParams(max_tokens=chance.choice((2, 6)), ignore_eos=True)
    resume = Resume("x" * 22, chance.randbytes(32), chance.randrange(9)) if chance.random() < 0.2 else None
    yield _bent(_open(params, resume=resume), chance, 0.2)
    for _ in range(chance.randrange(_FRAMES_A_STREAM)):
        yield _bent(_frame(chance, params), chance, 0.04)


def _frame(chance: random.Random, params: SamplingParams) -> NodeFrame:
    kind, wild = chance.random(), chance.random() < 0.03
    number = chance.randrange(1 << 32) if wild else chance.randrange(1, 6)
    if kind < 0.6:
        ids = tuple(chance.randrange(2, 258) for _ in range(chance.choice((0, 1, 4, 5000 if wild else 8))))
        return Draft(chance.choice((0, 1, 1, 7)), number, chance.choice((3, 4, 5, number)), 0, ids)
    if kind < 0.97:
        return Heartbeat(number, chance.getrandbits(64))
    return Cancel() if kind < 0.985 else _open(params)


def _bent(frame: NodeFrame, chance: random.Random, share: float) -> bytes:
    data = bytearray(wire.encode_request(frame).SerializeToString())
    if data and chance.random() < share:
        for _ in range(chance.randrange(1, 4)):
            data[chance.randrange(len(data))] = chance.randrange(256)
    return bytes(data)

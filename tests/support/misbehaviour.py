"""A node that misbehaves, in each way there is. For tests, and as a process.

Usage: python -m support.misbehaviour KIND ADDRESS

It says who it is by metadata, `identify` reads that: for hubs whose connections carry no identity.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

import grpc

from baru.drafting.v1 import drafting_pb2 as pb
from baru.drafting.v1 import drafting_pb2_grpc
from baru_common import wire
from baru_common.channel_options import CLIENT_OPTIONS
from baru_common.frames import Draft, DrafterInfo, Heartbeat, HubDescription, Open
from baru_common.sampling import SamplingParams

OFFENDER = "offender"
METADATA = (("who", OFFENDER),)
ENDS: Counter[str] = Counter()
"""How calls ended: status, and the start of what was said."""


def identify(context: Any) -> str:
    """Who calls: as the metadata says, else one of the honest nodes."""
    return str(dict(context.invocation_metadata()).get("who", "nodes"))


class Offender:
    """What all kinds need: a connection, a stub, a request."""

    def __init__(self, channel: grpc.aio.Channel, address: str, hub: HubDescription) -> None:
        self.channel = channel
        self.address = address
        self.stub: Any = drafting_pb2_grpc.DraftingServiceStub(channel)
        self.digest = hub.tokenizer_digest
        request = Open(
            prompt_ids=(3, 4, 5),
            params=SamplingParams(max_tokens=100_000, ignore_eos=True),
            target_fingerprint=hub.target_fingerprint,
            tokenizer_digest=hub.tokenizer_digest,
            drafter=DrafterInfo("offender"),
        )
        self.open = wire.encode_request(request).SerializeToString()

    def decode(self, *frames: bytes, then: AsyncIterator[bytes] | None = None) -> Any:
        """A call that sends these frames, and what comes `then`; it stays open."""

        async def requests() -> AsyncIterator[bytes]:
            for frame in (self.open, *frames):
                yield frame
            if then is not None:
                async for frame in then:
                    yield frame
            await asyncio.sleep(3600)

        method: Any = self.channel.stream_stream(
            "/baru.drafting.v1.DraftingService/Decode", response_deserializer=pb.DecodeResponse.FromString
        )
        return method(requests(), metadata=METADATA)

    async def read(self, call: Any) -> None:
        """Read to the end, and note how it ended."""
        try:
            async for _ in call:
                pass
            ENDS["OK"] += 1
        except grpc.aio.AioRpcError as error:
            ENDS[f"{error.code().name} {(error.details() or '')[:60]}"] += 1
        finally:
            call.cancel()


def _draft(num_ids: int, epoch: int = 9) -> bytes:
    return wire.encode_request(Draft(epoch, 1, 3, 0, (5,) * num_ids)).SerializeToString()


async def flood(offender: Offender) -> None:
    """Frames as fast as they go: heartbeats, each of which is to be answered, and drafts of another epoch."""
    beat = wire.encode_request(Heartbeat(1, 1)).SerializeToString()

    async def frames() -> AsyncIterator[bytes]:
        for frame in itertools.cycle((beat, _draft(64))):
            yield frame

    await offender.read(offender.decode(then=frames()))


async def giant(offender: Offender) -> None:
    """Drafts of a megabyte."""
    await offender.read(offender.decode(*[_draft(1_000_000)] * 3))


async def sessions(offender: Offender) -> None:
    """A thousand sessions at once."""
    await asyncio.gather(*(offender.read(offender.decode()) for _ in range(1000)))


async def unread(offender: Offender) -> None:
    """As many sessions as it gets, none of which is read."""
    beat = wire.encode_request(Heartbeat(1, 1)).SerializeToString()
    calls = [offender.decode(*[beat] * 200) for _ in range(64)]
    await asyncio.sleep(3600)
    del calls


async def cancel(offender: Offender) -> None:
    """Sessions that are given up as soon as they are asked for."""
    call = offender.decode()
    await asyncio.sleep(0.002)
    call.cancel()


async def describe(offender: Offender) -> None:
    """Questions, and the tokenizer again and again."""
    fetch = pb.FetchTokenizerRequest(tokenizer_digest=offender.digest)

    async def ask() -> None:
        try:
            await offender.stub.Describe(pb.DescribeRequest(), metadata=METADATA)
            async for _ in offender.stub.FetchTokenizer(fetch, metadata=METADATA):
                pass
        except grpc.aio.AioRpcError as error:
            ENDS[f"{error.code().name} {(error.details() or '')[:60]}"] += 1

    await asyncio.gather(*(ask() for _ in range(200)))


async def garbage(offender: Offender) -> None:
    """Bytes that are no message."""
    offender.open = b"\xff" * 1000
    await offender.read(offender.decode())


async def connections(offender: Offender) -> None:
    """Hundreds of connections on which nothing is said."""
    host, port = offender.address.rsplit(":", 1)
    held = []
    with suppress(OSError):
        for _ in range(500):
            held.append(await asyncio.open_connection(host, int(port)))
    await asyncio.sleep(3600)


Kind = Callable[[Offender], Awaitable[None]]
KINDS: dict[str, Kind] = {
    kind.__name__: kind for kind in (flood, giant, sessions, unread, cancel, describe, garbage, connections)
}


async def misbehave(kind: str, address: str, hub: HubDescription | None = None, *, once: bool = False) -> None:
    """Do it over and over, or once."""
    async with grpc.aio.insecure_channel(address, options=CLIENT_OPTIONS) as channel:
        if hub is None:
            stub: Any = drafting_pb2_grpc.DraftingServiceStub(channel)
            hub = wire.decode_description(await stub.Describe(pb.DescribeRequest()))
        offender = Offender(channel, address, hub)
        while True:
            await KINDS[kind](offender)
            if once:
                return


def main(argv: Sequence[str]) -> None:
    kind, address = argv
    with suppress(KeyboardInterrupt):
        asyncio.run(misbehave(kind, address))


if __name__ == "__main__":
    main(sys.argv[1:])

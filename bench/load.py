"""Several sessions at a time over a link with delay, real model, drafting on and off in turn.

The delay is that of a small TCP relay between nodes and hub: each byte waits half the round trip, each way.

Usage: python -m bench.load [--tokens N]
"""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import product

from rich.progress import track

from baru_micro import MicroNode

from .real import NODE_CORE, Prompt, hub_process, prompts, through_hub
from .store import OUT, Store, machine

SESSIONS = (1, 2, 4, 8, 16)
ROUND_TRIPS_MS = (0, 20, 100)
STORE = Store(OUT / "load.jsonl")


@asynccontextmanager
async def relay(address: str, round_trip_ms: float) -> AsyncIterator[str]:
    """Listen on a loopback port and pass everything on to `address`, half a round trip later each way."""
    host, port = address.rsplit(":", 1)

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        try:
            while data := await reader.read(1 << 16):
                loop.call_later(round_trip_ms / 2e3, writer.write, data)
        except ConnectionError:
            pass
        finally:
            loop.call_later(round_trip_ms / 2e3 + 0.01, writer.close)

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection(host, int(port))
        await asyncio.gather(pump(reader, there_writer), pump(there_reader, writer))

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


async def rate(node: MicroNode, chosen: list[Prompt], num_tokens: int) -> float:
    """Tokens per second of all prompts at once."""
    loop = asyncio.get_running_loop()
    start_s = loop.time()
    runs = await asyncio.gather(*(through_hub(node, prompt, num_tokens) for prompt in chosen))
    return sum(len(run.ids) for run in runs) / (loop.time() - start_s)


async def measure(num_tokens: int) -> None:
    """Every number of sessions at every round trip: off, on, off, on."""
    everything = [p for p in prompts() if p.repetitive]
    async with hub_process("--max-sessions", "32") as address:
        for num_sessions, round_trip_ms in track(list(product(SESSIONS, ROUND_TRIPS_MS)), description="cells"):
            key = f"{num_sessions}x{round_trip_ms}ms"
            if key in STORE.rows():
                continue
            chosen = [everything[i % len(everything)] for i in range(num_sessions)]
            async with (
                relay(address, round_trip_ms) as near,
                MicroNode.connect(near, drafter=None) as off,
                MicroNode.connect(near, drafter="ngram") as on,
            ):
                rates = [await rate(node, chosen, num_tokens) for node in (off, on, off, on)]
            STORE.append(
                key,
                {
                    "num_sessions": num_sessions,
                    "round_trip_ms": round_trip_ms,
                    "tokens_per_s_off": [rates[0], rates[2]],
                    "tokens_per_s_on": [rates[1], rates[3]],
                    "ratio": (rates[1] + rates[3]) / (rates[0] + rates[2]),
                    "machine": machine(),
                },
            )


def main() -> None:
    """Measure what is not in the store yet, and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=48)
    arguments = parser.parse_args()
    os.sched_setaffinity(0, {NODE_CORE})
    asyncio.run(measure(arguments.tokens))
    for key, row in STORE.rows().items():
        print(f"{key:12} {row['ratio']:.3f}")


if __name__ == "__main__":
    main()

"""What one misbehaving node costs seven honest ones: tokens/s with and without it, in turn; real processes.

The hub runs a simulated target in real time, the seven nodes draft, the offender is a process of its own. All on the
given core, the offender at a lower priority, as its own machine is elsewhere: what it costs is what the hub does for
it.

Usage: python -m bench.misbehaviour [--rounds N] [--seconds S] [--kinds K...] [--core N]
       python -m bench.misbehaviour serve
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from baru_common.sampling import SamplingParams
from baru_hub.config import HubConfig
from baru_hub.engines.simulated import DeviceProfile, SimulatedEngine
from baru_hub.server import running_hub
from baru_micro import MicroNode, Step

from .store import OUT, Store, machine

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from support.misbehaviour import KINDS, identify

TESTS = sys.path[0]
STORE = Store(OUT / "misbehaviour.jsonl")
PROFILE = "thor-qwen3-27b-nvfp4"
NUM_NODES = 7
_SETTLE_S = 1.0


async def serve() -> None:
    """The hub: default limits, who calls is told by metadata."""
    config = HubConfig(listen="127.0.0.1:0")
    async with running_hub(SimulatedEngine(DeviceProfile.load(PROFILE)), config, identify=identify) as hub:
        print(hub.address, flush=True)
        await asyncio.sleep(24 * 3600)


@asynccontextmanager
async def process(*argv: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run a program while the block runs."""
    path = os.pathsep.join((TESTS, os.environ.get("PYTHONPATH", "")))
    running = await asyncio.create_subprocess_exec(
        *argv, stdout=asyncio.subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}
    )
    try:
        yield running
    finally:
        running.kill()
        await running.wait()


class Honest:
    """Seven nodes that generate for ever."""

    def __init__(self) -> None:
        self.num_ids = 0

    async def generate(self, node: MicroNode, number: int) -> None:
        """One of them."""
        params = SamplingParams(max_tokens=100_000, ignore_eos=True)
        async for event in node.generate((200,) * (3 + number), params):
            if isinstance(event, Step):
                self.num_ids += len(event.ids)

    async def rate(self, seconds: float) -> float:
        """Tokens per second of all of them from now on."""
        start_s, before = time.monotonic(), self.num_ids
        await asyncio.sleep(seconds)
        return (self.num_ids - before) / (time.monotonic() - start_s)


async def measure(kinds: list[str], rounds: int, seconds: float) -> None:
    """Every kind: without, with, without, with, ..."""
    async with AsyncExitStack() as stack:
        hub = await stack.enter_async_context(process(sys.executable, "-m", "bench.misbehaviour", "serve"))
        address = (await hub.stdout.readline()).decode().strip() if hub.stdout else ""
        honest = Honest()
        connect = (MicroNode.connect(address, drafter="simulated:0.8:2") for _ in range(NUM_NODES))
        nodes = [await stack.enter_async_context(node) for node in connect]
        tasks = [asyncio.create_task(honest.generate(node, number)) for number, node in enumerate(nodes)]
        await asyncio.sleep(3 * _SETTLE_S)
        for kind in kinds:
            rates: dict[str, list[float]] = {"without": [], "with": []}
            for _ in range(rounds):
                rates["without"].append(await honest.rate(seconds))
                offender = ("nice", "-n", "10", sys.executable, "-m", "support.misbehaviour", kind, address)
                async with process(*offender):
                    await asyncio.sleep(_SETTLE_S + 2)  # it starts
                    rates["with"].append(await honest.rate(seconds))
                await asyncio.sleep(_SETTLE_S)
            ratios = [b / a for a, b in zip(rates["without"], rates["with"], strict=True)]
            print(f"{kind:12} {statistics.median(ratios):.3f}  {rates}", flush=True)
            STORE.append(
                kind, {"kind": kind, "seconds": seconds, **rates, "machine": machine(), "load": os.getloadavg()[0]}
            )
        for task in tasks:
            if task.done():
                task.result()
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def main() -> None:
    """Measure, or be the hub."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["measure", "serve"], default="measure")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--core", type=int, default=0)
    asked = parser.parse_args()
    if asked.what == "serve":
        asyncio.run(serve())
        return
    os.sched_setaffinity(0, {asked.core})
    asyncio.run(measure(asked.kinds, asked.rounds, asked.seconds))


if __name__ == "__main__":
    main()

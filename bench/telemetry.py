"""What telemetry costs: the same work with it and without, in turn.

Two hubs in this process, on one core, serve eight nodes over loopback gRPC; their target is simulated, 20 ms a step,
rows for free, so that all other time is ours. One of them keeps all instruments and is scraped every five seconds.
Beside tokens per second, the CPU time that an observation takes, at the hub and at a node, which is the sharper figure.

Usage: python -m bench.telemetry [--rounds N]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
import urllib.request
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AsyncExitStack

import uvloop

from baru_common.sampling import SamplingParams
from baru_common.telemetry import TelemetryConfig
from baru_hub.config import HubConfig
from baru_hub.engines.simulated import DeviceProfile, SimulatedEngine
from baru_hub.observing import Stepped
from baru_hub.scene import SceneStability
from baru_hub.server import running_hub
from baru_hub.telemetry import HubTelemetry
from baru_micro import MicroNode
from baru_micro.events import Event
from baru_micro.observing import NodeObserver, Request
from baru_micro.telemetry import NodeTelemetry, observing

from .steps import ratios, spread
from .store import OUT, Store, machine

STORE = Store(OUT / "telemetry.jsonl")
NUM_NODES, NUM_TOKENS, STEP_S = 8, 240, 0.02
SCRAPED = "127.0.0.1:0"


def main() -> None:
    """Measure, print, store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    os.sched_setaffinity(0, {0})
    STORE.path.unlink(missing_ok=True)
    for name, row in uvloop.run(measure(rounds)).items():
        STORE.append(name, {**row, "rounds": rounds, "machine": machine()})
        print(f"{name:44} " + "  ".join(f"{k} {v:.4f}" for k, v in row.items()))


async def measure(rounds: int) -> dict[str, dict[str, float]]:
    """Return the figures."""
    hub_ms, node_ms = _watch_the_watchers()
    async with AsyncExitStack() as stack:
        plain = await stack.enter_async_context(running_hub(_engine(), HubConfig(listen=SCRAPED)))
        watched = await stack.enter_async_context(running_hub(_engine(), HubConfig(listen=SCRAPED, metrics=SCRAPED)))
        arms = {"off": await _nodes(stack, plain.address), "on": await _nodes(stack, watched.address)}
        scraping = asyncio.create_task(_scrape(watched.metrics))
        stack.callback(scraping.cancel)
        samples: dict[str, list[float]] = defaultdict(list)
        for number in range(rounds + 1):
            for arm in ("off", "on") if number % 2 else ("on", "off"):
                rate, cpu_ms = await _round(arms[arm])
                if number:  # the first one warms up
                    samples[f"tokens/s, telemetry {arm}"].append(rate)
                    samples[f"CPU per token, telemetry {arm}, ms"].append(cpu_ms)
        observed = stack.enter_context(observing(TelemetryConfig(SCRAPED)))
        await _round(await _nodes(stack, plain.address, observed.observers))
    rows = {name: spread(values) for name, values in samples.items()}
    rows["tokens/s, on / off"] = spread(ratios(samples["tokens/s, telemetry on"], samples["tokens/s, telemetry off"]))
    rows["hub: observing a step of 8 sessions, ms"] = _middle(hub_ms)
    rows["hub: the same, share of a step of 20 ms"] = _middle([ms / (STEP_S * 1e3) for ms in hub_ms])
    rows["node: observing what it says, ms an event"] = _middle(node_ms)
    return rows


def _watch_the_watchers() -> tuple[list[float], list[float]]:
    """Return where the CPU time of each observation comes to stand, milliseconds: of whole steps, and of a node's
    events."""
    hub_ms: list[float] = []
    node_ms: list[float] = []
    stepped, followed, said = HubTelemetry.stepped, SceneStability.stepped, NodeTelemetry.said

    def timed_step(self: HubTelemetry, step: Stepped) -> None:
        start_s = time.thread_time()
        stepped(self, step)
        if len(step.parts) == NUM_NODES:
            hub_ms.append((time.thread_time() - start_s) * 1e3)

    def timed_scene(self: SceneStability, step: Stepped) -> None:
        start_s = time.thread_time()
        followed(self, step)
        if len(step.parts) == NUM_NODES:  # it is told after the other
            hub_ms[-1] += (time.thread_time() - start_s) * 1e3

    def timed_event(self: NodeTelemetry, request: Request, event: Event) -> None:
        start_s = time.thread_time()
        said(self, request, event)
        node_ms.append((time.thread_time() - start_s) * 1e3)

    HubTelemetry.stepped, SceneStability.stepped = timed_step, timed_scene  # type: ignore[method-assign]
    NodeTelemetry.said = timed_event  # type: ignore[method-assign]
    return hub_ms, node_ms


def _middle(samples: Sequence[float]) -> dict[str, float]:
    """Median, and the range of nine tenths: the machine has other things to do, too."""
    return spread(statistics.quantiles(samples, n=20))


def _engine() -> SimulatedEngine:
    return SimulatedEngine(DeviceProfile("fixed", (STEP_S, STEP_S), 0.0))


async def _nodes(stack: AsyncExitStack, hub: str, observers: Sequence[NodeObserver] = ()) -> list[MicroNode]:
    connecting = (
        MicroNode.connect(hub, drafter=f"simulated:0.8:0:{number}", observers=observers) for number in range(NUM_NODES)
    )
    return [await stack.enter_async_context(node) for node in connecting]


async def _round(nodes: Sequence[MicroNode]) -> tuple[float, float]:
    """All nodes generate at once: tokens per second, and milliseconds of CPU per token."""
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)

    async def one(number: int, node: MicroNode) -> None:
        async for _ in node.generate([200] * (8 + number), params):
            pass

    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    await asyncio.gather(*(one(number, node) for number, node in enumerate(nodes)))
    num_tokens = NUM_TOKENS * len(nodes)
    elapsed_s, cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
    return num_tokens / elapsed_s, cpu_s / num_tokens * 1e3


async def _scrape(address: str) -> None:
    while True:
        await asyncio.to_thread(_get, f"http://{address}/metrics")
        await asyncio.sleep(5.0)


def _get(url: str) -> None:
    with urllib.request.urlopen(url, timeout=10) as answer:  # noqa: S310
        answer.read()


if __name__ == "__main__":
    main()

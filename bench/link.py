"""How fast an outage is noticed and ended, and what a bad link costs, over both fault labs; real processes.

Outages: the target on one process, a node with a model of its own in another; the link is cut in mid-generation, the
hub is killed, and each event is timed. Bad links: the simulated engine with real time, so that the link is what counts.

Usage: python -m bench.link [--drafter SPEC] [--rounds N] [--labs proxy frames]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from rich.progress import track

from .store import OUT, Store, machine

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from support.faults import Conditions, Fault, Lab, LabKind
from support.netlab import OPEN, missing
from support.processes import End

STORE = Store(OUT / "link.jsonl")
CUT_S = 3.0
"""How long the link is cut."""
_PROMPT = "Write a long report about the harbour, its ships, its people and its weather."
Said = dict[str, Any]


@asynccontextmanager
async def running(lab: Lab, hub: Sequence[str], node: Sequence[str]) -> AsyncIterator[asyncio.Queue[Said]]:
    """Run a hub and a node in a lab; yield what the node says."""
    python = [sys.executable, "-m"]
    serving = await lab.processes.start(End.HUB, *python, "baru_hub.cli", "serve", "--listen", lab.hub_listen, *hub)
    await ready(serving)
    said: asyncio.Queue[Said] = asyncio.Queue()
    process = await lab.processes.start(End.NODE, *python, "bench.link_node", lab.address, *node)

    async def listen() -> None:
        if process.stdout is None:
            return
        async for line in process.stdout:
            said.put_nowait(json.loads(line))
        said.put_nowait({"event": "End", "t": time.monotonic()})

    listening = asyncio.create_task(listen())
    try:
        yield said
    finally:
        listening.cancel()


async def ready(hub: asyncio.subprocess.Process) -> None:
    """Wait until a hub serves."""
    if hub.stdout is None:
        raise RuntimeError("the hub has no output")
    async for line in hub.stdout:
        if json.loads(line)["event"] == "ready":
            return
    raise RuntimeError("the hub did not start")


async def until(said: asyncio.Queue[Said], **wanted: object) -> Said:
    """Return the next thing said that is like this."""
    while True:
        item = await asyncio.wait_for(said.get(), 120)
        if item["event"] == "End":
            raise RuntimeError("the node ended early")
        if wanted.items() <= item.items():
            return item


async def outage(lab: Lab, said: asyncio.Queue[Said]) -> dict[str, float]:
    """Cut the link without a word, bring it back; return the times."""
    for _ in range(6):
        await until(said, event="Step", who="verified")
    cut_s = time.monotonic()
    await lab.apply(Fault.BLACK_HOLE)
    down = await until(said, event="LinkChanged", state="down")
    provisional = await until(said, event="Step", who="provisional")
    await asyncio.sleep(max(cut_s + CUT_S - time.monotonic(), 0))
    while not said.empty():
        said.get_nowait()
    await lab.heal()
    back_s = time.monotonic()
    up = await until(said, event="LinkChanged", state="up")
    verified = await until(said, event="Step", who="verified")
    return {
        "noticed_s": down["t"] - cut_s,
        "first_provisional_s": provisional["t"] - cut_s,
        "reached_s": up["t"] - back_s,
        "first_verified_s": verified["t"] - back_s,
    }


async def hub_death(lab: Lab, said: asyncio.Queue[Said]) -> dict[str, float]:
    """Kill the hub; return how long the node took to notice, from when the kernel had closed its connections."""
    for _ in range(3):
        await until(said, event="Step", who="verified")
    plain = lab.tcp_socket(End.NODE)
    plain.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(plain, _address(lab.address))
    killed_s = time.monotonic()
    killing = asyncio.create_task(lab.apply(Fault.HUB_KILL))
    with contextlib.suppress(ConnectionError):
        while await loop.sock_recv(plain, 1 << 16):
            pass
    closed_s = time.monotonic()
    down = await until(said, event="LinkChanged", state="down")
    await killing
    plain.close()
    return {"death_to_close_s": closed_s - killed_s, "close_to_noticed_s": down["t"] - closed_s}


def _address(address: str) -> tuple[str, int]:
    host, port = address.rsplit(":", 1)
    return host, int(port)


async def outages(kind: LabKind, drafter: str, rounds: int) -> dict[str, list[float]]:
    """Time outages on the default target; a killed hub at the end."""
    found: dict[str, list[float]] = {}
    for _ in track(range(rounds), description=f"outages, {kind.value}"):
        async with OPEN[kind]() as lab:
            hub, node = ["--json", "--threads", "1"], [drafter, "600", _PROMPT]
            async with running(lab, hub, node) as said:
                for times in (await outage(lab, said), await hub_death(lab, said)):
                    for name, value in times.items():
                        found.setdefault(name, []).append(value)
    return found


async def rate(lab: Lab, said: asyncio.Queue[Said], conditions: Conditions) -> float:
    """Tokens per second of the next generation under these conditions."""
    await lab.shape(up=conditions, down=conditions)
    finish = await until(said, event="Finish")
    return float(finish["num_ids"] / finish["elapsed_s"])


async def bad_links(kind: LabKind, rounds: int, num_tokens: int = 400) -> dict[str, list[float]]:
    """Tokens per second at 50 ms round trip: drafting without and with 1 % loss, and the hub alone on the spot."""
    clear, lossy = Conditions(delay_s=0.025), Conditions(delay_s=0.025, loss=0.01)
    found: dict[str, list[float]] = {"drafting": [], "drafting, 1 % loss": [], "hub alone": []}
    engine = ["--engine", "simulated", "--profile", "thor-qwen3-27b-nvfp4", "--json"]
    async with OPEN[kind]() as lab:
        prompts = [_PROMPT] * (2 * rounds + 2)
        async with running(lab, engine, ["simulated:0.8:2", str(num_tokens), *prompts]) as said:
            await rate(lab, said, clear)  # warm-up
            for _ in track(range(rounds), description=f"loss, {kind.value}"):
                found["drafting"].append(await rate(lab, said, clear))
                found["drafting, 1 % loss"].append(await rate(lab, said, lossy))
    async with OPEN[kind]() as lab, running(lab, engine, ["none", str(num_tokens), *[_PROMPT] * (rounds + 1)]) as said:
        await rate(lab, said, Conditions())
        for _ in range(rounds):
            found["hub alone"].append(await rate(lab, said, Conditions()))
    return found


def main() -> None:
    """Run what is asked for and keep it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--drafter", default="causal_lm")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--labs", nargs="+", default=[kind.value for kind in LabKind])
    parser.add_argument("--only", choices=["outages", "loss"])
    asked = parser.parse_args()
    for kind in map(LabKind, asked.labs):
        if kind is LabKind.FRAMES and (why := missing()):
            print(f"left out {kind.value}: {why}")
            continue
        found: dict[str, list[float]] = {}
        if asked.only != "loss":
            found |= asyncio.run(outages(kind, asked.drafter, asked.rounds))
        if asked.only != "outages":
            found |= asyncio.run(bad_links(kind, asked.rounds))
        for name, values in found.items():
            print(f"{kind.value} {name}: median {statistics.median(values):.3f}, {min(values):.3f}-{max(values):.3f}")
        STORE.append(f"{kind.value} {time.time():.0f}", {"lab": kind.value, "found": found, "machine": machine()})


if __name__ == "__main__":
    main()

"""What constant size and pace cost: the same generations plain and shaped, at several ticks; real time, real gRPC.

A simulated Thor decides, a drafter that is right four times in five drafts on the node's side; both in this process,
with a relay between them that counts. Modes take turns, so that what else the machine does falls on all of them.

Usage: python -m bench.shape [--rounds N] [--tokens N]
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path

from rich.progress import track

from baru_common.drafters.simulated import SimulatedDrafter
from baru_common.sampling import SamplingParams
from baru_hub.config import HubConfig, Shaping
from baru_hub.engines.simulated import DeviceProfile, SimulatedEngine
from baru_hub.server import running_hub
from baru_micro import Finish, MicroNode

from .store import OUT, Store, machine

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from support.capture import DOWN, UP, Capture

STORE = Store(OUT / "shape.jsonl")
PROFILE = "thor-qwen3-8b-nvfp4"
ACCEPTANCE, TOKEN_MS = 0.8, 2.0
TICKS_MS = (None, 5, 20, 50)
"""None: plain."""
_PROMPT = tuple(range(2, 202))


def hub_config(tick_ms: int | None) -> HubConfig:
    """A hub that shapes at this tick, or not."""
    if tick_ms is None:
        return HubConfig(listen="127.0.0.1:0")
    return HubConfig(listen="127.0.0.1:0", traffic_shape=Shaping.REQUIRED, shape_tick_ms=tick_ms)


async def generation(node: MicroNode, capture: Capture, num_tokens: int) -> dict[str, float]:
    """Run one; count bytes until its end is known, and time until its call has ended."""
    start, start_s = len(capture.chunks), time.monotonic()
    asked = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    (finish,) = [event async for event in node.generate(_PROMPT, asked) if isinstance(event, Finish)]
    passed = capture.chunks[start:]
    for stream in list(node._hubs.current.streams):  # noqa: SLF001
        await stream.ended()
    return {
        "tokens_per_s": len(finish.ids) / finish.elapsed_s,
        "first_token_ms": finish.time_to_first_token_s * 1e3,
        "mean_accepted_length": finish.usage.mean_accepted_length,
        "up_bytes_s": sum(c.num_bytes for c in passed if c.way == UP) / finish.elapsed_s,
        "down_bytes_s": sum(c.num_bytes for c in passed if c.way == DOWN) / finish.elapsed_s,
        "elapsed_s": finish.elapsed_s,
        "call_s": time.monotonic() - start_s,
    }


async def measure(rounds: int, num_tokens: int) -> None:
    """All modes in turn, `rounds` times, after a warm-up."""
    async with AsyncExitStack() as stack:
        nodes = {}
        for tick_ms in TICKS_MS:
            engine = SimulatedEngine(DeviceProfile.load(PROFILE))
            hub = await stack.enter_async_context(running_hub(engine, hub_config(tick_ms)))
            capture, address = stack.enter_context(Capture.of(hub.address))
            drafter = SimulatedDrafter(ACCEPTANCE, TOKEN_MS)
            nodes[tick_ms] = await stack.enter_async_context(MicroNode.connect(address, drafter=drafter)), capture
        for number in track(range(-1, rounds), description="shapes"):
            for tick_ms, (node, capture) in nodes.items():
                found = await generation(node, capture, num_tokens)
                if number >= 0:
                    facts = {"tick_ms": tick_ms, "round": number, "profile": PROFILE, "machine": machine()}
                    STORE.append(f"{time.time():.0f} {tick_ms} {number}", facts | found)


def main() -> None:
    """Run what is asked for and keep it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=200)
    asked = parser.parse_args()
    asyncio.run(measure(asked.rounds, asked.tokens))


if __name__ == "__main__":
    main()

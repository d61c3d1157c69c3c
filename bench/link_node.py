"""A node of its own process, for `bench.link`: generates, and prints when what happened.

Usage: python -m bench.link_node ADDRESS DRAFTER TOKENS [PROMPT...]
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

from baru_common.sampling import SamplingParams
from baru_micro import Event, Finish, LinkChanged, LinkState, MicroNode, Step


def line(event: Event) -> dict[str, object]:
    """What is said of an event; `t` is the machine's monotonic clock, seconds."""
    said: dict[str, object] = {"t": time.monotonic(), "event": type(event).__name__}
    if isinstance(event, Step):
        said |= {"who": event.provenance.value, "num_ids": len(event.ids)}
    elif isinstance(event, LinkChanged):
        said |= {"state": event.state.value}
    elif isinstance(event, Finish):
        said |= {"num_ids": len(event.ids), "elapsed_s": event.elapsed_s}
    return said


async def generate(address: str, drafter: str | None, num_tokens: int, prompts: list[str]) -> None:
    """Answer the prompts one after the other."""
    async with MicroNode.connect(address, drafter=drafter, timeout_s=20.0) as node:

        def changed(state: LinkState) -> None:
            print(json.dumps({"t": time.monotonic(), "event": "Link", "state": state.value}), flush=True)

        node.link.on_change = changed
        for prompt in prompts:
            async for event in node.generate(prompt, SamplingParams(max_tokens=num_tokens, ignore_eos=True)):
                print(json.dumps(line(event)), flush=True)


if __name__ == "__main__":
    address, drafter, num_tokens, *prompts = sys.argv[1:]
    asyncio.run(generate(address, None if drafter == "none" else drafter, int(num_tokens), prompts or ["Once"]))

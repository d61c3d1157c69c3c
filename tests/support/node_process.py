"""A node in a process of its own: generates, and prints each event as a line of JSON.

Usage: python node_process.py ADDRESS DRAFTER TOKENS
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict
from enum import Enum
from typing import Any

from baru_common.sampling import SamplingParams
from baru_micro import Event, MicroNode


def plain(value: Any) -> Any:
    """What JSON has no word for, in its own."""
    return value.value if isinstance(value, Enum) else str(value)


def say(event: Event) -> None:
    sys.stdout.write(json.dumps({"event": type(event).__name__, **asdict(event)}, default=plain) + "\n")
    sys.stdout.flush()


async def main(address: str, drafter: str, num_tokens: int) -> None:
    async with MicroNode.connect(address, drafter=drafter) as node:
        async for event in node.generate("Say something.", SamplingParams(max_tokens=num_tokens, ignore_eos=True)):
            say(event)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))

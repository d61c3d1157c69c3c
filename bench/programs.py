"""Our services as programs of their own."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


@asynccontextmanager
async def program(module: str, *words: str, core: int | None = None) -> AsyncIterator[dict[str, str]]:
    """Run one while the block runs, on a core of its own if that is given; yield what it says when it is ready."""
    pinned = () if core is None else ("taskset", "-c", str(core))
    running = await asyncio.create_subprocess_exec(
        *pinned, sys.executable, "-m", module, *words, "--json", stdout=asyncio.subprocess.PIPE
    )
    try:
        if running.stdout is None:
            raise RuntimeError(f"{module} has no output")
        while line := await running.stdout.readline():
            told: dict[str, str] = json.loads(line)
            if told["event"] == "ready":
                yield told
                return
        raise RuntimeError(f"{module} did not start")
    finally:
        running.terminate()
        await running.wait()

"""A node that drafts by n-gram fits an 8 GB board: no torch, no transformers, no numpy, little memory."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from support.hubs import hub_of
from support.lockstep import free_running
from support.tiny import tiny_target

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads VmHWM")

_HEAVY = ("torch", "transformers", "numpy", "safetensors", "gguf", "accelerate", "opentelemetry", "prometheus_client")
_MOST_MB = 150
_WAIT_S = 100.0
_NODE = """
import asyncio, json, re, sys
from pathlib import Path
from baru_common.sampling import SamplingParams
from baru_micro import Finish, MicroNode, Started

async def main():
    async with MicroNode.connect(sys.argv[1], drafter="ngram") as node:
        params = SamplingParams(max_tokens=int(sys.argv[2]), ignore_eos=True)
        messages = [{"role": "user", "content": "Say this and this and this again."}]
        events = [event async for event in node.generate(messages, params)]
    finish = events[-1]
    # VmHWM is this program's own peak; ru_maxrss starts with that of whoever started it.
    peak_kb = int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
    print(json.dumps({
        "num_tokens": len(finish.ids), "num_drafted": finish.usage.num_drafted,
        "peak_mb": peak_kb / 1024, "modules": sorted({name.partition(".")[0] for name in sys.modules}),
    }))

asyncio.run(main())
"""


async def node_against(address: str, num_tokens: int) -> dict[str, Any]:
    """Run a real generation in a process of its own; return what it said of itself at the end."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _NODE, address, str(num_tokens)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), _WAIT_S)
    assert process.returncode == 0, err.decode()
    told: dict[str, Any] = json.loads(out)
    return told


def check(told: dict[str, Any], num_tokens: int) -> None:
    assert told["num_tokens"] == num_tokens
    assert told["num_drafted"] > 0
    assert [name for name in _HEAVY if name in told["modules"]] == []
    assert told["peak_mb"] < _MOST_MB


async def test_an_ngram_node_is_light() -> None:
    """Against the tiny target: everything that a node imports, and nothing else."""
    async with hub_of(tiny_target(), scheduler=free_running()) as hub:
        check(await node_against(hub.address, 100), 100)


@asynccontextmanager
async def default_hub() -> AsyncIterator[str]:
    """`baru-hub serve` with the default target, as a process; yields its address."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "baru_hub.cli", "serve", "--kv-cache-mb", "64", "--listen", "127.0.0.1:0", "--json"),
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    try:
        assert process.stdout
        while True:
            line = await asyncio.wait_for(process.stdout.readline(), 2 * _WAIT_S)
            assert line, "the hub ended before it was ready"
            event = json.loads(line)
            if event["event"] == "ready":
                break
        yield event["address"]
    finally:
        if process.returncode is None:
            process.terminate()
        assert await asyncio.wait_for(process.wait(), _WAIT_S) == 0


@pytest.mark.target
@pytest.mark.timeout(400)
async def test_an_ngram_node_is_light_with_the_default_targets_tokenizer() -> None:
    """Its 49 thousand ids are the greater part of what a node holds."""
    async with default_hub() as address:
        check(await node_against(address, 24), 24)

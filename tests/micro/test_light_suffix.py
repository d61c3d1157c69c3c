"""A node that drafts from a corpus is as light as one that drafts by n-gram."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

from baru_common.corpus import Corpus
from support.hubs import hub_of
from support.lockstep import free_running
from support.tiny import tiny_target

_HEAVY = ("torch", "transformers", "numpy", "safetensors", "gguf", "accelerate")
_WAIT_S = 100.0
_NODE = """
import asyncio, json, sys
from baru_common.sampling import SamplingParams
from baru_micro import MicroNode

async def main():
    async with MicroNode.connect(sys.argv[1], drafter="suffix:reports") as node:
        messages = [{"role": "user", "content": "Say this and this and this again."}]
        params = SamplingParams(max_tokens=60, ignore_eos=True)
        events = [event async for event in node.generate(messages, params)]
    print(json.dumps({
        "num_tokens": len(events[-1].ids), "num_drafted": events[-1].usage.num_drafted,
        "modules": sorted({name.partition(".")[0] for name in sys.modules}),
    }))

asyncio.run(main())
"""


async def test_a_node_with_a_corpus_is_light(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own: a generation drafted from a corpus needs nothing that is heavy."""
    monkeypatch.setenv("BARU_DATA_DIR", str(tmp_path / "data"))
    (tmp_path / "a.txt").write_text("Say this and this and this again, and that.")
    Corpus("reports").add(tmp_path / "a.txt")
    async with hub_of(tiny_target(), scheduler=free_running()) as hub:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", _NODE, hub.address), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        out, err = await asyncio.wait_for(process.communicate(), _WAIT_S)
    assert process.returncode == 0, err.decode()
    told = json.loads(out)
    assert told["num_tokens"] == 60
    assert told["num_drafted"] > 0
    assert [name for name in _HEAVY if name in told["modules"]] == []
    assert "tokenizers" in told["modules"]  # the list tells

"""Case I01 of the public bug reports: memory is counted before it is taken, and running out of it kills nobody."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from baru_common.drafters.cascade import CascadeDrafter
from baru_common.drafters.ngram import NgramDrafter
from baru_common.errors import CapacityExhausted
from baru_common.model_files import DEFAULT_TARGET, locate
from baru_common.out_of_memory import is_out_of_memory
from baru_common.sampling import SamplingParams
from baru_hub.engines.transformers import TransformersEngine
from baru_hub.memory_budget import weights_mb
from baru_micro import Finish, MicroNode
from support.drafters import FunctionDrafter
from support.endpoint import endpoint_of
from support.hubs import generate, hub_of
from support.tiny import plain_greedy, tiny_target

_V1 = Path("/sys/fs/cgroup/memory")
_PROMPT = [3, 30, 40, 50, 60]
_KV_MB = 1024


@contextmanager
def limited(megabytes: float) -> Iterator[Path]:
    """A group of processes that may take so much memory, and not swap."""
    v1 = (_V1 / "memory.limit_in_bytes").exists()
    root = _V1 if v1 else Path("/sys/fs/cgroup")
    group = root / f"baru-test-{os.getpid()}"
    limits = {"memory.limit_in_bytes": megabytes, "memory.memsw.limit_in_bytes": megabytes}
    if not v1:
        limits = {"memory.max": megabytes, "memory.swap.max": 0}
    try:
        group.mkdir()
        for name, limit in limits.items():
            if (group / name).exists():
                (group / name).write_text(str(round(limit * 1e6)))
    except OSError as error:
        pytest.skip(f"no group of processes with a limit: {error}")
    try:
        yield group
    finally:
        group.rmdir()


async def serve(group: Path, *options: str) -> asyncio.subprocess.Process:
    """A hub of the default target in that group."""
    command = (sys.executable, "-m", "baru_hub.cli", "serve", "--listen", "127.0.0.1:0", "--json", *options)
    return await asyncio.create_subprocess_exec(
        *("sh", "-c", 'echo $$ >"$0/cgroup.procs"; exec "$@"', str(group), *command),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def memory_mb(pid: int, name: str) -> float:
    found = re.search(rf"^{name}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert found
    return int(found[1]) / 1000


async def test_i01_a_budget_too_small_is_refused_at_the_start() -> None:
    """With what is needed, part by part, and what there is."""
    with limited(900) as group:
        hub = await serve(group, "--kv-cache-mb", "1024")
        _, said = await hub.communicate()
    assert hub.returncode == 1
    found = re.search(r"needs \d+ MB \(program 330, weights 269, keys and values 1024.*\); (\d+) MB are", said.decode())
    assert found, said
    assert int(found[1]) <= 900


@pytest.mark.parametrize(
    ("num", "length"),
    [
        pytest.param(4, 700, marks=pytest.mark.timeout(300)),
        pytest.param(50, 8000, marks=[pytest.mark.full, pytest.mark.timeout(3600)]),
    ],
)
async def test_i01_a_hub_keeps_within_its_limit(num: int, length: int) -> None:
    """1.3 times weights, keys and values. Loading takes no second copy, and conversations leave nothing behind."""
    prepared = await asyncio.create_subprocess_exec(sys.executable, "-m", "baru_hub.cli", "prepare")
    assert await prepared.wait() == 0
    held_mb = weights_mb(locate(DEFAULT_TARGET), "bfloat16") + _KV_MB
    with limited(1.3 * held_mb) as group:
        hub = await serve(group, "--kv-cache-mb", str(_KV_MB))
        try:
            assert hub.stdout
            event: dict[str, str] = {}
            while event.get("event") != "ready":
                event = json.loads(await hub.stdout.readline())
            assert peak_mb(group) <= 1.15 * held_mb
            sizes = []
            async with MicroNode.connect(event["address"], drafter="ngram") as node:
                for number in range(num):
                    prompt = [(7 * i + number) % 40_000 + 100 for i in range(length)]
                    events = [e async for e in node.generate(prompt, SamplingParams(max_tokens=8, ignore_eos=True))]
                    assert isinstance(events[-1], Finish)
                    sizes.append(memory_mb(hub.pid, "RssAnon"))
            warm = num // 4
            assert max(sizes[warm:]) - sizes[warm] < 100
            assert hub.returncode is None
        finally:
            hub.kill()
            await hub.communicate()


def peak_mb(group: Path) -> float:
    """The most that was taken, as the kernel counts it against the limit."""
    names = ("memory.max_usage_in_bytes", "memory.peak")
    return next(int((group / name).read_text()) / 1e6 for name in names if (group / name).exists())


def exhausted() -> None:
    raise RuntimeError(
        "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: 9663676416 bytes"
    )


async def test_i01_a_step_without_memory_costs_only_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever was in it is told to try again; nothing of it is left, and the next one is served."""
    forward, failures = TransformersEngine._forward, iter([True])

    def failing(self: TransformersEngine, batch: object) -> object:
        if next(failures, False):
            exhausted()
        return forward(self, batch)  # type: ignore[arg-type]

    params = SamplingParams(max_tokens=4, ignore_eos=True)
    async with hub_of(tiny_target()) as hub:
        monkeypatch.setattr(TransformersEngine, "_forward", failing)
        # gRPC may lose the reason when a stream is ended in a write; then the node takes it for a link that broke, and
        # comes back for its answer by itself.
        with suppress(CapacityExhausted):
            await generate(hub.address, _PROMPT, params)
        assert next(failures, None) is None
        finish, _ = await generate(hub.address, _PROMPT, params)
        assert list(finish.ids) == plain_greedy(tiny_target(), _PROMPT, 4)
        assert hub.verifier.num_sessions == 0


async def test_i01_an_endpoint_says_503_and_when_to_try_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TransformersEngine, "_forward", lambda *_: exhausted())
    async with endpoint_of(tiny_target()) as here:
        body = {"model": here.model, "prompt": "abc", "max_tokens": 4}
        response = await here.http.post("/v1/completions", json=body)
        assert response.status_code == 503
        assert int(response.headers["Retry-After"]) >= 1
        assert "out of memory" in response.json()["error"]["message"]


async def test_i01_a_drafter_without_memory_leaves_the_rest_to_others(caplog: pytest.LogCaptureFixture) -> None:
    """Its answer is whole and the target's; the n-gram beside it still drafts; and it is said, once."""
    target, asked = tiny_target(), 0

    def propose(*_: object) -> list[int]:
        nonlocal asked
        asked += 1
        exhausted()
        return []

    drafter = CascadeDrafter((FunctionDrafter(propose), NgramDrafter()))
    prompt = _PROMPT * 6
    with caplog.at_level(logging.WARNING):
        async with hub_of(target) as hub:
            finish, _ = await generate(hub.address, prompt, SamplingParams(max_tokens=40, ignore_eos=True), drafter)
    assert list(finish.ids) == plain_greedy(target, prompt, 40)
    assert finish.usage.num_verified > 0
    assert asked == 1
    assert [r.message for r in caplog.records if "run out of memory" in r.message] == [
        "the test drafter has run out of memory; this answer goes on without it"
    ]


@pytest.mark.parametrize(
    ("error", "found"),
    [
        (MemoryError(), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (OSError(12, "Cannot allocate memory"), True),
        (RuntimeError("shapes do not match"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_errors_of_memory_are_told_from_others(error: Exception, found: bool) -> None:
    assert is_out_of_memory(error) is found

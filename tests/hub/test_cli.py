"""`baru-hub` as a process: what it says while it serves, how it ends, and how it refuses to start."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from baru.drafting.v1 import drafting_pb2 as pb
from baru.drafting.v1 import drafting_pb2_grpc
from baru_common import __version__, discovery, wire
from baru_common.frames import Open
from baru_common.sampling import SamplingParams
from baru_micro import MicroNode, Step
from support.hubs import generate
from support.tiny import plain_greedy, save, tiny_target

_WAIT_S = 90.0
_TARGET = tiny_target()
_PROMPT = [1, 5, 9]


async def start(*arguments: str, **environment: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "baru_hub.cli", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"COLUMNS": "300", "OMP_NUM_THREADS": "1"} | environment,
    )


async def refused(*arguments: str, **environment: str) -> tuple[int, str, str]:
    """Run a hub that should not start; return exit code, output and errors."""
    process = await start(*arguments, **environment)
    out, err = await asyncio.wait_for(process.communicate(), _WAIT_S)
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def event(process: asyncio.subprocess.Process) -> dict[str, Any]:
    assert process.stdout
    line = await asyncio.wait_for(process.stdout.readline(), _WAIT_S)
    told: dict[str, Any] = json.loads(line)
    return told


@asynccontextmanager
async def served(target: Path, *options: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A hub with the tiny target, ready; killed in the end if it still runs."""
    arguments = ("--target", str(target), "--dtype", "float32", "--kv-cache-mb", "16", "--listen", "127.0.0.1:0")
    process = await start("serve", *arguments, "--json", *options)
    try:
        assert await event(process) == {"event": "loading", "target": str(target)}
        ready = await event(process)
        assert (ready["event"], ready["engine"], ready["target"]) == ("ready", "transformers", target.name)
        yield process, ready["address"]
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_hub_serves_until_it_is_told_to_stop(tmp_path: Path, number: int) -> None:
    """JSON lines say what happens; the session that runs may finish; the exit code is 0."""
    async with served(save(_TARGET, tmp_path / "tiny")) as (process, address):
        finish, _ = await generate(address, _PROMPT, SamplingParams(max_tokens=16, ignore_eos=True))
        assert list(finish.ids) == plain_greedy(_TARGET, _PROMPT, 16)
        async with MicroNode.connect(address, drafter=None) as node:
            events = node.generate(_PROMPT, SamplingParams(ignore_eos=True))
            seen = [await anext(events), await anext(events)]
            process.send_signal(number)
            assert await event(process) == {"event": "draining", "sessions": "1"}
            seen += [e async for e in events]
        assert sum(len(e.ids) for e in seen if isinstance(e, Step)) == 509
        assert await event(process) == {"event": "stopped"}
        _, err = await asyncio.wait_for(process.communicate(), _WAIT_S)
        assert process.returncode == 0
        assert b"Traceback" not in err


async def test_a_hub_can_be_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it listens, and while it runs; a node connects without its address."""
    monkeypatch.setattr(discovery, "_interfaces", lambda _library: ["127.0.0.1"])
    identity = "spiffe://kit/hub/one"
    async with served(save(_TARGET, tmp_path / "tiny"), "--announce", identity) as (_, address):
        assert await discovery.find([identity]) == [address]
        async with MicroNode.connect(f"mdns:{identity}", drafter=None) as node:
            assert node.hub_address == address


async def test_a_hub_does_not_wait_for_nodes_that_are_gone(tmp_path: Path) -> None:
    """Sessions kept for their return end with it: exit code 0, long before the grace time is over."""
    params = SamplingParams(max_tokens=50, ignore_eos=True)
    options = ("--drain-grace-s", "60", "--orphan-grace-s", "600", "--orphan-tokens", "3")
    async with served(save(_TARGET, tmp_path / "tiny"), *options) as (process, address):
        async with grpc.aio.insecure_channel(address) as channel:
            stub: Any = drafting_pb2_grpc.DraftingServiceStub(channel)
            told = await stub.Describe(pb.DescribeRequest())
            request = Open(tuple(_PROMPT), params, told.target_fingerprint, told.tokenizer_digest)
            call = stub.Decode()
            await call.write(wire.encode_request(request))
            assert (await call.read()).HasField("opened")
            call.cancel()
        process.send_signal(signal.SIGTERM)
        assert await event(process) == {"event": "draining", "sessions": "1"}
        assert await asyncio.wait_for(event(process), 10.0) == {"event": "stopped"}
        await asyncio.wait_for(process.communicate(), _WAIT_S)
        assert process.returncode == 0


async def test_a_settings_file_is_followed_and_options_go_before_it(tmp_path: Path) -> None:
    """The target comes from the file; so does the limit, but not the address."""
    file = tmp_path / "kit.toml"
    model = save(_TARGET, tmp_path / "tiny")
    file.write_text(
        f'[target]\nmodel = "{model}"\ndtype = "float32"\n[hub]\nlisten = "127.0.0.1:1"\nmax_draft_ahead = 33\n'
    )
    process = await start("serve", "--config", str(file), "--listen", "127.0.0.1:0", "--json")
    try:
        assert await event(process) == {"event": "loading", "target": str(model)}
        async with MicroNode.connect((await event(process))["address"], drafter=None) as node:
            assert (node.hub.target_name, node.hub.limits.max_draft_ahead) == ("tiny", 33)
    finally:
        process.kill()
        await process.wait()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--config", "/no/kit.toml"), ("/no/kit.toml cannot be read",)),
        (("--target", "/no/such/model"), ("there is no model at /no/such/model", ".gguf")),
        (("--target", "/no/[/red]such"), ("there is no model at /no/[/red]such", ".gguf")),
        (("--target", __file__), ("is not a .gguf file", "safetensors")),
        (("--listen", "127.0.0.1"), ("'127.0.0.1' is not an address", "HOST:PORT")),
        (("--listen", "127.0.0.1:http"), ("is not an address", "HOST:PORT")),
        (("--listen", "127.0.0.1:65536"), ("65536 is not a port", "0 to 65535")),
        (("--listen", "0.0.0.0:7443"), ("not a loopback address", "--tls")),
        (("--dtype", "int3", "--target", "/no"), ("error:", "what to do:")),
        (("--max-sessions", "0"), ("max_sessions is 0, must be at least 1",)),
        (("--max-depth", "-1"), ("max_depth is -1, must be at least 0",)),
        (("--orphan-grace-s", "-1"), ("orphan_grace_s is -1.0, must be at least 0",)),
        (("--orphan-tokens", "-1"), ("orphan_tokens is -1, must be at least 0",)),
        (("--max-patience-ms", "-1"), ("max_patience_ms is -1.0, must be at least 0",)),
        (("--max-patience-ms", "nan", "--target", "/no"), ("max_patience_ms is nan",)),
    ],
)
async def test_a_hub_that_cannot_start_says_why(arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    """What is wrong and what to do, on the error stream, with exit code 1; never a traceback."""
    code, out, err = await refused("serve", *arguments)
    assert "Traceback" not in err
    assert (code, out) == (1, "")
    assert all(word in err for word in words)


async def test_a_folder_without_weights_names_the_file(tmp_path: Path) -> None:
    """The one that is missing, not just that something is."""
    folder = save(_TARGET, tmp_path / "tiny")
    (folder / "model.safetensors").unlink()
    code, _, err = await refused("serve", "--target", str(folder))
    assert code == 1
    assert f"{folder / 'model.safetensors'} is missing" in err


async def test_a_port_in_use_is_said(tmp_path: Path) -> None:
    """After the target was loaded, in one sentence."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        folder = save(_TARGET, tmp_path / "tiny")
        code, _, err = await refused("serve", "--target", str(folder), "--dtype", "float32", "--listen", address)
    assert code == 1
    assert f"cannot listen on {address}" in err
    assert "Traceback" not in err


@pytest.mark.parametrize("arguments", [("serve", "--no-such"), ("serve", "--threads", "-1"), ("no-such",)])
async def test_a_wrong_call_is_a_usage_error(arguments: tuple[str, ...]) -> None:
    """Exit code 2, as everywhere."""
    code, out, _ = await refused(*arguments)
    assert (code, out) == (2, "")


async def test_the_version_is_the_packages() -> None:
    """Alone on its line."""
    assert await refused("version") == (0, f"{__version__}\n", "")


def test_what_needs_no_model_loads_no_torch() -> None:
    """A command that fails, and a hub with a simulated target, are there at once: torch takes seconds to load."""
    program = "import sys, baru_hub.cli, baru_hub.server, baru_hub.engines.simulated; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout == "False\n"

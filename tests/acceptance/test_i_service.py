"""Case I04 of the public bug reports: nobody kills a service that loads, and none needs a home."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baru_common.identity import Role
from baru_micro.transport import HubChannel
from support.fault_proxy import free_address
from support.kits import kit
from support.tiny import save, tiny_target

_WAIT_S = 100.0
_SLOW = """
import sys, time
import baru_hub.cli as cli
load, delay_s = cli._transformers_engine, float(sys.argv.pop(1))
cli._transformers_engine = lambda config: (time.sleep(delay_s), load(config))[1]
cli.main()
"""
"""The hub, whose target takes its time to load."""


async def page(address: str, path: str) -> tuple[int, str]:
    """Status and text of a health page; 0 while nobody listens."""

    def get() -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://{address}{path}", timeout=10) as answer:
                return answer.status, answer.read().decode().strip()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode().strip()
        except OSError:
            return 0, ""

    return await asyncio.to_thread(get)


async def until(address: str, path: str, status: int) -> str:
    """The text of a page, once it has this status; the test's own limit ends the wait."""
    while True:
        found, text = await page(address, path)
        if found == status:
            return text
        await asyncio.sleep(0.02)


async def check(address: str) -> Any:
    """What gRPC's health service says."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return (await stub.Check(health_pb2.HealthCheckRequest(), timeout=10, wait_for_ready=True)).status


class Manager:
    """What systemd hears."""

    def __init__(self) -> None:
        self.path = str(Path(tempfile.mkdtemp()) / "notify")
        self._end = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._end.bind(self.path)
        self._end.settimeout(_WAIT_S)

    def __enter__(self) -> Manager:
        return self

    def __exit__(self, *_: object) -> None:
        self._end.close()

    async def hears(self, words: str) -> None:
        while words not in await asyncio.to_thread(lambda: self._end.recv(4096).decode()):
            pass


@asynccontextmanager
async def hub(
    target: Path, *options: str, delay_s: float = 0.0, command: tuple[str, ...] = (), **start: Any
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A hub in a process of its own, not waited for."""
    arguments = ("serve", "--target", str(target), "--dtype", "float32", "--kv-cache-mb", "16", "--json", *options)
    process = await asyncio.create_subprocess_exec(
        *(*command, sys.executable, "-c", _SLOW, str(delay_s), *arguments), stdout=asyncio.subprocess.PIPE, **start
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@pytest.mark.parametrize("delay_s", [3.0, pytest.param(180.0, marks=[pytest.mark.full, pytest.mark.timeout(400)])])
async def test_i04_a_hub_that_loads_lives_and_is_not_ready(tmp_path: Path, delay_s: float) -> None:
    """HTTP and gRPC say so, nodes are told to try again, a node's own service waits and then serves; and systemd hears
    that the hub is ready when it is, and from then on that it goes on."""
    target = save(tiny_target(), tmp_path / "tiny")
    listen, health, endpoint = free_address(), free_address(), free_address()
    node = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "baru_micro.cli", "serve", "--hub", listen, "--listen", endpoint)
    )
    options = ("--listen", listen, "--health", health)
    try:
        with Manager() as manager:
            env = os.environ | {"NOTIFY_SOCKET": manager.path, "WATCHDOG_USEC": "300000"}
            async with hub(target, *options, delay_s=delay_s, env=env) as process:
                assert await until(health, "/livez", 200) == "alive"
                assert await page(health, "/readyz") == (503, "loading")
                assert await check(listen) == health_pb2.HealthCheckResponse.NOT_SERVING
                channel = HubChannel(listen, timeout_s=10)
                with pytest.raises(Exception, match="loads its target"):
                    await channel.describe()
                await channel.close()
                await until(endpoint, "/livez", 200)
                assert await page(endpoint, "/readyz") == (503, "no hub has answered yet")
                await manager.hears("READY=1")
                assert await until(health, "/readyz", 200) == "ready"
                assert await check(listen) == health_pb2.HealthCheckResponse.SERVING
                await manager.hears("WATCHDOG=1")
                assert json.loads(await until(endpoint, "/readyz", 200))["hub"] == listen
                process.send_signal(signal.SIGTERM)
                await manager.hears("STOPPING=1")
    finally:
        node.kill()
        await node.wait()


NOBODY = ("unshare", "--user", "--map-user=65532", "--map-group=65532")


def can_be_nobody() -> bool:
    return bool(shutil.which("unshare")) and subprocess.run([*NOBODY, "true"], capture_output=True).returncode == 0


@pytest.mark.skipif(not can_be_nobody(), reason="needs user namespaces")
async def test_i04_a_user_without_a_home_can_serve(tmp_path: Path) -> None:
    """A user that no list knows, no HOME, nothing said but the cache folder: as under DynamicUser."""
    target, health = save(tiny_target(), tmp_path / "tiny"), free_address()
    env = {"PATH": os.environ["PATH"], "BARU_CACHE_DIR": str(tmp_path / "cache")}
    options = ("--listen", "127.0.0.1:0", "--health", health)
    async with hub(target, *options, command=NOBODY, env=env, cwd="/"):
        assert await until(health, "/readyz", 200) == "ready"


@pytest.mark.parametrize("num", [2, pytest.param(5, marks=[pytest.mark.full, pytest.mark.timeout(300)])])
async def test_i04_a_hub_that_is_killed_comes_back(tmp_path: Path, num: int) -> None:
    """While it loads and while it serves, with certificates and an audit log: no file is left that it cannot read."""
    target, tls = save(tiny_target(), tmp_path / "tiny"), kit(tmp_path).issue("hub", Role.HUB)
    chance = random.Random(4)
    for number in range(num + 1):
        health = free_address()
        options = (
            "--listen",
            free_address(),
            "--health",
            health,
            "--tls",
            str(tls),
            "--audit",
            str(tmp_path / "audit"),
        )
        env = os.environ | {"BARU_CACHE_DIR": str(tmp_path / "cache")}
        async with hub(target, *options, env=env) as process:
            if number < num:
                await until(health, "/livez" if number % 2 else "/readyz", 200)
                await asyncio.sleep(chance.uniform(0, 0.5))
            else:
                await until(health, "/readyz", 200)
            process.kill()
    verified = await asyncio.create_subprocess_exec(
        *(
            sys.executable,
            "-m",
            "baru_hub.cli",
            "audit",
            "verify",
            str(tmp_path / "audit"),
            "--authority",
            str(tls / "ca.pem"),
        )
    )
    assert await verified.wait() == 0

"""A lab of real Ethernet frames: two network namespaces joined by TAP devices and a wire that can be made to fail.

Needs root, `ip` and /dev/net/tun; skips the test where they are missing. The wire is a process of its own
(`emulator`), so a busy test does not slow it, and it cleans up however the test ends.
"""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import json
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from .emulator import IP, namespace
from .fault_proxy import FaultProxy
from .faults import CLEAR, Conditions, Lab, LabKind, Report, Traffic
from .processes import End, Processes

HUB_PORT = 7443

_TESTS = Path(__file__).parents[1]


def missing() -> str:
    """What this machine lacks for a lab of frames; empty if nothing."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "it takes root on Linux"
    if shutil.which("ip") is None:
        return "the command `ip` (iproute2) is missing"
    try:
        os.close(os.open("/dev/net/tun", os.O_RDWR))
    except OSError as error:
        return f"/dev/net/tun: {error.strerror}"
    return ""


class NetLab(Lab):
    """A node's and a hub's namespace with a wire between them; whatever runs in them reaches nothing else."""

    kind = LabKind.FRAMES

    def __init__(self, emulator: asyncio.subprocess.Process, pid: int) -> None:
        self._emulator = emulator
        self.pid = pid
        """Of the wire's process."""
        self._namespaces = {end: namespace(end, pid) for end in End}
        self.processes = Processes({end: ("ip", "netns", "exec", name) for end, name in self._namespaces.items()})

    @classmethod
    @asynccontextmanager
    async def open(cls, seed: int = 0) -> AsyncIterator[NetLab]:
        """Make the namespaces and the wire; skips the test with the reason where that is not possible."""
        if reason := missing():
            pytest.skip(f"no network namespaces: {reason}")
        with _alone():
            async with cls._open(seed) as lab:
                yield lab

    @classmethod
    @asynccontextmanager
    async def _open(cls, seed: int) -> AsyncIterator[NetLab]:
        emulator = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "support.emulator", str(seed)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            cwd=_TESTS,
            start_new_session=True,  # an interrupt is for the test; the wire ends with it
        )
        try:
            lab = cls(emulator, (await _answer(emulator))["pid"])
            try:
                yield lab
            finally:
                await lab.processes.close()
        finally:
            assert emulator.stdin
            emulator.stdin.close()
            await emulator.wait()

    @property
    def hub_listen(self) -> str:
        return f"{IP[End.HUB]}:{HUB_PORT}"

    @property
    def address(self) -> str:
        return self.hub_listen

    def tcp_socket(self, end: End) -> socket.socket:
        with _inside(self._namespaces[end]):
            made = socket.socket()
        made.setblocking(False)
        return made

    async def shape(self, up: Conditions = CLEAR, down: Conditions = CLEAR) -> None:
        await self._ask(shape=[asdict(up), asdict(down)])

    async def reset(self) -> None:
        await self._ask(reset=True)

    async def report(self) -> Report:
        told = await self._ask()
        return Report(Traffic(**told["up"]), Traffic(**told["down"]), told["attempts_s"])

    async def _ask(self, **command: object) -> dict[str, Any]:
        assert self._emulator.stdin
        self._emulator.stdin.write(json.dumps(command).encode() + b"\n")
        await self._emulator.stdin.drain()
        return await _answer(self._emulator)


async def _answer(emulator: asyncio.subprocess.Process) -> dict[str, Any]:
    assert emulator.stdout
    line = await emulator.stdout.readline()
    if not line:
        raise RuntimeError("the wire ended; standard error says why")
    answer: dict[str, Any] = json.loads(line)
    return answer


OPEN: Mapping[LabKind, Callable[[], AbstractAsyncContextManager[Lab]]] = {
    LabKind.PROXY: FaultProxy.open,
    LabKind.FRAMES: NetLab.open,
}
"""How each lab is opened: parametrise a scenario by `LabKind`."""


@contextmanager
def _alone() -> Iterator[None]:
    """One lab of frames at a time on a machine, whoever runs tests: each removes what a killed one left."""
    with Path(tempfile.gettempdir(), "baru-netlab.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _inside(name: str) -> Iterator[None]:
    """What this thread opens belongs to that namespace, for as long as it is in it (os.setns came with Python 3.12)."""
    libc = ctypes.CDLL(None, use_errno=True)

    def enter(file: int) -> None:
        if libc.setns(file, 0):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    with Path("/proc/thread-self/ns/net").open() as ours, Path("/run/netns", name).open() as theirs:
        enter(theirs.fileno())
        try:
            yield
        finally:
            enter(ours.fileno())

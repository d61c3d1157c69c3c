"""What systemd is told, over a real socket."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from baru_common.service_manager import notify, watchdog_s, watched


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
        end.bind(str(tmp_path / "notify"))
        end.setblocking(False)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        yield end


def heard(end: socket.socket) -> list[str]:
    """Everything that waits to be read."""
    words = []
    with suppress(BlockingIOError):
        while True:
            words.append(end.recv(4096).decode())
    return words


def test_facts_are_lines_of_one_message(manager: socket.socket) -> None:
    notify(READY="1", STATUS="serving")
    assert heard(manager) == ["READY=1\nSTATUS=serving"]


@pytest.mark.parametrize("address", ["", "relative", "/nobody/is/there"])
def test_without_a_manager_nothing_happens(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    notify(READY="1")


def test_the_watchdog_of_another_process_is_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "2000000")
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()))
    assert watchdog_s() == 2.0
    monkeypatch.setenv("WATCHDOG_PID", "1")
    assert watchdog_s() is None


async def test_it_hears_of_the_service_only_while_that_goes_on(
    manager: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "3000")
    answers = iter([True, True, True, *[False] * 100_000])
    async with watched(lambda: next(answers)):
        await asyncio.sleep(0.1)
    assert heard(manager) == ["WATCHDOG=1"] * 3


@pytest.mark.timeout(30)
async def test_a_manager_that_does_not_read_holds_nobody_up(
    manager: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its queue fills after a few messages; the loop goes on, with what is said again and again left out."""
    monkeypatch.setenv("WATCHDOG_USEC", "3000")
    enough, turns = asyncio.Event(), iter(range(1, 100_000))

    def goes_on() -> bool:
        if next(turns) == 1000:
            enough.set()
        return True

    async with watched(goes_on):
        await enough.wait()
    notify(patience_s=0.01, STOPPING="1")
    assert 0 < len(heard(manager)) < 1000

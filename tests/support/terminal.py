"""A program in a real terminal, and what stands on its screen."""

from __future__ import annotations

import asyncio
import fcntl
import os
import pty
import re
import struct
import termios
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from types import MappingProxyType

import pyte


class _Screen(pyte.HistoryScreen):
    """Answers when it is asked where the cursor is."""

    answer: Callable[[str], None]

    def write_process_input(self, data: str) -> None:
        self.answer(data)


class Terminal:
    """A program in a terminal of its own, and what stands on its screen."""

    def __init__(self, process: asyncio.subprocess.Process, master: int, width: int, height: int) -> None:
        self.process = process
        self.written = bytearray()
        """All that the program wrote."""
        self._master = master
        self._width = width
        self._screen = _Screen(width, height, history=1000)
        self._screen.answer = self.type
        self._stream = pyte.ByteStream(self._screen)

    def read(self) -> None:
        try:
            data = os.read(self._master, 1 << 16)
        except OSError:  # nobody writes any more
            asyncio.get_running_loop().remove_reader(self._master)
            return
        self.written += data
        self._stream.feed(data)

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    @property
    def text(self) -> str:
        """What stands on the screen and above it."""
        above = ["".join(line[x].data for x in range(self._width)) for line in self._screen.history.top]
        return "\n".join(line.rstrip() for line in (*above, *self._screen.display))

    async def until(self, wanted: str, within_s: float = 40.0) -> str:
        """Wait until this pattern stands on the screen."""
        deadline_s = time.monotonic() + within_s
        while not (found := re.search(wanted, self.text)):
            assert time.monotonic() < deadline_s, f"no {wanted!r} in:\n{self.text}"
            await asyncio.sleep(0.05)
        return found.group()

    async def until_cooked(self, within_s: float = 20.0) -> None:
        """Wait until the program no longer reads key by key: Ctrl-C is a signal then."""
        deadline_s = time.monotonic() + within_s
        while not termios.tcgetattr(self._master)[3] & termios.ICANON:
            assert time.monotonic() < deadline_s, f"still reads keys:\n{self.text}"
            await asyncio.sleep(0.001)


@asynccontextmanager
async def in_terminal(
    *argv: str, width: int = 100, height: int = 24, env: Mapping[str, str] = MappingProxyType({})
) -> AsyncIterator[Terminal]:
    """Run a program in a terminal of this size, with `env` on top of ours, until the block ends."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
    process = await asyncio.create_subprocess_exec(
        *argv,
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # Ctrl-C is a signal to who owns the terminal
        env={**os.environ, "TERM": "xterm-256color", **env},
    )
    os.close(slave)
    terminal = Terminal(process, master, width, height)
    loop = asyncio.get_running_loop()
    loop.add_reader(master, terminal.read)
    try:
        yield terminal
    finally:
        loop.remove_reader(master)
        if process.returncode is None:
            process.kill()
        await process.wait()
        os.close(master)

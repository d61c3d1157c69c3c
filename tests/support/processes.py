"""The processes at the two ends of a lab's link: started, stalled, killed, started again, their clocks set wrong."""

from __future__ import annotations

import asyncio
import atexit
import os
import shutil
import signal
import struct
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from types import MappingProxyType

LEAP_S = 56 * 31_557_600
"""From 1970, where a board without a clock battery boots, to the present."""

# Adds the seconds in a shared page to every reading of the wall clock; the monotonic clock stays as it is.
_CLOCK_SOURCE = r"""
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile int64_t none, *offset_s = &none;

__attribute__((constructor)) static void share_offset(void) {
    const char *path = getenv("CLOCK_OFFSET");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    void *page = file < 0 ? MAP_FAILED : mmap(0, sizeof none, PROT_READ, MAP_SHARED, file, 0);
    if (page != MAP_FAILED) offset_s = page;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int failed = syscall(SYS_clock_gettime, clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += *offset_s;
    return failed;
}

int gettimeofday(struct timeval *now, void *zone) {
    int failed = syscall(SYS_gettimeofday, now, zone);
    if (!failed && now) now->tv_sec += *offset_s;
    return failed;
}

time_t time(time_t *now) {
    struct timespec is;
    clock_gettime(CLOCK_REALTIME, &is);
    if (now) *now = is.tv_sec;
    return is.tv_sec;
}
"""


class CannotApply(Exception):
    """This lab, or this machine, has no such fault; of a lab, `Fault.labs` says so beforehand."""


class End(Enum):
    NODE = "node"
    HUB = "hub"


@cache
def _clock_library() -> Path | None:
    """Made once a run, and removed after it; none where there is no C compiler."""
    if shutil.which("cc") is None:
        return None
    folder = Path(tempfile.mkdtemp(prefix="baru-clock-"))
    atexit.register(shutil.rmtree, folder)
    library = folder / "clock.so"
    command = ("cc", "-shared", "-fPIC", "-O1", "-x", "c", "-", "-o", str(library))
    subprocess.run(command, input=_CLOCK_SOURCE, text=True, check=True)
    return library


class _Clock:
    """A wall clock of its own for the process at one end, by a small library that is loaded before libc."""

    def __init__(self) -> None:
        file, name = tempfile.mkstemp(prefix="baru-clock-")
        self._offset = Path(name)
        os.write(file, bytes(8))
        os.close(file)

    def environment(self) -> Mapping[str, str]:
        """What a process that is to have this clock is started with."""
        library = _clock_library()
        return {"LD_PRELOAD": str(library), "CLOCK_OFFSET": str(self._offset)} if library else {}

    def step(self, offset_s: int) -> None:
        if offset_s and _clock_library() is None:
            raise CannotApply("a clock step needs a C compiler (cc)")
        with self._offset.open("r+b") as file:
            file.write(struct.pack("q", offset_s))

    def close(self) -> None:
        self._offset.unlink()


@dataclass
class _Running:
    argv: Sequence[str]
    env: Mapping[str, str]
    stdin: int | None
    stdout: int | None
    process: asyncio.subprocess.Process


class Processes:
    """At most one process at each end.

    The clock step moves what a process reads of the wall clock. A wait until an absolute wall-clock time that a
    process hands to the kernel still runs on the machine's clock.
    """

    def __init__(self, prefix: Mapping[End, Sequence[str]] | None = None) -> None:
        """Every command line at an end starts with that end's prefix."""
        self._prefix = prefix or {}
        self._clocks = {end: _Clock() for end in End}
        self._running: dict[End, _Running] = {}

    async def start(
        self,
        end: End,
        *argv: str,
        env: Mapping[str, str] = MappingProxyType({}),
        stdin: int | None = None,
        stdout: int | None = asyncio.subprocess.PIPE,
    ) -> asyncio.subprocess.Process:
        """Start a process at that end; `env` goes on top of our own environment."""
        environment = {**os.environ, **self._clocks[end].environment(), **env}
        process = await asyncio.create_subprocess_exec(
            *(*self._prefix.get(end, ()), *argv), stdin=stdin, stdout=stdout, env=environment
        )
        self._running[end] = _Running(argv, env, stdin, stdout, process)
        return process

    def process(self, end: End) -> asyncio.subprocess.Process:
        """The process that runs, or ran last, at that end."""
        return self._running[end].process

    def stall(self, end: End) -> None:
        self.process(end).send_signal(signal.SIGSTOP)

    async def kill(self, end: End) -> None:
        """kill -9, and wait until it is gone."""
        with suppress(ProcessLookupError):
            self.process(end).kill()
        await self.process(end).wait()

    async def restart(self, end: End) -> asyncio.subprocess.Process:
        """kill -9, then the same command again."""
        await self.kill(end)
        was = self._running[end]
        return await self.start(end, *was.argv, env=was.env, stdin=was.stdin, stdout=was.stdout)

    def step_clock(self, end: End, offset_s: int = LEAP_S) -> None:
        """Set that end's wall clock this far from the true time, at once."""
        self._clocks[end].step(offset_s)

    async def heal(self) -> None:
        """Stalled processes go on, clocks are right, a hub that was killed starts again."""
        for end in End:
            self.step_clock(end, 0)
        for end, running in list(self._running.items()):
            if running.process.returncode is None:
                running.process.send_signal(signal.SIGCONT)
            elif end is End.HUB and running.process.returncode == -signal.SIGKILL:
                await self.restart(end)

    async def close(self) -> None:
        for end in self._running:
            await self.kill(end)
        for clock in self._clocks.values():
            clock.close()

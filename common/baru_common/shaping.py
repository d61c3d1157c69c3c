"""The time and the length of a shaped stream: ticks that wait for nobody, and ends that say little."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import count

from .errors import BaruError
from .frames import TrafficShape

_RANGES = {"cell_bytes": (64, 16_000), "tick_ms": (1, 1000), "round_ms": (100, 3_600_000)}
"""A cell and what gRPC adds fit into one TLS record."""


def check_shape(shape: TrafficShape, blame: type[BaruError]) -> None:
    """Raise `blame` for a shape that is out of range."""
    for name, (least, most) in _RANGES.items():
        if not least <= (value := getattr(shape, name)) <= most:
            raise blame(f"{name} of the traffic shape is {value}, must be {least} to {most}")


def last_tick(shape: TrafficShape, tick: int) -> int:
    """Return the tick at which a stream ends that has nothing more to say at `tick`.

    Lengths double, so that one says no more of a stream than the power of two that its work fits into.
    """
    rounds = (shape.round_ms << doubling for doubling in count())
    return next(-(-length_ms // shape.tick_ms) for length_ms in rounds if length_ms >= tick * shape.tick_ms)


async def ticks(
    tick_s: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
) -> AsyncIterator[int]:
    """Yield 0 at once, and each n at `n * tick_s` from then; those that are missed are left out, never made up for."""
    start_s, tick = clock(), 0
    while True:
        yield tick
        tick = max(tick, int((clock() - start_s) / tick_s)) + 1
        await sleep(start_s + tick * tick_s - clock())

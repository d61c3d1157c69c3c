"""What a service tells systemd: that it is ready, what it does, and that it goes on (sd_notify(3))."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

_PATIENCE_S = 1.0
"""How long a manager that does not listen may hold up what is said once."""


def notify(patience_s: float = _PATIENCE_S, **facts: str) -> None:
    """Tell the manager, if there is one: `notify(READY="1", STATUS="serving")`. It never fails."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
        end.settimeout(patience_s)
        end.connect(f"\0{address[1:]}" if address[0] == "@" else address)
        end.send("\n".join(f"{name}={value}" for name, value in facts.items()).encode())


def watchdog_s() -> float | None:
    """How often the manager wants to hear of this process; None: it does not ask."""
    if os.environ.get("WATCHDOG_PID") not in (None, str(os.getpid())):
        return None
    usec = os.environ.get("WATCHDOG_USEC", "")
    return int(usec) / 1e6 if usec.isdigit() and int(usec) else None


@asynccontextmanager
async def watched(goes_on: Callable[[], bool]) -> AsyncIterator[None]:
    """While the block runs, tell the manager in time that the process goes on: as long as the loop runs, and `goes_on`.
    Else it is killed, and started again."""
    period_s = watchdog_s()
    if period_s is None:
        yield
        return

    async def tell() -> None:
        while True:
            if goes_on():
                notify(patience_s=0, WATCHDOG="1")
            await asyncio.sleep(period_s / 3)

    telling = asyncio.create_task(tell(), name="baru-watchdog")
    try:
        yield
    finally:
        telling.cancel()
        await asyncio.gather(telling, return_exceptions=True)

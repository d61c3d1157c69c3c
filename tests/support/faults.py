"""What can go wrong between a node and a hub, as data, and what every lab that makes it happen can do.

There are two: `fault_proxy` runs anywhere, `netlab` is closer to life. A scenario is written once, against `Lab`:

    lab.address     where the node finds the hub; every byte between the two passes the lab
    lab.hub_listen  where the hub is to listen
    apply, heal     one fault at a time, live
"""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from .processes import CannotApply, End, Processes

REORDER_S = 0.02
"""How much later than its turn a reordered frame comes."""


@dataclass(frozen=True)
class Conditions:
    """What one direction of the link does to what passes; probabilities are per frame (proxy: per segment)."""

    delay_s: float = 0.0
    jitter_s: float = 0.0
    """Up to this much on top of the delay; the order stays."""
    loss: float = 0.0
    reorder: float = 0.0
    duplicate: float = 0.0
    rate_bit_s: float = 0.0
    """0: no limit."""
    cut: bool = False


CLEAR = Conditions()


class LabKind(Enum):
    PROXY = "proxy"
    FRAMES = "frames"


class Place(Enum):
    LINK = "link"
    PROCESS = "process"


@dataclass(frozen=True)
class Effect:
    text: str
    up: Conditions = CLEAR
    """Node to hub."""
    down: Conditions = CLEAR
    labs: frozenset[LabKind] = frozenset(LabKind)
    place: Place = Place.LINK


def _both(text: str, conditions: Conditions, labs: frozenset[LabKind] = frozenset(LabKind)) -> Effect:
    return Effect(text, conditions, conditions, labs)


class Fault(Enum):
    """One thing that goes wrong; `lab.apply(fault)` does it, `lab.heal()` ends it."""

    RST = Effect("both ends of every connection get a reset")
    # A link of frames has no say in it: FIN comes from an end, or from a middlebox that ends TCP.
    FIN = Effect("both ends of every connection see an orderly end", labs=frozenset({LabKind.PROXY}))
    BLACK_HOLE_UP = Effect("nothing reaches the hub", up=Conditions(cut=True))
    BLACK_HOLE_DOWN = Effect("nothing reaches the node", down=Conditions(cut=True))
    BLACK_HOLE = _both("nothing passes", Conditions(cut=True))
    DELAY = _both("100 ms more round trip", Conditions(delay_s=0.05))
    JITTER = _both("20 to 80 ms each way", Conditions(delay_s=0.02, jitter_s=0.06))
    LOSS_1 = _both("1 % lost", Conditions(loss=0.01))
    LOSS_5 = _both("5 % lost", Conditions(loss=0.05))
    LOSS_20 = _both("20 % lost", Conditions(loss=0.2))
    REORDER = _both("10 % come late", Conditions(reorder=0.1))
    # Two copies in one byte stream would be a broken TCP, not a bad link.
    DUPLICATE = _both("10 % come twice", Conditions(duplicate=0.1), frozenset({LabKind.FRAMES}))
    RATE = _both("128 kbit/s", Conditions(rate_bit_s=128_000))
    STALL = Effect("the hub stands still, its kernel still answers (SIGSTOP)", place=Place.PROCESS)
    HUB_KILL = Effect("kill -9 of the hub", place=Place.PROCESS)
    HUB_RESTART = Effect("kill -9 of the hub, and it starts again with nothing", place=Place.PROCESS)
    NODE_KILL = Effect("kill -9 of the node", place=Place.PROCESS)
    CLOCK_STEP = Effect("the node's wall clock leaps 56 years ahead", place=Place.PROCESS)

    @property
    def labs(self) -> frozenset[LabKind]:
        return self.value.labs

    @property
    def place(self) -> Place:
        return self.value.place


@dataclass
class Traffic:
    """One direction's counters since the lab was opened; the proxy counts segments it read as frames."""

    num_frames: int = 0
    num_delivered: int = 0
    num_bytes: int = 0
    """Delivered: payload for the proxy, whole frames for the TAP pair."""
    num_lost: int = 0
    """By chance, by a cut or by a full queue; the proxy loses nothing, it counts what it held up instead."""
    num_duplicated: int = 0
    num_late: int = 0
    """Delivered after a later one. Always 0 for the proxy."""


@dataclass(frozen=True)
class Report:
    up: Traffic
    down: Traffic
    attempts_s: Sequence[float]
    """When each connection was attempted, `time.monotonic()`."""


class TokenBucket:
    """Lets `rate_bit_s` pass over time, and two frames at once."""

    burst_bytes = 2 * 1514

    def __init__(self) -> None:
        self._tokens_bytes = float(self.burst_bytes)
        self._filled_s = 0.0

    def take(self, num_bytes: int, rate_bit_s: float, now_s: float) -> float:
        """Return how many seconds from now the bytes may pass."""
        if not rate_bit_s:
            return 0.0
        rate_bytes_s = rate_bit_s / 8
        filled_bytes = self._tokens_bytes + (now_s - self._filled_s) * rate_bytes_s
        self._tokens_bytes = min(self.burst_bytes, filled_bytes) - num_bytes
        self._filled_s = now_s
        return max(0.0, -self._tokens_bytes / rate_bytes_s)

    def give_back(self, num_bytes: int) -> None:
        """For bytes that were taken for and did not pass."""
        self._tokens_bytes += num_bytes


class Lab(ABC):
    """A link between a node and a hub that can be made to fail, and the processes at its ends."""

    kind: ClassVar[LabKind]
    processes: Processes

    @property
    @abstractmethod
    def hub_listen(self) -> str:
        """HOST:PORT the hub is to listen on; free, and the same for a hub that starts again."""

    @property
    @abstractmethod
    def address(self) -> str:
        """HOST:PORT at which the node finds the hub."""

    @abstractmethod
    async def shape(self, up: Conditions = CLEAR, down: Conditions = CLEAR) -> None:
        """Set the conditions of both directions, in place of those before."""

    @abstractmethod
    async def reset(self) -> None:
        """End every open connection with RST, towards both ends."""

    @abstractmethod
    async def report(self) -> Report:
        """What passed so far."""

    @abstractmethod
    def tcp_socket(self, end: End) -> socket.socket:
        """A non-blocking TCP socket at that end of the link, for tests that need no process there."""

    async def finish(self) -> None:
        """End every open connection with FIN, towards both ends."""
        raise CannotApply(f"{Fault.FIN} does not exist on a link of {self.kind.value}")

    async def apply(self, fault: Fault) -> None:
        """Make it go wrong. A link fault takes the place of the one before; raises `CannotApply`."""
        if self.kind not in fault.labs:
            raise CannotApply(f"{fault} does not exist on a link of {self.kind.value}")
        match fault:
            case Fault.RST:
                await self.reset()
            case Fault.FIN:
                await self.finish()
            case Fault.STALL:
                self.processes.stall(End.HUB)
            case Fault.HUB_KILL:
                await self.processes.kill(End.HUB)
            case Fault.HUB_RESTART:
                await self.processes.restart(End.HUB)
            case Fault.NODE_KILL:
                await self.processes.kill(End.NODE)
            case Fault.CLOCK_STEP:
                self.processes.step_clock(End.NODE)
            case _:
                await self.shape(fault.value.up, fault.value.down)

    async def heal(self) -> None:
        """Clear the link, let stalled processes go on, set clocks right, start a killed hub again (with nothing).

        A killed node stays dead: what it did is not repeated.
        """
        await self.shape()
        await self.processes.heal()

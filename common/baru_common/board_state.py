"""How a board is: power mode, temperatures, throttling, power, memory. What it does not say is unknown, never zero.

Read from sysfs and procfs, of which Jetsons have the same shapes under other numbers: sensors are found by name.
Sources of the shapes: docs/boards.md.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from .instruments import Instrument, Kind, Series

_MODE = re.compile(r"pmode:(\d+)")
_MODE_NAME = re.compile(r"^<\s*POWER_MODEL\s+ID=(\d+)\s+NAME=(\S+)\s*>", re.MULTILINE)
_MEMORY = re.compile(r"^(MemTotal|MemAvailable):\s*(\d+) kB", re.MULTILINE)
_POWER_CHIPS = ("ina3221", "ina238", "ina2xx")
_WHOLE_BOARD = ("VDD_IN", "VIN")
"""Rails that carry everything."""


@dataclass(frozen=True)
class BoardState:
    """One look at the board. Empty or None: it does not say."""

    power_mode: str | None
    """By name, as 15W or MAXN; the numbers mean another mode on each board."""
    temperatures_c: Mapping[str, float]
    """By zone."""
    throttle_events: Mapping[str, int]
    """Times that the board slowed down since it was switched on, by cause: oc1 (under-voltage), oc2 (average current),
    oc3 (peak current, which may climb steadily in the fastest mode)."""
    power_w: Mapping[str, float]
    """By rail."""
    memory_mb: Mapping[str, float]
    """`total` and `available`."""

    @property
    def board_power_w(self) -> float | None:
        """What the whole board draws, W."""
        return next((self.power_w[rail] for rail in _WHOLE_BOARD if rail in self.power_w), None)

    def __str__(self) -> str:
        hottest = max(self.temperatures_c.values(), default=None)
        power = self.board_power_w
        parts = (
            f"power mode {self.power_mode or 'unknown'}",
            f"hottest {hottest:.0f} °C" if hottest is not None else "temperature unknown",
            f"{power:.1f} W" if power is not None else "power unknown",
            f"throttled {sum(self.throttle_events.values())} times" if self.throttle_events else "throttling unknown",
        )
        return ", ".join(parts)


def look(root: Path = Path("/")) -> BoardState:
    """Read everything that is there; what cannot be read is left out. `root`: of the file system."""
    return BoardState(
        power_mode=_power_mode(root),
        temperatures_c=dict(_temperatures(root)),
        throttle_events=dict(_throttling(root)),
        power_w=dict(_power(root)),
        memory_mb=_memory(root),
    )


def memory_kb(meminfo: Path) -> dict[str, int]:
    """Return MemTotal and MemAvailable, as far as the file says them."""
    return {name: int(kb) for name, kb in _MEMORY.findall(_text(meminfo) or "")}


def _memory(root: Path) -> dict[str, float]:
    return {name.removeprefix("Mem").lower(): kb / 1024 for name, kb in memory_kb(root / "proc/meminfo").items()}


def _power_mode(root: Path) -> str | None:
    found = _MODE.search(_text(root / "var/lib/nvpmodel/status") or "")
    names = dict(_MODE_NAME.findall(_text(root / "etc/nvpmodel.conf") or ""))
    return names.get(str(int(found[1]))) if found else None


def _temperatures(root: Path) -> Iterator[tuple[str, float]]:
    for zone in sorted(root.glob("sys/class/thermal/thermal_zone*")):
        name, milli = _text(zone / "type"), _number(zone / "temp")
        if name and milli is not None:
            yield name.removesuffix("-thermal"), milli / 1000


def _throttling(root: Path) -> Iterator[tuple[str, int]]:
    for chip in _chips(root, ("soctherm_oc",)):
        for file in sorted(chip.glob("oc*_event_cnt")):
            count = _number(file)
            if count is not None:
                yield file.name.removesuffix("_event_cnt"), count


def _power(root: Path) -> Iterator[tuple[str, float]]:
    for chip in _chips(root, _POWER_CHIPS):
        for label in sorted(chip.glob("in*_label")):
            number = label.name.removeprefix("in").removesuffix("_label")
            name = _text(label)
            volts, amperes = _number(chip / f"in{number}_input"), _number(chip / f"curr{number}_input")
            if name and volts is not None and amperes is not None:
                yield name, volts * amperes / 1e6


def _chips(root: Path, names: tuple[str, ...]) -> Iterator[Path]:
    """Sensors by name: their numbers change from start to start."""
    for chip in sorted(root.glob("sys/class/hwmon/hwmon*")):
        if _text(chip / "name") in names:
            yield chip


def _text(file: Path) -> str | None:
    with suppress(OSError, UnicodeDecodeError):
        return file.read_text().strip()
    return None


def _number(file: Path) -> int | None:
    with suppress(ValueError):
        return int(_text(file) or "")
    return None


# -- as metrics, of hub and node alike

POWER_MODE = Instrument("baru_board_power_mode", Kind.GAUGE, "1 for the board's power mode.", ("mode",))
TEMPERATURE = Instrument("baru_board_temperature_celsius", Kind.GAUGE, "Temperature of a zone of the board.", ("zone",))
THROTTLED = Instrument(
    "baru_board_throttle_events",
    Kind.GAUGE,
    "Times that the board slowed itself down since it was switched on: oc1 under-voltage, oc2 average current, oc3 "
    "peak current.",
    ("cause",),
)
POWER = Instrument("baru_board_power_watts", Kind.GAUGE, "What a rail of the board carries.", ("rail",))
MEMORY = Instrument("baru_board_memory_megabytes", Kind.GAUGE, "The machine's memory: total, available.", ("kind",))
INSTRUMENTS = [POWER_MODE, TEMPERATURE, THROTTLED, POWER, MEMORY]


def gauges(root: Path = Path("/")) -> Mapping[str, Callable[[], Series]]:
    """What each instrument shows when somebody looks: it reads its own part of the board, and no more."""

    def mode(root: Path) -> dict[str, float]:
        return {name: 1} if (name := _power_mode(root)) else {}

    def read(part: Callable[[Path], Mapping[str, float] | Iterator[tuple[str, float]]]) -> Callable[[], Series]:
        return lambda: {(name,): value for name, value in dict(part(root)).items()}

    return {
        POWER_MODE.name: read(mode),
        TEMPERATURE.name: read(_temperatures),
        THROTTLED.name: read(_throttling),
        POWER.name: read(_power),
        MEMORY.name: read(_memory),
    }

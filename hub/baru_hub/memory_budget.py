"""Does the target fit? Asked before it loads: what is needed, part by part, against what there is.

On a Jetson the GPU has no memory of its own, so everything counts against the machine's. A container, or a unit with
MemoryMax, has less than the machine: the lower limit counts. Linux kills what goes past it, without a word.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from baru_common.board_state import memory_kb
from baru_common.errors import ConfigError
from baru_common.model_checks import num_weights
from baru_common.model_files import ModelFiles, converted_folder

PROGRAM_MB = 330
"""Python, torch and transformers (165 MB of private memory, measured on x86-64), and what loading and steps take beside
weights and cache. CUDA takes more; not measured."""
_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_CGROUP_FILES = (("memory.max", "anon"), ("memory.limit_in_bytes", "total_rss"))
"""A group's limit, and what memory.stat calls memory that cannot be given back: in cgroups of version 2, and 1."""


@dataclass(frozen=True)
class Budget:
    """What a hub needs, MB."""

    parts: Mapping[str, float]

    @classmethod
    def of(cls, files: ModelFiles, dtype: str, kv_cache_mb: int) -> Budget:
        """Of a hub with this target."""
        parts = {"program": PROGRAM_MB, "weights": weights_mb(files, dtype), "keys and values": float(kv_cache_mb)}
        if files.is_gguf and not converted_folder(files, dtype).is_dir():
            parts["conversion, once"] = weights_mb(files, "float32")
        return cls(parts)

    @property
    def needed_mb(self) -> float:
        """All of it."""
        return sum(self.parts.values())

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {mb:.0f}" for name, mb in self.parts.items())
        return f"{self.needed_mb:.0f} MB ({parts})"

    def check(self, available_mb: float | None) -> None:
        """ConfigError when there is less; None: nobody knows how much there is."""
        if available_mb is not None and self.needed_mb > available_mb:
            raise ConfigError(
                f"the target needs {self}; {available_mb:.0f} MB are available",
                hint="a smaller --kv-cache-mb, a smaller target, a higher limit of the service (memory_mb), or"
                " `baru-hub prepare` first, which converts a GGUF file where nothing else needs memory",
            )


def weights_mb(files: ModelFiles, dtype: str) -> float:
    """Return what the weights take once they are loaded, from what the files say of themselves."""
    return sum(map(num_weights, files.weights)) * _BYTES.get(dtype, 4) / 1e6


def available_mb(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Return what this process may take in all, with what it has already: of the machine's memory, and of each limit
    that it is under. None when nothing says so."""
    own = _named(_lines(proc / "self" / "status"), "RssAnon:") / 1000
    machine = memory_kb(proc / "meminfo").get("MemAvailable")
    rooms = [*([machine / 1000] if machine else []), *_limits_mb(proc, cgroups)]
    return min(rooms) + own if rooms else None


def _limits_mb(proc: Path, cgroups: Path) -> list[float]:
    """Of the process's own group and of all above it, in either version of cgroups."""
    found = []
    for line in _lines(proc / "self" / "cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        for root in {cgroups / controllers, cgroups / (controllers or "unified")}:
            folder = root / path.lstrip("/")
            rooms = [_room_mb(each) for each in (folder, *folder.parents) if each.is_relative_to(root)]
            found += [room for room in rooms if room is not None]
    return found


def _room_mb(group: Path) -> float | None:
    for limit, used in _CGROUP_FILES:
        (number, *_) = _lines(group / limit) or [""]
        if number.isdigit():
            return (int(number) - _named(_lines(group / "memory.stat"), used)) / 1e6
    return None


def _named(lines: Iterable[str], name: str) -> int:
    """The number after a name; 0 where there is none."""
    return next((int(line.split()[1]) for line in lines if line.split()[:1] == [name]), 0)


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []

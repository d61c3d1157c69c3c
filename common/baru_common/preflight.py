"""Does this machine's system go with what the program was made for? Asked before anything slow begins.

An image for a Jetson holds the CUDA libraries of one release of NVIDIA's board support (L4T); the driver is the
host's. A host of another release gives anything from a missing library to a GPU that torch does not see, so both
versions are compared and named. Sources on the format of the release file, and on which releases go together, are in
docs/boards.md.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .errors import ConfigError

RELEASE_FILE = Path("/etc/nv_tegra_release")
IMAGE_RELEASE = "BARU_IMAGE_L4T"
"""Environment variable of an image: the release that it was made for, as 38 or 36.4."""
LIBRARIES = ("libcuda.so.1",)
"""What a driver brings; the rest comes with torch, which says itself what it misses."""
_HOST = re.compile(r"R(\d+).*?REVISION:\s*(\d+)")
_IMAGE = re.compile(r"(\d+)(?:\.(\d+))?")
_SPLIT = {36: 4}
"""Releases of one major number that do not go together: those before this minor one, and those from it on."""


@dataclass(frozen=True)
class Release:
    """A release of L4T."""

    major: int
    minor: int = 0

    def __str__(self) -> str:
        return f"L4T r{self.major}.{self.minor}"

    def goes_with(self, other: Release) -> bool:
        """Whether programs made for one run on the other."""
        since = _SPLIT.get(self.major, 0)
        return self.major == other.major and (self.minor >= since) == (other.minor >= since)


@dataclass(frozen=True)
class System:
    """What was found."""

    host: Release | None
    """Of the machine; None: it is no Jetson, or its release file is not to be seen."""
    image: Release | None
    """That the program's image was made for; None: it does not say."""
    missing: tuple[str, ...]
    """Libraries of the driver that cannot be loaded."""

    def __str__(self) -> str:
        host = str(self.host) if self.host else f"no {RELEASE_FILE}"
        return f"host: {host}; image: {self.image or 'for any host'}"


def look(
    release_file: Path = RELEASE_FILE,
    environment: Mapping[str, str] = os.environ,
    libraries: Sequence[str] = LIBRARIES,
) -> System:
    """Look at this machine. ConfigError when the image says nothing that can be understood."""
    return System(_host(release_file), _image(environment), tuple(name for name in libraries if not _loads(name)))


def usable_device(
    device: str, *, allow_cpu: bool, system: System | None = None, sees_gpu: Callable[[], bool] | None = None
) -> str:
    """Return the device to run on: `device`, or "cpu" where that cannot be used and `allow_cpu` says so.

    ConfigError names both versions and what is wrong. `sees_gpu`: whether torch sees one; None asks torch.
    """
    if not device.startswith("cuda"):
        return device
    system = system or look()
    if not (wrong := _wrong(system) or _torch_says(sees_gpu or _torch_sees_gpu)):
        return device
    if allow_cpu:
        return "cpu"
    raise ConfigError(
        f"{device} cannot be used: {wrong} ({system})",
        hint="use an image made for this host's release, or say --allow-cpu to run on the CPU",
    )


def require_fitting(system: System) -> None:
    """ConfigError, naming both versions, for an image that was not made for this host."""
    if wrong := _not_fitting(system):
        raise ConfigError(f"{wrong} ({system})", hint="use an image made for this host's release")


def _not_fitting(system: System) -> str:
    if system.image and not system.host:
        return "the host's release is not known"
    if system.image and system.host and not system.host.goes_with(system.image):
        return "the image was made for another release"
    return ""


def _wrong(system: System) -> str:
    if wrong := _not_fitting(system):
        return wrong
    return f"{system.missing[0]} cannot be loaded" if system.missing else ""


def _torch_sees_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _torch_says(sees_gpu: Callable[[], bool]) -> str:
    try:
        return "" if sees_gpu() else "torch sees no GPU"
    except (ImportError, OSError) as error:  # a library that torch was built with is not there
        return " ".join(str(error).split())


def _host(file: Path) -> Release | None:
    try:
        found = _HOST.search(file.read_text(errors="replace"))
    except OSError:
        return None
    return Release(int(found[1]), int(found[2])) if found else None


def _image(environment: Mapping[str, str]) -> Release | None:
    said = environment.get(IMAGE_RELEASE, "")
    if not said:
        return None
    if not (found := _IMAGE.fullmatch(said)):
        raise ConfigError(f"{IMAGE_RELEASE} is {said!r}", hint="an image says which L4T it is for: 38, or 36.4")
    return Release(int(found[1]), int(found[2] or _SPLIT.get(int(found[1]), 0)))


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True

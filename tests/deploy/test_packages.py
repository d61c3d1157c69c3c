"""The wheel: what is in it, and what it asks for."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from baru_hub.kit.boards import BOARDS
from baru_hub.kit.wheelhouse import resolve

ROOT = Path(__file__).parents[2]
HEAVY = {"torch", "transformers", "accelerate", "numpy", "safetensors", "gguf"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """As `python -m build` makes it."""
    out = tmp_path_factory.mktemp("wheel")
    command = (sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT))
    done = subprocess.run(command, capture_output=True, text=True)
    assert not done.returncode, done.stdout + done.stderr
    return zipfile.ZipFile(next(out.glob("*.whl")))


def test_an_orin_gets_what_its_own_python_needs(wheel: zipfile.ZipFile) -> None:
    """Python 3.10 there, a later one here: conditions are those of the board. Asks the index."""
    names = {pin.name: pin for pin in resolve(Path(wheel.filename or ""), ("chat", "mdns", "serve"), BOARDS["orin"])}
    assert "exceptiongroup" in names  # of Python before 3.11 alone
    assert {"baru-drafting", "grpcio", "pip", "uvicorn", "zeroconf"} <= names.keys()
    assert not names.keys() & HEAVY
    assert all(len(pin.sha256) == 64 for pin in names.values())


def required(wheel: zipfile.ZipFile, *extras: str) -> set[str]:
    """Names of what a machine with these extras installs, of this project's own requirements."""
    name = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    lines = Parser().parsestr(wheel.read(name).decode()).get_all("Requires-Dist", [])
    found: set[str] = set()
    todo = ["", *extras]
    while todo:
        extra = todo.pop()
        for requirement in map(Requirement, lines):
            asked = requirement.marker is None or requirement.marker.evaluate({"extra": extra})
            if not asked or (extra and requirement.marker is None):
                continue
            if requirement.name == "baru-drafting":
                todo += requirement.extras
            else:
                found.add(requirement.name)
    return found


def test_it_holds_the_four_packages_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    folders = {name.split("/")[0] for name in wheel.namelist()}
    packages = {name for name in folders if not name.endswith(".dist-info")}
    assert packages == {"baru", "baru_common", "baru_hub", "baru_micro"}
    assert not [name for name in wheel.namelist() if "/test_" in name or "__pycache__" in name]


def test_it_holds_what_a_kit_is_built_from(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    parts = ("systemd", "compose", "images", "k3s")
    wanted = {file.relative_to(ROOT).as_posix() for part in parts for file in (ROOT / "deploy" / part).rglob("*.*")}
    wanted |= {"deploy/kit/install.sh", "deploy/kit/constraints.txt"}
    assert {f"baru_hub/{name}" for name in wanted} <= names
    assert wheel.read("baru_hub/deploy/kit/constraints.txt") == (ROOT / "constraints.txt").read_bytes()


def test_a_node_needs_no_torch(wheel: zipfile.ZipFile) -> None:
    """Nor what comes with it; a hub does."""
    assert not required(wheel, "chat", "mdns", "micro", "serve") & HEAVY
    assert {"torch", "transformers"} <= required(wheel, "hub")

"""Results on disk: one JSON object a line, appended as each is known, so that an interrupted run goes on."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OUT = Path(__file__).parent / "out"
SCHEMA = 1


@dataclass(frozen=True)
class Store:
    """The rows of one benchmark, by key."""

    path: Path

    def rows(self) -> dict[str, dict[str, Any]]:
        """All rows so far."""
        if not self.path.exists():
            return {}
        rows = [json.loads(line) for line in self.path.read_text().splitlines()]
        return {row["key"]: row for row in rows}

    def append(self, key: str, row: Mapping[str, Any]) -> None:
        """Add a row, at once and whole."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps({"key": key, "schema": SCHEMA, **row}) + "\n")


def machine() -> str:
    """A line on the machine, for the reader of the figures."""
    model = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return f"{model}, {os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}"

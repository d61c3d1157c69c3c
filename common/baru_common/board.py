"""Which tier a machine belongs to, by what its firmware calls the board."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

UNKNOWN_TIER = "unknown"
_SOURCES = (Path("/proc/device-tree/model"), Path("/sys/class/dmi/id/product_name"))
_TIERS = (
    ("GB300", "forward"),
    ("Jetson AGX Thor", "hub"),
    ("Jetson AGX Orin", "heavy"),
    ("Jetson Orin NX", "standard"),
    ("Jetson Orin Nano", "micro"),
)
"""Part of the board's name, as NVIDIA's device trees have it, and the tier."""


def board_name() -> str:
    """What the firmware says; empty when it says nothing. A carrier board may keep the name of the developer kit."""
    for source in _SOURCES:
        with suppress(OSError):
            return source.read_bytes().rstrip(b"\0\n").decode(errors="replace")
    return ""


def tier_of(board: str) -> str:
    """Return the tier of a board of this name; "unknown" for any other machine."""
    return next((tier for part, tier in _TIERS if part.lower() in board.lower()), UNKNOWN_TIER)


def detected_tier() -> str:
    """Return the tier of this machine."""
    return tier_of(board_name())

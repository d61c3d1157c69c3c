"""Where things are kept on a machine, by kind: a variable of ours says it, or the user's home, or else the system's."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import platformdirs

SYSTEM = Path("/var/lib/baru")
"""For a user without a home, as services have it."""


def cache_folder() -> Path:
    """Converted weights and fetched tokenizers: `BARU_CACHE_DIR`, or the user's cache. May not exist yet."""
    return _folder("BARU_CACHE_DIR", platformdirs.user_cache_path, "cache")


def data_folder() -> Path:
    """What is a node's own: `BARU_DATA_DIR`, or the user's data folder. May not exist yet."""
    return _folder("BARU_DATA_DIR", platformdirs.user_data_path, "data")


def state_folder() -> Path:
    """What a hub was told, measured and wrote down: `BARU_STATE_DIR`, or the user's state folder. May not exist yet."""
    return _folder("BARU_STATE_DIR", platformdirs.user_state_path, "state")


def config_folder() -> Path:
    """What a person sets: the user's configuration folder. May not exist yet."""
    return _folder("BARU_CONFIG_DIR", platformdirs.user_config_path, "config")


def _folder(variable: str, find: Callable[[str], Path], part: str) -> Path:
    if named := os.environ.get(variable):
        return Path(named)
    try:
        return find("baru")
    except RuntimeError:  # this user has no home
        return SYSTEM / part

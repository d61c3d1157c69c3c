"""What hubs said of themselves when they were last heard, kept by address: a node can start while they are away."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

from baru_common.errors import BaruError
from baru_common.folders import cache_folder
from baru_common.frames import HubDescription
from baru_common.whole_files import write_atomically

from .transport import description_from_bytes, description_to_bytes

_log = logging.getLogger(__name__)


def remember(address: str, hub: HubDescription) -> None:
    """Keep what a hub said; a cache that cannot be written is no error."""
    try:
        write_atomically(_path(address), description_to_bytes(hub))
    except OSError as error:
        _log.warning("what the hub said cannot be kept: %s", error)


def recall(address: str) -> HubDescription | None:
    """Return what the hub at this address said last; None when that is not known, or damaged."""
    try:
        return description_from_bytes(_path(address).read_bytes())
    except (OSError, BaruError):
        return None


def _path(address: str) -> Path:
    return cache_folder() / "hubs" / hashlib.sha256(address.encode()).hexdigest()[:32]

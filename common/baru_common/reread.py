"""What files say, read again when they change."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from .errors import BaruError

_T = TypeVar("_T")
_Stamp = tuple[tuple[int, int, int] | None, ...]

_log = logging.getLogger(__name__)


class Reread(Generic[_T]):
    """A value made of files. While they are wrong, or half replaced, it stays as it was.

    The first reading raises the BaruError that says what is wrong.
    """

    def __init__(self, files: Sequence[Path], read: Callable[[], _T]) -> None:
        self._files = files
        self._read = read
        self._stamp = self._refused = _stamp(files)
        self.value = read()

    def refresh(self) -> bool:
        """Read again if a file has changed; say whether there is a new value."""
        stamp = _stamp(self._files)
        if stamp == self._stamp:
            return False
        try:
            value = self._read()
        except BaruError as error:
            if stamp != self._refused:  # said once
                _log.warning("what has changed on disk is not taken: %s", error)
            self._refused = stamp
            return False
        self.value, self._stamp = value, stamp
        return True


def _stamp(files: Sequence[Path]) -> _Stamp:
    """Changes when a file does: cheap enough to look at for each connection."""
    stamps: list[tuple[int, int, int] | None] = []
    for file in files:
        try:
            found = file.stat()
            stamps.append((found.st_mtime_ns, found.st_size, found.st_ino))
        except OSError:
            stamps.append(None)
    return tuple(stamps)

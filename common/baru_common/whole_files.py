"""Files and folders that are written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def write_atomically(path: Path, data: bytes) -> None:
    """Write `data` to `path` so that a reader, or a crash, sees the old file or the new one, whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


@contextmanager
def folder_written_atomically(path: Path) -> Iterator[Path]:
    """Yield a scratch folder that becomes `path` when the block ends well, and vanishes otherwise.

    Whoever comes second, by a race, leaves the first one's folder in place.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-", ignore_cleanup_errors=True) as scratch:
        work = Path(scratch) / "work"
        work.mkdir()
        yield work
        try:
            work.rename(path)
        except OSError:
            if not path.is_dir():
                raise

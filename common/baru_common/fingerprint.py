"""Digests that say which target this is, so that nobody resumes, drafts or signs against another."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from .folders import cache_folder
from .whole_files import write_atomically

_CHUNK_BYTES = 1 << 20


def file_digest(path: Path) -> str:
    """SHA-256 of a file, hex. Remembered by path, size and time of change: weights are large."""
    stat = path.stat()
    key = hashlib.sha256(f"{path.resolve()}:{stat.st_size}:{stat.st_mtime_ns}".encode()).hexdigest()
    note = cache_folder() / "digests" / key
    try:
        return note.read_text()
    except OSError:
        digest = _hash(path)
    with suppress(OSError):  # a read-only system just hashes again
        write_atomically(note, digest.encode())
    return digest


def files_digest(paths: Iterable[Path]) -> str:
    """One digest over several files, by name and content, hex."""
    named = sorted((path.name, file_digest(path)) for path in paths)
    return hashlib.sha256(json.dumps(named).encode()).hexdigest()


def fingerprint(facts: Mapping[str, str]) -> bytes:
    """SHA-256 over named facts, 32 bytes; independent of their order."""
    return hashlib.sha256(json.dumps(dict(facts), sort_keys=True).encode()).digest()


def _hash(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()

"""What canaries have measured, kept as JSON: one file for each triple, named by its key."""

from __future__ import annotations

import json
import logging
import platform
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import datetime, timezone
from pathlib import Path

from baru_common.board import board_name
from baru_common.whole_files import write_atomically

from .canary import Figure, Record, Triple

MAX_RECORDS = 256
_log = logging.getLogger(__name__)


def this_machine() -> str:
    """What a figure of ours is marked with."""
    return f"{board_name() or platform.machine()} ({platform.node()})"


def timestamp() -> str:
    """The present date and time, UTC."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


class CanaryLedger:
    """Records in memory, and in a folder if there is one."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._records: dict[str, Record] = {}
        self._unsaved: list[Record] = []
        self._stamp: object = None
        self.take(self.look() or ())

    def get(self, triple: Triple) -> Record | None:
        """Return what was measured; None when nothing was, for exactly this one."""
        return self._records.get(triple.key)

    def records(self) -> list[Record]:
        """Return all of them, the oldest first."""
        return sorted(self._records.values(), key=lambda record: record.measured_at)

    def put(self, record: Record) -> None:
        """Take a record in; `save` keeps it. A full ledger takes no more: who connects must not fill the disk."""
        if len(self._records) >= MAX_RECORDS and record.triple.key not in self._records:
            _log.warning("the canary ledger is full (%d records); `baru-hub canary forget` makes room", MAX_RECORDS)
            return
        self._records[record.triple.key] = record
        self._unsaved.append(record)

    def save(self) -> None:
        """Write what is new; a folder that cannot be written is no error, it is measured again next time."""
        unsaved, self._unsaved = self._unsaved, []
        for record in unsaved if self._folder else ():
            try:
                data = json.dumps(asdict(record), indent=2, sort_keys=True).encode()
                write_atomically(self._path(record.triple.key), data)
            except OSError as error:
                _log.warning("what the canary measured cannot be kept: %s", error)

    def forget(self, key: str = "") -> int:
        """Remove the records whose keys begin so; all of them without one. Return how many there were."""
        gone = [name for name in self._records if name.startswith(key)]
        for name in gone:
            del self._records[name]
            if self._folder:
                self._path(name).unlink(missing_ok=True)
        return len(gone)

    def look(self) -> list[Record] | None:
        """Read the folder again; None when it has not changed. Touches no record in memory: it may run in a thread."""
        stamp = self._folder_stamp()
        if self._folder is None or stamp == self._stamp:
            return None
        self._stamp = stamp
        found = [_read(path) for path in sorted(self._folder.glob("*.json"))[:MAX_RECORDS]]
        return [record for record in found if record]

    def take(self, found: Iterable[Record]) -> bool:
        """Hold what the folder holds, and what is not saved yet; return whether that is something else."""
        before = self._records
        self._records = {record.triple.key: record for record in (*found, *self._unsaved)}
        return self._records != before

    def _folder_stamp(self) -> object:
        with suppress(OSError):
            return self._folder and self._folder.stat().st_mtime_ns
        return None

    def _path(self, key: str) -> Path:
        return (self._folder or Path()) / f"{key}.json"


def _read(path: Path) -> Record | None:
    """A record that is damaged, or is not of the triple that its name says, counts as not measured."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        record = Record(**raw)
        record = replace(record, triple=Triple(**raw["triple"]), figure=Figure(**raw["figure"]))
        if record.triple.key == path.stem and 0 <= record.figure.num_accepted <= record.figure.num_tried:
            return record
    except (OSError, ValueError, TypeError, KeyError) as error:
        _log.warning("the canary record %s cannot be read: %s", path, error)
        return None
    _log.warning("the canary record %s is not of what its name says", path)
    return None

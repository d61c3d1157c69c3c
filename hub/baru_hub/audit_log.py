"""Writing the audit log: records go into a queue, and a thread of its own brings them to the disk.

    loop     note() ──▶ queue ──▶ thread: append, fsync, sign and replace the head, fsync

Nothing is dropped. While the disk cannot be written, or the queue is long, nobody is admitted; sessions that run go on,
and their few records wait. Refusals, which anybody can cause, are added up: the same one is written once a window, with
its number. What is queued and not yet written is lost when the hub crashes: what came within one write.
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path

from baru_common.errors import AuditBroken, ConfigError, HubUnavailable
from baru_common.signatures import Trust, canonical, spelled, utc_now
from baru_common.whole_files import write_atomically

from .audit import (
    HEAD_FILE,
    HEAD_PURPOSE,
    Head,
    Link,
    Record,
    Tail,
    broken,
    check_chain,
    file_name,
    first_of,
    head_bytes,
    kept_files,
    log_files,
    read_head,
)
from .signing import Notary

MAX_FILE_BYTES, MAX_FILES = 16 << 20, 64
MAX_PENDING = 1024
"""Records that wait for the disk; then nobody is admitted."""
REFUSAL_WINDOW = timedelta(seconds=10)
_MAX_KINDS = 64
"""Kinds of refusals that are told apart within a window."""
_MAX_BATCH = 256
_RETRY_S = 1.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Event:
    """What a record is to say."""

    at: datetime
    event: str
    identity: str
    fields: dict[str, int | str]


@dataclass
class Refusals:
    """Adds up what is refused: the first of a kind is told at once, how many followed when the window is over."""

    _counts: dict[tuple[str, str, str], int] = field(default_factory=dict)
    _since: datetime | None = None

    def add(self, event: str, identity: str, reason: str, at: datetime) -> Event | None:
        """Return what is to be written at once, if anything is."""
        kind = (event, identity, reason)
        if kind not in self._counts and len(self._counts) >= _MAX_KINDS:
            kind = (event, "others", reason)
        self._since = self._since or at
        self._counts[kind] = self._counts.get(kind, -1) + 1
        return None if self._counts[kind] else Event(at, event, kind[1], {"reason": reason})

    def due(self, now: datetime) -> bool:
        """The window is over; also when the clock was put back."""
        return self._since is not None and not self._since <= now < self._since + REFUSAL_WINDOW

    def told(self, now: datetime) -> list[Event]:
        """Return the sums, and begin a new window."""
        sums = [
            Event(now, event, identity, {"reason": reason, "num_more": more})
            for (event, identity, reason), more in self._counts.items()
            if more
        ]
        self._counts.clear()
        self._since = None
        return sums


class AuditLog:
    """One hub's log. `start` it, and `close` it: both touch the disk."""

    def __init__(
        self,
        folder: Path,
        notary: Notary,
        *,
        max_file_bytes: int = MAX_FILE_BYTES,
        max_files: int = MAX_FILES,
        max_pending: int = MAX_PENDING,
        wall_clock: Callable[[], datetime] = utc_now,
    ) -> None:
        self._chain = Chain(folder, notary, max_file_bytes, max_files, wall_clock)
        self._max_pending = max_pending
        self._wall_clock = wall_clock
        self._pending: deque[Event] = deque()
        self._refusals = Refusals()
        self._changed = threading.Condition()
        self._closing = False
        self._failure = ""
        self._thread = threading.Thread(target=self._run, name="baru-audit", daemon=True)

    def start(self) -> None:
        """Open the log, mend what a crash has torn, and begin to write. AuditBroken when it is not as it was left;
        ConfigError when it cannot be written, or another hub has it."""
        if found := self._chain.open():
            self.note("recovered", num_unsealed=found.num_unsealed, num_torn_bytes=found.num_torn_bytes)
        self._thread.start()

    def close(self) -> None:
        """Write what waits; ConfigError when it cannot be written."""
        with self._changed:
            self._pending.extend(self._refusals.told(self._wall_clock()))
            self._closing = True
            self._changed.notify()
        self._thread.join()
        self._chain.close()
        if self._pending:
            raise ConfigError(
                f"the audit log lacks its last {len(self._pending)} records: {self._failure}",
                hint="make room on its disk",
            )

    # -- what the hub calls, from its loop: never waits for a disk

    def note(self, event: str, identity: str = "", **fields: int | str) -> None:
        """Have a record written."""
        with self._changed:
            self._pending.append(Event(self._wall_clock(), event, identity, fields))
            self._changed.notify()

    def note_refusal(self, event: str, identity: str, reason: str) -> None:
        """Have it written that somebody was refused: once a window, with how many more there were."""
        with self._changed:
            told = self._refusals.add(event, identity, reason, self._wall_clock())
            if told:
                self._pending.append(told)
                self._changed.notify()

    def require_room(self) -> None:
        """HubUnavailable while nothing more can be written."""
        if self._failure or len(self._pending) >= self._max_pending:
            raise HubUnavailable(
                f"the hub cannot write its audit log: {self._failure or 'the disk is too slow'}",
                hint="make room on its disk; then it admits sessions again",
            )

    # -- the thread

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending or self._closing, timeout=_RETRY_S)
                if not self._failure and self._refusals.due(now := self._wall_clock()):
                    self._pending.extend(self._refusals.told(now))
                batch = list(self._pending)[:_MAX_BATCH]
                closing = self._closing
            if batch and not self._write(batch) and closing:
                return
            if not batch and closing:
                return

    def _write(self, batch: Sequence[Event]) -> bool:
        """Bring a batch to the disk; after a failure wait a moment, unless it is the end."""
        try:
            self._chain.append(batch)
        except Exception as error:  # whatever it is, it must be seen, and what was to be written must wait
            if not self._failure:
                _log.exception("the audit log cannot be written; nobody is admitted until it can")
            with self._changed:
                self._failure = getattr(error, "strerror", None) or str(error)
                self._changed.wait_for(lambda: self._closing, timeout=_RETRY_S)
            return False
        with self._changed:
            for _ in batch:
                self._pending.popleft()
            if self._failure:
                _log.warning("the audit log can be written again")
            self._failure = ""
        return True


class Chain:
    """The files: appends, seals, goes on to the next file, removes the oldest."""

    def __init__(
        self, folder: Path, notary: Notary, max_file_bytes: int, max_files: int, wall_clock: Callable[[], datetime]
    ) -> None:
        self._folder, self._notary, self._wall_clock = folder, notary, wall_clock
        self._max_file_bytes, self._max_files = max_file_bytes, max_files
        self._start = self._end = Link()
        self._path: Path | None = None
        """The file that is written; None: the next record begins one."""
        self._num_bytes = 0
        """Of that file, up to the last record that was sealed."""

    def open(self) -> Tail | None:
        """Take the folder, and find where the chain goes on; return how it ended if it did not end well."""
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = (self._folder / "lock").open("w")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._lock.close()
            raise ConfigError(f"another hub writes to the audit log in {self._folder}") from error
        except OSError as error:
            raise ConfigError(
                f"the audit log cannot be written in {self._folder}: {error.strerror}", hint="choose another --audit"
            ) from error
        try:
            return self._find_end()
        except AuditBroken as error:
            self.close()
            error.hint = f"see `baru-hub audit verify {self._folder}`; move the folder away to begin a new log"
            raise

    def close(self) -> None:
        """Let the folder go."""
        self._lock.close()

    def append(self, batch: Sequence[Event]) -> None:
        """Write and seal; all of it or, after an error, nothing."""
        if self._path is None:
            self._expire()
        link, data = self._linked(batch)
        path = self._path or self._folder / file_name(self._end.next)
        try:
            num_bytes = _write_at(path, self._num_bytes, data)
            _sync(self._folder)
            self._seal(self._start, link)
        except BaseException:
            with suppress(OSError):
                os.truncate(path, self._num_bytes)
            raise
        self._go_on_in(path, num_bytes)
        self._end = link

    def _linked(self, batch: Sequence[Event]) -> tuple[Link, bytes]:
        """Return where the chain goes on after the batch, and its lines."""
        link, lines = self._end, []
        for event in batch:
            record = Record(link.next, spelled(event.at), event.event, event.identity, event.fields, link.hash).sealed()
            lines.append(record.line())
            link = Link(record.sequence + 1, record.hash)
        return link, b"".join(lines)

    def _go_on_in(self, path: Path, num_bytes: int) -> None:
        is_full = num_bytes >= self._max_file_bytes
        self._path, self._num_bytes = (None, 0) if is_full else (path, num_bytes)

    def _expire(self) -> None:
        """Make room for another file; the head says first that the oldest are gone."""
        files = log_files(self._folder)
        kept = files[1 - self._max_files :]
        if len(kept) < len(files):
            self._start = _start_of(kept[0])
            self._seal(self._start, self._end)
            for path in files[: -len(kept)]:
                path.unlink()

    def _seal(self, start: Link, end: Link) -> None:
        head = Head(start.next, start.hash, end.next, end.hash, spelled(self._wall_clock()))
        signed = self._notary.sign(HEAD_PURPOSE, canonical(vars(head)))
        write_atomically(self._folder / HEAD_FILE, head_bytes(signed))
        _sync(self._folder)

    def _find_end(self) -> Tail | None:
        files = log_files(self._folder)
        if not files and not (self._folder / HEAD_FILE).exists():
            self._seal(self._start, self._end)
            return None
        head, _ = read_head(self._folder, Trust())
        # Only what was written last is looked at: the rest may be a gigabyte, and is for `baru-hub audit verify`.
        files = kept_files(self._folder, head)
        recent = [path for path in files if first_of(path) >= head.next - 1]
        before = files[: -len(recent)] if recent else files
        recent = before[-1:] + recent
        start = head.start if recent == files or not recent else _start_of(recent[0])
        tail = check_chain(recent, start, head)
        if tail.torn:
            os.truncate(tail.torn, tail.torn.stat().st_size - tail.num_torn_bytes)
        self._start, self._end = head.start, tail.end
        if recent:
            self._go_on_in(recent[-1], recent[-1].stat().st_size)
        return tail if tail.num_unsealed or tail.torn else None


def _start_of(path: Path) -> Link:
    """Return where the chain stands before the first record of a file."""
    try:
        with path.open("rb") as file:
            record = Record.from_line(file.readline())
    except ValueError:
        raise broken(path, 1, first_of(path), "the line is no record, or was changed") from None
    return Link(record.sequence, record.previous)


def _write_at(path: Path, at: int, data: bytes) -> int:
    """Write at a place, with nothing after it, down to the disk; return where the next one begins."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
        file.truncate(at)
        file.seek(at)
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return at + len(data)


def _sync(folder: Path) -> None:
    """Have the names in a folder reach the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

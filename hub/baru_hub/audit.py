"""The audit log on disk: what is in it, and how it is checked.

    audit-000000000000.jsonl   records, one a line; the number is the first record's. Full files are followed by others,
    audit-000000001732.jsonl   the chain goes on across them, and the oldest is removed once there are too many.
    head.json                  which records there are, and the last one's hash; signed, replaced as a whole

A record is canonical JSON: sequence (from 0), at, event, identity, fields, previous, hash. `hash` is the SHA-256 of
"baru.audit.v1\\0" and the record without it, so each vouches for all before it; the head vouches for the last one.
What was changed, removed, put in or put elsewhere breaks the chain at that place. A tail that was cut off, or a chain
that was made anew, contradicts the head, which cannot be made without the hub's key.
"""

from __future__ import annotations

import hashlib
import json
from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from baru_common.errors import AuditBroken
from baru_common.signatures import SignedStatement, Signer, Trust, canonical, check_signature, read_time

PURPOSE = "baru.audit.v1"
HEAD_PURPOSE = "baru.audit.head.v1"
HEAD_FILE = "head.json"
MAX_LINE_BYTES = 1 << 16
_MAX_HEAD_BYTES = 1 << 16


@dataclass(frozen=True)
class Link:
    """Where a chain goes on."""

    next: int = 0
    """Sequence of the next record."""
    hash: str = "0" * 64
    """Of the record before it."""


@dataclass(frozen=True)
class Record:
    """One thing that happened."""

    sequence: int
    at: str
    """Wall clock, RFC 3339 in UTC."""
    event: str
    identity: str
    """Whose doing it was; empty: the hub's own."""
    fields: Mapping[str, Any]
    previous: str
    hash: str = ""

    def sealed(self) -> Record:
        """Return it with its hash."""
        values = asdict(self)
        del values["hash"]
        return Record(**values, hash=hashlib.sha256(PURPOSE.encode() + b"\0" + canonical(values)).hexdigest())

    def line(self) -> bytes:
        """Return its line in the file."""
        return canonical(asdict(self)) + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> Record:
        """Read a line; ValueError when it is no record, or not spelled as `line` does."""
        try:
            record = cls(**json.loads(line))
            if record.line() == line and type(record.sequence) is int:
                return record
        except (TypeError, ValueError, RecursionError):
            pass
        raise ValueError


@dataclass(frozen=True)
class Head:
    """What a log holds, as it is signed."""

    first: int
    """Sequence of the first record that is kept."""
    first_previous: str
    """Hash of the one before it."""
    next: int
    last_hash: str
    at: str
    version: int = 1

    @property
    def start(self) -> Link:
        return Link(self.first, self.first_previous)

    @property
    def end(self) -> Link:
        return Link(self.next, self.last_hash)


@dataclass(frozen=True)
class Tail:
    """How a log ends."""

    end: Link
    num_unsealed: int
    """Records that the head does not know yet: the hub runs, or it crashed after it had written them."""
    torn: Path | None
    """The file whose last line was not written to its end, if there is one."""
    num_torn_bytes: int = 0


@dataclass(frozen=True)
class Report:
    """What a check has found, when it has found nothing wrong."""

    head: Head
    tail: Tail
    signer: Signer
    num_files: int

    @property
    def num_records(self) -> int:
        return self.tail.end.next - self.head.first


def file_name(sequence: int) -> str:
    """Name of the file that begins with a record."""
    return f"audit-{sequence:012d}.jsonl"


def log_files(folder: Path) -> list[Path]:
    """The log's files in order."""
    return sorted(path for path in folder.glob("audit-*.jsonl") if path.stem[6:].isdecimal())


def first_of(path: Path) -> int:
    """Sequence of a file's first record, as its name says."""
    return int(path.stem[6:])


def check_log(folder: Path, trust: Trust) -> Report:
    """Check a whole log; AuditBroken says what is wrong and where: file, line, sequence."""
    head, signer = read_head(folder, trust)
    files = kept_files(folder, head)
    return Report(head, check_chain(files, head.start, head), signer, len(files))


def kept_files(folder: Path, head: Head) -> list[Path]:
    """The files that the head speaks of: older ones are about to be removed."""
    files = log_files(folder)
    return [
        path for path, after in zip(files, [*files[1:], None], strict=True) if not after or first_of(after) > head.first
    ]


def read_head(folder: Path, trust: Trust) -> tuple[Head, Signer]:
    """Return what the head says, and who has signed it."""
    path = folder / HEAD_FILE
    try:
        with path.open("rb") as file:
            values = json.loads(file.read(_MAX_HEAD_BYTES))
        signed = SignedStatement(
            *(b64decode(values[name], validate=True) for name in ("head", "signature", "certificate"))
        )
        head = Head(**json.loads(signed.statement))
        at = read_time(head.at)
    except FileNotFoundError as error:
        raise broken(path, None, None, "the head is missing") from error
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise broken(path, None, None, f"the head cannot be read: {error}") from error
    return head, check_signature(signed, HEAD_PURPOSE, at, trust, AuditBroken)


def head_bytes(signed: SignedStatement) -> bytes:
    """Return the content of the head's file."""
    parts = {"head": signed.statement, "signature": signed.signature, "certificate": signed.certificate}
    return json.dumps({name: b64encode(value).decode() for name, value in parts.items()}, indent=1).encode() + b"\n"


def check_chain(files: Sequence[Path], start: Link, head: Head) -> Tail:
    """Follow the chain through these files, from `start` to its end."""
    link, torn, num_torn_bytes = start, None, 0
    last, line_number = files[-1] if files else None, 0
    for path in files:
        _check_name(path, link)
        for line_number, line in _lines(path):
            if path is last and not line.endswith(b"\n"):
                torn, num_torn_bytes = path, len(line)
                break
            link = _follow(line, link, path, line_number)
            if link.next == head.next and link.hash != head.last_hash:
                raise broken(
                    path,
                    line_number,
                    link.next - 1,
                    "the record is not the one that was sealed: the chain was made anew",
                )
    if link.next < head.next:
        missing = f"the log ends here, and records {link.next} to {head.next - 1} were sealed: its tail was cut off"
        raise broken(last or Path(file_name(link.next)), line_number, link.next, missing)
    return Tail(link, link.next - head.next, torn, num_torn_bytes)


def _check_name(path: Path, link: Link) -> None:
    if first_of(path) > link.next:
        missing = f"records {link.next} to {first_of(path) - 1} are missing before it: a file was removed"
        raise broken(path, 1, link.next, missing)
    if first_of(path) < link.next:
        raise broken(path, 1, link.next, f"a file that begins with record {link.next} was expected here")


def _follow(line: bytes, link: Link, path: Path, number: int) -> Link:
    """Return where the chain goes on after this line."""
    try:
        record = Record.from_line(line)
    except ValueError:
        raise broken(path, number, link.next, "the line is no record, or was changed") from None
    problem = None
    if record.sealed().hash != record.hash:
        problem = "the record was changed"
    elif record.sequence > link.next:
        problem = f"records {link.next} to {record.sequence - 1} are missing before it"
    elif record.sequence < link.next:
        problem = f"the record was put in, or put elsewhere: record {link.next} was expected"
    elif record.previous != link.hash:
        problem = f"the record does not follow record {link.next - 1}: one of both was made anew"
    if problem:
        raise broken(path, number, record.sequence, problem)
    return Link(record.sequence + 1, record.hash)


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    try:
        with path.open("rb") as file:
            number = 0
            while line := file.readline(MAX_LINE_BYTES):
                number += 1
                yield number, line
    except OSError as error:
        raise broken(path, None, None, f"the file cannot be read: {error.strerror}") from error


def broken(path: Path, line: int | None, sequence: int | None, what: str) -> AuditBroken:
    """Return the error that says where."""
    places = {"file": path.name, "line": line, "sequence": sequence}
    named = {name: str(place) for name, place in places.items() if place is not None}
    return AuditBroken(
        f"{', '.join(f'{name} {place}' for name, place in named.items())}: {what}",
        hint="keep a copy of the folder; who could write there?",
        details=named,
    )

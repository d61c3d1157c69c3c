"""The posture document of a hub on disk: applied whole or not at all, every version kept, every change logged.

FOLDER/posture.toml           the present document
       versions/NNNNN.toml    each that was ever applied
       history.jsonl          who changed what, and when
"""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from functools import cache
from importlib import resources
from pathlib import Path

from baru_common.errors import ConfigError, NotFound
from baru_common.whole_files import write_atomically

from .posture import MAX_BYTES, Document, parse

_CURRENT, _HISTORY, _VERSIONS = "posture.toml", "history.jsonl", "versions"


def shipped_text() -> str:
    """The shipped posture document, as written."""
    return (resources.files("baru_hub") / "data" / _CURRENT).read_text(encoding="utf-8")


@cache
def shipped() -> Document:
    """The shipped posture document."""
    return parse(shipped_text())


def read_document(path: Path) -> tuple[str, Document]:
    """Return a file's text and the document in it; ConfigError says what is wrong with either."""
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(MAX_BYTES + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the posture document {path} cannot be read: {error}") from error
    return text, parse(text)


@dataclass(frozen=True)
class Entry:
    """A change."""

    at: str
    """Date and time, UTC."""
    action: str
    """Either "apply" or "rollback"."""
    version: int
    digest: str
    """Of the document that it brought, hex."""
    before: int
    """Version that it replaced."""
    by: str
    """User."""


def _now() -> datetime:
    return datetime.now(timezone.utc)


class PostureStore:
    """One folder. Until something is applied, the shipped document holds."""

    def __init__(self, folder: Path, *, now: Callable[[], datetime] = _now) -> None:
        self.folder = folder
        self._now = now

    @property
    def path(self) -> Path:
        """The file with the present document; it may not be there."""
        return self.folder / _CURRENT

    def current(self) -> Document:
        """Return the present document."""
        return read_document(self.path)[1] if self.path.exists() else shipped()

    def current_text(self) -> str:
        """Return it as written."""
        return read_document(self.path)[0] if self.path.exists() else shipped_text()

    def history(self) -> list[Entry]:
        """Return all changes, the oldest first."""
        try:
            lines = (self.folder / _HISTORY).read_text(encoding="utf-8").splitlines()
        except OSError:
            return []
        entries = []
        for line in lines:
            with contextlib.suppress(ValueError, TypeError):  # a line that was cut off by a crash
                entries.append(Entry(**json.loads(line)))
        return entries

    def apply(self, text: str) -> Document:
        """Make a new document the present one; ConfigError, and nothing has changed, when it is not valid or its
        version is not new."""
        document = parse(text)
        with self._locked():
            current = self.current()
            if document.digest == current.digest:
                return document
            latest = max((current.version, *self._kept()))
            if document.version <= latest:
                raise ConfigError(
                    f"the document has version {document.version}, and version {latest} has been there already",
                    hint=f"give it version {latest + 1}; to go back to an earlier one use `posture rollback`",
                    details={"param": "version"},
                )
            self._keep(current.version, self.current_text())
            self._keep(document.version, text)
            self._put(document, text, "apply", current.version)
        return document

    def rollback(self, version: int | None = None) -> Document:
        """Go back to a version that was there before; None: undo the last change. NotFound when it was not kept."""
        with self._locked():
            current = self.current()
            if version is None:
                entries = self.history()
                if not entries:
                    raise NotFound("nothing was applied yet, so there is nothing to go back to")
                version = entries[-1].before
            kept = self._kept()
            if version not in kept:
                raise NotFound(
                    f"version {version} was not kept",
                    hint=f"there are {', '.join(map(str, sorted(kept)))}" if kept else "nothing was applied yet",
                )
            text, document = read_document(kept[version])
            if document.digest != current.digest:
                self._put(document, text, "rollback", current.version)
        return document

    def was_rolled_back_to(self, document: Document) -> bool:
        """True when the last change was somebody's going back to this document."""
        entries = self.history()
        return bool(entries) and (entries[-1].action, entries[-1].digest) == ("rollback", document.digest.hex())

    def _kept(self) -> dict[int, Path]:
        return {int(path.stem): path for path in (self.folder / _VERSIONS).glob("*.toml") if path.stem.isdecimal()}

    def _keep(self, version: int, text: str) -> None:
        path = self.folder / _VERSIONS / f"{version:05}.toml"
        if not path.exists():
            write_atomically(path, text.encode())

    def _put(self, document: Document, text: str, action: str, before: int) -> None:
        """Log it first: a hub that sees a lower version looks for the reason there."""
        at = self._now().isoformat(timespec="seconds")
        entry = Entry(at, action, document.version, document.digest.hex(), before, _user())
        with (self.folder / _HISTORY).open("a", encoding="utf-8") as log:
            log.write(json.dumps(asdict(entry)) + "\n")
            log.flush()
            os.fsync(log.fileno())
        write_atomically(self.path, text.encode())

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """One change at a time."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / ".lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                yield
        except OSError as error:
            raise ConfigError(
                f"the folder {self.folder} cannot be written: {error}", hint="give another one with --state"
            ) from error


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a service user without an entry
        return str(os.getuid())

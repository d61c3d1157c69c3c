"""A node's own texts, for drafting from: kept as they are in the node's data folder, and never sent anywhere.

    <data folder>/corpora/<name>/<SHA-256 of the text>.txt

Only the user who owns the folder may read it; sessions of another identity draft from another corpus, or from none.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .errors import ConfigError
from .folders import data_folder
from .whole_files import write_atomically

DEFAULT_CORPUS = "default"
MAX_TEXT_BYTES = 8 << 20
MAX_CORPUS_BYTES = 64 << 20
"""Text of one corpus: some 16 million ids, 130 MB of index."""
SUFFIXES = (".txt", ".md", ".rst", ".csv", ".json", ".log")
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")


@dataclass(frozen=True)
class Added:
    """What became of a folder that was added."""

    num_texts: int
    num_known: int
    """Texts that were there already."""
    skipped: tuple[tuple[Path, str], ...]
    """Files that were left out, and why."""


class Corpus:
    """The texts of one name."""

    def __init__(self, name: str = DEFAULT_CORPUS) -> None:
        if not _NAME.fullmatch(name):
            raise ConfigError(f"{name!r} is no name for a corpus", hint="use small letters, digits, - and _")
        self.name = name
        self.folder = data_folder() / "corpora" / name

    @property
    def version(self) -> tuple[str, ...]:
        """Changes when, and only when, texts come or go."""
        return tuple(sorted(path.name for path in self._paths()))

    @property
    def num_bytes(self) -> int:
        """Size of all texts."""
        return sum(path.stat().st_size for path in self._paths())

    def texts(self) -> Iterator[str]:
        """Yield every text."""
        for path in sorted(self._paths()):
            yield path.read_text(encoding="utf-8")

    def add(self, source: Path) -> Added:
        """Take in a text file, or every one below a folder; ConfigError when there is none or no more room."""
        if not source.exists():
            raise ConfigError(f"there is nothing at {source}")
        files = [source] if source.is_file() else sorted(path for path in source.rglob("*") if path.is_file())
        num_texts, num_known, skipped = 0, 0, []
        num_bytes = self.num_bytes
        for file in files:
            text, reason = _read(file)
            if text is None:
                skipped.append((file, reason))
                continue
            path = self.folder / f"{hashlib.sha256(text.encode()).hexdigest()}.txt"
            if path.exists():
                num_known += 1
                continue
            num_bytes += len(text.encode())
            if num_bytes > MAX_CORPUS_BYTES:
                raise ConfigError(
                    f"corpus {self.name} would pass {MAX_CORPUS_BYTES >> 20} MiB with {file}",
                    hint="remove what is not needed, or use another corpus",
                )
            self.folder.mkdir(parents=True, exist_ok=True)
            self.folder.chmod(0o700)
            write_atomically(path, text.encode())
            num_texts += 1
        if num_texts + num_known == 0:
            raise ConfigError(f"there is no text at {source}", hint=f"texts end in {', '.join(SUFFIXES)}, in UTF-8")
        return Added(num_texts, num_known, tuple(skipped))

    def remove(self) -> None:
        """Delete the corpus; ConfigError when there is none."""
        if not self.folder.is_dir():
            raise ConfigError(f"there is no corpus {self.name}")
        shutil.rmtree(self.folder)

    def _paths(self) -> Iterator[Path]:
        return self.folder.glob("*.txt")


def corpora() -> list[Corpus]:
    """Every corpus of this node."""
    folder = data_folder() / "corpora"
    return [Corpus(path.name) for path in sorted(folder.glob("*")) if _NAME.fullmatch(path.name)]


def _read(file: Path) -> tuple[str | None, str]:
    if file.suffix.lower() not in SUFFIXES:
        return None, "not a kind of text file"
    if file.stat().st_size > MAX_TEXT_BYTES:
        return None, f"larger than {MAX_TEXT_BYTES >> 20} MiB"
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        return None, f"cannot be read: {error}"
    return (text, "") if text.strip() else (None, "empty")

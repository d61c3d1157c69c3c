"""What `kit install` does to a machine: each action knows whether it was done, so that a second run does nothing."""

from __future__ import annotations

import os
import pwd
import shutil
import stat
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from baru_common.errors import ConfigError
from baru_common.whole_files import write_atomically

from .seal import digest_of


class Action(Protocol):
    """One thing to do."""

    def __str__(self) -> str:
        """Say it, in a line."""

    @property
    def is_done(self) -> bool:
        """Whether the machine is so already."""

    def do(self) -> None:
        """Do it; ConfigError when it cannot be done."""


@dataclass(frozen=True)
class Put:
    """A file of this content."""

    path: Path
    content: bytes
    mode: int = 0o644
    owner: int = 0

    def __str__(self) -> str:
        return f"write {self.path}"

    @property
    def is_done(self) -> bool:
        try:
            found = self.path.lstat()
            return (
                stat.S_ISREG(found.st_mode)
                and (stat.S_IMODE(found.st_mode), found.st_uid) == (self.mode, self.owner)
                and self.path.read_bytes() == self.content
            )
        except OSError:
            return False

    def do(self) -> None:
        write_atomically(self.path, self.content)
        self.path.chmod(self.mode)
        os.chown(self.path, self.owner, self.owner)


@dataclass(frozen=True)
class Folder:
    """A folder, for one user alone."""

    path: Path
    owner: int

    def __str__(self) -> str:
        return f"make {self.path}"

    @property
    def is_done(self) -> bool:
        try:
            found = self.path.stat()
        except OSError:
            return False
        return (stat.S_IMODE(found.st_mode), found.st_uid) == (0o700, self.owner)

    def do(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        self.path.chmod(0o700)
        os.chown(self.path, self.owner, self.owner)


@dataclass(frozen=True)
class Copy:
    """A model, as it is in the bundle."""

    source: Path
    path: Path

    def __str__(self) -> str:
        return f"copy {self.path}"

    @property
    def is_done(self) -> bool:
        return self.path.exists() and digest_of(self.path) == digest_of(self.source)

    def do(self) -> None:
        """Beside its place first: a reader sees the old one or the new one. Services may read it, whoever could read
        the source."""
        new = self.path.with_name(f".{self.path.name}.new")
        _remove(new)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.source.is_dir():
            shutil.copytree(self.source, new, copy_function=shutil.copyfile)
            for folder in (new, *(path for path in new.rglob("*") if path.is_dir())):
                folder.chmod(0o755)
            _remove(self.path)
        else:
            shutil.copyfile(self.source, new)
        new.rename(self.path)


@dataclass(frozen=True)
class Link:
    """A symbolic link."""

    path: Path
    to: Path

    def __str__(self) -> str:
        return f"link {self.path} to {self.to}"

    @property
    def is_done(self) -> bool:
        return self.path.is_symlink() and self.path.readlink() == self.to

    def do(self) -> None:
        if self.path.exists() and not self.path.is_symlink():
            raise ConfigError(f"{self.path} is there and is no link", hint="it is not of this kit: move it away")
        new = self.path.with_name(f".{self.path.name}.new")
        new.unlink(missing_ok=True)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new.symlink_to(self.to)
        new.rename(self.path)


@dataclass(frozen=True)
class User:
    """The user that services run as, from the file in sysusers.d."""

    name: str
    number: int

    def __str__(self) -> str:
        return f"add the user {self.name}"

    @property
    def is_done(self) -> bool:
        try:
            return pwd.getpwnam(self.name).pw_uid == self.number
        except KeyError:
            return False

    def do(self) -> None:
        run("systemd-sysusers")
        if not self.is_done:
            raise ConfigError(
                f"the user {self.name} has not the number {self.number}", hint="remove the one that is there"
            )


def run(*command: str, timeout_s: float = 900.0) -> None:
    """Run a program of the system; ConfigError with its last words when it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout_s)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{' '.join(command)}: {error}") from error
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise ConfigError(f"{' '.join(command)} failed: {said[-1] if said else done.returncode}")


def apply(actions: Sequence[Action], *, dry_run: bool) -> list[Action]:
    """Do what is not done, in order; return it. With `dry_run` only return it."""
    changed = list[Action]()
    for action in actions:
        if not action.is_done:
            changed.append(action)
            if not dry_run:
                action.do()
    return changed


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)

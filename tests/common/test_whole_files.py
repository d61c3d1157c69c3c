from __future__ import annotations

import os
from pathlib import Path

import pytest

from baru_common.whole_files import folder_written_atomically, write_atomically


class Crash(BaseException):
    """Not an Exception: an interrupt, for one, is none either."""


def crash(*_: object) -> None:
    raise Crash


def test_a_file_is_written_whole_and_alone(tmp_path: Path) -> None:
    """Missing folders are made, an old file is replaced, nothing else is left."""
    path = tmp_path / "a" / "b" / "file"
    write_atomically(path, b"old")
    write_atomically(path, b"new")
    assert path.read_bytes() == b"new"
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("step", ["fsync", "replace"])
@pytest.mark.parametrize("old", [b"old", None])
def test_a_crash_while_writing_leaves_the_old_file(
    step: str, old: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it comes while the bytes are written or when they are put in place."""
    path = tmp_path / "file"
    if old is not None:
        path.write_bytes(old)
    monkeypatch.setattr(os if step == "fsync" else Path, step, crash)
    with pytest.raises(Crash):
        write_atomically(path, b"new, and longer")
    assert [p.read_bytes() for p in tmp_path.iterdir()] == ([] if old is None else [old])


def test_the_old_file_is_whole_until_the_new_one_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the moment before the exchange both are complete, and the new one is on the disk."""
    path = tmp_path / "file"
    seen: list[tuple[bytes, bytes, bool]] = []
    synced: list[int] = []
    path.write_bytes(b"old")
    real_replace, real_fsync = Path.replace, os.fsync

    def replace(source: Path, target: Path) -> Path:
        seen.append((source.read_bytes(), target.read_bytes(), bool(synced)))
        return real_replace(source, target)

    def fsync(handle: int) -> None:
        synced.append(handle)
        real_fsync(handle)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", replace)
        patch.setattr(os, "fsync", fsync)
        write_atomically(path, b"new")
    assert seen == [(b"new", b"old", True)]


def test_a_folder_appears_whole_and_alone(tmp_path: Path) -> None:
    """While it is filled nobody sees it under its name."""
    path = tmp_path / "models" / "one"
    with folder_written_atomically(path) as scratch:
        (scratch / "weights").write_bytes(b"w")
        assert not path.exists()
        (scratch / "config").write_bytes(b"c")
    assert {p.name: p.read_bytes() for p in path.iterdir()} == {"weights": b"w", "config": b"c"}
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("error", [Crash, OSError, ValueError])
def test_a_folder_that_was_not_finished_vanishes(error: type[BaseException], tmp_path: Path) -> None:

    def write_half() -> None:
        with folder_written_atomically(tmp_path / "one") as scratch:
            (scratch / "weights").write_bytes(b"half")
            raise error

    with pytest.raises(error):
        write_half()
    assert list(tmp_path.iterdir()) == []


def test_the_first_of_two_writers_wins(tmp_path: Path) -> None:
    """The second finds a folder there, leaves it as it is, and cleans up after itself."""
    path = tmp_path / "one"
    with folder_written_atomically(path) as slow:
        (slow / "who").write_text("slow")
        with folder_written_atomically(path) as fast:
            (fast / "who").write_text("fast")
    assert (path / "who").read_text() == "fast"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_in_the_way_is_an_error(tmp_path: Path) -> None:
    """What is no folder cannot stand for one."""
    path = tmp_path / "one"
    path.write_text("in the way")
    with pytest.raises(OSError, match="one"), folder_written_atomically(path):
        pass
    assert path.read_text() == "in the way"
    assert list(tmp_path.iterdir()) == [path]

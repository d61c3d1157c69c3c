"""The audit log: whatever is done to it is found, with its place; and nothing that happened is left out."""

from __future__ import annotations

import json
import resource
import threading
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from baru_common.errors import AuditBroken, ConfigError, HubUnavailable
from baru_common.folders import state_folder
from baru_common.signatures import Trust
from baru_hub.audit import HEAD_FILE, Record, Report, check_log, log_files
from baru_hub.audit_cli import app
from baru_hub.audit_log import REFUSAL_WINDOW, AuditLog
from baru_hub.signing import Notary
from support.signers import NOW

_WAIT_S = 10.0
_NUM = 12


@contextmanager
def log_in(folder: Path, **options: object) -> Iterator[AuditLog]:
    log = AuditLog(folder, Notary(state_folder(), certified=False), **options)  # type: ignore[arg-type]
    log.start()
    try:
        yield log
    finally:
        log.close()


def written(folder: Path, num: int = _NUM, *, per_file: int = 5) -> Path:
    """A log of so many records in several files."""
    for start in range(0, num, per_file):  # each hub's batch fills a file
        with log_in(folder, max_file_bytes=1) as log:
            batch = [(f"event_{i}", "somebody", i) for i in range(start, min(start + per_file, num))]
            with log._changed:
                for event, identity, i in batch:
                    log.note(event, identity, num=i)
    return folder


def records(folder: Path) -> list[Record]:
    return [
        Record.from_line(line) for path in log_files(folder) for line in path.read_bytes().splitlines(keepends=True)
    ]


def check(folder: Path) -> Report:
    return check_log(folder, Trust(key=Notary(state_folder(), certified=False).public_key))


def place(folder: Path) -> dict[str, str]:
    with pytest.raises(AuditBroken) as caught:
        check(folder)
    return caught.value.details


def lines_of(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True)


# -- writing


def test_a_log_says_what_happened(tmp_path: Path) -> None:
    """In order, in files that follow each other; private; each record vouches for the one before."""
    folder = written(tmp_path / "audit")
    found = records(folder)
    assert [(r.sequence, r.event, r.fields["num"]) for r in found] == [(i, f"event_{i}", i) for i in range(_NUM)]
    assert [path.name for path in log_files(folder)] == [f"audit-{i:012d}.jsonl" for i in (0, 5, 10)]
    assert (check(folder).num_records, check(folder).num_files, check(folder).tail.num_unsealed) == (_NUM, 3, 0)
    assert {path.stat().st_mode & 0o077 for path in [folder, *folder.iterdir()] if path.name != "lock"} == {0}


def test_old_files_go_and_the_rest_is_still_whole(tmp_path: Path) -> None:
    folder = tmp_path / "audit"
    for i in range(6):
        with log_in(folder, max_file_bytes=1, max_files=3) as log:
            log.note("event", num=i)
    assert [r.fields["num"] for r in records(folder)] == [3, 4, 5]
    assert (check(folder).head.first, check(folder).num_records) == (3, 3)
    log_files(folder)[0].unlink()  # by somebody else
    assert place(folder)["sequence"] == "3"


def test_a_folder_has_one_hub(tmp_path: Path) -> None:
    with log_in(tmp_path / "audit"), pytest.raises(ConfigError, match="another hub"):
        AuditLog(tmp_path / "audit", Notary(state_folder(), certified=False)).start()


def test_refusals_are_added_up(tmp_path: Path) -> None:
    """The first of a kind is there at once, how many followed at the end of the window; kinds are bounded."""
    now = [NOW]

    def clock() -> datetime:
        return now[0]

    with log_in(tmp_path / "audit", wall_clock=clock) as log:
        for _ in range(1000):
            log.note_refusal("session_refused", "one", "CAPACITY_EXHAUSTED")
        until(lambda: len(records(tmp_path / "audit")) == 1)
        now[0] += REFUSAL_WINDOW
        until(lambda: len(records(tmp_path / "audit")) == 2)
        for i in range(1000):
            log.note_refusal("session_refused", f"node-{i}", "CAPACITY_EXHAUSTED")
    found = records(tmp_path / "audit")
    assert found[1].fields == {"reason": "CAPACITY_EXHAUSTED", "num_more": 999}
    assert len(found) < 2 + 64 + 3
    assert sum(1 + int(r.fields.get("num_more", 0)) for r in found[2:] if "num_more" not in r.fields) == 65
    assert [r.fields["num_more"] for r in found if r.identity == "others" and "num_more" in r.fields] == [935]


def until(holds: Callable[[], bool]) -> None:
    end_s = time.monotonic() + _WAIT_S
    while not holds():
        assert time.monotonic() < end_s
        time.sleep(0.01)


# -- a disk that cannot be written


@contextmanager
def full_disk(num_bytes: int) -> Iterator[None]:
    """No file of this process may grow past this: the write fails as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_while_the_disk_is_full_nobody_is_admitted_and_nothing_is_lost(tmp_path: Path) -> None:
    """What happened meanwhile is written when there is room again, once and in order."""
    folder = tmp_path / "audit"
    with log_in(folder) as log:
        log.note("before", num=0)
        until(lambda: len(records(folder)) == 1)
        with full_disk(log_files(folder)[0].stat().st_size + 500):
            for i in range(1, 9):
                log.note("meanwhile", num=i)
            until(lambda: bool(log._failure))
            with pytest.raises(HubUnavailable, match="audit log"):
                log.require_room()
            assert [r.fields["num"] for r in records(folder)] == [0]  # nothing torn is left
        until(lambda: not log._failure)
        log.require_room()
        log.note("after", num=9)
    assert [r.fields["num"] for r in records(folder)] == list(range(10))
    assert check(folder).num_records == 10


def test_a_hub_that_stops_with_a_full_disk_says_what_is_missing(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "audit", Notary(state_folder(), certified=False))
    log.start()
    with full_disk(10):
        log.note("one")
        log.note("two")
        with pytest.raises(ConfigError, match="lacks its last 2 records"):
            log.close()


def test_a_slow_disk_stops_admission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller never waits: it is refused."""
    may_write = threading.Event()
    with log_in(tmp_path / "audit", max_pending=3) as log:
        append = log._chain.append
        monkeypatch.setattr(log._chain, "append", lambda batch: (may_write.wait(_WAIT_S), append(batch)))
        for _ in range(3):
            log.require_room()
            log.note("event")
        with pytest.raises(HubUnavailable, match="too slow"):
            log.require_room()
        may_write.set()
    assert check(tmp_path / "audit").num_records == 3


# -- after a crash


def test_a_torn_line_is_cut_off_and_that_is_written_down(tmp_path: Path) -> None:
    """As a crash leaves it: past what was sealed, without an end."""
    folder = written(tmp_path / "audit")
    with log_files(folder)[-1].open("ab") as file:
        file.write(b'{"at":"2026')
    assert check(folder).tail.num_torn_bytes == 11
    with log_in(folder):
        pass
    last = records(folder)[-1]
    assert (last.event, last.fields) == ("recovered", {"num_torn_bytes": 11, "num_unsealed": 0})
    assert check(folder).num_records == _NUM + 1


def test_records_that_were_not_sealed_yet_are_kept(tmp_path: Path) -> None:
    folder = written(tmp_path / "audit")
    head = (folder / HEAD_FILE).read_bytes()
    with log_in(folder) as log:
        log.note("late", num=_NUM)
    (folder / HEAD_FILE).write_bytes(head)
    assert check(folder).tail.num_unsealed == 1
    with log_in(folder):
        pass
    assert records(folder)[-1].fields == {"num_torn_bytes": 0, "num_unsealed": 1}
    assert check(folder).num_records == _NUM + 2


def test_a_hub_does_not_start_on_a_log_that_was_changed(tmp_path: Path) -> None:
    folder = written(tmp_path / "audit")
    path = log_files(folder)[-1]
    path.write_bytes(b"".join(lines_of(path)[:-1]))
    with pytest.raises(AuditBroken, match="tail was cut off") as caught, log_in(folder):
        pass
    assert "baru-hub audit verify" in caught.value.hint


# -- tampering


def edit(number: int, lines: list[bytes]) -> list[bytes]:
    return [*lines[:number], lines[number].replace(b"somebody", b"somebodx"), *lines[number + 1 :]]


def remake(number: int, lines: list[bytes]) -> list[bytes]:
    """Changed, and its own hash made anew."""
    values = json.loads(lines[number]) | {"identity": "x"}
    return [*lines[:number], Record(**(values | {"hash": ""})).sealed().line(), *lines[number + 1 :]]


def remake_all(number: int, lines: list[bytes]) -> list[bytes]:
    """Changed, and the chain after it made anew."""
    made, previous = lines[:number], None
    for line in lines[number:]:
        values = json.loads(line) | {"identity": "x", "hash": ""}
        record = Record(**(values | ({"previous": previous} if previous else {}))).sealed()
        made, previous = [*made, record.line()], record.hash
    return made


@pytest.mark.parametrize(
    ("change", "line", "sequence"),
    [
        (lambda ls: edit(1, ls), "2", "11"),
        (lambda ls: remake(0, ls), "2", "11"),
        (lambda ls: remake(1, ls), "2", "11"),
        (lambda ls: remake_all(0, ls), "2", "11"),
        (lambda ls: ls[1:], "1", "11"),
        (lambda ls: ls[:1], "1", "11"),
        (lambda ls: [ls[1], ls[0]], "1", "11"),
        (lambda ls: [ls[0], ls[0], ls[1]], "2", "10"),
        (lambda ls: [ls[0], ls[1][:-1]], "2", "11"),
        (lambda ls: [ls[0], b"{}\n", ls[1]], "2", "11"),
        (lambda ls: [ls[0] + b" ", ls[1]], "2", "11"),
    ],
)
def test_a_change_is_found_where_it_is(
    tmp_path: Path, change: Callable[[list[bytes]], list[bytes]], line: str, sequence: str
) -> None:
    folder = written(tmp_path / "audit")
    path = log_files(folder)[-1]
    path.write_bytes(b"".join(change(lines_of(path))))
    assert place(folder) == {"file": path.name, "line": line, "sequence": sequence}


def test_a_file_that_is_missing_or_in_the_wrong_place_is_found(tmp_path: Path) -> None:
    folder = written(tmp_path / "audit")
    first, second, third = log_files(folder)
    kept = second.read_bytes()
    second.unlink()
    assert place(folder) == {"file": third.name, "line": "1", "sequence": "5"}
    second.write_bytes(third.read_bytes())
    assert place(folder) == {"file": second.name, "line": "1", "sequence": "10"}
    second.write_bytes(kept)
    third.unlink()
    assert place(folder) == {"file": second.name, "line": "5", "sequence": "10"}
    first.unlink()
    assert place(folder) == {"file": second.name, "line": "1", "sequence": "0"}


def test_the_head_cannot_be_made_by_others(tmp_path: Path) -> None:
    """A chain that was made anew and sealed with another key, and a head that was changed."""
    folder = written(tmp_path / "audit")
    mine = (folder / HEAD_FILE).read_bytes()
    other = AuditLog(tmp_path / "other", Notary(tmp_path / "key", certified=False))
    other.start()
    other.close()
    (folder / HEAD_FILE).write_bytes((tmp_path / "other" / HEAD_FILE).read_bytes())
    assert place(folder) == {"field": "certificate"}
    values = json.loads(mine)
    values["head"] = b64encode(b64decode(values["head"]).replace(b'"next":12', b'"next":11')).decode()
    (folder / HEAD_FILE).write_text(json.dumps(values))
    assert place(folder) == {"field": "signature"}
    for content in (b"", b"{}", b"[1]", mine[:-30]):
        (folder / HEAD_FILE).write_bytes(content)
        assert place(folder)["file"] == HEAD_FILE
    (folder / HEAD_FILE).unlink()
    assert place(folder)["file"] == HEAD_FILE


@cache
def _sample() -> tuple[tuple[tuple[str, bytes], ...], bytes]:
    """Files of a log, and the key of its hub."""
    with TemporaryDirectory() as scratch:
        folder = written(Path(scratch) / "audit")
        key = Notary(state_folder(), certified=False).public_key
        return tuple((path.name, path.read_bytes()) for path in sorted(folder.iterdir()) if path.name != "lock"), key


@settings(max_examples=60, deadline=None)
@given(st.integers(0), st.integers(1, 255), st.sampled_from(["change", "remove", "add"]))
def test_no_byte_of_a_record_can_be_changed_removed_or_added(place: int, by: int, how: str) -> None:
    files, key = _sample()
    whole = b"".join(content for name, content in files if name != HEAD_FILE)
    at = place % len(whole)
    with TemporaryDirectory() as scratch:
        for name, content in files:
            value = content
            if name != HEAD_FILE:
                if 0 <= at < len(content):
                    changed = {"change": bytes([content[at] ^ by]), "remove": b"", "add": bytes([by, content[at]])}[how]
                    value = content[:at] + changed + content[at + 1 :]
                at -= len(content)
            (Path(scratch) / name).write_bytes(value)
        with pytest.raises(AuditBroken):
            check_log(Path(scratch), Trust(key=key))


# -- the command


def test_the_command_tells_people_and_scripts(tmp_path: Path) -> None:
    """0: whole; 1: broken, and where; 3: whole, but nobody vouches for the key."""
    folder = written(tmp_path / "audit")
    key = Notary(state_folder(), certified=False).public_key.hex()
    run = CliRunner().invoke
    assert run(app, ["verify", str(folder)]).exit_code == 3
    good = run(app, ["verify", str(folder), "--key", key, "--json"])
    told = json.loads(good.stdout)
    assert (good.exit_code, told["ok"], told["vouched"], told["num_records"], told["last"]) == (0, True, True, 12, 11)
    assert "12 records (0 to 11) in 3 files" in run(app, ["verify", str(folder), "--key", key]).stdout
    path = log_files(folder)[1]
    path.write_bytes(b"".join(edit(2, lines_of(path))))
    bad = run(app, ["verify", str(folder), "--key", key, "--json"])
    assert bad.exit_code == 1
    assert {**json.loads(bad.stdout), "error": ""} == {
        "ok": False,
        "error": "",
        "file": path.name,
        "line": "3",
        "sequence": "7",
    }
    assert isinstance(run(app, ["verify", str(folder), "--key", "ab"]).exception, ConfigError)

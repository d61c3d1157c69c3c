"""Files of a machine are checked before anything is done with them: what is wrong is named, and what to do about it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from baru_common.errors import ClockError, ConfigError, Unauthenticated
from baru_common.identity import Role
from baru_common.tls import MEMBERS, RELEASED, TlsFiles, readable_by_others, server_credentials
from support.kits import Kit, kit


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Kit:
    return kit(tmp_path_factory.mktemp("kits"))


@pytest.fixture
def folder(made: Kit) -> Path:
    """A node's folder, fresh."""
    shutil.rmtree(made.folder / "alpha", ignore_errors=True)
    return made.issue("alpha")


def write(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text)


def remove(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).unlink()


def from_another_kit(*names: str) -> Callable[[Path], object]:
    def copy(folder: Path) -> None:
        other = kit(folder / "elsewhere").issue("alpha")
        for name in names:
            (folder / name).write_bytes((other / name).read_bytes())

    return copy


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (remove("node.pem"), "there is no node.pem or observer.pem or operator.pem in"),
        (remove("node.key"), r"node\.key cannot be read: No such file"),
        (remove("ca.pem"), r"ca\.pem cannot be read: No such file"),
        (write("node.pem", "x"), r"node\.pem: it is no certificate in PEM"),
        (write("node.key", "x"), r"node\.key: it is no private key in PEM"),
        (write("ca.pem", "x"), r"ca\.pem: it is no certificate in PEM"),
        (lambda folder: (folder / "node.key").chmod(0o640), r"node\.key can be read by others"),
        (from_another_kit("node.key"), r"node\.key is not the key of .*node\.pem"),
        (from_another_kit("node.pem", "node.key"), r"node\.pem is not signed by .*ca\.pem"),
        (from_another_kit("ca.pem"), r"node\.pem is not signed by .*ca\.pem"),
    ],
)
def test_what_is_wrong_is_named(spoil: Callable[[Path], object], words: str, folder: Path) -> None:
    """The file, what it is about it, and what to do."""
    assert TlsFiles.of(folder, *MEMBERS).load(*MEMBERS).own.identity.name == "alpha"
    spoil(folder)
    with pytest.raises(ConfigError, match=words) as refused:
        TlsFiles.of(folder, *MEMBERS).load(*MEMBERS)
    assert refused.value.hint


@pytest.mark.parametrize(("mode", "found"), [(0o400, False), (0o440, False), (0o460, True), (0o444, True)])
def test_a_key_may_be_lent_to_a_group(mode: int, found: bool, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a cluster mounts a secret: of its own user, readable by the pod's group."""
    key = folder / "node.key"
    key.chmod(mode)
    owner = key.stat()
    monkeypatch.setattr("os.geteuid", lambda: owner.st_uid + 1)
    monkeypatch.setattr("os.getegid", lambda: owner.st_gid)
    assert readable_by_others(key) is found


def test_a_hub_needs_a_hubs_certificate(folder: Path) -> None:
    """Under whatever name the files are given."""
    with pytest.raises(ConfigError, match=r"there is no hub\.pem"):
        TlsFiles.of(folder, Role.HUB)
    with pytest.raises(ConfigError, match=r"node\.pem is of a node, must be of a hub"):
        server_credentials(TlsFiles(folder / "node.pem", folder / "node.key", folder / "ca.pem"))


def test_dates_are_judged_by_a_clock_that_may_be_wrong(folder: Path) -> None:
    """Before the certificate, or before this release, it is the clock; afterwards it may be either."""
    found = TlsFiles.of(folder, *MEMBERS).load(*MEMBERS)
    starts, ends = found.own.starts, found.own.ends
    for now in (datetime(1970, 1, 1, tzinfo=timezone.utc), RELEASED - timedelta(1), starts - timedelta(seconds=1)):
        problem = found.time_problem(now)
        assert isinstance(problem, ClockError)
        assert f"it says {now:%Y-%m-%d}" in problem.message
        assert "set the clock" in problem.hint
    assert found.time_problem(starts) is None
    assert found.time_problem(ends - timedelta(seconds=1)) is None
    expired = found.time_problem(ends)
    assert isinstance(expired, Unauthenticated)
    assert "alpha/node.pem expired on" in expired.message


def test_files_are_read_again_when_they_change(made: Kit, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """While they are half replaced, what was read before stays, which is said once."""
    watched = TlsFiles.of(folder, *MEMBERS).watched(*MEMBERS)
    before = watched.value.own.serial
    key = (folder / "node.key").read_bytes()
    assert not watched.refresh()
    made.issue("alpha", replace=True)
    new_key = (folder / "node.key").read_bytes()
    (folder / "node.key").write_bytes(key)
    assert not watched.refresh()
    assert not watched.refresh()
    assert watched.value.own.serial == before
    assert caplog.text.count("is not the key of") == 1
    (folder / "node.key").write_bytes(new_key)
    assert watched.refresh()
    assert watched.value.own.serial != before
    (folder / "node.pem").unlink()
    assert not watched.refresh()

"""The parts of a kit, one by one: what it is told, its seal, what it does to a machine. The whole of it, on machines of
its own, is in tests/acceptance/test_kit.py."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from baru_common.errors import ConfigError
from baru_hub.ca import Authority
from baru_hub.kit import wheelhouse
from baru_hub.kit.actions import Action, Copy, Folder, Link, Put, apply
from baru_hub.kit.boards import BOARDS
from baru_hub.kit.install import Part
from baru_hub.kit.manifest import Manifest
from baru_hub.kit.seal import SUMS, check_seal, digest_of, seal
from baru_hub.kit.wheelhouse import Pin

_GOOD = """
[kit]
name = "tent"
[model.target]
source = "model"
sha256 = "{digest}"
[hub.hub-1]
address = "10.0.0.1"
target = "target"
[node.node-1]
address = "10.0.0.2"
""".format(digest="0" * 64)


def manifest(folder: Path, text: str) -> Manifest:
    (folder / "kit.toml").write_text(text)
    return Manifest.read(folder / "kit.toml")


def test_a_manifest_is_read_as_it_is_written(tmp_path: Path) -> None:
    read = manifest(tmp_path, _GOOD)
    assert list(read.machines) == ["hub-1", "node-1"]
    assert read.hubs_of(read.nodes["node-1"]) == ("hub-1",)
    assert not read.nodes["node-1"].needs_torch


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('[kit]\nname = "tent"', "", r"no table \[kit\]"),
        ('name = "tent"', 'name = "a tent"', "a tent"),
        ('sha256 = "' + "0" * 64, 'sha256 = "abc', "sha256 is 'abc'"),
        ("[hub.hub-1]", "[node.hub-1]", "target"),
        ('[hub.hub-1]\naddress = "10.0.0.1"\ntarget = "target"', "", "no hub"),
        ('target = "target"', 'target = "other"', "hub.hub-1 names the model 'other'"),
        ('target = "target"', 'target = "target"\nboard = "nano"', "there is no board 'nano'"),
        ('target = "target"', 'target = "target"\nrun = "docker"', "hub.hub-1.run is wrong"),
        ('target = "target"', 'target = "target"\nmemory_mb = -1', "memory_mb is -1"),
        ('target = "target"', 'target = "target"\ntaget = 1', "taget"),
        ('address = "10.0.0.2"', 'address = ""', "node.node-1: address is empty"),
        ('address = "10.0.0.2"', 'address = "10.0.0.2"\nhubs = ["hub-9"]', "node.node-1 names the hub 'hub-9'"),
        ("[node.node-1]", "[node.hub-1]", "hub-1 is a hub and a node"),
        ("[node.node-1]", "[nodes.node-1]", "nodes"),
    ],
)
def test_what_is_wrong_with_a_manifest_is_named(old: str, new: str, words: str, tmp_path: Path) -> None:
    assert old in _GOOD
    with pytest.raises(ConfigError, match=words) as refused:
        manifest(tmp_path, _GOOD.replace(old, new, 1))
    assert "kit.toml" in refused.value.message


@pytest.fixture
def sealed(tmp_path: Path) -> Path:
    """A sealed folder, with one of a machine in it that has a seal of its own."""
    folder = tmp_path / "kit"
    for name in ("wheels/a.whl", "kit.toml", "machines/node-1/key"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    seal(folder, "kit tent", Authority.create(tmp_path / "ca", "tent"))
    return folder


def another_authority(folder: Path) -> None:
    """Sealed again by somebody else: whole, but of another fingerprint."""
    seal(folder, "kit tent", Authority.create(folder.parent / "other", "tent"))


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda folder: (folder / "kit.toml").write_text("x"), "kit.toml was changed"),
        (lambda folder: (folder / "kit.toml").unlink(), "kit.toml is missing"),
        (lambda folder: (folder / "wheels" / "b.whl").write_text("x"), "wheels/b.whl is not of this kit"),
        (lambda folder: (folder / "wheels" / "b.whl").symlink_to("/etc/passwd"), "wheels/b.whl is not of this kit"),
        (lambda folder: (folder / SUMS).write_text("# kit tent\n"), f"{SUMS} is not what the authority signed"),
    ],
)
def test_what_was_done_to_a_sealed_folder_is_named(spoil: Callable[[Path], object], problem: str, sealed: Path) -> None:
    assert check_seal(sealed).problems == ()
    spoil(sealed)
    assert problem in check_seal(sealed).problems


def test_a_machines_own_folder_is_not_of_the_kits_seal(sealed: Path) -> None:
    (sealed / "machines" / "node-1" / "key").write_text("another")
    assert check_seal(sealed).problems == ()


def test_a_seal_of_somebody_else_has_another_fingerprint(sealed: Path) -> None:
    before = check_seal(sealed)
    another_authority(sealed)
    after = check_seal(sealed)
    assert after.problems == before.problems == ()
    assert after.fingerprint != before.fingerprint


def test_a_folder_without_a_seal_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no folder of a kit"):
        check_seal(tmp_path)


def test_a_machine_is_found_by_name_or_by_its_role(tmp_path: Path) -> None:
    facts = '{{"name": "{}", "role": "{}", "run": "systemd", "release": "1", "models": [], "memory_mb": 0}}'
    for name, role in (("hub-1", "hub"), ("node-1", "node"), ("node-2", "node")):
        (tmp_path / "machines" / name).mkdir(parents=True)
        (tmp_path / "machines" / name / "machine.json").write_text(facts.format(name, role))
    assert Part.find(tmp_path, "hub").name == "hub-1"
    assert Part.find(tmp_path, "node-2").unit == "baru-node.service"
    with pytest.raises(ConfigError, match="several machines node") as refused:
        Part.find(tmp_path, "node")
    assert "node-1, node-2" in refused.value.hint
    with pytest.raises(ConfigError, match="no machine node-9"):
        Part.find(tmp_path, "node-9")
    (tmp_path / "machines" / "hub-1" / "machine.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"machine\.json is damaged"):
        Part.find(tmp_path, "hub")


def actions_in(folder: Path) -> list[Action]:
    source = folder / "source"
    source.mkdir(exist_ok=True)
    (source / "weights").write_text("secret to its owner")
    (source / "weights").chmod(0o600)
    user = os.getuid()
    return [
        Put(folder / "etc" / "settings", b"text", 0o640, user),
        Folder(folder / "keys", user),
        Copy(source, folder / "opt" / "model"),
        Link(folder / "opt" / "current", folder / "opt" / "release-1"),
    ]


def test_a_second_run_does_nothing(tmp_path: Path) -> None:
    actions = actions_in(tmp_path)
    assert apply(actions, dry_run=True) == actions
    assert not (tmp_path / "etc").exists()
    assert apply(actions, dry_run=False) == actions
    assert apply(actions, dry_run=False) == []
    assert (tmp_path / "etc" / "settings").stat().st_mode & 0o777 == 0o640
    assert (tmp_path / "keys").stat().st_mode & 0o777 == 0o700


def test_a_service_may_read_a_model_whoever_could_read_the_source(tmp_path: Path) -> None:
    apply(actions_in(tmp_path), dry_run=False)
    copied = tmp_path / "opt" / "model"
    assert copied.stat().st_mode & 0o005 == 0o005
    assert (copied / "weights").stat().st_mode & 0o004
    assert digest_of(copied) == digest_of(tmp_path / "source")


@pytest.mark.parametrize(
    ("spoil", "number"),
    [
        (lambda root: (root / "etc" / "settings").write_text("other"), 0),
        (lambda root: (root / "etc" / "settings").chmod(0o666), 0),
        (lambda root: (root / "keys").chmod(0o755), 1),
        (lambda root: (root / "opt" / "model" / "weights").write_text("other"), 2),
        (lambda root: shutil.rmtree(root / "opt" / "model"), 2),
        (lambda root: (root / "opt" / "current").unlink(), 3),
    ],
)
def test_what_was_changed_is_put_right_and_nothing_else(
    spoil: Callable[[Path], object], number: int, tmp_path: Path
) -> None:
    actions = actions_in(tmp_path)
    apply(actions, dry_run=False)
    spoil(tmp_path)
    assert apply(actions, dry_run=False) == [actions[number]]
    assert all(action.is_done for action in actions)


def test_what_is_no_link_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "current").write_text("somebody's")
    with pytest.raises(ConfigError, match="is there and is no link"):
        Link(tmp_path / "current", tmp_path).do()


def test_the_same_packages_are_not_asked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a lock says of the same wheel is taken while its files are there: a kit is changed without a network."""
    wheel, wheels, asked = tmp_path / "own.whl", tmp_path / "wheels", list[str]()
    wheel.write_text("own")
    wheels.mkdir()
    (wheels / "a.whl").write_text("a")
    pins = [Pin("a", "1.0", digest_of(wheels / "a.whl"))]

    def resolve(*_: object) -> list[Pin]:
        asked.append("resolve")
        return pins

    monkeypatch.setattr(wheelhouse, "resolve", resolve)
    monkeypatch.setattr(wheelhouse, "fetch", lambda *_: asked.append("fetch"))
    board, lock = BOARDS["orin"], wheels / "orin.txt"
    for _ in range(2):
        assert wheelhouse.packages(wheel, ("serve",), board, wheels, lock) == pins
    assert asked == ["resolve"]
    wheelhouse.packages(wheel, ("serve", "chat"), board, wheels, lock)
    assert asked == ["resolve", "resolve"]
    (wheels / "a.whl").write_text("damaged")
    wheelhouse.packages(wheel, ("serve", "chat"), board, wheels, lock)
    assert asked == ["resolve", "resolve", "fetch"]

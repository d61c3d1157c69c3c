"""`baru-hub kit install` and `kit uninstall`: one machine's part of a kit, put on it and taken away again."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baru_common.errors import ConfigError
from baru_common.identity import Role

from . import places
from .actions import Action, Copy, Folder, Link, Put, User, apply, run
from .manifest import Run
from .seal import SEALED_APART, check_seal, digest_of, fingerprint

_USERS = f"g video 44\ng render -\ng baru {places.USER_ID}\nu baru {places.USER_ID}:baru Baru {places.STATE}\n"
_PROFILE = f"export BARU_CONFIG={places.SETTINGS}\n"
_SYSTEMD_RUNS = Path("/run/systemd/system")
_KEPT_RELEASES = 2


@dataclass(frozen=True)
class Part:
    """What a bundle holds for one machine."""

    bundle: Path
    folder: Path
    name: str
    role: Role
    run: Run
    release: str
    models: tuple[str, ...]
    memory_mb: int

    @classmethod
    def find(cls, bundle: Path, named: str) -> Part:
        """Find a machine by its name, or by its role when the bundle holds one of it; ConfigError else."""
        parts = [cls._read(bundle, folder) for folder in sorted((bundle / SEALED_APART).glob("*/machine.json"))]
        found = [part for part in parts if part.name == named] or [part for part in parts if part.role.value == named]
        if len(found) != 1:
            names = ", ".join(part.name for part in found or parts) or "none"
            raise ConfigError(
                f"{bundle} has {'several machines' if found else 'no machine'} {named}", hint=f"name one: {names}"
            )
        return found[0]

    @classmethod
    def _read(cls, bundle: Path, file: Path) -> Part:
        try:
            facts: dict[str, Any] = json.loads(file.read_text())
            return cls(
                bundle=bundle,
                folder=file.parent,
                name=facts["name"],
                role=Role(facts["role"]),
                run=Run(facts["run"]),
                release=facts["release"],
                models=tuple(facts["models"]),
                memory_mb=facts["memory_mb"],
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{file} is damaged: {error}", hint="check the bundle: `baru-hub kit verify`") from error

    @property
    def unit(self) -> str:
        """Name of its service."""
        return f"baru-{self.role.value}.service"

    @property
    def release_folder(self) -> Path:
        return places.RELEASES / self.release

    def check(self, trusted: str | None) -> str:
        """Check the seals of the bundle and of this machine's folder, and return the authority's fingerprint.

        ConfigError when something was changed, or it is not the `trusted` authority's.
        """
        seals = [check_seal(folder) for folder in (self.bundle, self.folder)]
        for seal in seals:
            if seal.problems:
                raise ConfigError(
                    f"{seal.what}: {seal.problems[0]}", hint="copy the bundle again from where it was built"
                )
        if len({seal.fingerprint for seal in seals}) > 1:
            raise ConfigError(f"{self.folder} is of another kit than {self.bundle}", hint="copy the bundle again")
        found = seals[0].fingerprint
        if trusted and found != trusted.upper():
            raise ConfigError(
                f"the bundle is signed by {found}, not by {trusted}",
                hint="compare it with what `baru-hub kit build` has printed; if they differ, use nothing of it",
            )
        return found


def known_fingerprint() -> str | None:
    """Return the fingerprint of the authority that this machine trusts already, if it does any."""
    try:
        return fingerprint((places.TLS / "ca.pem").read_bytes())
    except (OSError, ValueError):
        return None


def plan(part: Part) -> list[Action]:
    """Return all that is to be so on the machine, in order: what runs changes last."""
    models = part.bundle / "models"
    actions: list[Action] = [Copy(models / name, places.MODELS / name) for name in part.models]
    if part.run is Run.SYSTEMD:
        actions += [Put(places.USERS, _USERS.encode()), User("baru", places.USER_ID)]
    owner = places.USER_ID
    actions.append(Put(places.SETTINGS, (part.folder / "baru.toml").read_bytes()))
    actions.append(Put(places.MANIFEST, (part.bundle / places.MANIFEST.name).read_bytes()))
    for path in (places.ALLOWED, places.POSTURE):
        if (part.folder / path.name).exists():
            actions.append(Put(path, (part.folder / path.name).read_bytes()))
    actions.append(Folder(places.TLS, owner))
    actions += [
        Put(places.TLS / file.name, file.read_bytes(), 0o600, owner) for file in sorted((part.folder / "tls").iterdir())
    ]
    actions += _service(part)
    commands = ("baru-hub", "baru-micro")
    return [
        *actions,
        Put(places.PROFILE, _PROFILE.encode()),
        *(Link(places.COMMANDS / name, places.CURRENT / "bin" / name) for name in commands),
        Link(places.CURRENT, part.release_folder),
    ]


def _service(part: Part) -> list[Action]:
    """What runs it: a unit, or the manifests and what makes them this machine's."""
    deploy, to = part.bundle / "deploy", places.SETTINGS.parent / part.run.value
    if part.run is Run.COMPOSE:
        environment = (part.folder / "compose.env").read_bytes()
        return [*_files(deploy / "compose", to), Put(to / ".env", environment)]
    if part.run is Run.K3S:
        return [Folder(places.STATE, places.USER_ID), *_files(deploy / "k3s", to), *_instance(part, to / "instance")]
    limit = f"MemoryMax={part.memory_mb}M\n" if part.memory_mb else ""
    return [
        Put(places.UNITS / part.unit, (deploy / "systemd" / part.unit).read_bytes()),
        Put(places.UNITS / f"{part.unit}.d" / "kit.conf", f"[Service]\n{limit}".encode()),
    ]


def _files(source: Path, to: Path) -> list[Action]:
    found = sorted(path for path in source.rglob("*") if path.is_file())
    return [Put(to / path.relative_to(source), path.read_bytes()) for path in found]


def _instance(part: Part, to: Path) -> list[Action]:
    """The hub's own kustomization, with what it makes a ConfigMap and a Secret of."""
    if part.role is not Role.HUB:
        return []
    names = ("kustomization.yaml", *places.SETTINGS_FILES)
    plain = [Put(to / name, (part.folder / name).read_bytes()) for name in names if (part.folder / name).exists()]
    keys = [Put(to / file.name, file.read_bytes(), 0o600) for file in sorted((part.folder / "tls").iterdir())]
    return [*plain, *keys]


def install(part: Part, say: Callable[[str], None], *, dry_run: bool, start: bool) -> None:
    """Put a machine's part on it and start its service; what was done already is left alone.

    When the service does not come up with a new release, the release before is put back: ConfigError.
    """
    if not dry_run and os.geteuid() != 0:
        raise ConfigError("setting up a machine takes root", hint="use sudo; --dry-run shows what would be done")
    if not dry_run and not (part.release_folder / ".complete").exists():
        raise ConfigError(f"{part.release_folder} is not there", hint="use ./install.sh of the bundle: it makes it")
    os.umask(0o022)
    before = places.CURRENT.readlink() if places.CURRENT.is_symlink() else None
    actions = plan(part)
    changed = apply(actions, dry_run=dry_run)
    for action in changed:
        say(f"{'would ' if dry_run else ''}{action}")
    if not dry_run:
        _record(part, actions)
    if part.run is Run.SYSTEMD and start:
        again = any(not _read_again(action) for action in changed)
        _start(part, before, say, dry_run=dry_run, again=again)
    if not dry_run:
        _forget_releases(part.release_folder, before)
    if not changed:
        say(f"{part.name} is as the bundle says")


def _read_again(action: Action) -> bool:
    """Whether a running service sees the change by itself."""
    path = action.path if isinstance(action, Put) else None
    return path is not None and (path in (places.ALLOWED, places.MANIFEST) or path.parent == places.TLS)


def _start(part: Part, before: Path | None, say: Callable[[str], None], *, dry_run: bool, again: bool) -> None:
    if not _SYSTEMD_RUNS.exists():
        say(f"systemd does not run here: {part.unit} was not started")
        return
    if dry_run:
        say(f"would {'restart' if again else 'start'} {part.unit}")
        return
    run("systemctl", "daemon-reload")
    run("systemctl", "enable", "--quiet", part.unit)
    try:
        run("systemctl", "restart" if again else "start", part.unit)
    except ConfigError as error:
        if before is None or before == part.release_folder:
            raise ConfigError(f"{part.unit} does not start", hint=f"see `journalctl --unit {part.unit}`") from error
        say(f"{part.unit} does not start with {part.release}: back to {before.name}")
        Link(places.CURRENT, before).do()
        run("systemctl", "restart", part.unit)
        raise ConfigError(
            f"release {part.release} does not start; {before.name} runs again",
            hint=f"see `journalctl --unit {part.unit}`",
        ) from error
    say(f"{part.unit} runs")


def _record(part: Part, actions: Sequence[Action]) -> None:
    """Write down what is ours here, with digests, for `uninstall`."""
    files = {str(a.path): digest_of(a.path) for a in actions if isinstance(a, (Put, Copy))}
    links = [str(a.path) for a in actions if isinstance(a, Link)]
    record = {"name": part.name, "role": part.role.value, "run": part.run.value, "unit": part.unit}
    text = json.dumps(record | {"files": files, "links": links}, indent=1)
    Put(places.RECORD, text.encode()).do()


def _forget_releases(current: Path, before: Path | None) -> None:
    kept = {current, before}
    found = sorted(places.RELEASES.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
    for folder in [folder for folder in found if folder not in kept][max(0, _KEPT_RELEASES - len(kept - {None})) :]:
        shutil.rmtree(folder)


def recorded() -> dict[str, Any]:
    """Return what is installed here; ConfigError when nothing is."""
    try:
        found: dict[str, Any] = json.loads(places.RECORD.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError("no part of a kit is installed here", hint="./install.sh of a bundle installs one") from error
    return found


def uninstall(say: Callable[[str], None], *, purge: bool, dry_run: bool) -> None:
    """Stop the service and remove what `install` put here. A file that was changed since stays, and is said; so does
    the state (audit log, cache) without `purge`."""
    if not dry_run and os.geteuid() != 0:
        raise ConfigError("this takes root", hint="use sudo; --dry-run shows what would be done")
    record = recorded()
    if record["run"] == Run.SYSTEMD.value and _SYSTEMD_RUNS.exists():
        say(f"{'would ' if dry_run else ''}stop {record['unit']}")
        if not dry_run:
            run("systemctl", "disable", "--now", "--quiet", record["unit"])
    ours = [Path(name) for name, digest in record["files"].items() if _is_ours(Path(name), digest, say)]
    for path in [*ours, *map(Path, record["links"]), places.PROGRAM, *([places.STATE] if purge else [])]:
        say(f"{'would ' if dry_run else ''}remove {path}")
        if not dry_run:
            _take_away(path)


def _is_ours(path: Path, digest: str, say: Callable[[str], None]) -> bool:
    if not path.exists():
        return False
    if digest_of(path) == digest:
        return True
    say(f"{path} was changed since and stays")
    return False


def _take_away(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    for folder in (path.parent, path.parent.parent):
        if folder.name.startswith("baru") or folder in (places.TLS, places.MODELS):
            _rmdir(folder)


def _rmdir(folder: Path) -> None:
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()

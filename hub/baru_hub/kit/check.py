"""`baru-hub kit check`: the field test. Every machine examines itself; whoever asks gathers what they found."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from typing import Any

from baru_common.config_file import ConfigFile
from baru_common.errors import BaruError, ConfigError
from baru_common.identity import Role
from baru_common.tls import TlsFiles
from baru_hub.config import HubConfig

from . import places
from .install import recorded
from .manifest import Manifest

DEFAULT_SSH = "ssh -o BatchMode=yes {address}"
_OWN = ("baru-hub", "kit", "check", "--json")
_TIMEOUT_S = 1500.0
_HTTP_S = 5.0


@dataclass(frozen=True)
class Found:
    """One thing that was looked at, as the node's doctor says it."""

    name: str
    ok: bool
    found: str
    advice: str = ""


def check_this() -> list[Found]:
    """Examine this machine; ConfigError when no part of a kit is installed here."""
    role = Role(recorded()["role"])
    return list(_check_hub() if role is Role.HUB else _check_node())


def check_all(manifest: Manifest, ssh: str) -> Iterator[tuple[str, list[Found]]]:
    """Have each machine examine itself, hubs first; `ssh` is how it is reached, with {name} and {address}."""
    here = recorded_name()
    for name, machine in manifest.machines.items():
        if name == here:
            yield name, check_this()
            continue
        reach = [word.format(name=name, address=machine.address) for word in shlex.split(ssh)]
        yield name, _asked((*reach, *_OWN))


def recorded_name() -> str | None:
    """Return this machine's name in its kit; None when it is no part of one."""
    try:
        return str(recorded()["name"])
    except ConfigError:
        return None


def as_json(found: Mapping[str, Sequence[Found]]) -> dict[str, object]:
    """What scripts, and other machines, are told."""
    ok = all(one.ok for checks in found.values() for one in checks)
    return {"ok": ok, "machines": {name: [asdict(one) for one in checks] for name, checks in found.items()}}


def _check_hub() -> Iterator[Found]:
    config = ConfigFile.read(places.SETTINGS).settings("hub", HubConfig, {})
    if config.tls:
        yield _certificate(TlsFiles.of(config.tls, Role.HUB))
    yield _ready(f"http://{config.health}/readyz")


def _certificate(files: TlsFiles) -> Found:
    try:
        credentials = files.load(Role.HUB)
        if problem := credentials.time_problem():
            raise problem
    except BaruError as error:
        return Found("certificate", ok=False, found=error.message, advice=error.hint)
    left = credentials.own.ends - datetime.now(timezone.utc)
    return Found("certificate", ok=True, found=f"{credentials.own.identity}, for {left.days} more days")


def _ready(url: str) -> Found:
    try:
        with urllib.request.urlopen(url, timeout=_HTTP_S) as answer:  # noqa: S310
            return Found("ready", ok=True, found=answer.read(200).decode(errors="replace").strip())
    except urllib.error.HTTPError as error:
        said = error.read(200).decode(errors="replace").strip()
        return Found("ready", ok=False, found=said or str(error), advice="wait until the target is loaded; see its log")
    except OSError as error:
        return Found("ready", ok=False, found=f"{url}: {error}", advice="is it running? systemctl status baru-hub")


def _check_node() -> list[Found]:
    command = (sys.executable, "-m", "baru_micro.cli", "doctor", "--cut", "--json", "--config", str(places.SETTINGS))
    told = _told(command)
    hubs = told.get("hubs", [told])
    return [Found(**check) for hub in hubs for check in hub["checks"]]


def _asked(command: Sequence[str]) -> list[Found]:
    """Ask another machine; one that does not answer is a finding, too."""
    try:
        told = _told(command)
        ((_, checks),) = told["machines"].items()
        return [Found(**check) for check in checks]
    except (ConfigError, KeyError, TypeError, ValueError) as error:
        advice = "can it be reached? `kit check --ssh` says how"
        return [Found("answers", ok=False, found=str(error), advice=advice)]


def _told(command: Sequence[str]) -> dict[str, Any]:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)  # noqa: S603
        told: dict[str, Any] = json.loads(done.stdout)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(str(error)) from error
    except ValueError as error:
        said = done.stderr.strip().splitlines()
        raise ConfigError(f"{shlex.join(command)}: {said[-1] if said else 'no answer'}") from error
    return told

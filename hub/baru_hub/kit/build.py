"""`baru-hub kit build`: from kit.toml to a folder that sets up every machine without a network.

    SHA256SUMS SHA256SUMS.sig ca.pem    the seal of all but `machines`
    install.sh                          puts a machine's part on it, from nothing but Python
    kit.toml sbom.cdx.json              what the kit is, and what it consists of
    wheels/                             packages of every kind of machine
    models/NAME/                        models, as their digests say
    deploy/                             units, manifests, images: what the package has
    machines/NAME/                      settings, list of packages, certificate and key of one machine; its own seal

A folder that was built before is brought up to date: packages and models that are there stay, so do certificates.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import shutil
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path

from baru_common import __version__
from baru_common.certificates import Certificate
from baru_common.errors import ConfigError, ModelFileError
from baru_common.identity import Role
from baru_common.model_files import locate
from baru_common.whole_files import write_atomically
from baru_hub.ca import Authority

from . import places, render
from .boards import board
from .manifest import HubMachine, Manifest, Model, Run
from .sbom import sbom
from .seal import SEALED_APART, digest_of, fingerprint, seal
from .wheelhouse import Pin, own_wheel, packages, requirements

OPERATOR = "operator"
"""Who looks after the kit: a certificate of its own, for console and metrics."""
RENEW_BEFORE = timedelta(days=120)
"""A certificate with less time left is made anew when a kit is built again."""
_CHECKS = {Role.HUB: "baru_hub.cli", Role.NODE: "baru_micro.cli"}
Say = Callable[[str], None]


class Bundle:
    """One run of `kit build`."""

    def __init__(self, manifest: Manifest, authority: Authority, out: Path, say: Say) -> None:
        """ConfigError when the authority is that of another kit."""
        if authority.kit != manifest.kit.name:
            raise ConfigError(
                f"the authority in {authority.folder} is of kit {authority.kit}, not {manifest.kit.name}",
                hint="give the folder of this kit's authority: --ca",
            )
        self.manifest, self.authority, self.out, self._say = manifest, authority, out, say

    def build(self, wheel: Path | None = None, renew: tuple[str, ...] = ()) -> str:
        """Make everything, and return the fingerprint that tells this kit's folders from anybody else's.

        `wheel`: of this project; None makes it from the source tree. `renew`: machines that get new certificates.
        """
        self.out.mkdir(mode=0o700, parents=True, exist_ok=True)
        model_files = self._models()
        for name in self.manifest.machines:
            self._machine(name, model_files, renew=name in renew)
        self._certificate(OPERATOR, Role.OPERATOR, renew=OPERATOR in renew)
        self._forget_others()
        pins = self._packages(wheel)
        write_atomically(self.out / "sbom.cdx.json", sbom(self.manifest, pins).encode())
        write_atomically(self.out / "kit.toml", self.manifest.path.read_bytes())
        self._copied(places.deploy_file("kit", "install.sh"), self.out / "install.sh")
        for part in ("systemd", "compose", "images", "k3s"):
            self._copied(places.deploy_file(part), self.out / "deploy" / part)
        return self._seal()

    # -- models

    def _models(self) -> dict[str, str]:
        """Copy each model, and return where it will be on a machine."""
        return {name: self._model(name, model) for name, model in self.manifest.models.items()}

    def _model(self, name: str, model: Model) -> str:
        source = self._source(model.source)
        to = self.out / "models" / name
        if source.is_file():
            to = to / source.name
        if not (to.exists() and digest_of(to) == model.sha256):
            self._say(f"model {name}: {source}")
            self._copied(source, to)
            if (found := digest_of(to)) != model.sha256:
                shutil.rmtree(self.out / "models" / name)
                raise ConfigError(
                    f"model.{name}: {source} has the digest {found}, not {model.sha256}",
                    hint="it is another file, or a damaged one; if it is the one you mean, write its digest",
                )
        return str(places.MODELS / to.relative_to(self.out / "models"))

    def _source(self, named: str) -> Path:
        beside = self.manifest.path.parent / Path(named).expanduser()
        if beside.exists():
            return beside
        try:
            return locate(named).path
        except ModelFileError as error:
            raise ConfigError(f"there is no model {named}", hint=error.hint) from error

    # -- machines

    def _machine(self, name: str, model_files: dict[str, str], *, renew: bool) -> None:
        folder = self.out / SEALED_APART / name
        manifest, role = self.manifest, self.manifest.role(name)
        self._certificate(name, role, renew=renew)
        write_atomically(folder / "baru.toml", render.settings(manifest, name, model_files).encode())
        if role is Role.HUB:
            write_atomically(folder / "allow", render.allowed(manifest).encode())
            if manifest.kit.posture:
                self._copied(manifest.path.parent / manifest.kit.posture, folder / "posture.toml")
        self._for_containers(name, folder)
        _check_settings(name, role, folder / "baru.toml")

    def _for_containers(self, name: str, folder: Path) -> None:
        """Write what compose or k3s has to know, and a key for the endpoint of a node; it stays the same."""
        manifest, role, run = self.manifest, self.manifest.role(name), self.manifest.machines[name].run
        if role is Role.NODE and manifest.machines[name].in_container:
            keys = folder / "tls" / places.API_KEYS.name
            if not keys.exists():
                write_atomically(keys, f"{secrets.token_urlsafe(32)}\n".encode())
        if run is Run.COMPOSE:
            write_atomically(folder / "compose.env", render.compose_environment(manifest, name).encode())
        elif run is Run.K3S and role is Role.HUB:
            files = [file for file in places.SETTINGS_FILES if (folder / file).exists()]
            keys_of = [file.name for file in (folder / "tls").iterdir()]
            text = render.k3s_instance(manifest, name, files, keys_of)
            write_atomically(folder / "kustomization.yaml", text.encode())

    def _certificate(self, name: str, role: Role, *, renew: bool) -> None:
        """Issue one, unless there is one that holds for long enough."""
        folder = self.out / SEALED_APART / name / "tls"
        there = folder / f"{role.value}.pem"
        machine = self.manifest.machines.get(name)
        addresses = [machine.address] if isinstance(machine, HubMachine) else []
        if there.exists() and not renew:
            found = Certificate.read(there.read_bytes())
            if found.ends - datetime.now(timezone.utc) > RENEW_BEFORE and set(addresses) <= set(found.hosts):
                self.authority.publish(folder)
                return
        self._say(f"certificate of {role.value} {name}")
        self.authority.issue(name, role, folder, addresses=addresses, replace=True)

    def _forget_others(self) -> None:
        """Machines that the kit does not have any more."""
        for folder in (self.out / SEALED_APART).iterdir():
            if folder.name not in (*self.manifest.machines, OPERATOR):
                self._say(f"{folder.name} is no machine of the kit any more: its folder goes; revoke its certificate")
                shutil.rmtree(folder)

    # -- packages

    def _packages(self, wheel: Path | None) -> list[Pin]:
        """Have the wheels of every kind of machine there, and no others; write each machine's list."""
        found: dict[str, list[Pin]] = {}
        scratch, wheels = self.out / ".wheel", self.out / "wheels"
        wheels.mkdir(exist_ok=True)
        shutil.rmtree(scratch, ignore_errors=True)
        try:
            own = wheel or own_wheel(scratch, wheels)
            for name, machine in self.manifest.machines.items():
                kind = render.kind(machine)
                if kind not in found:
                    self._say(f"packages for {kind}")
                    lock = wheels / f"{kind}.txt"
                    found[kind] = packages(own, render.extras(machine), board(machine.board), wheels, lock)
                self._list(name, requirements(found[kind]))
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        pins = [pin for pins in found.values() for pin in pins]
        needed = {pin.sha256 for pin in pins}
        for file in wheels.iterdir():
            if digest_of(file) not in needed and file.stem not in found:
                file.unlink()
        return pins

    def _list(self, name: str, packages: str) -> None:
        """Write what a machine installs, and the name of its release: it says which packages that are."""
        folder = self.out / SEALED_APART / name
        release = f"{__version__}-{hashlib.sha256(packages.encode()).hexdigest()[:8]}"
        facts = json.dumps(render.facts(self.manifest, name, release), indent=1)
        for file, text in (("requirements.txt", packages), ("release", f"{release}\n"), ("machine.json", facts)):
            write_atomically(folder / file, text.encode())

    def _seal(self) -> str:
        kit, machines = self.manifest.kit.name, self.out / SEALED_APART
        for folder in sorted(machines.iterdir()):
            seal(folder, f"kit {kit}, machine {folder.name}, release {__version__}", self.authority)
        seal(self.out, f"kit {kit}, release {__version__}", self.authority)
        return fingerprint(self.authority.certificate_pem)

    @staticmethod
    def _copied(source: Path, to: Path) -> None:
        to.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.rmtree(to, ignore_errors=True)
            shutil.copytree(source, to)
        else:
            shutil.copy(source, to)


def _check_settings(name: str, role: Role, file: Path) -> None:
    """Have the program itself read what it will be told: a node's is another package than this one."""
    command = (sys.executable, "-m", _CHECKS[role], "settings", "--config", str(file))
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode:
        said = " ".join(done.stderr.split()).removeprefix("error: ").replace(f"{file}: ", "")
        raise ConfigError(f"{role.value}.{name}.settings: {said}")

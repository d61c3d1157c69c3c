"""`kit.toml`: what a kit consists of. Read whole and checked before anything is made."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from baru_common.config_file import ConfigFile
from baru_common.errors import ConfigError
from baru_common.identity import Identity, Role

from .boards import board

TABLES = ("kit", "model", "hub", "node")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_Settings = dict[str, dict[str, Any]]
_T = TypeVar("_T")


class Run(Enum):
    """What runs a machine's program."""

    SYSTEMD = "systemd"
    COMPOSE = "compose"
    K3S = "k3s"


@dataclass(frozen=True)
class Model:
    """A model that some machines hold."""

    source: str
    """A file or folder, relative to kit.toml; or the name of one that is known (`baru-hub serve --target`)."""
    sha256: str
    """Digest, as `baru-hub kit digest` gives it."""

    def __post_init__(self) -> None:
        if not _SHA256.fullmatch(self.sha256):
            raise ConfigError(
                f"sha256 is {self.sha256!r}", hint="write the 64 lower-case digits of `baru-hub kit digest`"
            )


@dataclass(frozen=True)
class Machine:
    """What hubs and nodes have in common."""

    address: str
    """Its name or IP address on the kit's network."""
    board: str = "this"
    run: Run = Run.SYSTEMD
    memory_mb: int = 0
    """Most memory of its service; 0: no limit."""
    settings: _Settings = field(default_factory=dict)
    """More for its settings file, by table."""

    @property
    def in_container(self) -> bool:
        """It has an address of its own that is known only once it runs."""
        return self.run is not Run.SYSTEMD

    def __post_init__(self) -> None:
        board(self.board)
        if not self.address:
            raise ConfigError("address is empty", hint="write the machine's name or IP address on the kit's network")
        if self.memory_mb < 0:
            raise ConfigError(f"memory_mb is {self.memory_mb}, must be at least 0")


@dataclass(frozen=True)
class HubMachine(Machine):
    """Table [hub.NAME]."""

    target: str = ""
    """Name of its model; empty: as `settings.target` says, for a simulated one."""

    @property
    def models(self) -> tuple[str, ...]:
        return (self.target,) if self.target else ()


@dataclass(frozen=True)
class NodeMachine(Machine):
    """Table [node.NAME]."""

    drafter: str = "suffix"
    hubs: tuple[str, ...] = ()
    """Names of its hubs, the first choice first; none: all, as the file has them."""
    models: tuple[str, ...] = ()
    """Models for its drafter: NAME is at /opt/baru/models/NAME."""

    @property
    def needs_torch(self) -> bool:
        """A drafter with a model."""
        return any(part.split(":")[0] not in ("suffix", "ngram") for part in self.drafter.split("+"))


@dataclass(frozen=True)
class Kit:
    """Table [kit]."""

    name: str
    posture: Path | None = None
    """A posture document for its hubs, relative to kit.toml; none: the shipped one."""


@dataclass(frozen=True)
class Manifest:
    """A whole kit."""

    path: Path
    kit: Kit
    models: Mapping[str, Model]
    hubs: Mapping[str, HubMachine]
    nodes: Mapping[str, NodeMachine]

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """Read and check a file; ConfigError names what is wrong, and where."""
        file = ConfigFile.read(path, TABLES)
        manifest = cls(
            path,
            file.settings("kit", Kit, {}) if file.has("kit") else _missing(path),
            _each(file, "model", Model),
            _each(file, "hub", HubMachine),
            _each(file, "node", NodeMachine),
        )
        manifest._check()
        return manifest

    @property
    def machines(self) -> dict[str, HubMachine | NodeMachine]:
        """By name, hubs first."""
        return {**self.hubs, **self.nodes}

    def role(self, name: str) -> Role:
        """What a machine is there for."""
        return Role.HUB if name in self.hubs else Role.NODE

    def hubs_of(self, node: NodeMachine) -> tuple[str, ...]:
        """Names of a node's hubs, the first choice first."""
        return node.hubs or tuple(self.hubs)

    def _check(self) -> None:
        if not self.hubs:
            raise ConfigError(f"{self.path}: no hub", hint="a kit has at least one table [hub.NAME]")
        for name, machine in self.machines.items():
            self._check_name(name)
            for model in machine.models:
                self._known(f"{self.role(name).value}.{name}", "model", model, self.models)
        for name in self.hubs.keys() & self.nodes.keys():
            raise ConfigError(f"{self.path}: {name} is a hub and a node", hint="give each machine a name of its own")
        for name, node in self.nodes.items():
            for hub in node.hubs:
                self._known(f"node.{name}", "hub", hub, self.hubs)

    def _check_name(self, name: str) -> None:
        try:
            Identity(self.kit.name, self.role(name), name)
        except ConfigError as error:
            raise ConfigError(f"{self.path}: {error.message}", hint=error.hint) from None

    def _known(self, where: str, what: str, name: str, there: Mapping[str, object]) -> None:
        if name not in there:
            names = ", ".join(there) or "none"
            raise ConfigError(f"{self.path}: {where} names the {what} {name!r}", hint=f"there is {names}")


def _missing(path: Path) -> Kit:
    raise ConfigError(f"{path}: no table [kit]", hint='begin with [kit] and name = "..."')


def _each(file: ConfigFile, table: str, kind: type[_T]) -> dict[str, _T]:
    """Every table [table.NAME], as `kind`."""
    found = (file.tables or {}).get(table, {})
    for name, values in found.items():
        if not isinstance(values, dict):
            raise ConfigError(f"{file.path}: {table}.{name} is no table", hint=f"write [{table}.NAME]")
    inner = ConfigFile(file.path, {f"{table}.{name}": values for name, values in found.items()})
    return {name: _named(inner, f"{table}.{name}", kind) for name in found}


def _named(file: ConfigFile, table: str, kind: type[_T]) -> _T:
    try:
        return file.settings(table, kind, {})
    except ConfigError as error:
        if table in error.message:
            raise
        raise ConfigError(f"{file.path}: {table}: {error.message}", hint=error.hint) from None

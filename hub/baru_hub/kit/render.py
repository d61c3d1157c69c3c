"""What each machine of a kit is told: its settings file, and what is put on it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tomli_w

from baru_common.identity import Role

from . import places
from .manifest import HubMachine, Manifest, NodeMachine, Run

_Table = dict[str, Any]


def extras(machine: HubMachine | NodeMachine) -> tuple[str, ...]:
    """Which extras of the package a machine needs."""
    if isinstance(machine, HubMachine):
        return ("hub", "mdns", "serve")
    return ("chat", "mdns", "serve", *(("torch",) if machine.needs_torch else ()))


def settings(manifest: Manifest, name: str, model_files: Mapping[str, str]) -> str:
    """Return a machine's settings file. `model_files`: where the models of the kit are on a machine."""
    machine = manifest.machines[name]
    if isinstance(machine, HubMachine):
        tables = _hub(manifest, machine, model_files)
    else:
        tables = {"node": _node(manifest, machine)}
    for table, values in machine.settings.items():
        tables[table] = tables.get(table, {}) | values
    note = f"# {name} of kit {manifest.kit.name}. Written by `baru-hub kit build`: change kit.toml and build again.\n"
    return note + tomli_w.dumps(tables)


def allowed(manifest: Manifest) -> str:
    """Return a hub's list of who may connect: the kit's nodes, and who looks after it."""
    names = [f"{Role.NODE.value}/{name}" for name in manifest.nodes]
    return "".join(f"{name}\n" for name in (*names, f"{Role.OPERATOR.value}/operator"))


def facts(manifest: Manifest, name: str, release: str) -> _Table:
    """What `kit install` has to know of a machine."""
    machine = manifest.machines[name]
    return {
        "kit": manifest.kit.name,
        "name": name,
        "role": manifest.role(name).value,
        "run": machine.run.value,
        "release": release,
        "models": list(machine.models),
        "memory_mb": machine.memory_mb,
    }


def kind(machine: HubMachine | NodeMachine) -> str:
    """Machines of one kind install the same packages."""
    return f"{machine.board}, {', '.join(extras(machine))}"


def _hub(manifest: Manifest, machine: HubMachine, model_files: Mapping[str, str]) -> _Table:
    inside = machine.run is not Run.SYSTEMD  # a container has an address of its own
    tables: _Table = {
        "hub": {
            "listen": f"{places.IN_CONTAINERS if inside else machine.address}:{places.HUB_PORT}",
            "tls": str(places.TLS),
            "allow_file": str(places.ALLOWED),
            "metrics": f"127.0.0.1:{places.METRICS_PORT}",
            "health": f"{places.IN_CONTAINERS if inside else '127.0.0.1'}:{places.HEALTH_PORT}",
            "audit": str(places.STATE / "audit"),
        },
        "target": {"model": model_files[machine.target]} if machine.target else {},
    }
    return tables | ({"posture": {"document": str(places.POSTURE)}} if manifest.kit.posture else {})


def _node(manifest: Manifest, machine: NodeMachine) -> _Table:
    hubs = [manifest.hubs[name].address for name in manifest.hubs_of(machine)]
    return {
        "hub": [f"{address}:{places.HUB_PORT}" for address in hubs],
        "tls": str(places.TLS),
        "drafter": machine.drafter,
        "listen": f"127.0.0.1:{places.ENDPOINT_PORT}",
    }

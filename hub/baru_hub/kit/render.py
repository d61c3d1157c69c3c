"""What each machine of a kit is told: its settings file, and what is put on it. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import tomli_w

from baru_common import __version__
from baru_common.identity import Role

from . import places
from .boards import board
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
    return "-".join((machine.board, *extras(machine)))


def _hub(manifest: Manifest, machine: HubMachine, model_files: Mapping[str, str]) -> _Table:
    own = _own_address(machine)
    tables: _Table = {
        "hub": {
            "listen": f"{own if machine.in_container else machine.address}:{places.HUB_PORT}",
            "tls": str(places.TLS),
            "allow_file": str(places.ALLOWED),
            "metrics": f"{own}:{places.METRICS_PORT}",
            "health": f"{own}:{places.HEALTH_PORT}",
            "audit": str(places.STATE / "audit"),
        },
        "target": {"model": model_files[machine.target]} if machine.target else {},
    }
    if machine.in_container:
        tables["hub"]["metrics_tls"] = [str(places.TLS / name) for name in ("hub.pem", "hub.key", "ca.pem")]
    return tables | ({"posture": {"document": str(places.POSTURE)}} if manifest.kit.posture else {})


def _node(manifest: Manifest, machine: NodeMachine) -> _Table:
    hubs = [manifest.hubs[name].address for name in manifest.hubs_of(machine)]
    return {
        "hub": [f"{address}:{places.HUB_PORT}" for address in hubs],
        "tls": str(places.TLS),
        "drafter": machine.drafter,
        "listen": f"{_own_address(machine)}:{places.ENDPOINT_PORT}",
        **({"api_key_file": str(places.API_KEYS)} if machine.in_container else {}),
    }


def _own_address(machine: HubMachine | NodeMachine) -> str:
    """Where what is for the machine itself listens."""
    return places.IN_CONTAINERS if machine.in_container else "127.0.0.1"


def compose_environment(manifest: Manifest, name: str) -> str:
    """What compose.yaml has to know of a machine beyond its settings file."""
    machine, role = manifest.machines[name], manifest.role(name).value
    kind = machine.board if board(machine.board).cuda else "cpu"
    lines = {
        "COMPOSE_PROFILES": role,
        "COMPOSE_FILE": "compose.yaml" if kind == "cpu" else "compose.yaml:jetson.yaml",
        f"BARU_{role.upper()}_IMAGE": f"baru-{role}:{__version__}-{kind}",
        **({"BARU_ADDRESS": machine.address} if role == Role.HUB.value else {}),
        **({f"BARU_{role.upper()}_MEMORY": f"{machine.memory_mb}m"} if machine.memory_mb else {}),
    }
    return "".join(f"{key}={value}\n" for key, value in lines.items())


def k3s_instance(manifest: Manifest, name: str, files: Iterable[str], secrets: Iterable[str]) -> str:
    """A kustomization that makes the overlay of a hub's board this hub: `files` and `secrets` lie beside it."""
    machine = manifest.machines[name]
    nodes = any(node.run is Run.K3S for node in manifest.nodes.values())
    overlays = ["thor-hub" if machine.board == "thor" else "single-box"]
    overlays += ["orin-node"] if nodes and machine.board == "thor" else []
    limits = {"memory": f"{machine.memory_mb}Mi"}
    patch = [{"op": "add", "path": "/spec/template/spec/containers/0/resources/limits", "value": limits}]
    made: _Table = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [f"../overlays/{overlay}" for overlay in overlays],
        "configMapGenerator": [_generator("baru-hub", files)],
        "secretGenerator": [_generator("baru-hub-tls", secrets)],
        "patches": [{"target": {"kind": "StatefulSet", "name": "baru-hub"}, "patch": json.dumps(patch)}]
        if machine.memory_mb
        else [],
    }
    return json.dumps(made, indent=1)


def _generator(name: str, files: Iterable[str]) -> _Table:
    return {"name": name, "namespace": "baru", "behavior": "replace", "files": sorted(files)}

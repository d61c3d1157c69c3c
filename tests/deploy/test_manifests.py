"""Every file of deploy/ is looked at by the tool that knows its kind, and by what the program itself says of it.

Nothing of it is run here: there is no container engine and no cluster. The units are run by systemd in
tests/acceptance/test_kit.py.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from baru_common import __version__
from baru_common.preflight import RELEASE_FILE
from baru_hub.kit import places, render
from baru_hub.kit.manifest import Manifest

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
OVERLAYS = sorted((DEPLOY / "k3s" / "overlays").iterdir())
IMAGES = sorted((DEPLOY / "images").glob("*.Dockerfile"))
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
COMPOSE = sorted((DEPLOY / "compose").glob("*.yaml"))
_MOST_EXPOSED = 3.0
_YAMLLINT = (
    "{extends: default, rules: {line-length: {max: 130}, document-start: disable, truthy: {check-keys: false},"
    " braces: {max-spaces-inside: 1}, comments: {min-spaces-from-content: 1}, comments-indentation: disable}}"
)


def said_by(*command: str | Path, stdin: str | None = None) -> str:
    """What a tool says, on both its outputs; it has to succeed."""
    beside = Path(sys.executable).parent / command[0]
    tool = str(beside) if beside.exists() else str(command[0])
    done = subprocess.run([tool, *map(str, command[1:])], input=stdin, capture_output=True, text=True)
    assert not done.returncode, done.stdout + done.stderr
    return done.stdout + done.stderr


def rendered(folder: Path) -> list[dict[str, Any]]:
    """What would be applied."""
    return [found for found in yaml.safe_load_all(said_by("kubectl", "kustomize", folder)) if found]


def pods(folder: Path) -> list[dict[str, Any]]:
    return [one["spec"]["template"]["spec"] for one in rendered(folder) if "template" in one.get("spec", {})]


@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.name)
def test_images_are_clean(path: Path) -> None:
    assert said_by("hadolint", path) == ""


@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.name)
def test_images_run_as_the_kits_user_and_hold_no_keys(path: Path) -> None:
    text = path.read_text()
    last = text.split("\nFROM ")[-1] if path.name != "cpu.Dockerfile" else text
    user = f"{places.USER_ID}:{places.USER_ID}"
    assert f"\nUSER {user}\n" in last
    assert "HEALTHCHECK" in last
    assert f"BARU_CONFIG={places.SETTINGS}" in last
    assert "--require-hashes" in text
    assert f"ARG VERSION={__version__}\n" in text
    assert path.with_name(f"{path.name}.dockerignore").read_text().split("\n")[1:] == ["*", "!wheels", ""]


@pytest.mark.parametrize("path", COMPOSE, ids=lambda path: path.name)
def test_compose_files_are_of_its_schema(path: Path) -> None:
    said_by("check-jsonschema", "--builtin-schema", "compose-spec", path)


def test_containers_of_compose_may_do_nothing_but_serve() -> None:
    services = yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text())["services"]
    assert services.keys() == {"hub", "node"}
    for service in services.values():
        assert service["read_only"] is True
        assert service["user"] == f"{places.USER_ID}:{places.USER_ID}"
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert {volume["target"]: volume.get("read_only") for volume in service["volumes"]}["/etc/baru"] is True
    assert services["hub"]["ports"][0].endswith(f":{places.HUB_PORT}:{places.HUB_PORT}")
    assert services["node"]["ports"] == [f"127.0.0.1:{places.ENDPOINT_PORT}:{places.ENDPOINT_PORT}"]


def test_boards_get_their_gpu_by_the_runtime() -> None:
    """`--gpus`, and device requests of compose, fail on these boards."""
    services = yaml.safe_load((DEPLOY / "compose" / "jetson.yaml").read_text())["services"]
    for service in services.values():
        assert service["runtime"] == "nvidia"
        assert "deploy" not in service


@pytest.mark.parametrize("path", OVERLAYS, ids=lambda path: path.name)
def test_overlays_are_what_kubernetes_knows(path: Path) -> None:
    text = said_by("kubectl", "kustomize", path)
    said_by("kubernetes-validate", "--strict", "-", stdin=text)


@pytest.mark.parametrize("path", OVERLAYS, ids=lambda path: path.name)
def test_pods_may_do_nothing_but_serve(path: Path) -> None:
    for pod in pods(path):
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] == places.USER_ID
        assert pod["automountServiceAccountToken"] is False
        (container,) = pod["containers"]
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert container["image"].startswith(f"baru-{container['name']}:{__version__}-")
        assert "memory" in container["resources"]["limits"]
        mounts = {mount["mountPath"]: mount.get("readOnly", False) for mount in container["volumeMounts"]}
        assert mounts[str(places.SETTINGS.parent)] is True
        assert {path for path, read_only in mounts.items() if not read_only} == {str(places.STATE), "/tmp"}  # noqa: S108


@pytest.mark.parametrize("name", ["thor-hub", "orin-node"])
def test_boards_see_the_release_that_the_preflight_compares(name: str) -> None:
    (pod,) = pods(DEPLOY / "k3s" / "overlays" / name)
    assert str(RELEASE_FILE) in [mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]]


@pytest.mark.parametrize("path", OVERLAYS, ids=lambda path: path.name)
def test_probes_let_a_target_load_and_ask_for_pages_that_exist(path: Path) -> None:
    for pod in pods(path):
        (container,) = pod["containers"]
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        for kind in ("startup", "liveness", "readiness"):
            get = container[f"{kind}Probe"]["httpGet"]
            assert get["path"] in ("/livez", "/readyz")
            assert ports[get["port"]] in (places.HEALTH_PORT, places.ENDPOINT_PORT)
        assert container["livenessProbe"]["httpGet"]["path"] == "/livez"
        start = container["startupProbe"]
        assert start["periodSeconds"] * start["failureThreshold"] > 180


def test_what_is_not_named_is_not_reached() -> None:
    """In both namespaces everything is denied first; ways in and out are to the ports of the kit."""
    policies = [one for one in rendered(DEPLOY / "k3s" / "overlays" / "single-box") if one["kind"] == "NetworkPolicy"]
    closed = {one["metadata"]["namespace"] for one in policies if one["metadata"]["name"] == "deny-all"}
    assert closed == {"baru", "baru-nodes"}
    node = next(one for one in policies if one["metadata"]["name"] == "baru-node")
    assert node["spec"]["egress"][0]["ports"] == [{"port": places.HUB_PORT, "protocol": "TCP"}]


def test_a_hub_is_scraped_under_its_services_port(tmp_path: Path) -> None:
    shutil.copytree(DEPLOY / "k3s", tmp_path / "k3s")
    overlay = tmp_path / "k3s" / "overlays" / "rear-centre" / "kustomization.yaml"
    overlay.write_text(overlay.read_text() + "components: [../../prometheus]\n")
    found = {(one["kind"], one["metadata"]["name"]): one for one in rendered(overlay.parent)}
    monitor, service = found["ServiceMonitor", "baru-hub"], found["Service", "baru-hub-metrics"]
    assert service["metadata"]["labels"].items() >= monitor["spec"]["selector"]["matchLabels"].items()
    (port,) = service["spec"]["ports"]
    assert monitor["metadata"]["namespace"] == service["metadata"]["namespace"]
    assert monitor["spec"]["endpoints"][0]["port"] == port["name"]
    assert port["port"] == places.METRICS_PORT


_KIT = """
[kit]
name = "tent"
[hub.thor]
address = "10.0.0.1"
board = "thor"
run = "{run}"
memory_mb = 64000
settings = {{target = {{engine = "simulated", profile = "thor-qwen3-8b-nvfp4"}}}}
[node.nano]
address = "10.0.0.2"
board = "orin"
run = "{run}"
"""


def manifest_of(folder: Path, run: str) -> Manifest:
    (folder / "kit.toml").write_text(_KIT.format(run=run))
    return Manifest.read(folder / "kit.toml")


def test_a_kits_hub_is_an_overlay_with_its_settings_and_keys(tmp_path: Path) -> None:
    manifest = manifest_of(tmp_path, "k3s")
    shutil.copytree(DEPLOY / "k3s", tmp_path / "k3s")
    instance = tmp_path / "k3s" / "instance"
    instance.mkdir()
    (instance / "baru.toml").write_text(render.settings(manifest, "thor", {}))
    (instance / "allow").write_text(render.allowed(manifest))
    (instance / "hub.key").write_text("secret")
    text = render.k3s_instance(manifest, "thor", ["baru.toml", "allow"], ["hub.key"])
    (instance / "kustomization.yaml").write_text(text)
    said_by("kubernetes-validate", "--strict", "-", stdin=said_by("kubectl", "kustomize", instance))
    found = {one["kind"]: one for one in rendered(instance) if one["kind"] in ("ConfigMap", "Secret", "StatefulSet")}
    assert "node/nano" in found["ConfigMap"]["data"]["allow"]
    assert f"0.0.0.0:{places.HUB_PORT}" in found["ConfigMap"]["data"]["baru.toml"]
    assert found["Secret"]["data"].keys() == {"hub.key"}
    pod = found["StatefulSet"]["spec"]["template"]["spec"]
    assert pod["containers"][0]["resources"]["limits"] == {"memory": "64000Mi"}
    assert pod["runtimeClassName"] == "nvidia"
    (projected,) = (volume["projected"] for volume in pod["volumes"] if "projected" in volume)
    names = [source.get("configMap", source.get("secret"))["name"] for source in projected["sources"]]
    assert names == [found["ConfigMap"]["metadata"]["name"], found["Secret"]["metadata"]["name"]]


def test_compose_is_told_a_kits_machines(tmp_path: Path) -> None:
    manifest = manifest_of(tmp_path, "compose")
    lines = render.compose_environment(manifest, "thor").splitlines()
    assert f"BARU_HUB_IMAGE=baru-hub:{__version__}-thor" in lines
    assert "COMPOSE_FILE=compose.yaml:jetson.yaml" in lines
    assert "BARU_HUB_MEMORY=64000m" in lines
    known = set(re.findall(r"\$\{(\w+)", "".join(path.read_text() for path in COMPOSE)))
    assert {line.split("=")[0] for line in lines} <= known | {"COMPOSE_FILE", "COMPOSE_PROFILES"}
    assert f'api_key_file = "{places.API_KEYS}"' in render.settings(manifest, "nano", {})


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_units_are_verified_without_a_word(path: Path, tmp_path: Path) -> None:
    """The program is not at its place here: another stands in for it."""
    text = path.read_text()
    program = re.search(r"^ExecStart=(\S+)", text, re.MULTILINE)
    assert program
    assert Path(program[1]).parent == places.CURRENT / "bin"
    copy = tmp_path / path.name
    copy.write_text(text.replace(program[1], "/bin/true"))
    assert said_by("systemd-analyze", "verify", copy) == ""


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_units_are_exposed_to_little(path: Path) -> None:
    found = re.search(
        r"Overall exposure level for \S+: ([\d.]+)", said_by("systemd-analyze", "security", "--offline=true", path)
    )
    assert found
    assert float(found[1]) <= _MOST_EXPOSED


def test_yaml_is_clean() -> None:
    assert said_by("yamllint", "--strict", "--config-data", _YAMLLINT, DEPLOY) == ""


@pytest.mark.parametrize(
    "path", [DEPLOY / "kit" / "install.sh", *sorted(ROOT.glob("t*/**/*.sh"))], ids=lambda p: p.name
)
def test_shell_scripts_are_clean(path: Path) -> None:
    assert said_by("shellcheck", path) == ""

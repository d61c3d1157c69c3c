"""A field kit from an empty folder: built, put on a hub and three nodes that reach each other and nothing else, tried
with its own field test, and hurt. Each machine runs systemd, as a real one does; the tests run in this order."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from baru_common.model_files import DEFAULT_TARGET
from baru_hub.kit.seal import digest_of
from support.hosts import BUNDLE, Host, Lab, missing
from support.tiny import save, tiny_target

pytestmark = [
    pytest.mark.timeout(1200),
    pytest.mark.skipif(bool(missing()), reason=f"no machines of their own: {missing()}"),
]
NODES = ("node-1", "node-2", "node-3")
_KIT = """
[kit]
name = "tent"

[model.target]
source = "{source}"
sha256 = "{digest}"

[hub.hub-1]
address = "10.99.0.1"
target = "target"
memory_mb = 4000
{settings}
"""
_NODE = """
[node.node-{number}]
address = "10.99.0.1{number}"
memory_mb = 400
"""


def baru_hub(*arguments: object) -> str:
    """Run the command; its standard output."""
    command = (sys.executable, "-m", "baru_hub.cli", *map(str, arguments))
    done = subprocess.run(command, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    return done.stdout


@dataclass
class Kit:
    """What was built, and the machines."""

    folder: Path
    fingerprint: str
    hosts: dict[str, Host]
    lab: Lab

    @property
    def bundle(self) -> Path:
        return self.folder / "kit"

    def build(self, *options: object) -> str:
        """Build it, or bring it up to date; the fingerprint that is printed."""
        manifest, authority = self.folder / "kit.toml", self.folder / "ca"
        said = baru_hub("kit", "build", manifest, "--out", self.bundle, "--ca", authority, *options)
        return said.split("fingerprint ")[1].strip()

    def install(self, name: str, options: str = "") -> str:
        """What `install.sh` says on that machine."""
        return (
            self.hosts[name]
            .run(f"{BUNDLE}/install.sh {name} --fingerprint {self.fingerprint} {options}", timeout_s=600)
            .stderr
        )


def targets() -> Iterator[Any]:
    yield "tiny"
    yield pytest.param(DEFAULT_TARGET, marks=pytest.mark.full)


@pytest.fixture(scope="module", params=targets())
def kit(request: pytest.FixtureRequest) -> Iterator[Kit]:
    """A kit, built and installed on four machines at once."""
    with tempfile.TemporaryDirectory() as made, Lab.open() as lab:
        folder = Path(made)
        source = request.param
        if source == "tiny":
            save(tiny_target(), folder / "model")
            digest, source = digest_of(folder / "model"), "model"
            settings = '[hub.hub-1.settings.target]\ndtype = "float32"'
        else:
            digest, settings = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53", ""
        text = _KIT.format(source=source, digest=digest, settings=settings)
        (folder / "kit.toml").write_text(text + "".join(_NODE.format(number=n) for n in (1, 2, 3)))
        kit = Kit(folder, "", {}, lab)
        kit.fingerprint = kit.build()
        for name, last in zip(("hub-1", *NODES), (1, 11, 12, 13), strict=True):
            kit.hosts[name] = Host(name, f"10.99.0.{last}", lab, kit.bundle)
        try:
            for host in kit.hosts.values():
                host.start()
            yield kit
        finally:
            for host in kit.hosts.values():
                host.stop()


def ask(host: Host, num_tokens: int = 300) -> subprocess.Popen[str]:
    """Ask that machine's endpoint for a text, streamed, of which nothing is taken back."""
    model = json.loads(host.run("curl -sf http://127.0.0.1:8000/v1/models").stdout)["data"][0]["id"]
    body = {"model": model, "prompt": "Once upon a time", "max_tokens": num_tokens, "temperature": 0}
    body |= {"ignore_eos": True, "stream": True, "reconcile": "rewrite"}
    command = f"curl -sSN --json {shlex.quote(json.dumps(body))} http://127.0.0.1:8000/v1/completions"
    return subprocess.Popen(host.command(command), stdout=subprocess.PIPE, text=True)


def text_of(asked: subprocess.Popen[str], num_chunks: int = 0) -> str:
    """The text of its next chunks; of all that are left, if no number is given."""
    assert asked.stdout
    text, seen = "", 0
    while not num_chunks or seen < num_chunks:
        line = asked.stdout.readline()
        if not line:
            asked.stdout.close()
            assert asked.wait() == 0
            break
        if line.startswith("data: {"):
            data = json.loads(line.removeprefix("data: "))
            assert "error" not in data, data
            text += "".join(choice["text"] for choice in data["choices"])
            seen += 1
        elif line.strip():
            assert line.startswith("data: [DONE]"), line
    return text


def whole(host: Host) -> str:
    """The whole text, undisturbed."""
    return text_of(ask(host))


def test_a_dry_run_changes_nothing(kit: Kit) -> None:
    node = kit.hosts["node-1"]
    before = node.run("find /etc /opt /usr /var/lib | sort | sha256sum").stdout
    said = kit.install("node-1", "--dry-run")
    assert "would write /etc/baru/baru.toml" in said
    assert "would restart baru-node.service" in said
    assert node.run("find /etc /opt /usr /var/lib | sort | sha256sum").stdout == before


def test_somebody_elses_bundle_is_refused(kit: Kit) -> None:
    other = ":".join(["00"] * 32)
    done = kit.hosts["node-1"].run(f"{BUNDLE}/install.sh node-1 --fingerprint {other}", check=False, timeout_s=600)
    assert done.returncode
    assert "not by" in done.stderr
    assert kit.hosts["node-1"].run("test -e /etc/baru", check=False).returncode


def test_every_machine_is_set_up_without_a_network(kit: Kit) -> None:
    """The nodes first: a node waits for its hub. Nothing routes anywhere else."""
    assert kit.hosts["hub-1"].run("ip route").stdout.split()[0] == "10.99.0.0/24"
    with ThreadPoolExecutor() as pool:
        said = list(pool.map(kit.install, (*NODES, "hub-1")))
    for text, role in zip(said, ("node", "node", "node", "hub"), strict=True):
        assert f"baru-{role}.service runs" in text
    for name in NODES:
        kit.hosts[name].until("curl -sf http://127.0.0.1:8000/readyz")
    node = kit.hosts["node-1"]
    assert int(node.run("du -sm --apparent-size /opt/baru/releases").stdout.split()[0]) < 200
    assert node.run("find /opt/baru -name torch").stdout == ""
    secrets = kit.hosts["hub-1"].run("stat -c '%a %u' /etc/baru/tls/hub.key").stdout.split()
    assert secrets == ["600", "65532"]


def test_a_second_run_does_nothing(kit: Kit) -> None:
    before = kit.hosts["node-2"].run("systemctl show --property=MainPID baru-node").stdout
    assert kit.install("node-2").strip().endswith("node-2 is as the bundle says")
    assert kit.hosts["node-2"].run("systemctl show --property=MainPID baru-node").stdout == before


def test_the_field_test_passes(kit: Kit) -> None:
    """Of every machine, asked from one place."""
    reach = kit.folder / "reach"
    cases = "".join(f'{name}) exec {shlex.join(host.command(""))[:-2]}"$*" ;;\n' for name, host in kit.hosts.items())
    reach.write_text(f'#!/bin/sh\nname=$1\nshift\ncase "$name" in\n{cases}esac\n')
    reach.chmod(0o755)
    told = json.loads(
        baru_hub("kit", "check", "--all", "--json", "--manifest", kit.folder / "kit.toml", "--ssh", f"{reach} {{name}}")
    )
    assert told["ok"]
    assert list(told["machines"]) == ["hub-1", *NODES]
    for name in NODES:
        names = [check["name"] for check in told["machines"][name]]
        assert {"certificate", "reachable", "drafts", "falls back", "comes back"} <= set(names)


def test_a_killed_hub_comes_back_and_no_answer_is_lost(kit: Kit) -> None:
    hub, node = kit.hosts["hub-1"], kit.hosts["node-1"]
    wanted = whole(node)
    assert len(wanted) > 100
    asked = ask(node)
    text = text_of(asked, 5)
    pid = hub.run("systemctl show --property=MainPID --value baru-hub").stdout.strip()
    hub.run(f"kill -9 {pid}")
    assert text + text_of(asked) == wanted
    assert hub.run("systemctl show --property=NRestarts --value baru-hub").stdout.strip() == "1"
    assert hub.run("systemctl is-active baru-hub").stdout.strip() == "active"


def test_a_pulled_link_costs_only_its_node_and_only_time(kit: Kit) -> None:
    node, other = kit.hosts["node-2"], kit.hosts["node-3"]
    wanted = whole(node)
    asked = ask(node)
    text = text_of(asked, 5)
    kit.lab.pull(node)
    try:
        assert whole(other) == wanted
    finally:
        kit.lab.push(node)
    assert text + text_of(asked) == wanted


def test_a_node_is_replaced(kit: Kit) -> None:
    """The board is lost: its certificate is revoked, and a new board gets a new one under the same name."""
    old, hub = kit.hosts["node-3"], kit.hosts["hub-1"]
    wanted = whole(kit.hosts["node-1"])
    lost = Path(kit.folder, "lost")
    lost.mkdir()
    for name in ("ca.pem", "node.pem", "node.key"):
        (lost / name).write_bytes((old.root / "etc/baru/tls" / name).read_bytes())
    old.stop()
    baru_hub("certs", "revoke", "node-3", "--dir", kit.folder / "ca")
    assert kit.build("--renew", "node-3") == kit.fingerprint
    before = hub.run("systemctl show --property=MainPID baru-hub").stdout
    assert "write /etc/baru/tls/crl.pem" in kit.install("hub-1")
    assert hub.run("systemctl show --property=MainPID baru-hub").stdout == before
    old.start()
    kit.install("node-3")
    old.until("curl -sf http://127.0.0.1:8000/readyz")
    assert whole(old) == wanted
    stolen = kit.hosts["node-1"]
    for file in lost.iterdir():
        stolen.run(f"umask 077; mkdir -p /tmp/lost && cat >/tmp/lost/{file.name} <<'E'\n{file.read_text()}E")
    refused = stolen.run("baru-micro doctor --hub 10.99.0.1:7443 --tls /tmp/lost", check=False)
    assert refused.returncode
    assert "revoked" in refused.stdout + refused.stderr
    assert hub.run("systemctl is-active baru-hub").stdout.strip() == "active"


def test_a_release_that_does_not_start_is_rolled_back(kit: Kit) -> None:
    """An upgrade whose program is broken: the one before runs again, and that is said."""
    node = kit.hosts["node-1"]
    before = node.run("readlink /opt/baru/current").stdout
    broken = kit.folder / "baru_drafting-0.1.0-py3-none-any.whl"
    broken.write_bytes(next((kit.bundle / "wheels").glob("baru_drafting-*.whl")).read_bytes())
    with zipfile.ZipFile(broken, "a") as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there are two files of this name now: the last counts
        archive.writestr("baru_micro/cli.py", "def main():\n    raise SystemExit('broken')\n")
    kit.build("--wheel", broken)
    done = node.run(f"{BUNDLE}/install.sh node-1", check=False, timeout_s=600)
    assert done.returncode
    assert "does not start" in done.stderr
    assert "runs again" in done.stderr
    assert node.run("readlink /opt/baru/current").stdout == before
    node.until("curl -sf http://127.0.0.1:8000/readyz")


def test_nothing_is_left_after_uninstall(kit: Kit) -> None:
    node = kit.hosts["node-2"]
    node.run("baru-hub kit uninstall --purge")
    places = "/etc/baru /opt/baru /var/lib/baru /etc/systemd/system/baru-node.service* /usr/local/bin/baru-*"
    left = node.run(f"ls -d {places}", check=False)
    assert left.stdout == ""
    assert "baru" not in node.run("systemctl list-units --all --no-legend 'baru-*'").stdout

"""Group I of the public bug reports: a kit without a network."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.tiny import plain_greedy, save, tiny_target

# A namespace whose only way out is a wire that nobody answers on: names do not resolve, connects hang,
# and every attempt is counted by the wire. The models lie on a read-only file system.
ISOLATED = """
set -e
ip link set lo up
ip link add wire0 type veth peer name wire1
ip addr add 10.99.0.1/24 dev wire0
ip link set wire0 addrgenmode none arp off; ip link set wire1 addrgenmode none arp off
ip link set wire0 up; ip link set wire1 up
ip route add default via 10.99.0.2
mount -o bind "$1" "$1"; mount -o remount,bind,ro "$1"
shift
awk '/wire0/ {print $11}' /proc/net/dev
set +e
"$@"
status=$?
awk '/wire0/ {print $11}' /proc/net/dev
exit $status
"""

HUB_AND_NODE = """
import asyncio, json, sys
from baru_common.model_files import load
from baru_common.sampling import SamplingParams
from baru_hub.config import HubConfig
from baru_hub.engines.transformers import TransformersEngine
from baru_hub.server import running_hub
from baru_micro import Finish, MicroNode

async def main(target, drafter):
    engine = TransformersEngine(load(target, dtype="float32"), kv_cache_mb=16)
    async with running_hub(engine, HubConfig(listen="127.0.0.1:0")) as hub:
        async with MicroNode.connect(hub.address, drafter="causal_lm:" + drafter) as node:
            async for event in node.generate([40, 50, 60, 70], SamplingParams(max_tokens=20, ignore_eos=True)):
                if isinstance(event, Finish):
                    print(json.dumps(event.ids))

asyncio.run(main(*sys.argv[1:]))
"""


def can_isolate() -> bool:
    """True where this user may make network and mount namespaces, and the tools are there."""
    if not shutil.which("unshare") or not shutil.which("ip"):
        return False
    probe = ["unshare", "-n", "-m", "ip", "link", "add", "wire0", "type", "veth", "peer", "name", "wire1"]
    return subprocess.run(probe, capture_output=True, check=False).returncode == 0


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """Two copies of the tiny model: a plain folder, and one in a model hub's cache layout."""
    save(tiny_target(), tmp_path / "models" / "plain")
    cached = tmp_path / "models" / "models--org--tiny"
    save(tiny_target(), cached / "snapshots" / "abc")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("abc")
    return tmp_path / "models"


@pytest.mark.skipif(not can_isolate(), reason="needs the right to make network namespaces (root)")
def test_i03_starts_and_serves_without_a_network(models: Path, tmp_path: Path) -> None:
    """Hub and node run from a read-only disk and send no packet anywhere but to each other."""
    resolve = tmp_path / "resolv.conf"
    resolve.write_text("nameserver 10.99.0.3\n")
    arguments = [str(models / "plain"), str(models / "models--org--tiny")]
    command = ["unshare", "-n", "-m", "sh", "-c", f"mount -o bind {resolve} /etc/resolv.conf;{ISOLATED}", "sh"]
    run = subprocess.run(
        [*command, str(models), sys.executable, "-c", HUB_AND_NODE, *arguments],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
        env={**os.environ, "BARU_CACHE_DIR": str(models / "cache")},
    )
    assert run.returncode == 0, run.stderr
    packets_before, ids, packets_after = run.stdout.splitlines()
    assert json.loads(ids) == plain_greedy(tiny_target(), [40, 50, 60, 70], 20)
    assert packets_after == packets_before


@pytest.mark.skipif(not can_isolate(), reason="needs the right to make network namespaces (root)")
def test_i03_the_wire_counts_an_attempt(models: Path) -> None:
    """The test above can fail: a name look-up, or a connect, is a packet on the wire."""
    look_up = (
        "import socket; s = socket.socket(); s.settimeout(0.2)\ntry: s.connect(('10.98.0.1', 80))\nexcept OSError: pass"
    )
    run = subprocess.run(
        ["unshare", "-n", "-m", "sh", "-c", ISOLATED, "sh", str(models), sys.executable, "-c", look_up],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    before, after = run.stdout.splitlines()
    assert int(after) > int(before)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_i03_a_missing_file_is_named_at_once(models: Path, name: str) -> None:
    """The hub exits with an error that names the file, before it loads anything."""
    (models / "plain" / name).unlink()
    run = subprocess.run(
        [sys.executable, "-m", "baru_hub.cli", "serve", "--target", str(models / "plain"), "--listen", "127.0.0.1:0"],
        capture_output=True,
        text=True,
        timeout=10,
        check=False,
    )
    assert run.returncode == 1
    assert str(models / "plain" / name) in run.stderr.replace("\n", "")
    assert "Traceback" not in run.stderr

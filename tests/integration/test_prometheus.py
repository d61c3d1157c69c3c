"""A real Prometheus scrapes a running hub and node, with the configuration, rules and dashboards that we ship."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import math
import re
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from baru_common.drafters.simulated import SimulatedDrafter
from baru_common.sampling import Grammar, GrammarKind, SamplingParams
from baru_common.telemetry import TelemetryConfig
from baru_hub.server import Hub
from baru_micro import Finish, LinkChanged, MicroNode
from baru_micro.telemetry import observing
from support.fault_proxy import FaultProxy
from support.hubs import hub_of
from support.link import until
from support.lockstep import free_running
from support.tiny import tiny_target

ROOT = Path(__file__).parents[2]
SHIPPED = ROOT / "deploy" / "observability"
SCRAPED = TelemetryConfig(metrics="127.0.0.1:0")
_NAME = re.compile(r"\b(?:baru_[\w:]+|process_\w+|up)\b(?:\{[^}]*\})?")

pytestmark = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason="no prometheus and promtool here (Debian: apt-get install prometheus)",
)


def checked(*command: str) -> None:
    done = subprocess.run(command, cwd=SHIPPED, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_finds_nothing_wrong() -> None:
    checked("promtool", "check", "config", "prometheus.yml")
    checked("promtool", "test", "rules", "rules_test.yml")


def test_the_dashboards_are_what_their_panels_say() -> None:
    spec = importlib.util.spec_from_file_location("make_dashboards", ROOT / "tools" / "make_dashboards.py")
    assert spec
    assert spec.loader
    made = importlib.util.module_from_spec(spec)
    import sys

    sys.modules["make_dashboards"] = made
    spec.loader.exec_module(made)
    for name in made.DASHBOARDS:
        assert json.loads((SHIPPED / "dashboards" / f"{name}.json").read_text()) == made.dashboard(name)


def rules() -> Iterator[dict[str, Any]]:
    for path in sorted(SHIPPED.glob("rules/*.yml")):
        for group in yaml.safe_load(path.read_text())["groups"]:
            yield from group["rules"]


def queries() -> Iterator[str]:
    """Everything that must return data: dashboards, recording rules, and of alerts, which had better be false, all that
    they look at."""
    for path in sorted(SHIPPED.glob("dashboards/*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel["targets"]:
                yield target["expr"].replace("$__rate_interval", "1m").replace("$instance", ".+")
    for rule in rules():
        if "record" in rule:
            yield rule["record"]
            yield rule["expr"]
        else:
            yield from _NAME.findall(re.sub(r"\bby \([^)]*\)", "", rule["expr"]))


class Prometheus:
    def __init__(self, address: str) -> None:
        self._url = f"http://{address}/api/v1/query?"

    async def values(self, query: str) -> list[float]:
        """Numbers that the query returns; an error of the query is raised."""
        url = self._url + urllib.parse.urlencode({"query": query})
        answer = json.loads(await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=10).read()))
        found = (float(sample["value"][1]) for sample in answer["data"]["result"])
        return [value for value in found if not math.isnan(value)]


@asynccontextmanager
async def prometheus(folder: Path, hub: str, node: str) -> AsyncIterator[Prometheus]:
    """With the shipped configuration, only more often."""
    shutil.copytree(SHIPPED, folder, dirs_exist_ok=True)
    config = (folder / "prometheus.yml").read_text()
    (folder / "prometheus.yml").write_text(re.sub(r"(scrape|evaluation)_interval: \d+s", r"\1_interval: 1s", config))
    (folder / "targets" / "hubs.yml").write_text(json.dumps([{"targets": [hub]}]))
    (folder / "targets" / "nodes.yml").write_text(json.dumps([{"targets": [node]}]))
    with __import__("socket").create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    process = await asyncio.create_subprocess_exec(
        *("prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"),
        *(f"--web.listen-address={address}", "--log.level=warn"),
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        yield Prometheus(address)
    finally:
        process.terminate()
        await process.wait()


@asynccontextmanager
async def observed_node(hub: Hub) -> AsyncIterator[tuple[MicroNode, FaultProxy, str]]:
    """A node behind a link that can break; and where it is scraped."""
    async with AsyncExitStack() as stack:
        proxy = await stack.enter_async_context(FaultProxy.open(hub.address))
        observers = stack.enter_context(observing(SCRAPED))
        connecting = MicroNode.connect(proxy.address, drafter="ngram", observers=observers)
        yield await stack.enter_async_context(connecting), proxy, observers.address

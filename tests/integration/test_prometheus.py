"""A real Prometheus scrapes a running hub and node, with the configuration, rules and dashboards that we ship."""

from __future__ import annotations

import asyncio
import json
import math
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from socket import create_server
from typing import Any

import pytest
import yaml
from tools.make_dashboards import DASHBOARDS, dashboard

from baru_common import board_state
from baru_common.sampling import SamplingParams
from baru_common.telemetry import TelemetryConfig
from baru_micro import Finish, MicroNode
from baru_micro.observing import NodeObserver
from baru_micro.telemetry import observing
from support.drafters import wrong_at
from support.hubs import hub_of
from support.lockstep import free_running
from support.tiny import tiny_target

ROOT = Path(__file__).parents[2]
SHIPPED = ROOT / "deploy" / "observability"
ANY_PORT = "127.0.0.1:0"
WAIT_S = 100.0
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
    for name in DASHBOARDS:
        written = json.loads((SHIPPED / "dashboards" / f"{name}.json").read_text())
        assert written == dashboard(name), "run tools/make_dashboards.py"


def rules() -> Iterator[dict[str, Any]]:
    for path in sorted(SHIPPED.glob("rules/*.yml")):
        for group in yaml.safe_load(path.read_text())["groups"]:
            yield from group["rules"]


_OF_BOARDS = {instrument.exported_name for instrument in board_state.INSTRUMENTS}
"""What only a Jetson says; their alerts are tested in rules_test.yml."""


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
            names = _NAME.findall(re.sub(r"\bby \([^)]*\)", "", rule["expr"]))
            yield from (name for name in names if name.partition("{")[0] not in _OF_BOARDS)


class Prometheus:
    def __init__(self, address: str) -> None:
        self._url = f"http://{address}/api/v1/query?"

    async def ready(self) -> None:
        while True:
            with suppress(ConnectionError, urllib.error.URLError):
                await self.values("vector(1)")
                return
            await asyncio.sleep(0.05)

    async def values(self, query: str) -> list[float]:
        """Numbers that the query returns; an error of the query is raised."""
        url = self._url + urllib.parse.urlencode({"query": query})
        answer = json.loads(await asyncio.to_thread(self._get, url))
        found = (float(sample["value"][1]) for sample in answer["data"]["result"])
        return [value for value in found if not math.isnan(value)]

    @staticmethod
    def _get(url: str) -> bytes:
        with urllib.request.urlopen(url, timeout=10) as answer:  # noqa: S310
            body: bytes = answer.read()
        return body


@asynccontextmanager
async def prometheus(folder: Path, hub: str, node: str) -> AsyncIterator[Prometheus]:
    """With the shipped configuration, only more often."""
    shutil.copytree(SHIPPED, folder, dirs_exist_ok=True)
    config = (folder / "prometheus.yml").read_text()
    (folder / "prometheus.yml").write_text(re.sub(r"(scrape|evaluation)_interval: \d+s", r"\1_interval: 300ms", config))
    (folder / "targets" / "hubs.yml").write_text(json.dumps([{"targets": [hub]}]))
    (folder / "targets" / "nodes.yml").write_text(json.dumps([{"targets": [node]}]))
    with create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    process = await asyncio.create_subprocess_exec(
        *("prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"),
        *(f"--web.listen-address={address}", "--log.level=warn"),
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        asked = Prometheus(address)
        await asyncio.wait_for(asked.ready(), WAIT_S)
        yield asked
    finally:
        process.terminate()
        await process.wait()


async def keep_generating(hub: str, observers: Sequence[NodeObserver]) -> None:
    """Two nodes, one of which drafts what the target will say, and wrongly now and then; until cancelled."""
    prompt, params = list(range(3, 40)), SamplingParams(max_tokens=60, ignore_eos=True)
    async with MicroNode.connect(hub, drafter=None) as plain:
        answer = [event async for event in plain.generate(prompt, params)][-1]
    assert isinstance(answer, Finish)
    drafter = wrong_at(prompt, answer.ids, 8, lambda index: index == 3, 300)
    async with MicroNode.connect(hub, drafter=drafter, observers=observers) as node:
        while True:
            async for _ in node.generate(prompt, params):
                pass


@pytest.mark.timeout(150)
async def test_every_query_of_dashboards_and_rules_returns_data(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        hub = await stack.enter_async_context(
            hub_of(tiny_target(), scheduler=free_running(), metrics=ANY_PORT, max_depth=4)
        )
        node = stack.enter_context(observing(TelemetryConfig(metrics=ANY_PORT)))
        asked = await stack.enter_async_context(prometheus(tmp_path, hub.metrics, node.metrics))
        load = asyncio.create_task(keep_generating(hub.address, node.observers))
        stack.callback(load.cancel)
        silent, start_s = sorted(set(queries())), time.monotonic()
        assert len(silent) > 90
        while silent and not load.done() and time.monotonic() - start_s < WAIT_S:
            await asyncio.sleep(0.2)
            silent = [query for query in silent if not await asked.values(query)]
        if load.done():
            load.result()
        assert silent == []
        # What is true for a moment, as on a machine that stalls, is no alert yet.
        true = {rule["alert"]: rule["expr"] for rule in rules() if "alert" in rule}
        start_s = time.monotonic()
        while set(true) - {"BaruHubPatienceWasted"} and time.monotonic() - start_s < WAIT_S:
            true = {alert: query for alert, query in true.items() if await asked.values(query)}
            await asyncio.sleep(0.2)
        assert set(true) <= {"BaruHubPatienceWasted"}, "an alert is true of a healthy kit"

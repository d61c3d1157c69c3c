"""`baru-hub top`: rates from two readings, at a real kit, in any terminal."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
from rich.console import Console

from baru_common.drafters.simulated import SimulatedDrafter
from baru_common.errors import ConfigError, HubUnavailable
from baru_common.scrape import MAX_BYTES, Scrape, read, scrape
from baru_common.telemetry import TelemetryConfig
from baru_hub.top import LinkRow, NodeRow, Readings, View, view
from baru_hub.top_cli import drawn
from baru_micro import MicroNode
from baru_micro.telemetry import observing
from support.hubs import hub_of
from support.link import asked, scripted_engine
from support.lockstep import free_running

HUB = """
baru_hub_steps_total{{model="m"}} {steps}
baru_hub_emitted_tokens_total{{model="m",node="one",drafter="ngram"}} {one}
baru_hub_emitted_tokens_total{{model="m",node="two",drafter="none"}} {two}
baru_hub_session_steps_total{{model="m",node="one",drafter="ngram"}} {steps}
baru_hub_session_steps_total{{model="m",node="two",drafter="none"}} {steps}
baru_hub_verified_tokens_total{{model="m",node="one",drafter="ngram"}} {verified}
baru_hub_accepted_tokens_total{{model="m",node="one",drafter="ngram"}} {accepted}
baru_hub_depth_steps_total{{model="m",depth="0"}} {steps}
baru_hub_depth_steps_total{{model="m",depth="4"}} {steps}
baru_hub_step_time_seconds_sum{{model="m"}} {time}
baru_hub_step_time_seconds_count{{model="m"}} {steps}
baru_hub_sessions{{model="m",state="attached"}} 2
baru_hub_max_sessions{{model="m"}} 8
"""
BEFORE = {"steps": 100, "one": 1000, "two": 100, "verified": 2000, "accepted": 900, "time": 9.0}
AFTER = {"steps": 140, "one": 1120, "two": 140, "verified": 2100, "accepted": 975, "time": 10.0}


def reading(at_s: float, values: dict[str, float]) -> Scrape:
    return Scrape("h:1", at_s, read(HUB.format(**values).encode()).series)


def test_rates_are_of_the_time_between() -> None:
    """By hand, from the two texts."""
    shown = view([Readings(reading(14.0, AFTER), reading(10.0, BEFORE))])
    (hub,) = shown.hubs
    assert (hub.target, hub.sessions, hub.max_sessions) == ("m", {"attached": 2}, 8)
    assert (hub.tokens_per_s, hub.steps_per_s, hub.step_ms, hub.depth) == (40.0, 10.0, 25.0, 2.0)
    assert (hub.batch, hub.waits_per_s, hub.waits_won) == (None, 0.0, None)
    assert shown.nodes == [
        NodeRow("one", "ngram", "h:1", 1120, 30.0, 0.75, 3.0, 0),
        NodeRow("two", "none", "h:1", 140, 10.0, None, 1.0, 0),
    ]


def test_one_reading_has_means_but_no_rates_and_a_restart_is_no_negative_rate() -> None:
    (hub,) = view([Readings(reading(14.0, AFTER))]).hubs
    assert (hub.tokens_per_s, hub.depth) == (None, 2.0)
    (hub,) = view([Readings(reading(14.0, BEFORE), reading(10.0, AFTER))]).hubs
    assert hub.tokens_per_s == (1000 + 100) / 4


@pytest.mark.parametrize("data", [b"<html>", b"\xff", b'a{b="c"} x', b"#" * (MAX_BYTES + 1)])
def test_what_is_no_metrics_is_refused(data: bytes) -> None:
    with pytest.raises(ConfigError, match="shows no metrics"):
        read(data, "h:1")


def test_a_narrow_terminal_and_one_without_colour() -> None:
    """Nothing is cut off, nothing drives the terminal."""
    shown = view([Readings(reading(14.0, AFTER), reading(10.0, BEFORE))])
    links = [LinkRow("n:1", "h:1", "down", None, 2), LinkRow("n:1", "\x1b[31mh:2", "up", 1.25, 0)]
    for width in (60, 160):
        console = Console(width=width, record=True, no_color=True, file=open(os.devnull, "w"))  # noqa: SIM115, PTH123
        console.print(drawn(View(shown.hubs, shown.nodes, links), {"x:9": "nobody there"}))
        text = console.export_text()
        console.file.close()
        assert max(map(len, text.splitlines())) <= width
        for word in ("one", "75%", "30.0", "down", "1.2", "nobody", "x:9"):
            assert word in text
        assert "\x1b" not in text


@asynccontextmanager
async def kit() -> AsyncIterator[tuple[str, str]]:
    """A hub and a node that generate for as long as it takes: where both are scraped."""
    with observing(TelemetryConfig(metrics="127.0.0.1:0")) as observed:
        async with (
            hub_of(scripted_engine(0.004), scheduler=free_running(), metrics="127.0.0.1:0") as hub,
            MicroNode.connect(hub.address, drafter=SimulatedDrafter(0.8), observers=observed.observers) as node,
        ):

            async def generate() -> None:
                async for _ in node.generate("go", asked(100_000)):
                    pass

            task = asyncio.create_task(generate())
            yield hub.metrics, observed.metrics
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


async def top(*arguments: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "baru_hub.cli", "top", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"COLUMNS": "200"},
    )
    out, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def test_at_a_real_kit() -> None:
    """As JSON: what is going on; into a pipe: one table, without being asked."""
    async with kit() as (hub, node):
        await asyncio.sleep(1.0)
        addresses = ("--metrics", hub, "--metrics", node, "--interval", "0.5")
        (code, out, err), (plain_code, plain, _) = await asyncio.gather(
            top(*addresses, "--once", "--json"), top(*addresses)
        )
    assert code == plain_code == 0, err
    told = json.loads(out)
    assert (told["schema"], told["missing"]) == (1, {})
    (row,) = told["hubs"]
    assert row["tokens_per_s"] > 20
    assert 0 < row["depth"] <= 16
    assert row["sessions"]["attached"] == 1
    (drafting,) = told["nodes"]
    assert (drafting["node"], drafting["drafter"]) == ("loopback", "simulated")
    assert 0.1 < drafting["acceptance"] <= 1
    (link,) = told["links"]
    assert (link["state"], link["outages"]) == ("up", 0)
    assert "simulated" in plain
    assert "up" in plain


async def test_nobody_there() -> None:
    """It says where, and what to do; one of several that is missing is shown as such."""
    with pytest.raises(HubUnavailable, match=r"nobody shows metrics at 127\.0\.0\.1:9"):
        await asyncio.to_thread(scrape, "127.0.0.1:9")
    code, out, err = await top("--metrics", "127.0.0.1:9", "--once", "--interval", "0.2")
    assert (code, out) == (1, "")
    assert "--metrics HOST:PORT" in err
    assert "Traceback" not in err

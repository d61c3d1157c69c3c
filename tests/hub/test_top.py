"""`baru-hub top`: rates from two readings, at a real kit, in any terminal."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import fields, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from baru_common.drafters.simulated import SimulatedDrafter
from baru_common.errors import ConfigError, HubUnavailable
from baru_common.scrape import MAX_BYTES, Scrape, read, scrape
from baru_common.telemetry import TelemetryConfig
from baru_hub.cli import app
from baru_hub.top import HubRow, LinkRow, NodeRow, Readings, View, view
from baru_hub.top_cli import Watcher, _tls
from baru_hub.top_screen import Cropped, drawn
from baru_micro import MicroNode
from baru_micro.telemetry import observing
from support.hubs import hub_of
from support.link import asked, scripted_engine
from support.lockstep import free_running
from support.signers import self_signed
from support.terminal import in_terminal

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
baru_hub_prefilling_sessions{{model="m"}} 1
baru_hub_errors_total{{model="m",at="open",reason="HUB_FULL"}} 3
baru_hub_errors_total{{model="m",at="session",reason="INTERNAL"}} 5
baru_hub_pages{{model="m",state="held"}} 12
baru_hub_pages{{model="m",state="free"}} 88
baru_hub_acceptance_changes_total{{model="m",node="one",scope="node",direction="up"}} 4
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
    assert (hub.prefilling_sessions, hub.refused, hub.pages, hub.changes) == (1, 3, {"held": 12, "free": 88}, 4)
    assert shown.nodes == [
        NodeRow("one", "ngram", "h:1", 1120, 30.0, 0.75, 3.0, 0),
        NodeRow("two", "none", "h:1", 140, 10.0, None, 1.0, 0),
    ]


def test_one_reading_has_means_but_no_rates_and_a_restart_is_no_negative_rate() -> None:
    (hub,) = view([Readings(reading(14.0, AFTER))]).hubs
    assert (hub.tokens_per_s, hub.depth) == (None, 2.0)
    (hub,) = view([Readings(reading(14.0, BEFORE), reading(10.0, AFTER))]).hubs
    assert hub.tokens_per_s == (1000 + 100) / 4


@pytest.mark.parametrize("data", [b"<html>", b"\xff", b'a{b="c"} x', b"#" * (MAX_BYTES + 1), b"node_load1 1\n"])
def test_what_is_no_metrics_of_ours_is_refused(data: bytes) -> None:
    with pytest.raises(ConfigError, match=r"h:1 shows (no metrics|metrics, but not those of a hub or a node)"):
        read(data, "h:1")


def test_what_is_no_number_tells_nothing() -> None:
    odd = 'baru_hub_steps_total 3\nbaru_hub_sessions{state="attached"} NaN\nbaru_hub_depth_steps_total{depth="x"} 2\n'
    (hub,) = view([Readings(read(odd.encode()))]).hubs
    assert (hub.sessions, hub.depth) == ({}, None)


def test_every_key_is_documented() -> None:
    """A script relies on them: a new one is written down, one that goes makes another schema."""
    table = (Path(__file__).parents[2] / "docs/telemetry.md").read_text()
    for rows, row in {"hubs": HubRow, "nodes": NodeRow, "links": LinkRow}.items():
        found = re.search(rf"(?m)^\| `{rows}` \|(.*)$", table)
        assert found
        assert sorted(re.findall(r"`(\w+)`", found[1])) == sorted(field.name for field in fields(row))


def printed(shown: View, width: int, height: int | None = None) -> list[str]:
    console = Console(width=width, height=height, record=True, file=open(os.devnull, "w"))  # noqa: SIM115, PTH123
    whole = drawn(shown, {"x:9": "nobody at x:9"})
    console.print(Cropped(whole) if height else whole, end="")
    console.file.close()
    return console.export_text().splitlines()


SHOWN = view([Readings(reading(14.0, AFTER), reading(10.0, BEFORE))])
LINKS = [LinkRow("n:1", "h:1", "down", None, 2), LinkRow("n:1", "\x1b[31mh:2", "up", 1.25, 0)]


@pytest.mark.parametrize("width", [60, 160])
def test_a_narrow_terminal(width: int) -> None:
    """No number is broken; what a peer calls itself is neither markup nor a control; each node is under its hub."""
    (hub,) = SHOWN.hubs
    large = replace(hub, address="192.168.100.100:9464", tokens_per_s=12345.6, target="a-target-of-135m-instruct")
    node = NodeRow("[/]one:smile:", "suffix+causal_lm", large.address, 123456789, 1234.5, 0.75, 2.9, 12)
    lines = printed(View([large, hub], [node, *SHOWN.nodes], LINKS), width)
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    for words in (
        "12345.6 tokens/s",
        "12 held, 88 free",
        "4 changes of acceptance",
        "sessions 2/8",
        "3 refused",
        "2.90",
    ):
        assert words in text
    for words in ("123456789", "1234.5", "75%", "30.0", "[/]one", "down", "1.2", "nobody at x:9"):
        assert words in text
    assert "\x1b" not in text
    assert text.index("192.168.100.100") < text.index("[/]one") < text.index("h:1 ") < text.index("two")


def test_what_a_low_terminal_leaves_out_is_told() -> None:
    whole = printed(SHOWN, 80)
    lines = printed(SHOWN, 80, height=5)
    assert [line.rstrip() for line in lines[:4]] == [line.rstrip() for line in whole[:4]]
    assert lines[4].startswith(f"and {len(whole) - 4} more lines")
    assert len(lines) == 5


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
        env=os.environ | {"COLUMNS": "200", "http_proxy": "http://127.0.0.1:9"},
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


async def test_in_a_real_terminal_it_goes_on_until_ctrl_c() -> None:
    """60 columns and no colour; a kit that goes is shown as gone; what was on the screen before comes back."""
    program = (sys.executable, "-m", "baru_hub.cli", "top", "--interval", "0.2", "--metrics")
    async with AsyncExitStack() as running:
        hub, node = await running.enter_async_context(kit())
        live = in_terminal(*program, hub, "--metrics", node, width=60, env={"NO_COLOR": "1"})
        dumb = in_terminal(*program, hub, env={"TERM": "dumb"})
        async with live as here, dumb as there:
            await here.until(r"loopback +simulated? +\d+\.\d +\d+%")
            await there.until(r"loopback +simulated")
            assert await asyncio.wait_for(there.process.wait(), 20) == 0
            assert b"\x1b[?1049" not in there.written
            await running.aclose()
            await here.until(f"nobody shows metrics at {hub}")
            here.type("\x03")
            assert await asyncio.wait_for(here.process.wait(), 20) == 130
            assert not re.search(rb"\x1b\[[0-9;]*3\dm", here.written)
            assert here.written.rindex(b"\x1b[?1049l") > here.written.rindex(b"nobody")


async def test_told_to_end_it_leaves_the_screen_as_it_was() -> None:
    program = (sys.executable, "-m", "baru_hub.cli", "top", "--interval", "0.2", "--metrics")
    async with kit() as (hub, _), in_terminal(*program, hub, width=60) as here:
        await here.until("accepted")
        here.process.terminate()
        assert await asyncio.wait_for(here.process.wait(), 20) == 128 + signal.SIGTERM
        assert here.written.rindex(b"\x1b[?1049l") > here.written.rindex(b"accepted")


@contextmanager
def answering(body: bytes, together: threading.Barrier) -> Iterator[str]:
    """Metrics that are shown only while all others are asked, too."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            with suppress(threading.BrokenBarrierError):
                together.wait(20)
                self.send_response(200)
                self.end_headers()
                self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            together.abort()
            server.shutdown()
            thread.join()


def test_all_are_asked_at_once() -> None:
    """So that three that are gone keep the screen waiting no longer than one."""
    together = threading.Barrier(2)
    body = b"baru_hub_steps_total 1\n"
    with answering(body, together) as one, answering(body, together) as two:
        watcher = Watcher([one, two], None)
        watcher.read()
    assert (watcher.missing, len(watcher.view().hubs)) == ({}, 2)


@pytest.mark.parametrize("address", ["127.0.0.1", "http://127.0.0.1:9464/metrics", "h:99999"])
def test_what_is_no_address_is_said_before_anybody_is_asked(address: str) -> None:
    with pytest.raises(ConfigError, match="is not an address"):
        Watcher(["127.0.0.1:9", address], None)


def test_an_interval_is_finite() -> None:
    for interval in ("inf", "nan", "0"):
        assert CliRunner().invoke(app, ["top", "--interval", interval]).exit_code == 2


async def test_with_certificates(tmp_path: Path) -> None:
    certificate = self_signed(tmp_path)
    async with hub_of(scripted_engine(0.004), metrics="127.0.0.1:0", metrics_tls=certificate) as hub:
        watcher = Watcher([hub.metrics], _tls(certificate))
        await asyncio.to_thread(watcher.read, need_one=True)
        with pytest.raises((ConfigError, HubUnavailable), match="metrics"):
            await asyncio.to_thread(Watcher([hub.metrics], None).read, need_one=True)
    assert len(watcher.view().hubs) == 1


async def test_nobody_there() -> None:
    """It says where, and what to do; one of several that is missing is shown as such."""
    with pytest.raises(HubUnavailable, match=r"nobody shows metrics at 127\.0\.0\.1:9"):
        await asyncio.to_thread(scrape, "127.0.0.1:9")
    for odd in ("h h:1", "a..b:1"):
        with pytest.raises(ConfigError, match="shows no metrics"):
            scrape(odd)
    code, out, err = await top("--metrics", "127.0.0.1:9", "--once", "--interval", "0.2")
    assert (code, out) == (1, "")
    assert "--metrics HOST:PORT" in err
    assert "Traceback" not in err

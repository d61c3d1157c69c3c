"""The console as a person sees it: a real hub, two nodes that generate, one loses its link; headless Chromium."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import pytest
from playwright.async_api import Page, async_playwright, expect

from baru_common.drafters.simulated import SimulatedDrafter
from baru_common.frames import DrafterInfo
from baru_hub.canary import FIXED_PROMPTS, Figure, Record, Triple
from baru_hub.canary_store import CanaryLedger
from baru_hub.console import app
from baru_hub.console.server import running_console
from baru_hub.console.state import ConsoleState
from baru_hub.posture_keeper import PostureKeeper
from baru_hub.server import Hub
from baru_micro import Fallback, LinkOptions, MicroNode
from support.fault_proxy import FaultProxy
from support.faults import Fault
from support.hubs import LOOPBACK, hub_of
from support.kits import kit
from support.link import asked, scripted_engine
from support.lockstep import free_running

CHROMIUM = shutil.which("chromium")
PICTURES = os.environ.get("BARU_SCREENSHOTS")
"""Folder to put the pictures of the documentation into."""
PICTURE_MS = 40_000
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed")


@dataclass(frozen=True)
class Field:
    """A hub with a console, and two nodes that generate; the link of `bravo` can be cut."""

    hub: Hub
    url: str
    link: FaultProxy


def posture_of(hub: Hub) -> PostureKeeper:
    """The shipped document, and what one canary measured."""
    ledger, spec = CanaryLedger(), hub.verifier.spec
    triple, figure = Triple.of_node(spec, DrafterInfo("suffix", digest=b"d" * 32, engine="baru")), Figure(400, 240)
    ledger.put(Record(triple, figure, spec.target_name, "", FIXED_PROMPTS, "here", "2026-11-30"))
    return PostureKeeper(spec, ledger=ledger)


@asynccontextmanager
async def field(folder: Path) -> AsyncIterator[Field]:
    made, state = kit(folder), ConsoleState()
    config = replace(LOOPBACK, console="127.0.0.1:0")
    async with AsyncExitStack() as stack:
        hub = await stack.enter_async_context(
            hub_of(
                scripted_engine(0.02, name="thor-qwen3-8b-int4"),
                scheduler=free_running(),
                observers=[state],
                tls=made.hub,
                node_silence_s=0.6,
            )
        )
        url = await stack.enter_async_context(running_console(config, hub, state, posture_of(hub)))
        link = await stack.enter_async_context(FaultProxy.open(hub.address))
        nodes = (("alpha", hub.address, SimulatedDrafter(0.85)), ("bravo", link.address, SimulatedDrafter(0.5, seed=3)))
        for name, address, drafter in nodes:
            connecting = MicroNode.connect(
                address, drafter=drafter, options=LinkOptions(fallback=Fallback.WAIT), tls=made.issue(name)
            )
            node = await stack.enter_async_context(connecting)
            stack.push_async_callback(_end, asyncio.create_task(_generate(node)))
        yield Field(hub, url, link)


async def _generate(node: MicroNode) -> None:
    async for _ in node.generate("go", asked(100_000)):
        pass


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


@asynccontextmanager
async def opened(
    url: str, width: int, scheme: Literal["light", "dark"], *, unanswered: str = "$^"
) -> AsyncIterator[Page]:
    """A page on which nothing went wrong but what is `unanswered`, and which asked nobody but the hub for anything."""
    problems: list[str] = []
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page = await browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        page.on("console", lambda said: problems.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda r: None if r.url.startswith((url, "data:")) else problems.append(r.url))
        await page.clock.install()
        await page.goto(url)
        yield page
        await browser.close()
    assert not [problem for problem in problems if not re.search(unanswered, problem)]


async def picture(page: Page, name: str) -> None:
    if PICTURES:
        await page.screenshot(path=Path(PICTURES) / f"{name}.png", full_page=True)


async def test_what_a_person_looks_for(tmp_path: Path) -> None:
    """Both nodes and their links, figures that move, cells that say in words what they show; then a cut link, and its
    return. By eye, by keyboard, in the light and in the dark."""
    async with field(tmp_path) as here, opened(here.url, 1280, "light") as page:
        alpha, bravo = (
            page.locator("#node-rows tr", has_text="alpha"),
            page.locator("#node-rows tr", has_text="bravo"),
        )
        for row in (alpha, bravo):
            await expect(row.locator(".state")).to_have_text("up")
            await expect(row.locator("td").nth(3)).to_have_text(re.compile(r"[1-9]\d*\.\d"), timeout=15_000)
            await expect(row.locator("td").nth(4)).to_have_text(re.compile(r"\d+ %"))
        await expect(page.locator("#quiet")).to_be_visible()
        await expect(page.locator("#posture")).to_contain_text("version 1")
        await expect(page.locator("#posture")).to_contain_text(re.compile(r"suffix.*60 %.*admitted"))
        cells = page.locator("article.session", has_text="alpha").locator(".cells")
        await expect(cells).to_have_attribute("aria-label", re.compile(r"\d+ accepted, .*\d+ (bonus|corrections)"))
        before = await page.locator("article.session", has_text="alpha").inner_text()
        await expect(page.locator("article.session", has_text="alpha")).not_to_have_text(before)
        plots = page.locator("svg[role=img]")
        await expect(plots.first).to_have_attribute(
            "aria-label", re.compile(r"tokens/s, the latest: alpha \d+, bravo \d+")
        )
        await page.wait_for_timeout(PICTURE_MS if PICTURES else 0)
        await picture(page, "console-1280-light")

        await here.link.apply(Fault.BLACK_HOLE)
        await expect(bravo.locator(".state")).to_have_text("link cut")
        await expect(alpha.locator(".state")).to_have_text("up")
        await expect(page.locator("#alerts")).to_contain_text("no link to bravo")
        await expect(page.locator("#events li").first).to_contain_text("the link to bravo is cut")
        await picture(page, "console-1280-cut")
        async with opened(here.url, 800, "dark") as tablet:
            await expect(tablet.locator("#alerts")).to_contain_text("no link to bravo")
            assert await tablet.evaluate("document.documentElement.scrollWidth") <= 800
            await tablet.wait_for_timeout(1000)
            await picture(tablet, "console-800-dark")

        await here.link.heal()
        await expect(bravo.locator(".state")).to_have_text("up", timeout=15_000)
        await expect(page.locator("#events")).to_contain_text("bravo is back")

        reached = []
        for _ in range(5):
            await page.keyboard.press("Tab")
            reached.append(
                await page.evaluate("document.activeElement.ariaLabel || document.activeElement.textContent")
            )
        assert reached[:3] == ["To the nodes", "Dark", "Table of nodes"]
        await page.locator("#theme").press("Enter")
        assert await page.evaluate("document.documentElement.dataset.theme") == "dark"


async def test_it_says_when_nobody_answers_and_goes_on_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turned away at first; then there is nothing to show yet; then the hub is gone."""
    monkeypatch.setattr(app, "MAX_VIEWERS", 0)
    config, state = replace(LOOPBACK, console="127.0.0.1:0"), ConsoleState()
    async with hub_of(scripted_engine(0.02), observers=[state]) as hub, AsyncExitStack() as stack:
        url = await stack.enter_async_context(running_console(config, hub, state, None))
        async with opened(url, 1280, "light", unanswered="503|ERR_") as page:
            gone = page.locator("#gone")
            await expect(gone).to_be_hidden()
            await page.clock.run_for(4000)
            await expect(gone).to_be_visible()
            monkeypatch.setattr(app, "MAX_VIEWERS", 1)
            await page.clock.run_for(3000)
            await expect(gone).to_be_hidden()
            for what in ("No node has asked for anything yet", "No session runs", "No canary has run"):
                await expect(page.locator("main")).to_contain_text(what)
            await stack.aclose()
            await page.clock.run_for(4000)
            await expect(gone).to_be_visible()

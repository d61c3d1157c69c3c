"""Group G of the public bug reports, certificates and clocks: they run out, are replaced, and boards start in 1970."""

from __future__ import annotations

import asyncio
import time
from datetime import timedelta
from pathlib import Path

import pytest

from baru_common.identity import Role
from baru_micro import LinkState, MicroNode
from support.fault_proxy import FaultProxy
from support.faults import Lab
from support.hubs import hub_of
from support.kits import kit
from support.link import Shown, Told, script, scripted_engine, until
from support.lockstep import free_running
from support.processes import LEAP_S, CannotApply, End

STEP_S = 0.05


@pytest.mark.parametrize(
    "life_s",
    [pytest.param(3, id="ci"), pytest.param(60, id="full", marks=(pytest.mark.full, pytest.mark.timeout(300)))],
)
async def test_g11a_certificates_are_replaced_while_all_runs(life_s: int, tmp_path: Path) -> None:
    """Both sides get new files at half of the life, and the connection is cut after its end: the session goes on, with
    no restart, and the old certificates would not do any more."""
    made, life = kit(tmp_path), timedelta(seconds=life_s)
    hub_files, node_files = made.issue("one", Role.HUB, lifetime=life), made.issue("alpha", lifetime=life)
    start_s = time.monotonic()
    num_tokens = round((1.5 * life_s + 1) / STEP_S)
    shown = Shown()
    async with (
        FaultProxy.open() as lab,
        hub_of(scripted_engine(STEP_S), scheduler=free_running(), listen=lab.hub_listen, tls=hub_files),
        MicroNode.connect(lab.address, drafter=None, tls=node_files) as node,
    ):
        following = asyncio.create_task(shown.follow(node, num_tokens))
        await asyncio.sleep(life_s / 2)
        made.issue("one", Role.HUB, replace=True)
        made.issue("alpha", replace=True)
        await asyncio.sleep(max(0.0, start_s + 1.5 * life_s - time.monotonic()))
        assert not following.done()
        num_changes = len(shown.changes)
        await lab.reset()
        back_s = await until(lambda: [c.state for c in shown.changes[num_changes:]][-1:] == [LinkState.UP])
        assert back_s < 10.0
        await following
    assert shown.ids == script(num_tokens)


def set_clock(lab: Lab, offset_s: int) -> None:
    try:
        lab.processes.step_clock(End.NODE, offset_s)
    except CannotApply as why:
        pytest.skip(str(why))


async def test_g11b_a_node_that_boots_in_1970(tmp_path: Path) -> None:
    """It says that its clock is wrong, decodes by itself, and is with its hub once the clock is set: no restart, and
    nothing else happens at the leap of 56 years."""
    made = kit(tmp_path)
    alpha = made.issue("alpha")
    num_tokens = 100
    async with FaultProxy.open() as lab:
        set_clock(lab, -LEAP_S)
        async with hub_of(
            scripted_engine(STEP_S), scheduler=free_running(), listen=lab.hub_listen, tls=made.hub
        ) as hub:
            async with MicroNode.connect(lab.address, drafter=None, tls=alpha):
                pass  # so that the node knows its hub from before, as a board does that was switched off
            options = {"hub": lab.address, "num_tokens": num_tokens, "tls": str(alpha)}
            async with Told.by(lab, End.NODE, "generate", **options) as node:
                down = await node.first(lambda line: line["event"] == "LinkChanged")
                assert down["state"] == "down"
                assert "the clock of this machine is wrong: it says 19" in down["reason"]
                await until(lambda: len(node.some(lambda line: line.get("verified") is False)) > 5)
                set_clock(lab, 0)
                await node.first(lambda line: line.get("verified"))
                finish = await node.first(lambda line: line["event"] == "Finish")
            await until(lambda: hub.verifier.num_sessions == 0)
    assert finish["ids"] == script(num_tokens)
    changes = [line["state"] for line in node.some(lambda line: line["event"] == "LinkChanged")]
    assert changes == ["down", "up"]


@pytest.mark.parametrize("skew_s", [-600, pytest.param(600, marks=pytest.mark.full)])
async def test_g11c_ten_minutes_between_the_clocks_mean_nothing(skew_s: int, tmp_path: Path) -> None:
    """Not even with certificates that were made a moment ago."""
    made = kit(tmp_path)
    async with FaultProxy.open() as lab:
        set_clock(lab, skew_s)
        options = {"hub": lab.address, "num_tokens": 20, "tls": str(made.issue("alpha"))}
        async with (
            hub_of(scripted_engine(STEP_S), scheduler=free_running(), listen=lab.hub_listen, tls=made.hub),
            Told.by(lab, End.NODE, "generate", **options) as node,
        ):
            finish = await node.first(lambda line: line["event"] == "Finish")
    assert finish["ids"] == script(20)
    assert {line["event"] for line in node.lines} == {"Started", "Step", "Finish"}
    assert abs(node.lines[0]["clock_s"] - time.time() - skew_s) < 60.0

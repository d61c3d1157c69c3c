"""Every fault, in both labs, with a hub and a node that are processes: the same scenario, the same assertions."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from baru_common.scripted import scripted_id
from support import node_process
from support.faults import Fault, Lab, LabKind
from support.netlab import OPEN
from support.processes import CannotApply, End

NUM_TOKENS = 120
HOLD_S = 1.6
"""A fault lasts longer than it takes to call the link down."""
WAIT_S = 60.0
IN_CI = {
    (LabKind.PROXY, Fault.HUB_RESTART),
    (LabKind.PROXY, Fault.CLOCK_STEP),
    (LabKind.FRAMES, Fault.BLACK_HOLE),
    (LabKind.FRAMES, Fault.STALL),
}
SCENARIOS = [
    pytest.param(kind, fault, id=f"{kind.value}-{fault.name}", marks=() if (kind, fault) in IN_CI else pytest.mark.full)
    for kind in LabKind
    for fault in Fault
    if kind in fault.labs
]
CUTS = {Fault.RST, Fault.FIN, Fault.BLACK_HOLE, Fault.STALL, Fault.HUB_KILL, Fault.HUB_RESTART}
"""Faults after which the node must have noticed an outage."""


async def start_hub(lab: Lab) -> None:
    serve = ["serve", "--engine", "simulated", "--profile", "thor-qwen3-8b-nvfp4", "--listen", lab.hub_listen, "--json"]
    await ready(await lab.processes.start(End.HUB, sys.executable, "-m", "baru_hub.cli", *serve))


async def ready(hub: asyncio.subprocess.Process) -> None:
    async for line in lines(hub):
        if line["event"] == "ready":
            return
    raise AssertionError("the hub did not start")


async def start_node(lab: Lab) -> asyncio.subprocess.Process:
    script = str(Path(node_process.__file__))
    return await lab.processes.start(End.NODE, sys.executable, script, lab.address, "simulated:0.8:2", str(NUM_TOKENS))


async def lines(process: asyncio.subprocess.Process) -> AsyncIterator[dict[str, Any]]:
    assert process.stdout
    async for line in process.stdout:
        yield json.loads(line)


class Shown:
    """What the node says, added up."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.ids: list[int] = []
        self.text = ""
        self.enough = asyncio.Event()
        """Set when something is under way."""

    async def follow(self, process: asyncio.subprocess.Process) -> None:
        async for event in lines(process):
            self.events.append(event)
            self.take(event)

    def take(self, event: dict[str, Any]) -> None:
        if event["event"] == "Step":
            self.ids += [piece["token_id"] for piece in event["pieces"]]
            self.text += "".join(piece["text"] for piece in event["pieces"])
        elif event["event"] == "Retracted":
            assert self.ids[event["start"] :] == event["ids"]
            del self.ids[event["start"] :]
            assert self.text.endswith(event["text"])
            self.text = self.text[: len(self.text) - len(event["text"])]
        if len(self.ids) >= 15:
            self.enough.set()

    def check(self) -> None:
        """Complete, each id once, all of them the target's."""
        (finish,) = (event for event in self.events if event["event"] == "Finish")
        num_prompt = self.events[0]["num_prompt"]
        assert finish["ids"] == [scripted_id(i) for i in range(num_prompt, num_prompt + NUM_TOKENS)]
        assert self.ids == finish["ids"]
        assert self.text + finish["tail"] == finish["text"]
        assert finish["spans"] == [{"start": 0, "end": NUM_TOKENS, "provenance": "verified"}]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("kind", "fault"), SCENARIOS)
async def test_a_fault_does_not_move_the_output(kind: LabKind, fault: Fault) -> None:
    async with OPEN[kind]() as lab:
        await start_hub(lab)
        node = await start_node(lab)
        shown = Shown()
        following = asyncio.create_task(shown.follow(node))
        await asyncio.wait_for(shown.enough.wait(), WAIT_S)
        try:
            await lab.apply(fault)
        except CannotApply as error:
            following.cancel()
            pytest.skip(str(error))
        await asyncio.sleep(HOLD_S)
        await lab.heal()
        if fault is Fault.NODE_KILL:
            await asyncio.wait_for(following, WAIT_S)
            shown = Shown()  # a new one is served as if nothing had been
            await asyncio.wait_for(shown.follow(await start_node(lab)), WAIT_S)
        else:
            await asyncio.wait_for(following, WAIT_S)
        shown.check()
        if fault in CUTS:
            assert "down" in [event["state"] for event in shown.events if event["event"] == "LinkChanged"]

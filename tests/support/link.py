"""What link tests share: a script as target and drafter, a reader of events, and hubs and nodes as programs.

A program at a lab's end says what happens there as lines of JSON; `Told` reads them.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from baru_common.drafters.simulated import SimulatedDrafter
from baru_common.sampling import SamplingContext, SamplingParams
from baru_common.scripted import scripted_id
from baru_micro import Confirmed, Event, Finish, LinkChanged, LinkOptions, MicroNode, Provenance, Retracted, Step
from baru_micro.link import Timers

from .processes import End

if TYPE_CHECKING:  # a node loads nothing of a hub
    from baru_hub.engines.simulated import SimulatedEngine

    from .faults import Lab

PROMPT = (200, 201, 202)
WAIT_S = 30.0
"""What must come, comes within this, however busy the machine."""

Line = dict[str, Any]


def asked(num_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, ignore_eos=True)


def script(num_tokens: int, start: int = len(PROMPT)) -> list[int]:
    """What a simulated target says after the prompt."""
    return [scripted_id(position) for position in range(start, start + num_tokens)]


def scripted_engine(
    step_s: float, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep, name: str = "link"
) -> SimulatedEngine:
    """Any number of sessions in one step of this length."""
    from baru_hub.engines.simulated import DeviceProfile, SimulatedEngine

    return SimulatedEngine(DeviceProfile(name, (step_s, step_s), 0.0), sleep=sleep)


@dataclass(frozen=True)
class Local(SimulatedDrafter):
    """A simulated drafter that has a model: it can decode by itself, at the same pace."""

    def decoder(self, sampling: SamplingContext) -> Local:
        return self


@dataclass
class Shown:
    """What a caller makes of the events, id by id: none may be lost or come twice."""

    ids: list[int] = field(default_factory=list)
    num_settled: int = 0
    num_steps: int = 0
    """With ids of the hub."""
    provisional: int = 0
    changes: list[LinkChanged] = field(default_factory=list)
    finish: Finish | None = None

    def take(self, event: Event) -> None:
        if isinstance(event, Step):
            assert event.base == len(PROMPT) + len(self.ids)
            self.ids += event.ids
            if event.provenance is Provenance.VERIFIED:
                self.num_settled = len(self.ids)
                self.num_steps += 1
            else:
                self.provisional += len(event.ids)
        elif isinstance(event, Confirmed):
            assert self.num_settled == event.start < event.end <= len(self.ids)
            self.num_settled = event.end
        elif isinstance(event, Retracted):
            assert event.start >= self.num_settled
            assert tuple(self.ids[event.start :]) == event.ids
            del self.ids[event.start :]
        elif isinstance(event, LinkChanged):
            self.changes.append(event)
        elif isinstance(event, Finish):
            assert event.ids == tuple(self.ids)
            self.finish = event

    async def follow(self, node: MicroNode, num_tokens: int) -> Shown:
        """Take in a whole generation."""
        async for event in node.generate(PROMPT, asked(num_tokens)):
            self.take(event)
        return self


async def until(holds: Callable[[], object], within_s: float = WAIT_S) -> float:
    """Wait until it holds; return how long that took."""
    start_s = time.monotonic()
    while not holds():
        assert time.monotonic() - start_s < within_s, f"not within {within_s} s"
        await asyncio.sleep(0.01)
    return time.monotonic() - start_s


class Told:
    """What a program says."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[Line] = []

    @classmethod
    @asynccontextmanager
    async def by(cls, lab: Lab, end: End, program: str, **options: object) -> AsyncIterator[Told]:
        """Start one of this module's programs at that end of the lab; kill it in the end."""
        path = os.pathsep.join((str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")))
        argv = (sys.executable, "-m", "support.link", program, json.dumps(options))
        told = cls(await lab.processes.start(end, *argv, env={"PYTHONPATH": path}))
        reading = asyncio.create_task(told._read())
        try:
            yield told
        finally:
            await lab.processes.kill(end)
            await reading

    async def _read(self) -> None:
        assert self.process.stdout
        async for line in self.process.stdout:
            self.lines.append(json.loads(line))

    def some(self, wanted: Callable[[Line], object]) -> list[Line]:
        return [line for line in self.lines if wanted(line)]

    async def first(self, wanted: Callable[[Line], object], within_s: float = WAIT_S) -> Line:
        """Wait for a line that is as wanted."""
        await until(lambda: self.some(wanted), within_s)
        return self.some(wanted)[0]


# -- the programs


def _say(**facts: object) -> None:
    print(json.dumps({"at_s": time.monotonic(), "clock_s": time.time(), **facts}), flush=True)  # noqa: T201


async def serve(listen: str, step_s: float, **settings: Any) -> None:
    """A hub: `ready`, then how many sessions hold memory, whenever that changes."""
    from .hubs import hub_of
    from .lockstep import free_running

    num_sessions = -1
    async with hub_of(scripted_engine(step_s), scheduler=free_running(), listen=listen, **settings) as hub:
        _say(event="ready")
        while True:
            if hub.verifier.num_sessions != num_sessions:
                num_sessions = hub.verifier.num_sessions
                _say(event="sessions", num=num_sessions)
            await asyncio.sleep(0.05)


async def generate(hub: str, num_tokens: int, tls: str | None = None) -> None:
    """A node with default options: every event of one generation, and how the link stands."""
    async with MicroNode.connect(hub, drafter=Local(0.5, token_ms=20), timeout_s=WAIT_S, tls=tls) as node:
        async for event in node.generate(PROMPT, asked(num_tokens)):
            facts: Line = {"event": type(event).__name__, "state": node.link.state.value}
            if isinstance(event, Step):
                facts["verified"] = event.provenance is Provenance.VERIFIED
            if isinstance(event, LinkChanged):
                facts["reason"] = event.reason
            if isinstance(event, Finish):
                facts |= {"ids": event.ids, "elapsed_s": event.elapsed_s}
            _say(**facts)


async def fleet(hub: str, num_tokens: int, num_nodes: int) -> None:
    """Many nodes that connect one after the other and then generate at once: each one's first ids, and its end."""
    calm = LinkOptions(timers=Timers(heartbeat_s=2.0, suspect_s=10.0, down_s=20.0))  # they share one core

    async def one(node: MicroNode, number: int) -> None:
        shown = Shown()
        async for event in node.generate(PROMPT, asked(num_tokens)):
            shown.take(event)
            if isinstance(event, Step) and shown.num_steps == 1:
                _say(event="begun", node=number)
        assert shown.finish
        _say(event="Finish", node=number, ids=shown.finish.ids, changes=[c.state.value for c in shown.changes])

    async with AsyncExitStack() as stack:
        connecting = (MicroNode.connect(hub, drafter=None, timeout_s=WAIT_S, options=calm) for _ in range(num_nodes))
        nodes = [await stack.enter_async_context(node) for node in connecting]
        await asyncio.gather(*(one(node, number) for number, node in enumerate(nodes)))


def main(program: str, options: str) -> None:
    programs: Sequence[Callable[..., Awaitable[None]]] = (serve, generate, fleet)
    (run,) = (p for p in programs if getattr(p, "__name__", "") == program)

    async def running() -> None:
        await run(**json.loads(options))

    asyncio.run(running())


if __name__ == "__main__":
    main(*sys.argv[1:])

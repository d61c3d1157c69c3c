"""Group J of the public bug reports, traffic: what passes says nothing of what is said, and neither do logs."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from baru_common.cli_support import configure_logs
from baru_common.drafters import Proposal
from baru_common.drafters.simulated import SimulatedDrafter
from baru_common.errors import BaruError, EngineFailure
from baru_hub.acceptance import Decision
from baru_hub.config import Shaping as HubShaping
from baru_hub.engines import Feed
from baru_hub.engines.simulated import DeviceProfile, SimulatedEngine
from baru_micro import Finish, MicroNode
from support.capture import DOWN, UP, Capture, Record, encrypt
from support.hubs import hub_of
from support.link import PROMPT, asked, script, until

TICK_MS, ROUND_S = 5, 0.2
NUM_TOKENS = 24
NUM_AROUND = 5
"""Records at the start and at the end of a call that hold gRPC's headers, and what was under way before."""
MOST_RECORDS = 512
PROFILE = DeviceProfile("quick", (0.004, 0.004), 0.0)
Floats = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Run:
    """One generation as it is seen from outside, and what it was."""

    prompt: int
    num_accepted: int
    records: Sequence[Record]

    def sizes(self, way: int) -> set[int]:
        """Sizes in one direction, between set-up and end."""
        return {r.num_bytes for r in [r for r in self.records if r.way == way][NUM_AROUND:-NUM_AROUND]}

    @property
    def lateness_s(self) -> Floats:
        """Of the hub's cells against a perfect clock that fits them best."""
        at_s = np.array([r.at_s for r in self.records if r.way == DOWN])
        offset_s = at_s - at_s[0]
        late_s = offset_s - np.round(offset_s * 1000 / TICK_MS) * TICK_MS / 1000
        return np.asarray(late_s - np.median(late_s))


class ByPrompt(SimulatedDrafter):
    """Right and wrong where the prompt says."""

    def propose(self, ids: Sequence[int], num_committed: int, max_tokens: int) -> Proposal:
        return Proposal(replace(self, seed=ids[0]).draft(len(ids), max_tokens))


async def runs(num_prompts: int, num_runs: int, shaping: HubShaping) -> list[Run]:
    """Generate for each prompt in turn, again and again, over one connection."""
    found = []
    shape: dict[str, Any] = {"traffic_shape": shaping, "shape_tick_ms": TICK_MS, "shape_round_s": ROUND_S}
    async with hub_of(SimulatedEngine(PROFILE), **shape) as hub:
        with Capture.of(hub.address) as (capture, address):
            async with MicroNode.connect(address, drafter=ByPrompt(0.6)) as node:
                for prompt in [*range(num_prompts)] * num_runs:
                    start = len(capture.records)
                    events = node.generate((2 + prompt, *PROMPT), asked(NUM_TOKENS))
                    (finish,) = [event async for event in events if isinstance(event, Finish)]
                    await until(lambda: not node._hubs.current.streams)
                    found.append(Run(prompt, finish.usage.num_accepted, capture.records[start:]))
    return found


def recognised(found: Sequence[Run]) -> float:
    """Share of runs whose nearest neighbour is of the same prompt, by what tells most: sizes, or gaps, too; of both
    directions, or of one."""
    chosen = [[r for r in run.records if r.way in ways] for run in found for ways in ((UP, DOWN), (UP,), (DOWN,))]
    views = [[_seen(records) for records in chosen[start::3]] for start in range(3)]
    prompts = np.array([run.prompt for run in found])
    return max(_nearest(np.array(view)[:, :, parts], prompts) for view in views for parts in ([0], [1], [0, 1]))


def _seen(records: Sequence[Record]) -> Floats:
    seen = np.zeros((MOST_RECORDS, 2))
    seen[: len(records), 0] = [r.way * r.num_bytes for r in records[:MOST_RECORDS]]
    seen[1 : len(records), 1] = np.diff([r.at_s for r in records[:MOST_RECORDS]])
    return seen


def _nearest(seen: Floats, prompts: np.ndarray[Any, Any]) -> float:
    flat = (seen / (seen.std(axis=(0, 1), keepdims=True) + 1e-9)).reshape(len(seen), -1)
    distances = np.stack([np.abs(flat - one).sum(axis=1) for one in flat])
    np.fill_diagonal(distances, np.inf)
    return float(np.mean(prompts[distances.argmin(axis=1)] == prompts))


@pytest.mark.parametrize(
    ("num_prompts", "num_runs", "most"),
    [
        pytest.param(6, 4, 0.55, id="ci"),  # by chance 0.17, with a deviation of 0.08
        pytest.param(50, 20, 0.1, id="full", marks=(pytest.mark.full, pytest.mark.timeout(1800))),  # by chance 0.02
    ],
)
async def test_j05_traffic_says_nothing_of_what_was_accepted(
    num_prompts: int, num_runs: int, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two sizes a direction, a fixed tick, and who watches cannot tell prompts; without a shape, he can."""
    encrypt(monkeypatch)
    shaped = await runs(num_prompts, num_runs, HubShaping.REQUIRED)
    for way in (UP, DOWN):
        assert len(set.union(*(run.sizes(way) for run in shaped))) <= 2
    assert len({run.num_accepted for run in shaped}) > 2
    late_s = [np.mean(np.abs(run.lateness_s)) for run in shaped]
    assert np.mean(late_s) < TICK_MS / 1000 / 2
    assert abs(np.corrcoef(late_s, [run.num_accepted for run in shaped])[0, 1]) < 0.6
    assert recognised(shaped) <= most
    assert recognised(await runs(num_prompts, num_runs, HubShaping.OFF)) >= 0.6


class FailsLate(SimulatedEngine):
    """Its steps fail, once there is something to keep quiet about."""

    num_steps = 0

    async def verify(self, feeds: Sequence[Feed]) -> list[Decision | BaruError]:
        self.num_steps += 1
        if self.num_steps % 8 == 0:
            raise RuntimeError("the device is gone")
        return await super().verify(feeds)


async def test_logs_hold_no_text(caplog: pytest.LogCaptureFixture) -> None:
    """Neither of a prompt nor of an answer, as text or as ids: not at the default level, not with --verbose, not when
    a step fails."""
    prompt = "the heron flies at midnight"
    for name in ("baru_common", "baru_hub", "baru_micro"):
        caplog.set_level(logging.DEBUG, logger=name)  # and as it was, in the end
    async with hub_of(FailsLate(PROFILE)) as hub, MicroNode.connect(hub.address, drafter=SimulatedDrafter(0.8)) as node:
        ids = node.prompt_ids(prompt)
        for verbose in (False, True):
            configure_logs(verbose=verbose)
            with pytest.raises(EngineFailure):
                [event async for event in node.generate(prompt, asked(200))]
    answer = script(6, start=len(ids))
    assert "the device is gone" in caplog.text
    for told in ("heron", node.tokenizer.decode(answer), str(ids[:4])[1:-1], str(answer[:4])[1:-1]):
        assert told not in caplog.text

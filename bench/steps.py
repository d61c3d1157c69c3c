"""What a step costs on this machine, and where our own time goes.

Part one, in one interleaved run on one core: a plain bf16 step of one session against a token of transformers' own
greedy `generate`, and of eight sessions against one. Part two: eight sessions over real gRPC, time per step outside
the forward pass, by stage.

Usage: python -m bench.steps [--rounds N]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
import uvloop

from baru_common import wire
from baru_common.errors import BaruError
from baru_common.frames import Draft, Verdict
from baru_common.model_files import DEFAULT_TARGET, load
from baru_common.sampling import SamplingParams
from baru_hub.acceptance import Decision
from baru_hub.config import HubConfig
from baru_hub.engines import Feed
from baru_hub.engines.simulated import DeviceProfile, SimulatedEngine
from baru_hub.engines.transformers import TransformersEngine
from baru_hub.scheduler import GoodputScheduler, Plan
from baru_hub.server import running_hub
from baru_hub.session import Block, Session
from baru_micro import MicroNode

from .store import OUT, Store, machine

STORE = Store(OUT / "steps.jsonl")
PROMPT = [504, 260, 6330, 282] * 32
NUM_TOKENS = 24


def main() -> None:
    """Measure both parts and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    os.sched_setaffinity(0, {0})
    torch.set_num_threads(1)
    STORE.path.unlink(missing_ok=True)
    for name, row in {**engine_costs(rounds), **own_time()}.items():
        STORE.append(name, {**row, "machine": machine()})
        print(f"{name:44} " + "  ".join(f"{k} {v:.3f}" for k, v in row.items()))


def engine_costs(rounds: int) -> dict[str, dict[str, float]]:
    """Milliseconds of steps and of `generate`, in turn; ratios round by round."""
    engine, model = TransformersEngine(load(DEFAULT_TARGET)), load(DEFAULT_TARGET).model
    samples: dict[str, list[float]] = defaultdict(list)
    for _ in range(rounds):
        samples["generate"].append(generate_ms(model))
        samples["step of 1"].append(asyncio.run(steps_ms(engine, 1, 0)))
        samples["step of 8"].append(asyncio.run(steps_ms(engine, 8, 0)))
        samples["step of 1 with 4 drafts"].append(asyncio.run(steps_ms(engine, 1, 4)))
        samples["step of 8 with 4 drafts"].append(asyncio.run(steps_ms(engine, 8, 4)))
    rows = {f"{name}, ms": spread(values) for name, values in samples.items()}
    rows["step of 1 / generate"] = spread(ratios(samples["step of 1"], samples["generate"]))
    rows["step of 8 / step of 1"] = spread(ratios(samples["step of 8"], samples["step of 1"]))
    return rows


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and range."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Pair by pair."""
    return [a / b for a, b in zip(above, below, strict=True)]


@torch.inference_mode()
def generate_ms(model: Any) -> float:
    """A token of transformers' greedy generation, the prompt's pass taken off."""
    ids = torch.tensor([PROMPT])

    def run(num_tokens: int) -> float:
        start_s = time.perf_counter()
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
        )
        return time.perf_counter() - start_s

    return (run(NUM_TOKENS + 1) - run(1)) / NUM_TOKENS * 1e3


async def steps_ms(engine: TransformersEngine, num_sessions: int, num_drafts: int) -> float:
    """A decoding step of some sessions, each with the prompt and as many drafts."""
    sequences = [engine.allocate(PROMPT, len(PROMPT) + 64, None).sequence for _ in range(num_sessions)]
    for sequence in sequences:
        await engine.verify([Feed(sequence, 0, Block(tuple(PROMPT)))])
    block = Block((504,), (260,) * num_drafts)
    start_s = time.perf_counter()
    for step in range(NUM_TOKENS):
        await engine.verify([Feed(sequence, len(PROMPT) + step, block) for sequence in sequences])
    elapsed_s = time.perf_counter() - start_s
    for sequence in sequences:
        engine.free(sequence)
    return elapsed_s / NUM_TOKENS * 1e3


class Stopwatch:
    """Milliseconds between marks, by name."""

    def __init__(self) -> None:
        self.samples: dict[str, list[float]] = defaultdict(list)
        self._last_s = time.perf_counter()

    def mark(self, name: str) -> None:
        """End a stage."""
        now_s = time.perf_counter()
        self.samples[name].append((now_s - self._last_s) * 1e3)
        self._last_s = now_s

    def steady(self, name: str) -> list[float]:
        """A stage's samples without the start and the end of the run, where not all sessions decode."""
        samples = self.samples[name]
        return samples[len(samples) // 4 : len(samples) // 2]


def own_time() -> dict[str, dict[str, float]]:
    """Milliseconds per step of our own code with eight sessions, over loopback gRPC, nodes in another process."""
    return uvloop.run(_own_time())


async def _own_time() -> dict[str, dict[str, float]]:
    # What a step takes beyond its forward pass (simulated: 20 ms, rows for free) is ours.
    forward_s = 0.02
    engine = SimulatedEngine(DeviceProfile("fixed", (forward_s, forward_s), 0.0))
    scheduler = GoodputScheduler(await engine.calibrate())
    watch = Stopwatch()
    make_plan, learn, verify = scheduler.plan, scheduler.learn, engine.verify

    def timed_plan(sessions: Sequence[Session], now_s: float) -> Plan:
        watch.mark("accept, commit, queue verdicts")
        planned = make_plan(sessions, now_s)
        watch.mark("plan")
        return planned

    def timed_learn(plan: Plan, step_s: float, draft_s: float = 0.0) -> None:
        watch.mark("wake up")
        learn(plan, step_s, draft_s)
        watch.mark("learn")

    async def timed_verify(feeds: Sequence[Feed]) -> list[Decision | BaruError]:
        watch.mark("lay out feeds")
        decided = await verify(feeds)
        watch.mark("forward")
        return decided

    scheduler.plan, scheduler.learn, engine.verify = timed_plan, timed_learn, timed_verify  # type: ignore[method-assign]
    async with running_hub(engine, HubConfig(listen="127.0.0.1:0", max_patience_ms=0), scheduler=scheduler) as hub:
        command = ["-m", "bench.steps_client", hub.address]
        client = await asyncio.create_subprocess_exec("taskset", "-c", "1", sys.executable, *command)
        await client.wait()
    # Serialisation, gRPC and reading drafts share the event loop with the simulated pass: what it overran is theirs.
    watch.samples["serialise, gRPC, read drafts"] = [ms - forward_s * 1e3 for ms in watch.samples.pop("forward")]
    stages = {name: watch.steady(name) for name in watch.samples}
    total = [sum(parts) for parts in zip(*stages.values(), strict=False)]
    draft, verdict = Draft(1, 1, 200, 0, (500,) * 8), Verdict(1, 200, 8, 8, (500,) * 9, 1, 8)
    return {
        "8 sessions: a step beyond its forward pass, ms": spread(total),
        **{f"8 sessions: {name}, ms": spread(samples) for name, samples in stages.items()},
        "frame of 8 drafted ids, bytes": {"size": float(wire.encode_request(draft).ByteSize())},
        "verdict of 9 ids, bytes": {"size": float(wire.encode_response(verdict).ByteSize())},
    }


async def clients(address: str) -> None:
    """Eight nodes that generate at once."""

    async def one(index: int) -> None:
        async with MicroNode.connect(address, drafter=f"simulated:0.8:0:{index}") as node:
            params = SamplingParams(max_tokens=800, ignore_eos=True)
            async for _ in node.generate([200] * (8 + index), params):
                pass

    await asyncio.gather(*(one(i) for i in range(8)))


if __name__ == "__main__":
    main()

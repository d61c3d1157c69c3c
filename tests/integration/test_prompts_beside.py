"""A long prompt is fed beside the others without holding them up. On a virtual clock."""

from __future__ import annotations

import asyncio
import statistics
from itertools import pairwise

from bench.virtual import run

from baru_common.frames import Open, Verdict
from baru_common.sampling import SamplingParams
from baru_hub.engines.simulated import DeviceProfile, SimulatedEngine
from baru_hub.scheduler import GoodputScheduler
from baru_hub.verifier import Verifier

NUM_LONG = 4000


async def gaps_beside_a_long_prompt() -> tuple[list[float], float]:
    """Return the times between verdicts of three sessions, and when the long prompt's first id came."""
    engine = SimulatedEngine(DeviceProfile("dear-rows", (0.02, 0.03), 0.001))
    clock = asyncio.get_running_loop().time
    gaps: list[float] = []

    async with Verifier(engine, GoodputScheduler(await engine.calibrate()), clock=clock) as verifier:
        hub = verifier.describe()

        async def listen(prompt: tuple[int, ...], num_tokens: int) -> float:
            params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
            live = await verifier.open(Open(prompt, params, hub.target_fingerprint, hub.tokenizer_digest))
            stamps = []
            async for frame in live.frames():
                if isinstance(frame, Verdict):
                    stamps.append(clock())
            gaps.extend(b - a for a, b in pairwise(stamps))
            return stamps[0]

        decoding = [asyncio.create_task(listen((200,) * 4, 600)) for _ in range(3)]
        await asyncio.sleep(0.5)
        first_s = await listen((200,) * NUM_LONG, 1)
        await asyncio.gather(*decoding)
    return gaps, first_s


def test_a_long_prompt_stretches_no_gap_to_three_medians() -> None:
    """4,000 ids, each as dear as a twentieth of a step: the others' gaps stay below 3x the median."""
    gaps, first_s = run(gaps_beside_a_long_prompt())
    assert max(gaps) < 3 * statistics.median(gaps)
    assert first_s < NUM_LONG * 0.001 * 4 + 5, "and the prompt itself gets through"

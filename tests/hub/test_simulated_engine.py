"""The simulated target says what its script says, in the time that its profile says; and gRPC carries it."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest

from baru_common.drafters.simulated import SimulatedDrafter
from baru_common.errors import ConfigError
from baru_common.sampling import SamplingParams
from baru_common.scripted import EOS_ID, is_hard, scripted_id
from baru_hub.cost_model import StepShape
from baru_hub.engines import Feed
from baru_hub.engines.simulated import DeviceProfile, SimulatedEngine, devices
from baru_hub.session import Block
from support.hubs import generate, hub_of
from support.lines import ids_of
from support.lockstep import Lockstep

_PROFILES = sorted(devices()["targets"])


class Clock:
    """Adds up the time that is slept, and lets none pass."""

    def __init__(self) -> None:
        self.slept_s: list[float] = []

    async def sleep(self, delay_s: float) -> None:
        self.slept_s.append(delay_s)
        await asyncio.sleep(0)


def engine_of(name: str = "thor-qwen3-8b-int4") -> tuple[SimulatedEngine, Clock]:
    clock = Clock()
    return SimulatedEngine(DeviceProfile.load(name), sleep=clock.sleep), clock


@pytest.mark.parametrize("name", _PROFILES)
def test_step_times_at_the_published_points_are_exact(name: str) -> None:
    """One and eight sessions as published, linear between, and each further row adds its own."""
    profile, published = DeviceProfile.load(name), devices()["targets"][name]
    one, eight = (ms / 1e3 for ms in published["plain_ms"])
    assert profile.step_s(StepShape(1, 1, 0)) == pytest.approx(one, rel=1e-12)
    assert profile.step_s(StepShape(8, 8, 0)) == pytest.approx(eight, rel=1e-12)
    assert profile.step_s(StepShape(1, 1, 9000)) == pytest.approx(one, rel=1e-12)
    assert profile.step_s(StepShape(9, 1, 0)) == pytest.approx(one + 8 * published["row_ms"] / 1e3, rel=1e-12)
    assert profile.step_s(StepShape(12, 4, 0)) == pytest.approx(
        one + 3 * (eight - one) / 7 + 8 * published["row_ms"] / 1e3, rel=1e-12
    )


def test_an_unknown_profile_is_refused_and_the_known_ones_named() -> None:
    """Who mistypes a name sees which there are."""
    with pytest.raises(ConfigError, match="no-such-device") as refused:
        DeviceProfile.load("no-such-device")
    assert len(_PROFILES) >= 3
    assert all(name in refused.value.hint for name in _PROFILES)


@pytest.mark.parametrize("name", _PROFILES)
async def test_the_calibration_finds_the_profile(name: str) -> None:
    """Without waiting for anything, to a few percent at the published points."""
    engine, clock = engine_of(name)
    cost, profile = await engine.calibrate(), DeviceProfile.load(name)
    assert clock.slept_s == []
    for shape in (StepShape(1, 1, 0), StepShape(8, 8, 0), StepShape(9, 1, 0), StepShape(40, 8, 0)):
        assert cost.predict_s(shape) == pytest.approx(profile.step_s(shape), rel=0.05)


async def test_what_is_decided_is_the_script() -> None:
    """By position alone, whatever was fed; pieces of prompts decide nothing; one step, one sleep."""
    engine, clock = engine_of()
    feeds = [
        Feed(1, 5, Block((9, 9), (9, 9, 9))),
        Feed(2, 0, Block((9,) * 16, decides=False)),
        Feed(3, 40, Block((9,))),
    ]
    decided = await engine.verify(feeds)
    assert list(map(ids_of, decided)) == [[scripted_id(p) for p in (7, 8, 9, 10)], [], [scripted_id(41)]]
    assert clock.slept_s == [DeviceProfile.load("thor-qwen3-8b-int4").step_s(StepShape(22, 3, 0))]


def test_the_script_is_text_that_does_not_end() -> None:
    """Letters and spaces of the engine's own vocabulary, never an end of sequence, not always the same."""
    vocabulary = engine_of()[0].spec.vocabulary
    ids = [scripted_id(p) for p in range(2000)]
    assert EOS_ID not in ids
    assert b"".join(vocabulary.pieces[i] or b"?" for i in ids).decode().replace(" ", "a").isalpha()
    assert len(set(ids)) == 27


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.8, 1.0])
def test_a_simulated_drafter_is_right_as_often_as_asked(acceptance: float) -> None:
    """Independently at each position, the same each time, and elsewhere with another seed."""
    drafter = SimulatedDrafter(acceptance)
    right = [a == scripted_id(p) for p, a in enumerate(drafter.draft(0, 5000))]
    assert sum(right) / 5000 == pytest.approx(acceptance, abs=0.02)
    assert right == [not is_hard(p, acceptance) for p in range(5000)]
    assert drafter.propose([0] * 30, 20, 8).ids == drafter.draft(30, 8) == drafter.draft(25, 13)[5:]
    other = SimulatedDrafter(acceptance, seed=1).draft(0, 5000)
    assert (other == drafter.draft(0, 5000)) == (acceptance in (0.0, 1.0))
    pairs = sum(a and b for a, b in pairwise(right)) / 4999
    assert pairs == pytest.approx(acceptance**2, abs=0.03)


@pytest.mark.parametrize(
    "argument", ["", "x", "1.5", "-0.1", "nan", "0.5:x", "0.5:-1", "0.5:nan", "0.5:inf", "0.5:1:x", "0.5:1:2:3"]
)
def test_nonsense_is_no_drafter(argument: str) -> None:
    """A ConfigError says what the form is, before anything runs."""
    with pytest.raises(ConfigError):
        SimulatedDrafter.parse(argument)


def test_a_drafter_is_read_from_its_name() -> None:
    """Time and seed may be left out."""
    assert SimulatedDrafter.parse("0.7") == SimulatedDrafter(0.7)
    assert SimulatedDrafter.parse("0.7:2.5") == SimulatedDrafter(0.7, 2.5)
    assert SimulatedDrafter.parse("0.7:2.5:9") == SimulatedDrafter(0.7, 2.5, 9)


@pytest.mark.parametrize("acceptance", ["0", "0.6", "1"])
async def test_the_script_comes_over_grpc(acceptance: str) -> None:
    """A real hub and node on loopback: the script's ids, whatever was drafted; each accepted draft saves a step."""
    engine, clock = engine_of()
    async with hub_of(engine, scheduler=Lockstep(depth=4)) as hub:
        prompt = [2, 3, 4, 5, 6]
        params = SamplingParams(max_tokens=40, ignore_eos=True)
        finish, steps = await generate(hub.address, prompt, params, f"simulated:{acceptance}")
    assert list(finish.ids) == [scripted_id(p) for p in range(5, 45)]
    assert len(clock.slept_s) == len(steps) == finish.usage.num_steps
    assert finish.usage.num_verified > 0
    assert finish.usage.num_steps == 40 - finish.usage.num_accepted
    assert (finish.usage.num_rejected == 0) == (acceptance == "1")
    assert (finish.usage.num_accepted == 0) == (acceptance == "0")

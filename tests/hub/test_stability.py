"""A change of acceptance is found soon, and where there is none, hardly ever."""

from __future__ import annotations

import random
from collections.abc import Iterator
from statistics import median

import pytest

from baru_common.drafters.simulated import SimulatedDrafter
from baru_common.frames import Usage
from baru_common.sampling import SamplingParams
from baru_common.trace_context import TraceContext
from baru_hub.observing import Ended, Part, Stepped, Who
from baru_hub.scene import SceneChange, SceneStability, Scope
from baru_hub.stability import Change, ChangeDetector
from baru_hub.survival import Survival
from support.hubs import generate, hub_of
from support.link import scripted_engine
from support.lockstep import Lockstep

DEPTH = 5
_RATES = {0: 0.9, 1: 0.7, 2: 0.5, 3: 0.3}


def steps(chance: random.Random, acceptance: float, depth: int = DEPTH) -> Iterator[int]:
    """How many of `depth` draft ids each step accepts."""
    while True:
        yield next((place for place in range(depth) if chance.random() >= acceptance), depth)


def found(seed: int, before: float, after: float, num_before: int) -> list[Change]:
    chance, detector = random.Random(seed), ChangeDetector()
    series = [next(steps(chance, before)) for _ in range(num_before)] + [next(steps(chance, after)) for _ in range(120)]
    changes = (detector.add(DEPTH, num_accepted) for num_accepted in series)
    return [change for change in changes if change]


def test_a_fall_is_found_within_twenty_steps() -> None:
    """From 0.8 to 0.4 after 400 steps, in 60 series: when, from when on, and by how much."""
    series = [found(seed, 0.8, 0.4, 400) for seed in range(60)]
    first = [next(change for change in changes if change.seen > 400) for changes in series]
    assert sum(map(len, series)) <= len(first) + 1
    delays = [change.seen - 400 for change in first]
    assert median(delays) <= 18
    assert sum(0 < delay <= 20 for delay in delays) >= 42
    assert max(delays) <= 45
    assert median(abs(change.onset - 400) for change in first) <= 2
    assert all(abs(change.before - 0.8) < 0.06 for change in first)
    assert abs(median(change.after for change in first) - 0.4) < 0.06
    assert all(change.size < -0.1 and change.confidence > 0.98 for change in first)


@pytest.mark.parametrize(("before", "after"), [(0.4, 0.8), (0.6, 0.95), (1.0, 0.5), (0.0, 0.4)])
def test_changes_of_other_kinds(before: float, after: float) -> None:
    """Rises, and from what never varied: one event each, of the right size."""
    (change,) = found(1, before, after, 600)
    assert 0 < change.seen - 600 <= 40
    assert abs(change.size - (after - before)) < 0.2


@pytest.mark.parametrize("acceptance", [0.0, 0.2, 0.5, 0.8, 0.95, 1.0])
def test_a_steady_series_raises_no_alarm(acceptance: float) -> None:
    """At most one in 20,000 steps."""
    chance, detector = random.Random(11), ChangeDetector()
    series = steps(chance, acceptance)
    assert sum(detector.add(DEPTH, next(series)) is not None for _ in range(20_000)) <= 1


def test_a_change_of_depth_is_none() -> None:
    """Deeper positions are worse, and the depth goes up and down in blocks."""
    chance, detector = random.Random(5), ChangeDetector()
    changes = []
    for step in range(8_000):
        depth = 1 if step // 200 % 2 else 6
        hits = (chance.random() < _RATES.get(place, 0.2) for place in range(depth))
        changes.append(detector.add(depth, next((place for place, hit in enumerate(hits) if not hit), depth)))
    assert not any(changes)


# -- at the hub


def _who(session: str, node: str = "spiffe://kit/node/one") -> Who:
    return Who(session, node, "ngram", TraceContext.new())


def _part(who: Who, num_accepted: int, num_verified: int = DEPTH) -> Part:
    return Part(who, 0, num_verified, num_verified, num_accepted, 0, num_accepted + 1, 9, 0, 0, 0.02)


def test_a_node_is_watched_over_all_its_sessions() -> None:
    """Two sessions that fall together: the node's change is found sooner than either's, and others see nothing."""
    events: list[SceneChange] = []
    scene, chance = SceneStability([events.append]), random.Random(2)
    ours, other = [_who("a"), _who("b")], _who("c", "spiffe://kit/node/two")
    good, bad = steps(chance, 0.8), steps(chance, 0.4)
    for step in range(340):
        series = good if step < 300 else bad
        parts = [*(_part(who, next(series)) for who in ours), _part(other, next(good))]
        scene.stepped(Stepped([*parts, _part(ours[0], 0, 0)], 0.02, 0.0, 0.0))
    assert [event.scope for event in events] == [Scope.NODE, Scope.SESSION, Scope.SESSION]
    assert {event.who.node for event in events} == {ours[0].node}
    assert all(event.change.seen <= 340 for event in events[1:]), "a step that checks nothing is none"
    for who in (*ours, other):
        scene.ended(Ended(who, "stop", failed=False, usage=Usage(*[0] * 9)))
    assert not scene._sessions


class _Turning(SimulatedDrafter):
    """Good up to a position, then bad."""

    def draft(self, position: int, max_tokens: int) -> list[int]:
        good, bad = SimulatedDrafter(0.85), SimulatedDrafter(0.2)
        return [(good if p < 900 else bad).draft(p, 1)[0] for p in range(position, position + max_tokens)]


@pytest.mark.parametrize("follows", [False, True])
async def test_a_hub_reports_it(
    follows: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its log: who, when, how much, and nothing else; drafting follows only where that is asked for."""
    followed: list[float] = []
    monkeypatch.setattr(Survival, "restart", lambda _, rate: followed.append(rate))
    params = SamplingParams(max_tokens=1200, ignore_eos=True)
    with caplog.at_level("INFO", "baru_hub.scene"):
        async with hub_of(
            scripted_engine(step_s=0.0), scheduler=Lockstep(4), log_sessions=True, follow_changes=follows
        ) as hub:
            await generate(hub.address, "go", params, _Turning(0.5))
    (of_session,) = [record for record in caplog.records if record.__dict__.get("scope") == "session"]
    assert of_session.message == "acceptance changed"
    assert of_session.__dict__["drafter"] == "simulated"
    assert of_session.__dict__["size"] < -0.4
    assert followed == ([of_session.__dict__["after"]] if follows else [])


def test_forgetting_takes_all_positions_to_what_is_now() -> None:
    survival = Survival(4)
    for _ in range(400):
        survival.observe(4, 4)
    assert survival.gains()[3] > 0.9
    survival.restart(0.4)
    assert survival.gains()[0] == pytest.approx(0.4, abs=0.03)
    assert survival.gains()[3] < 0.06

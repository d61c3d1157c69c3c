"""What the scheduler by goodput decides, with sessions made by hand and costs that are known. Time is a number here."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baru_common.frames import Draft
from baru_hub.acceptance import Decision
from baru_hub.cost_model import CostModel, StepShape
from baru_hub.mailbox import Mailbox
from baru_hub.pace import Pace
from baru_hub.scheduler import GoodputScheduler, Plan
from baru_hub.session import Session
from support.sampling import context

_NOW_S, _STEP_S = 1000.0, 0.02
FREE, DEAR = (_STEP_S, 1e-7, 1e-7, 1e-7), (_STEP_S, 0.05, 1e-7, 1e-7)
"""A row costs nothing, or more than a step."""


def scheduler_of(prior: tuple[float, float, float, float] = FREE, max_prefill: int = 512) -> GoodputScheduler:
    return GoodputScheduler(CostModel(prior), max_prefill)


def session_of(name: str = "a", *, num_pending: int = 1, has_drafter: bool = True, max_depth: int = 8) -> Session:
    """A session whose last verdict came at `_NOW_S`, asked for drafts, and whose node is unknown."""
    session = Session(
        session_id=name,
        epoch=1,
        max_length=100_000,
        sampling=context(num_pending + 9),
        mailbox=Mailbox(100, 64),
        pace=Pace(max_depth),
        has_drafter=has_drafter,
        committed=[7] * (num_pending + 9),
        num_cached=9,
    )
    session.stamp(_NOW_S)
    session.pace.asked = session.pace.window if has_drafter else 0
    return session


def answers_in(session: Session, answer_s: float, num_ids: int = 4) -> Session:
    """The node is known to answer in this time, steadily."""
    for _ in range(60):
        session.pace.answers.observe(answer_s, num_ids)
    return session


def accepts(session: Session, num_accepted: int, num_steps: int = 60) -> Session:
    """Drafts of eight were accepted so far, always."""
    for _ in range(num_steps):
        session.pace.learn(8, num_accepted)
    return session


def draft(session: Session, *ids: int) -> Session:
    num_committed = len(session.committed)
    session.mailbox.put(Draft(1, session.mailbox.chain_id + 1, num_committed, 0, ids), num_committed)
    return session


def carry_out(plan: Plan) -> None:
    """Do what the loop does: the target decides 7 everywhere."""
    for session, block in plan.blocks:
        session.take(block, Decision((7,) * (len(block.draft) + 1) if block.decides else ()))
        session.stamp(_NOW_S)


def depths(plan: Plan) -> dict[str, int]:
    return {session.session_id: len(block.draft) for session, block in plan.blocks}


def test_depth_grows_while_a_row_is_free() -> None:
    """A good drafter and free rows: all that is allowed is checked."""
    session, scheduler = session_of(), scheduler_of(FREE)
    for _ in range(60):
        carry_out(scheduler.plan([draft(session, *[7] * 16)], _NOW_S))
    assert depths(scheduler.plan([draft(session, *[7] * 16)], _NOW_S)) == {"a": 8}


@pytest.mark.parametrize("num_sessions", [1, 8])
def test_depth_goes_to_nothing_when_a_row_costs_more_than_it_earns(num_sessions: int) -> None:
    """Drafts that are right half the time are neither checked nor asked for any more; after a few plans."""
    sessions, scheduler = [session_of(str(i)) for i in range(num_sessions)], scheduler_of(DEAR)
    for _ in range(3):
        plan = scheduler.plan([draft(session, 7, 7, 7) for session in sessions], _NOW_S)
    assert set(depths(plan).values()) == {0}
    assert all(session.pace.window == 0 for session in sessions)


@pytest.mark.parametrize("row_share", [0.05, 0.2, 0.5])
@pytest.mark.parametrize("acceptance", [0.06, 0.1, 0.15, 0.18, 0.2, 0.22, 0.4, 0.45, 0.7, 0.8])
def test_no_depth_is_kept_that_costs_throughput(row_share: float, acceptance: float) -> None:
    """By the scheduler's own estimates: never below 0.98 of the rate without drafts, for any price of a row."""
    session, scheduler = session_of(), scheduler_of((_STEP_S * (1 - row_share), _STEP_S * row_share, 1e-9, 1e-9))
    plain_s = scheduler.cost.predict_s(StepShape(1, 1, len(session.committed)))
    for position in session.pace.survival._positions:
        position.slow.hits, position.slow.tries = acceptance * 1e6, 1e6
    for _ in range(20):
        plan = scheduler.plan([draft(session, *[7] * 8)], _NOW_S)
    num_ids = 1 + sum(session.pace.survival.gains()[: depths(plan)["a"]])
    assert num_ids / scheduler.cost.predict_s(plan.shape) >= 0.98 / plain_s


def test_a_bad_drafter_s_rows_do_not_pay_where_a_good_one_s_do() -> None:
    """Each session's depth follows its own drafter, at one price."""
    good, bad = accepts(session_of("good"), 8), accepts(session_of("bad"), 0)
    scheduler = scheduler_of((_STEP_S, 0.004, 1e-7, 1e-7))
    plan = scheduler.plan([draft(good, *[7] * 8), draft(bad, *[7] * 8)], _NOW_S)
    assert depths(plan) == {"good": 8, "bad": 0}


@given(random=st.randoms(use_true_random=False), dear=st.booleans())
@settings(max_examples=50, deadline=None)
def test_every_decoding_session_is_in_every_step(random: Random, dear: bool) -> None:
    """Once each, with all that it has pending, whatever else is served; with nobody there is nothing to do."""
    sessions = [
        session_of(str(i), num_pending=random.choice([1, 1, 5, 16, 17, 300]), has_drafter=random.random() < 0.5)
        for i in range(random.randint(1, 8))
    ]
    scheduler, now_s = scheduler_of(DEAR if dear else FREE), _NOW_S
    assert scheduler.plan([], now_s) == Plan((), None)
    for _ in range(8):
        for session in sessions:
            if random.random() < 0.5:
                draft(session, *(random.choice([7, 8]) for _ in range(random.randint(0, 9))))
        decoding = {s.session_id for s in sessions if s.num_pending <= 16}
        plan = scheduler.plan(sessions, now_s)
        assert plan.blocks or 0 < (plan.wait_s or 0) <= scheduler.max_patience_s
        now_s += plan.wait_s or 0.0
        if plan.blocks:
            served = [session.session_id for session, _ in plan.blocks]
            assert len(set(served)) == len(served)
            assert decoding <= set(served)
            assert all(block.decides for session, block in plan.blocks if session.session_id in decoding)
        carry_out(plan)


@given(seed=st.integers(0, 10_000))
@settings(max_examples=30, deadline=None)
def test_equal_states_get_equal_plans(seed: int) -> None:
    """Nothing but sessions, costs and clock decides."""
    plans = []
    for _ in range(2):
        random, scheduler = Random(seed), scheduler_of((_STEP_S, 0.001, 0.001, 0.001))
        sessions = [session_of(str(i), num_pending=random.choice([1, 40])) for i in range(4)]
        seen: list[object] = []
        for _ in range(6):
            draft(random.choice(sessions), *[random.choice([7, 8]) for _ in range(4)])
            plan = scheduler.plan(sessions, _NOW_S + random.random() * 0.1)
            seen.append((plan.wait_s, [(s.session_id, block) for s, block in plan.blocks]))
            carry_out(plan)
            scheduler.learn(plan, 0.02)
        plans.append(seen)
    assert plans[0] == plans[1]


def test_the_model_learns_from_the_steps() -> None:
    """What a plan took is what the next one of its shape is expected to take."""
    scheduler = scheduler_of()
    plan = scheduler.plan([session_of(has_drafter=False)], _NOW_S)
    for _ in range(200):
        scheduler.learn(plan, 0.08)
    assert scheduler.cost.predict_s(plan.shape) == pytest.approx(0.08, rel=0.05)
    assert (plan.shape.num_rows, plan.shape.num_sessions, plan.shape.num_context) == (1, 1, 10)


@pytest.mark.parametrize(("row_s", "piece"), [(0.001, 21), (0.0001, 201), (1e-7, 512), (0.01, 16)])
def test_a_prompt_stretches_the_others_step_to_twice_at_most(row_s: float, piece: int) -> None:
    """A piece takes as long as the step without it; 16 ids at least, 512 at most."""
    scheduler = scheduler_of((_STEP_S, row_s, 1e-7, 1e-7))
    plan = scheduler.plan([session_of("d", has_drafter=False), session_of("p", num_pending=5000)], _NOW_S)
    assert [len(block.pending) for _, block in plan.blocks] == [1, pytest.approx(piece, abs=1)]
    assert not plan.blocks[1][1].decides
    alone = scheduler.plan([session_of("p", num_pending=5000)], _NOW_S)  # nobody stalls
    assert [len(block.pending) for _, block in alone.blocks] == [512]


def test_the_oldest_prompt_is_fed_first_and_none_starves() -> None:
    """Each gets what the one before it left; all are through after as many steps as their ids take."""
    sessions = [session_of(str(i), num_pending=n, has_drafter=False) for i, n in enumerate((130, 40, 200, 90))]
    scheduler, through = scheduler_of(DEAR, max_prefill=64), list[str]()
    assert [len(b.pending) for _, b in scheduler.plan(sessions[1:], _NOW_S).blocks] == [40, 24]
    for _ in range(40):
        plan = scheduler.plan(sessions, _NOW_S)
        carry_out(plan)
        through += [s.session_id for s, b in plan.blocks if b.decides and s.session_id not in through]
    assert through == ["0", "1", "2", "3"]


@pytest.mark.parametrize(("answer_s", "waits"), [(0.002, True), (0.005, True), (0.2, False), (5.0, False)])
def test_a_near_node_is_waited_for_and_a_far_one_is_not(answer_s: float, waits: bool) -> None:
    """A good draft within a fraction of a step is worth it; many plain steps long, it is not."""
    session = answers_in(accepts(session_of(), 8), answer_s)
    plan = scheduler_of().plan([session], _NOW_S)
    assert (plan.wait_s is not None) == (not plan.blocks) == waits
    assert plan.wait_s is None or 0.9 * answer_s <= plan.wait_s < 0.25


def test_a_draft_that_is_there_or_never_right_is_not_waited_for() -> None:
    """The answer has come, even an empty one; or none would help."""
    there, empty, useless = (answers_in(accepts(session_of(), n), 0.002) for n in (8, 8, 0))
    for session in (draft(there, 7, 7), draft(empty), useless):
        assert scheduler_of().plan([session], _NOW_S).blocks


def test_an_unknown_node_gets_a_short_chance_and_a_silent_one_loses_it() -> None:
    """Two waits in vain; then none until it has answered by itself."""
    session, scheduler, waits = session_of(), scheduler_of(), []
    for _ in range(6):
        waits.append(scheduler.plan([session], _NOW_S).wait_s or 0.0)
        carry_out(scheduler.plan([session], _NOW_S + waits[-1] + 1e-6))
    assert [wait_s > 0 for wait_s in waits] == [True, True, False, False, False, False]
    assert max(waits) < 0.05
    carry_out(scheduler.plan([draft(session, 7)], _NOW_S))
    assert scheduler.plan([session], _NOW_S).wait_s


@pytest.mark.parametrize("change", ["has_drafter", "asked", "room", "depth"])
def test_what_cannot_answer_is_not_waited_for(change: str) -> None:
    """No drafter, not asked, no place left, or no depth allowed."""
    session = answers_in(accepts(session_of(max_depth=0 if change == "depth" else 8), 8), 0.002)
    session.has_drafter = change != "has_drafter"
    session.pace._until_probe = 0  # nor looked at again
    session.pace.asked = 0 if change == "asked" else 8
    session.max_length = len(session.committed) + (1 if change == "room" else 100)
    assert scheduler_of().plan([session], _NOW_S).blocks
    assert scheduler_of().plan([answers_in(accepts(session_of(), 8), 0.002)], _NOW_S).wait_s


@given(
    answers=st.lists(st.tuples(st.floats(0, 3), st.integers(0, 20), st.floats(0, 0.5)), min_size=1, max_size=4),
    patience_s=st.sampled_from([0.0, 0.01, 0.25]),
)
@settings(max_examples=60, deadline=None)
def test_no_wait_is_longer_than_the_most_patience(answers: list[tuple[float, int, float]], patience_s: float) -> None:
    """Counted from the verdict, plan after plan, whatever was learned of the nodes."""
    sessions = [session_of(str(i)) for i in range(len(answers))]
    for session, (answer_s, num_ids, age_s) in zip(sessions, answers, strict=True):
        accepts(answers_in(session, answer_s, num_ids), 8).stamp(_NOW_S - age_s)
    scheduler, now_s = GoodputScheduler(CostModel(FREE), max_patience_s=patience_s), _NOW_S
    while (wait_s := scheduler.plan(sessions, now_s).wait_s) is not None:
        now_s += wait_s
        assert now_s <= max(session.decided_s for session in sessions) + patience_s + 2e-4

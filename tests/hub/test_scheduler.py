"""Who is served when: fair turns, bounded blocks, and no wait that nobody needs. Time is a number here."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baru_common.frames import Draft
from baru_hub.mailbox import Mailbox
from baru_hub.scheduler import Plan, TurnScheduler
from baru_hub.session import Session

_DEPTH, _PATIENCE_S, _PREFILL = 4, 0.5, 6
_START_S = 1000.0


def scheduler_of(patience_s: float = _PATIENCE_S) -> TurnScheduler:
    return TurnScheduler(max_depth=_DEPTH, patience_s=patience_s, max_prefill=_PREFILL)


def session_of(name: str, *, num_prompt: int = 3, room: int = 1000, has_drafter: bool = False) -> Session:
    """A session that was opened at `_START_S`."""
    return Session(
        session_id=name,
        epoch=1,
        num_prompt=num_prompt,
        max_length=num_prompt + room,
        stop_ids=frozenset(),
        mailbox=Mailbox(100, 16),
        has_drafter=has_drafter,
        committed=list(range(num_prompt)),
        decided_s=_START_S,
    )


def draft(session: Session, *ids: int) -> None:
    num_committed = len(session.committed)
    session.mailbox.put(Draft(1, session.mailbox.chain_id + 1, num_committed, 0, ids), num_committed)


def carry_out(plan: Plan, now_s: float) -> list[str]:
    """Do what the loop does with a plan; return who was served. The target refuses all drafts."""
    for session, block in plan.blocks:
        session.take(block, [99] * (len(block.draft) + 1) if block.decides else [])
        session.decided_s = now_s
    return [session.session_id for session, _ in plan.blocks]


def turns(scheduler: TurnScheduler, sessions: list[Session], num_steps: int) -> list[list[str]]:
    return [carry_out(scheduler.plan(sessions, _START_S), _START_S) for _ in range(num_steps)]


@pytest.mark.parametrize("num_sessions", [1, 2, 3, 7])
def test_turns_are_fair(num_sessions: int) -> None:
    """In any window of as many steps as there are sessions, each of them is served."""
    sessions = [session_of(str(i), num_prompt=1 + 5 * i) for i in range(num_sessions)]
    served = turns(scheduler_of(), sessions, 12 * num_sessions)
    everyone = {session.session_id for session in sessions}
    for start in range(len(served) - num_sessions + 1):
        assert {name for step in served[start : start + num_sessions] for name in step} == everyone


@given(random=st.randoms(use_true_random=False))
def test_nobody_starves_while_others_come_and_go(random: Random) -> None:
    """Sessions end right after they were served, new ones arrive each time: an old one still gets its turn."""
    scheduler = scheduler_of()
    patient = session_of("patient")
    sessions = [session_of("first"), patient]
    since_served = 0
    for i in range(60):
        served = carry_out(scheduler.plan(sessions, _START_S), _START_S)
        since_served = 0 if "patient" in served else since_served + 1
        assert since_served <= 16  # however the turns restart when the one before has gone
        sessions = [s for s in sessions if s is patient or s.session_id not in served or random.random() < 0.5]
        if len(sessions) < 4:
            sessions.append(session_of(f"new {i}"))


@given(
    prompts=st.lists(st.integers(1, 20), min_size=1, max_size=4),
    drafted=st.lists(st.integers(0, 12), min_size=4, max_size=4),
)
def test_a_plan_keeps_its_bounds(prompts: list[int], drafted: list[int]) -> None:
    """No session twice in a step, no more than the depth of drafts, no more than a piece of a prompt."""
    sessions = [session_of(str(i), num_prompt=n, has_drafter=True) for i, n in enumerate(prompts)]
    for session, num_ids in zip(sessions, drafted, strict=False):
        draft(session, *range(num_ids))
    scheduler, now_s = scheduler_of(), _START_S + _PATIENCE_S
    for _ in range(30):
        plan = scheduler.plan(sessions, now_s)
        assert len({id(session) for session, _ in plan.blocks}) == len(plan.blocks)
        for session, block in plan.blocks:
            assert len(block.draft) <= _DEPTH
            assert 1 <= len(block.pending) <= _PREFILL
            assert list(block.pending) == session.committed[session.num_cached :][: len(block.pending)]
        carry_out(plan, now_s)
        now_s += _PATIENCE_S


def test_without_sessions_there_is_nothing_to_wait_for() -> None:
    """The loop sleeps until it is woken."""
    assert scheduler_of().plan([], _START_S) == Plan((), None)


@pytest.mark.parametrize("elapsed", [0.0, 0.1, 0.499])
def test_a_node_that_may_be_drafting_is_waited_for(elapsed: float) -> None:
    """And no longer than its patience lasts, counted from the last verdict."""
    plan = scheduler_of().plan([session_of("a", has_drafter=True)], _START_S + elapsed)
    assert plan.blocks == ()
    assert plan.wait_s is not None
    assert 0 < plan.wait_s <= _PATIENCE_S - elapsed + 1e-9


@pytest.mark.parametrize("elapsed", [0.5, 0.7, 1e9])
def test_patience_ends(elapsed: float) -> None:
    """At its end, and after it, the hub goes on with a plain step."""
    plan = scheduler_of().plan([session_of("a", has_drafter=True)], _START_S + elapsed)
    assert [len(block.draft) for _, block in plan.blocks] == [0]


def test_waiting_as_long_as_told_is_always_enough() -> None:
    """The next plan, that much later, waits no more: no spinning on a rest of a nanosecond."""
    for i in range(200):
        scheduler, now_s = scheduler_of(i / 199), _START_S + (i * 37 % 100) / 1009
        sessions = [session_of("a", has_drafter=True)]
        waited_s, num_plans = 0.0, 0
        while not (plan := scheduler.plan(sessions, now_s)).blocks:
            assert plan.wait_s is not None
            now_s, waited_s, num_plans = now_s + plan.wait_s + 1e-6, waited_s + plan.wait_s, num_plans + 1
        assert num_plans <= 1
        assert waited_s <= scheduler.patience_s + 1e-9


def test_of_several_waits_the_shortest_counts() -> None:
    """Whoever is due first is served first."""
    early, late = (session_of(name, has_drafter=True) for name in ("early", "late"))
    early.decided_s, late.decided_s = _START_S - 0.3, _START_S
    scheduler = scheduler_of()
    plan = scheduler.plan([late, early], _START_S)
    assert plan.wait_s == pytest.approx(0.2)
    assert carry_out(scheduler.plan([late, early], _START_S + 0.2001), _START_S + 0.2001) == ["early"]


def _no_drafter(session: Session) -> None:
    session.has_drafter = False


def _says_nothing(session: Session) -> None:
    draft(session)


def _has_drafted(session: Session) -> None:
    draft(session, 1, 2)


def _has_a_long_prompt(session: Session) -> None:
    session.committed += range(50)


def _has_one_place_left(session: Session) -> None:
    session.max_length = len(session.committed) + 1


@pytest.mark.parametrize("change", [_no_drafter, _says_nothing, _has_drafted, _has_a_long_prompt, _has_one_place_left])
def test_what_cannot_gain_from_waiting_is_served_at_once(change: Callable[[Session], None]) -> None:
    """No drafter, an answer already there, a prompt still to be fed, or no place for a draft."""
    session = session_of("a", has_drafter=True)
    change(session)
    plan = scheduler_of().plan([session], _START_S)
    assert [s.session_id for s, _ in plan.blocks] == ["a"]


def test_one_session_waiting_holds_up_no_other() -> None:
    """The one that has something to do gets every step meanwhile."""
    waiting, busy = session_of("waiting", has_drafter=True), session_of("busy")
    assert turns(scheduler_of(), [waiting, busy], 5) == [["busy"]] * 5


def test_an_answer_to_an_older_verdict_is_none() -> None:
    """The node had nothing to propose one step ago; for what was decided since, it may have."""
    session = session_of("a", has_drafter=True)
    scheduler = scheduler_of()
    draft(session)
    assert carry_out(scheduler.plan([session], _START_S), _START_S) == ["a"]
    assert scheduler.plan([session], _START_S).blocks == ()


def test_drafts_are_checked_as_deep_as_allowed() -> None:
    """More than the depth waits in the mailbox; depth 0 turns drafting off without any wait."""
    session = session_of("a", has_drafter=True)
    draft(session, *range(7))
    plan = scheduler_of().plan([session], _START_S)
    assert [block.draft for _, block in plan.blocks] == [(0, 1, 2, 3)]

"""How deep and how wide the hub drafts itself: pure decisions, with sessions made by hand and costs that are known."""

from __future__ import annotations

import itertools

import pytest

from baru_common.frames import Draft
from baru_hub.acceptance import Decision
from baru_hub.cost_model import CostModel, StepShape
from baru_hub.mailbox import Mailbox
from baru_hub.pace import OwnPace, Pace
from baru_hub.scheduler import GoodputScheduler, Plan
from baru_hub.session import Block, Session
from support.sampling import context

_NOW_S, _STEP_S = 1000.0, 0.02
FREE = (_STEP_S, 1e-7, 1e-7, 1e-7)
"""A row costs nothing."""


def scheduler_of(pass_share: float = 0.02, prior: tuple[float, float, float, float] = FREE) -> GoodputScheduler:
    """`pass_share`: what a pass of the hub's drafter takes, in plain steps."""
    scheduler = GoodputScheduler(CostModel(prior))
    scheduler._pass_s = pass_share * _STEP_S
    return scheduler


def session_of(name: str = "a", *, max_depth: int = 8, room: int = 10_000, has_drafter: bool = False) -> Session:
    session = Session(
        session_id=name,
        epoch=1,
        max_length=10 + room,
        sampling=context(10),
        mailbox=Mailbox(100, 64),
        pace=Pace(max_depth),
        own=OwnPace(max_depth),
        has_drafter=has_drafter,
        committed=[7] * 10,
        num_cached=9,
    )
    session.stamp(_NOW_S)
    return session


def own_of(session: Session) -> OwnPace:
    assert session.own is not None
    return session.own


def holding(session: Session, num_held: int, num_steps: int = 60) -> Session:
    """The hub's drafts of eight held so far, always."""
    for _ in range(num_steps):
        own_of(session).learn(8, num_held)
    return session


def block_of(plan: Plan, name: str = "a") -> Block:
    return next(block for session, block in plan.blocks if session.session_id == name)


def depth_of(scheduler: GoodputScheduler, session: Session) -> int:
    scheduler.plan([session], _NOW_S)
    return own_of(session).depth


# -- depth


@pytest.mark.parametrize(("num_held", "depth"), [(8, 8), (3, 3), (1, 1), (0, 0)])
def test_depth_is_what_holds(num_held: int, depth: int) -> None:
    """With cheap passes and free rows."""
    assert depth_of(scheduler_of(), holding(session_of(), num_held)) == depth


def test_a_good_drafter_is_found_from_nothing() -> None:
    """Depth grows as deeper guesses turn out right, up to what is allowed."""
    session, scheduler, depths = session_of(), scheduler_of(), []
    for _ in range(40):
        depths.append(depth_of(scheduler, session))
        own_of(session).learn(depths[-1], depths[-1])
    assert depths[0] > 0
    assert depths[-1] == 8
    assert depths == sorted(depths)


@pytest.mark.parametrize("num_held", [0, 4, 8])
def test_dear_passes_turn_it_off(num_held: int) -> None:
    """A pass that takes as long as a step gains nothing, however right it is."""
    assert depth_of(scheduler_of(pass_share=1.2), holding(session_of(), num_held)) == 0


def test_dear_rows_turn_it_off() -> None:
    assert depth_of(scheduler_of(prior=(_STEP_S, 0.05, 1e-7, 1e-7)), holding(session_of(), 8)) == 0


def test_a_pass_is_shared() -> None:
    """Eight sessions that are drafted for together go as deep as one alone would."""
    scheduler = scheduler_of(pass_share=0.3)
    assert depth_of(scheduler, holding(session_of(), 2)) == 2
    sessions = [holding(session_of(str(i)), 2) for i in range(8)]
    scheduler.plan(sessions, _NOW_S)
    assert [own_of(session).depth for session in sessions] == [2] * 8


def test_passes_are_learned_as_they_are_measured() -> None:
    """By the longest path of the step, what a node drafted included."""
    session, scheduler = holding(session_of(), 8), scheduler_of()
    plan = Plan(((session, Block((7,)).extended([1, 2, 3, 4], [])),))
    for _ in range(100):
        scheduler.learn(plan, _STEP_S, draft_s=4 * 1.5 * _STEP_S)
    assert scheduler._pass_s == pytest.approx(1.5 * _STEP_S, rel=0.01)
    assert depth_of(scheduler, session) == 0
    for _ in range(100):
        scheduler.learn(plan, _STEP_S, draft_s=4 * 0.01 * _STEP_S)
    assert depth_of(scheduler, session) == 8


def test_steps_without_it_teach_nothing_of_passes() -> None:
    scheduler = scheduler_of()
    before = scheduler._pass_s
    scheduler.learn(Plan(((session_of(), Block((7,), (1, 2))),)), _STEP_S, draft_s=0.0)
    assert scheduler._pass_s == before


def test_a_small_promise_changes_nothing() -> None:
    """Within the margin depth stays where it is, be it high or low; past it, it moves."""
    scheduler = scheduler_of(pass_share=0.2)
    found = {}
    for start in range(9):
        session = holding(session_of(), 2)
        own_of(session).depth = start
        found[start] = depth_of(scheduler, session)
    assert found[0] == found[8] == 2  # six passes in vain are no small matter
    cheap = scheduler_of(pass_share=0.002)
    for start in (2, 3, 4):  # a pass or two that cost next to nothing
        session = holding(session_of(), 2)
        own_of(session).depth = start
        assert depth_of(cheap, session) == start


@pytest.mark.parametrize("pass_share", [0.02, 0.2])
def test_one_that_earns_nothing_is_let_go_however_cheap(pass_share: float) -> None:
    """While it drafts nobody waits for the node, whose drafts may be good."""
    session = holding(session_of(), 0)
    own_of(session).depth = 1
    assert depth_of(scheduler_of(pass_share), session) == 0


def test_a_depth_that_is_not_known_any_more_is_given_up() -> None:
    session = session_of()
    own_of(session).depth = 30
    assert depth_of(scheduler_of(), session) <= 8


# -- beside a node's drafts


def with_draft(num_accepted: int, num_held: int, *, length: int = 4, num_steps: int = 60) -> Session:
    """A node's draft of four ids is there; so many of such were accepted so far, and so many of the hub's own."""
    session = holding(session_of(has_drafter=True), num_held)
    session.mailbox.put(Draft(1, 1, 10, 0, (1, 2, 3, 4)[:length]), 10)
    for _ in range(num_steps):
        session.pace.learn(4, num_accepted)
    return session


@pytest.mark.parametrize(
    ("num_accepted", "num_held", "length", "depth"),
    [(4, 8, 4, 8), (4, 0, 4, 0), (4, 3, 4, 3), (0, 3, 0, 3), (1, 8, 0, 8)],
)
def test_who_earns_more_drafts(num_accepted: int, num_held: int, length: int, depth: int) -> None:
    """A node's good draft goes first, and the hub goes on from it; a bad one is in the way, and not asked for."""
    session = with_draft(num_accepted, num_held)
    block = block_of(scheduler_of().plan([session], _NOW_S))
    assert (len(block.draft), block.own_depth) == (length, depth)
    assert (session.pace.window > 0) is (length > 0)


def test_a_bad_node_is_probed() -> None:
    """One id at a time, at growing intervals as long as that fails, and closer ones when it holds."""
    session, scheduler = with_draft(1, 6), scheduler_of(pass_share=0.1)
    lengths = []
    for _ in range(700):
        block = block_of(scheduler.plan([session], _NOW_S))
        lengths.append(len(block.draft))
        good = len(lengths) > 200
        session.pace.learn(len(block.draft), len(block.draft) if good else 0)
    assert 2 <= sum(lengths[:200]) <= 12
    assert set(lengths[:200]) <= {0, 1}
    assert sum(lengths[-100:]) >= 10


# -- probes


def test_one_that_earns_nothing_is_tried_now_and_again() -> None:
    """One id deep, at growing intervals as it keeps failing; and no more seldom than every 128 steps or so."""
    session, scheduler = holding(session_of(), 0), scheduler_of()
    probes = []
    for step in range(1200):
        depth = depth_of(scheduler, session)
        assert depth in (0, 1)
        if depth:
            probes.append(step)
        own_of(session).learn(depth, 0)
    gaps = [b - a for a, b in itertools.pairwise(probes)]
    assert gaps == sorted(gaps)
    assert gaps[0] < 20
    assert 100 < gaps[-1] < 140
    assert len(probes) >= 8


def test_one_that_comes_good_is_used_again() -> None:
    session, scheduler = holding(session_of(), 0, 30), scheduler_of()
    depths = []
    for _ in range(300):
        depths.append(depth_of(scheduler, session))
        own_of(session).learn(depths[-1], depths[-1])
    assert depths[0] == 0
    assert depths[-1] == 8


def rests_until_probed(own: OwnPace) -> int:
    """Steps without it until it is to be tried again."""
    num_rests = 0
    while not own.probing:
        own.rest()
        num_rests += 1
    return num_rests


def test_a_success_brings_the_probes_closer() -> None:
    own, waits = OwnPace(), []
    for num_held in (0, 0, 0, 0, 0, 0, 1, 0):
        waits.append(rests_until_probed(own))
        own.learn(1, num_held)
    assert waits == [8, 16, 32, 64, 128, 128, 128, 8]


def test_a_step_that_was_only_waited_for_is_no_step_without_it() -> None:
    """However often a plan is made anew while a node's draft is under way."""
    session, scheduler = holding(session_of(has_drafter=True), 0), scheduler_of(pass_share=2.0)
    session.pace.asked = session.pace.window
    for _ in range(60):
        session.pace.answers.observe(0.004, 4)
        session.pace.learn(4, 4)
    session.pace.asked = session.pace.window
    for _ in range(200):
        plan = scheduler.plan([session], _NOW_S)
        assert plan.wait_s
        assert not plan.blocks
    assert not own_of(session).probing


# -- width


def test_leaves_are_made_where_they_hit() -> None:
    """A second guess pays when it is often right where the first is wrong, and rows are cheap."""
    session, scheduler = holding(session_of(), 2), scheduler_of()
    for _ in range(60):
        own_of(session).learn_beside(hit=True)
    depth_of(scheduler, session)
    assert own_of(session).width == 2
    for _ in range(400):
        own_of(session).learn_beside(hit=False)
    dear = scheduler_of(prior=(_STEP_S, 0.0005, 1e-7, 1e-7))
    depth_of(dear, session)
    assert own_of(session).depth > 0
    assert own_of(session).width == 1


def test_no_leaves_beside_a_path_that_always_holds() -> None:
    session, scheduler = holding(session_of(), 8, 400), scheduler_of(prior=(_STEP_S, 0.0003, 1e-7, 1e-7))
    depth_of(scheduler, session)
    assert (own_of(session).depth, own_of(session).width) == (8, 1)


def test_no_leaves_without_a_path() -> None:
    session = holding(session_of(), 0)
    for _ in range(60):
        own_of(session).learn_beside(hit=True)
    assert depth_of(scheduler_of(), session) == 0
    assert own_of(session).width == 1


def test_beside_is_a_share_that_forgets() -> None:
    own = OwnPace()
    assert own.beside == pytest.approx(0.2)
    for _ in range(300):
        own.learn_beside(hit=True)
    assert own.beside > 0.95
    for _ in range(300):
        own.learn_beside(hit=False)
    assert own.beside < 0.15


# -- beside a node's draft


def drafted(session: Session, *ids: int) -> Session:
    """The node has sent a draft that is there in time, as its drafts always were, all of them right."""
    for _ in range(60):
        session.pace.learn(4, 4)
    num_committed = len(session.committed)
    session.mailbox.put(Draft(1, session.mailbox.chain_id + 1, num_committed, 0, ids), num_committed)
    return session


def test_going_on_from_a_nodes_draft_costs_a_pass_for_each_of_its_ids() -> None:
    """What pays from the committed ids does not pay from the end of a long draft."""
    dear = 0.3
    alone = holding(session_of(), 2)
    assert depth_of(scheduler_of(pass_share=dear), alone) == 2
    behind = drafted(holding(session_of(has_drafter=True), 2), 1, 2, 3, 4)
    assert depth_of(scheduler_of(pass_share=dear), behind) == 0
    cheap = drafted(holding(session_of(has_drafter=True), 2), 1, 2, 3, 4)
    assert depth_of(scheduler_of(pass_share=0.01), cheap) == 2


def test_a_nodes_draft_that_will_not_hold_is_no_place_to_go_on_from() -> None:
    session = holding(session_of(has_drafter=True), 4)
    for _ in range(60):
        session.pace.learn(4, 0)
    num_committed = len(session.committed)
    session.mailbox.put(Draft(1, 1, num_committed, 0, (1, 2, 3, 4)), num_committed)
    scheduler = scheduler_of(pass_share=0.05, prior=(_STEP_S, 0.0005, 1e-7, 1e-7))
    assert (
        depth_of(scheduler, session) == 4
    )  # a bad node's draft is not checked, so the hub goes on from the committed ids


def test_nobody_waits_for_a_node_while_the_hub_drafts() -> None:
    session = holding(session_of(has_drafter=True), 8)
    session.pace.asked = session.pace.window
    for _ in range(60):
        session.pace.answers.observe(0.001, 4)
    plan = scheduler_of().plan([session], _NOW_S)
    assert plan.blocks
    assert block_of(plan).own_depth > 0


# -- what a block asks for


@pytest.mark.parametrize(("room", "depth"), [(1, 0), (2, 1), (5, 4), (9, 8), (100, 8)])
def test_never_more_than_there_is_room_for(room: int, depth: int) -> None:
    """One id comes in any case."""
    session = holding(session_of(room=room), 8)
    block = block_of(scheduler_of().plan([session], _NOW_S))
    assert (len(block.draft), block.own_depth) == (0, depth)


def test_a_nodes_draft_takes_of_the_room() -> None:
    session = drafted(holding(session_of(room=6, has_drafter=True), 8), 1, 2, 3)
    session.pace.depth = 3
    own_of(session).depth, own_of(session).width = 8, 2
    block = session.next_block(3, 100)
    assert (block.draft, block.own_depth, block.own_width) == ((1, 2, 3), 2, 2)


def test_a_prompt_is_not_drafted_for() -> None:
    """What the drafter reads is not computed yet while more than the last id is pending."""
    session = holding(session_of(), 8)
    session.num_cached = 7
    own_of(session).depth = 8
    assert session.next_block(4, 100).own_depth == 0
    assert session.next_block(4, 2).own_depth == 0
    session.num_cached = 9
    assert session.next_block(4, 100).own_depth == 8


def test_a_session_without_it_asks_for_nothing() -> None:
    session = session_of()
    session.own = None
    assert block_of(scheduler_of().plan([session], _NOW_S)).own_depth == 0


# -- what is learned from a step


def take(session: Session, block: Block, *decided: int) -> OwnPace:
    """Let the target say the same after each node as at its depth in `decided`."""
    depths = [0, *(depth + 1 for depth in block.tree.depths)]
    session.take(block, Decision(tuple(decided[depth] for depth in depths)))
    return own_of(session)


def gains_of(num_tried: int, num_held: int) -> list[float]:
    own = OwnPace(8)
    own.learn(num_tried, num_held)
    return own.survival.gains()


def test_its_own_path_is_judged_from_where_the_nodes_draft_ended() -> None:
    """Two of the node's, three of its own, of which two held."""
    session = session_of()
    block = Block((7,), (1, 2)).extended([1, 2, 3, 4, 5], [])
    own = take(session, block, 1, 2, 3, 4, 9, 8)
    assert own.survival.gains() == gains_of(3, 2)
    assert (session.num_accepted, session.num_guessed) == (2, 2)


def test_what_came_after_a_wrong_draft_of_the_nodes_teaches_nothing() -> None:
    session = session_of()
    before = gains_of(0, 0)
    own = take(session, Block((7,), (1, 2)).extended([1, 2, 3, 4], []), 1, 9, 3, 4, 5)
    assert own.survival.gains() == before
    assert own.beside == OwnPace().beside


@pytest.mark.parametrize(("decided", "hit"), [((1, 6, 9, 9), True), ((1, 8, 9, 9), False)])
def test_a_leaf_is_judged_where_the_path_was_wrong(decided: tuple[int, ...], hit: bool) -> None:
    session = session_of()
    block = Block((7,)).extended([1, 2, 3], [[5], [1, 6], [1, 2, 7]])
    expected = OwnPace()
    expected.learn_beside(hit=hit)
    own = take(session, block, *decided)
    assert own.beside == expected.beside
    assert own.survival.gains() == gains_of(3, 1)
    assert session.num_guessed == 1 + hit


def test_where_there_was_no_leaf_none_was_wrong() -> None:
    own = take(session_of(), Block((7,)).extended([1, 2], [[5]]), 1, 9, 9)
    assert own.beside == OwnPace().beside


def test_steps_cost_what_their_trees_hold() -> None:
    """Leaves are rows, too."""
    plan = Plan(((session_of(), Block((7,)).extended([1, 2], [[5], [1, 6]])),))
    assert plan.shape == StepShape(5, 1, 10)

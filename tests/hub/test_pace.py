"""How deep one session drafts, when it is tried again, and whether its node is worth waiting for."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baru_hub.pace import Answers, Pace


def steps_until_probe(pace: Pace) -> int:
    num_steps = 0
    while not pace.probing:
        pace.learn(0, 0)
        num_steps += 1
    return num_steps


def switched_off() -> Pace:
    """A session whose drafts were refused until none paid any more."""
    pace = Pace(8)
    for _ in range(20):
        pace.learn(4, 0)
    pace.adjust_depth(pace.survival.gains(), 0.5)
    assert pace.depth == 0
    return pace


# -- depth


@pytest.mark.parametrize(("price", "depth"), [(0.01, 4), (0.3, 3), (0.45, 2), (0.7, 1), (0.95, 0)])
def test_depth_goes_to_where_a_row_no_longer_pays(price: float, depth: int) -> None:
    """From either side it ends within the band around the price."""
    gains = [0.9, 0.7, 0.5, 0.3]
    for start in (0, 4):
        pace = Pace(8)
        pace.depth = start
        pace.adjust_depth(gains, price)
        assert abs(pace.depth - depth) <= 1
        assert all(gain >= 0.75 * price for gain in gains[: pace.depth])
        assert all(gain <= 1.25 * price for gain in gains[pace.depth :])


@given(price=st.floats(0.05, 1.0), seed=st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_a_constant_price_makes_no_depth_flap(price: float, seed: int) -> None:
    """Gains that waver by some percent around what they are move the depth in one direction only."""
    random, pace = Random(seed), Pace(8)
    true = [0.8**j for j in range(1, 9)]
    depths = []
    for _ in range(60):
        noise = 1 + random.uniform(-0.08, 0.08)
        pace.adjust_depth([gain * noise for gain in true], price)
        depths.append(pace.depth)
    assert depths in (sorted(depths), sorted(depths, reverse=True))


def test_depth_stays_within_what_has_a_gain() -> None:
    """No gains, as of a session without a drafter: no depth."""
    pace = Pace(8)
    pace.adjust_depth([], 0.0)
    assert pace.depth == 0


def test_depth_zero_turns_drafting_off_for_good() -> None:
    """With no depth allowed nothing is asked for, and nothing is ever probed."""
    pace = Pace(0)
    for _ in range(300):
        pace.learn(0, 0)
        pace.adjust_depth(pace.survival.gains(), 0.0)
        pace.adjust_window(0.02, 1.0, 64)
        assert (pace.depth, pace.window, pace.probing, pace.checked_depth) == (0, 0, False, 0)


@pytest.mark.parametrize(("answer_s", "window"), [(0.0, 5), (0.02, 7), (0.1, 15), (9.0, 64)])
def test_the_window_reaches_past_what_will_be_overtaken(answer_s: float, window: int) -> None:
    """Steps of 20 ms and two ids each go by while a draft is under way; never more than the mailbox keeps."""
    pace = Pace(8)
    pace.answers.mean_s = answer_s
    pace.adjust_window(0.02, 2.0, 64)
    assert pace.depth == 4
    assert pace.window == window


# -- probing


def test_probing_becomes_rare_as_it_keeps_failing() -> None:
    """The interval doubles with each probe in vain, up to 128 steps."""
    pace, intervals = switched_off(), []
    for _ in range(7):
        intervals.append(steps_until_probe(pace))
        assert pace.checked_depth == 1
        pace.learn(1, 0)
    assert intervals == [8, 16, 32, 64, 128, 128, 128]


def test_a_probe_that_succeeds_resets_the_interval() -> None:
    """The next look comes after the first interval again."""
    pace = switched_off()
    for _ in range(4):
        steps_until_probe(pace)
        pace.learn(1, 0)
    steps_until_probe(pace)
    pace.learn(1, 1)
    assert steps_until_probe(pace) == 8


def test_a_probe_lasts_until_something_was_checked() -> None:
    """Steps without a draft meanwhile leave it open: the node's answer may be under way."""
    pace = switched_off()
    steps_until_probe(pace)
    for _ in range(50):
        pace.learn(0, 0)
        assert pace.probing
    pace.adjust_window(0.02, 1.0, 64)
    assert pace.window > 0


def test_a_drafter_that_turned_good_comes_back() -> None:
    """From depth 0, by probes alone, to full depth; within a few hundred steps."""
    pace = switched_off()
    for _ in range(400):
        depth = pace.checked_depth
        pace.learn(depth, depth)
        pace.adjust_depth(pace.survival.gains(), 0.2)
    assert pace.depth == 8


def test_no_probe_while_drafting_pays() -> None:
    """Plain steps of a drafter in good standing count towards nothing, and one that is back needs no look."""
    pace = Pace(8)
    for _ in range(300):
        pace.learn(0, 0)
    assert (pace.depth, pace.probing) == (4, False)
    pace.adjust_depth([], 1.0)
    assert steps_until_probe(pace) == 8
    pace.adjust_depth([0.9, 0.8, 0.7], 0.1)
    assert (pace.checked_depth, pace.probing) == (3, False)


# -- answers


def test_latency_and_length_of_answers_are_learned() -> None:
    """The mean is found, and what is overdue lies past nearly all that came."""
    answers, random = Answers(), Random(0)
    seen = [0.05 + random.uniform(-0.01, 0.01) for _ in range(200)]
    for latency_s in seen:
        answers.observe(latency_s, 6)
    assert answers.mean_s == pytest.approx(0.05, rel=0.1)
    assert answers.num_ids == pytest.approx(6)
    assert max(seen) < answers.latest_s < 0.1


def test_the_first_answer_counts_whole() -> None:
    """The guess from before it is forgotten at once."""
    answers = Answers()
    answers.observe(0.3, 2)
    assert answers.mean_s == pytest.approx(0.3)
    assert answers.num_ids == pytest.approx(2)


def test_an_answer_that_holds_nothing_says_nothing_of_lengths() -> None:
    """The node had nothing to propose: that is no short draft."""
    answers = Answers()
    answers.observe(0.01, 8)
    before = answers.num_ids
    answers.observe(0.01, 0)
    assert answers.num_ids == before


def test_the_pace_of_a_stream_is_learned() -> None:
    """Further frames count by their interval; two at the same moment say nothing."""
    answers = Answers()
    for _ in range(100):
        answers.observe_pace(1, 0.02)
        answers.observe_pace(1, 0.0)
    assert answers.ids_per_s == pytest.approx(50, rel=0.01)
    assert answers.num_ids_after(0.1) == pytest.approx(answers.num_ids + 5, rel=0.01)
    assert answers.num_ids_after(-1.0) == answers.num_ids


def test_losses_stop_the_waiting_and_an_answer_in_time_restores_it() -> None:
    """Two waits in vain in a row; then an answer that came by itself."""
    answers, seen = Answers(), []
    for waits, answered in ((True, False), (False, False), (True, False), (False, False), (False, True)):
        if waits:
            answers.wait()
        answers.settle(answered=answered)
        seen.append(answers.may_wait)
    assert seen == [True, True, False, False, True]
    assert (answers.num_waits, answers.num_won) == (2, 0)


def test_a_wait_won_forgives_a_loss_before() -> None:
    """Only losses in a row count; and one wait is one, however often the plan was made again."""
    answers = Answers()
    for answered in (False, True, False):
        answers.wait()
        answers.wait()
        answers.settle(answered=answered)
    assert answers.may_wait
    assert (answers.num_waits, answers.num_won) == (3, 1)

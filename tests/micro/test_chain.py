"""The node's chain against a simulated hub that uses the real mailbox and the real acceptance.

The link is two queues; frames of both ways are delayed at random, and never reordered, as in a stream.
"""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baru_common.errors import ProtocolViolation
from baru_common.frames import Draft, Verdict
from baru_common.sampling import SparseProbs
from baru_hub.acceptance import Decision
from baru_hub.mailbox import Mailbox
from baru_hub.session import Session
from baru_micro.chain import DraftChain, Outcome
from support.sampling import context

_MAX_AHEAD, _DEPTH = 8, 5
_PROMPT = [3, 1, 2]


def own(position: int) -> int:
    """The target's own id at a position."""
    return _PROMPT[position] if position < 3 else (position * position + position // 3) % 4


class NodeAndHub(RuleBasedStateMachine):
    """A node that drafts right and wrong ids, a hub that never waits, a link that takes its time."""

    def __init__(self) -> None:
        super().__init__()
        self.node = DraftChain.start(_PROMPT, epoch=1)
        self.hub = Session("s", 1, context(3), 1 << 30, Mailbox(4, _MAX_AHEAD), True, list(_PROMPT))
        self.up: deque[Draft] = deque()
        self.down: deque[Verdict] = deque()
        self.num_sent = 0

    @rule(count=st.integers(0, 5), wrong=st.sets(st.integers(0, 4), max_size=2))
    def draft(self, count: int, wrong: set[int]) -> None:
        """The node drafts within its window; or says, once, that it has nothing to propose."""
        count = min(count, _MAX_AHEAD - self.node.ahead)
        start = len(self.node.ids)
        if count or self.node.wants_answer:
            ids = [(own(start + i) + (i in wrong)) % 4 for i in range(count)]
            frame = self.node.extend(ids)
            assert (frame.start, frame.end, frame.epoch) == (start, start + count, 1)
            self.up.append(frame)
            self.num_sent += count
        assert not (count == 0 and self.node.wants_answer)

    @precondition(lambda self: self.up)
    @rule(count=st.integers(1, 4))
    def frames_arrive_at_the_hub(self, count: int) -> None:
        """None of them is wrong to it, however far it has gone on meanwhile."""
        for _ in range(min(count, len(self.up))):
            self.hub.mailbox.put(self.up.popleft(), len(self.hub.committed))

    @rule()
    def the_hub_steps(self) -> None:
        block = self.hub.next_block(_DEPTH, 100)
        base = len(self.hub.committed)
        # What the target says after a wrong draft id is something else; it must have no effect.
        decided = [own(base)]
        for i, token in enumerate(block.draft):
            decided.append(own(base + i + 1) if decided[i] == token == own(base + i) else 3)
        verdict = self.hub.take(block, Decision(tuple(decided)))
        assert verdict is not None
        self.down.append(verdict)

    @precondition(lambda self: self.down)
    @rule(count=st.integers(1, 4))
    def verdicts_arrive_at_the_node(self, count: int) -> None:
        for _ in range(min(count, len(self.down))):
            self.apply(self.down.popleft())

    def apply(self, verdict: Verdict) -> None:
        """The outcome says what the drafts before it were worth, and the chain shows it."""
        node = self.node
        before, version, chain_id = list(node.ids), node.version, node.chain_id
        decided = list(verdict.token_ids)
        outcome = node.apply(verdict)
        compared = before[verdict.base : verdict.base + len(decided)]
        if compared == decided:
            assert outcome is Outcome.AGREED
            assert (node.ids, node.version) == (before, version)
            return
        assert outcome is (Outcome.PASSED if compared == decided[: len(compared)] else Outcome.DIVERGED)
        assert node.version != version
        assert (node.chain_id, node.base, node.ahead) == (chain_id + 1, node.num_committed, 0)
        assert node.wants_answer

    @invariant()
    def both_hold_the_targets_own_ids(self) -> None:
        """At all times; the node is never ahead of the hub, and its drafts stay within the window."""
        for committed in (self.node.ids[: self.node.num_committed], self.hub.committed):
            assert committed == [own(i) for i in range(len(committed))]
        in_flight = sum(len(verdict.token_ids) for verdict in self.down)
        assert self.node.num_committed + in_flight == len(self.hub.committed)
        assert 0 <= self.node.ahead <= _MAX_AHEAD
        assert self.node.base <= self.node.num_committed

    def teardown(self) -> None:
        """When all frames have arrived, both sides agree, and every drafted id was counted once."""
        while self.down:
            self.apply(self.down.popleft())
        while self.up:
            self.hub.mailbox.put(self.up.popleft(), len(self.hub.committed))
        assert self.node.ids[: self.node.num_committed] == self.hub.committed
        mailbox = self.hub.mailbox
        assert (mailbox.num_drafted, mailbox.num_stale_frames) == (self.num_sent, 0)
        if self.node.ahead:  # what is left at the hub is what the node still holds
            assert list(mailbox.usable(self.hub.committed)) == self.node.ids[self.node.num_committed :]


NodeAndHub.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestNodeAndHub = NodeAndHub.TestCase


def verdict(base: int, *ids: int) -> Verdict:
    return Verdict(1, base, 0, 0, ids)


@pytest.mark.parametrize(
    ("drafted", "decided", "outcome", "left"),
    [
        ((5, 6, 7), (5, 6), Outcome.AGREED, [7]),
        ((5, 6, 7), (5, 6, 7), Outcome.AGREED, []),
        ((5, 6), (5, 6, 7), Outcome.PASSED, []),
        ((), (5,), Outcome.PASSED, []),
        ((5, 6, 7), (5, 9), Outcome.DIVERGED, []),
        ((5, 6), (9,), Outcome.DIVERGED, []),
    ],
)
def test_a_verdict_keeps_what_it_agrees_with(
    drafted: tuple[int, ...], decided: tuple[int, ...], outcome: Outcome, left: list[int]
) -> None:
    """Drafts past an agreed part stay; everything after a difference is void."""
    chain = DraftChain.start([1, 2], epoch=1)
    chain.extend(drafted)
    assert chain.apply(verdict(2, *decided)) is outcome
    assert chain.ids == [1, 2, *decided, *left]
    assert chain.num_committed == 2 + len(decided)
    assert chain.chain_id == (1 if outcome is Outcome.AGREED else 2)


def test_a_refusal_voids_the_rest_even_if_the_ids_agree() -> None:
    """Rejection sampling may refuse a draft id and then draw the same one itself: what was drafted past it is void."""
    chain = DraftChain.start([1, 2], epoch=1)
    chain.extend([5, 6, 7])
    assert chain.apply(Verdict(1, 2, 2, 1, (5, 6), chain_id=1)) is Outcome.DIVERGED
    assert (chain.ids, chain.num_committed, chain.base, chain.chain_id) == ([1, 2, 5, 6], 4, 4, 2)


def test_a_frame_says_what_its_ids_were_drawn_from() -> None:
    probs = (SparseProbs.of([(5, 0.5), (6, 0.5)]), SparseProbs.of([(6, 1.0)]))
    chain = DraftChain.start([1, 2], epoch=3)
    assert chain.extend([5], probs[:1]) == Draft(3, 1, 2, 0, (5,), probs[:1])
    assert chain.extend([6], probs[1:]) == Draft(3, 1, 2, 1, (6,), probs[1:])


@pytest.mark.parametrize("base", [0, 1, 3, 9])
def test_a_verdict_that_does_not_follow_is_refused(base: int) -> None:
    """One lost, one repeated: the node would hold ids that the hub does not, so nothing is taken."""
    chain = DraftChain.start([1, 2], epoch=1)
    chain.extend([5])
    with pytest.raises(ProtocolViolation, match=f"position {base} came, 2"):
        chain.apply(verdict(base, 5))
    assert (chain.ids, chain.num_committed) == ([1, 2, 5], 2)


def test_nothing_to_propose_is_said_once_for_each_length() -> None:
    """So that the hub does not wait in vain; and said again when more is committed."""
    chain = DraftChain.start([1, 2], epoch=1)
    wanted = [chain.wants_answer]
    chain.extend([])
    wanted.append(chain.wants_answer)
    chain.apply(verdict(2, 5))
    wanted.append(chain.wants_answer)
    chain.extend([6])
    wanted.append(chain.wants_answer)
    assert wanted == [True, False, True, False]

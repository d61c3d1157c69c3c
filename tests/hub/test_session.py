"""One session's state under random drafts: its ranges hold after each step, and its counts add up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baru_common.frames import Draft, FinishReason, Verdict
from baru_hub.mailbox import Mailbox
from baru_hub.session import Block, Session

_SIZE, _MAX_AHEAD = 50, 8
_NOWHERE = 49  # an id that the target below never says


def session_of(
    prompt: Sequence[int], max_length: int, stop_ids: Sequence[int] = (), max_ahead: int = _MAX_AHEAD
) -> Session:
    return Session(
        session_id="s",
        epoch=1,
        num_prompt=len(prompt),
        max_length=max_length,
        stop_ids=frozenset(stop_ids),
        mailbox=Mailbox(_SIZE, max_ahead),
        has_drafter=True,
        committed=list(prompt),
    )


def own(position: int) -> int:
    """The target's own id at a position: no state, so a wrong draft before it would not show here."""
    return (7 * position + position // 5) % 40


@dataclass
class Run:
    """Drives a session as the loop does, with a target that checks what it is fed."""

    session: Session
    random: Random
    wrong: float
    max_draft: int
    max_pending: int
    verdicts: list[Verdict] = field(default_factory=list)
    cache: list[int] = field(default_factory=list)
    """What the engine's cache holds."""
    chain: int = 0

    def draft(self) -> None:
        """A new chain, right up to a random place."""
        base = len(self.session.committed)
        length = self.random.randint(0, _MAX_AHEAD)
        ids = [_NOWHERE if self.random.random() < self.wrong else own(base + i) for i in range(length)]
        self.chain += 1
        self.session.mailbox.put(Draft(1, self.chain, base, 0, tuple(ids)), base)

    def step(self) -> Block:
        session = self.session
        committed = list(session.committed)
        block = session.next_block(self.max_draft, self.max_pending)
        assert committed[session.num_cached :][: len(block.pending)] == list(block.pending)
        assert 1 <= len(block.pending) <= self.max_pending
        assert len(block.draft) <= min(self.max_draft, session.room - 1)
        assert block.decides or not block.draft
        assert block.decides == (session.num_cached + len(block.pending) == len(committed))
        self.cache = [*self.cache[: session.num_cached], *block.pending, *block.draft]
        rows = range(len(committed), len(committed) + len(block.draft) + 1) if block.decides else ()
        verdict = session.take(block, [own(i) for i in rows])
        assert (verdict is not None) == block.decides
        self.check_ranges(committed, verdict)
        return block

    def check_ranges(self, before: list[int], verdict: Verdict | None) -> None:
        session = self.session
        emitted = verdict.token_ids if verdict else ()
        assert session.committed == [*before, *emitted]
        assert session.committed[session.num_prompt :] == [
            own(i) for i in range(session.num_prompt, len(session.committed))
        ]
        assert session.num_cached <= len(session.committed) - 1
        assert self.cache[: session.num_cached] == session.committed[: session.num_cached]
        assert len(session.committed) + session.room == session.max_length
        assert session.room >= 0
        if verdict:
            assert session.num_pending == 1
            assert verdict.base == len(before)
            assert verdict.num_accepted <= verdict.num_verified
            assert 1 <= len(verdict.token_ids) <= verdict.num_accepted + 1
            self.verdicts.append(verdict)


@given(
    num_prompt=st.integers(1, 12),
    num_more=st.integers(1, 40),
    max_draft=st.integers(0, 9),
    max_pending=st.integers(1, 14),
    wrong=st.sampled_from([0.0, 0.2, 1.0]),
    random=st.randoms(use_true_random=False),
    stop_at=st.one_of(st.none(), st.integers(0, 30)),
)
def test_ranges_hold_and_counts_add_up(
    num_prompt: int, num_more: int, max_draft: int, max_pending: int, wrong: float, random: Random, stop_at: int | None
) -> None:
    """Whatever is drafted: the output is the target's own, the ranges fit, nothing is lost in the counts."""
    prompt = [own(i) for i in range(num_prompt)]
    stop_ids = () if stop_at is None else (own(num_prompt + stop_at),)
    session = session_of(prompt, num_prompt + num_more, stop_ids)
    run = Run(session, random, wrong, max_draft, max_pending)
    num_blocks = 0
    while session.finish is None:
        if run.random.random() < 0.8:
            run.draft()
        run.step()
        num_blocks += 1
        assert num_blocks <= num_prompt + num_more  # each step feeds or emits one id at least
    usage = session.finished(session.finish).usage
    assert usage.num_drafted == usage.num_accepted + usage.num_rejected + usage.num_discarded
    assert usage.num_verified == usage.num_accepted + usage.num_rejected
    assert min(usage.num_rejected, usage.num_discarded) >= 0
    assert usage.num_prompt == num_prompt
    assert usage.num_emitted == sum(len(v.token_ids) for v in run.verdicts)
    assert usage.num_steps == len(run.verdicts)
    assert usage.num_verified == sum(v.num_verified for v in run.verdicts)
    assert usage.num_accepted == sum(v.num_accepted for v in run.verdicts)
    output = session.committed[num_prompt:]
    first = next((i for i, token in enumerate(output) if token in stop_ids), None)
    if first is None:
        assert (session.finish, len(output)) == (FinishReason.LENGTH, num_more)
    else:
        assert (session.finish, len(output)) == (FinishReason.STOP, first + 1)


@pytest.mark.parametrize("max_pending", [1, 2, 3, 7, 10, 11])
def test_a_prompt_is_fed_in_pieces_that_decide_nothing(max_pending: int) -> None:
    """Only the last piece decides; the pieces put together are the prompt."""
    prompt = [own(i) for i in range(10)]
    run = Run(session_of(prompt, 40), Random(0), 0.0, 4, max_pending)
    run.draft()  # it is there early, and must wait until the whole prompt was fed
    blocks: list[Block] = []
    while not run.verdicts:
        assert run.session.num_pending == len(prompt) - sum(len(b.pending) for b in blocks)
        blocks.append(run.step())
    assert [token for block in blocks for token in block.pending] == prompt
    assert len(blocks) == -(-10 // max_pending)
    assert [block.decides for block in blocks] == [*[False] * (len(blocks) - 1), True]


@pytest.mark.parametrize("room", range(1, 12))
def test_no_draft_takes_the_last_place(room: int) -> None:
    """The target emits one id in any case, so at most room - 1 draft ids are checked, and all fit."""
    prompt = [own(0)]
    session = session_of(prompt, 1 + room)
    session.mailbox.put(Draft(1, 1, 1, 0, tuple(own(1 + i) for i in range(_MAX_AHEAD))), 1)
    block = session.next_block(_MAX_AHEAD, 1)
    assert len(block.draft) == min(_MAX_AHEAD, room - 1)
    verdict = session.take(block, [own(1 + i) for i in range(len(block.draft) + 1)])
    assert verdict is not None
    assert verdict.num_accepted == verdict.num_verified == len(block.draft)
    assert session.finish is (FinishReason.LENGTH if room <= _MAX_AHEAD + 1 else None)


def test_a_verdict_names_the_chain_that_was_checked() -> None:
    """A newer chain that arrives while the step runs is not the one that the verdict speaks of."""
    session = session_of([1, 2], 40)
    session.mailbox.put(Draft(1, 1, 2, 0, (own(2), own(3))), 2)
    block = session.next_block(8, 8)
    session.mailbox.put(Draft(1, 2, 2, 0, (_NOWHERE,)), 2)
    verdict = session.take(block, [own(2), own(3), own(4)])
    assert verdict is not None
    assert (verdict.chain_id, verdict.num_verified, verdict.num_accepted) == (1, 2, 2)


def test_a_verdict_without_a_draft_names_no_chain() -> None:
    """Zero, as the contract says."""
    session = session_of([1, 2], 40)
    session.mailbox.put(Draft(1, 3, 2, 0, ()), 2)
    verdict = session.take(session.next_block(8, 8), [own(2)])
    assert verdict is not None
    assert (verdict.chain_id, verdict.num_verified) == (0, 0)

"""One session's state under random drafts: its ranges hold after each step, and its counts add up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baru_common.errors import InvalidRequest
from baru_common.frames import Draft, FinishReason, TokenLogprobs, Verdict
from baru_common.sampling import NO_ID, SparseProbs
from baru_hub.acceptance import Decision
from baru_hub.mailbox import Mailbox
from baru_hub.session import Block, Session
from support.sampling import context

_SIZE, _MAX_AHEAD = 50, 8
_NOWHERE = 49  # an id that the target below never says


def session_of(
    prompt: Sequence[int], max_length: int, stop_ids: Sequence[int] = (), max_ahead: int = _MAX_AHEAD, **params: Any
) -> Session:
    return Session(
        session_id="s",
        epoch=1,
        max_length=max_length,
        sampling=context(len(prompt), stop_ids=tuple(stop_ids), **params),
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
        verdict = session.take(block, Decision(tuple(own(i) for i in rows)))
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
    verdict = session.take(block, Decision(tuple(own(1 + i) for i in range(len(block.draft) + 1))))
    assert verdict is not None
    assert verdict.num_accepted == verdict.num_verified == len(block.draft)
    assert session.finish is (FinishReason.LENGTH if room <= _MAX_AHEAD + 1 else None)


def test_a_verdict_names_the_chain_that_was_checked() -> None:
    """A newer chain that arrives while the step runs is not the one that the verdict speaks of."""
    session = session_of([1, 2], 40)
    session.mailbox.put(Draft(1, 1, 2, 0, (own(2), own(3))), 2)
    block = session.next_block(8, 8)
    session.mailbox.put(Draft(1, 2, 2, 0, (_NOWHERE,)), 2)
    verdict = session.take(block, Decision((own(2), own(3), own(4))))
    assert verdict is not None
    assert (verdict.chain_id, verdict.num_verified, verdict.num_accepted) == (1, 2, 2)


def test_a_verdict_without_a_draft_names_no_chain() -> None:
    """Zero, as the contract says."""
    session = session_of([1, 2], 40)
    session.mailbox.put(Draft(1, 3, 2, 0, ()), 2)
    verdict = session.take(session.next_block(8, 8), Decision((own(2),)))
    assert verdict is not None
    assert (verdict.chain_id, verdict.num_verified) == (0, 0)


# -- what a request asks for


def test_what_was_refused_is_not_offered_again() -> None:
    """Rejection sampling may refuse a draft id and draw the same one itself: the chain looks right, and is void."""
    session = session_of([1, 2], 40)
    session.mailbox.put(Draft(1, 1, 2, 0, (5, 6, 7)), 2)
    verdict = session.take(session.next_block(2, 8), Decision((5, 6), num_accepted=1))
    assert verdict is not None
    assert (verdict.num_verified, verdict.num_accepted, verdict.token_ids) == (2, 1, (5, 6))
    assert session.next_block(8, 8).draft == ()
    session.mailbox.put(Draft(1, 1, 2, 3, (8,)), 4)  # the node does not know yet
    assert session.next_block(8, 8).draft == ()
    session.mailbox.put(Draft(1, 2, 4, 0, (9,)), 4)
    assert session.next_block(8, 8).draft == (9,)


def test_what_was_accepted_goes_on() -> None:
    """A chain longer than the block that was checked is of use past it."""
    session = session_of([1, 2], 40)
    session.mailbox.put(Draft(1, 1, 2, 0, (5, 6, 7)), 2)
    session.take(session.next_block(1, 8), Decision((5, 6), num_accepted=1))
    assert session.next_block(8, 8).draft == (7,)


@pytest.mark.parametrize("max_draft", range(4))
def test_a_block_carries_what_its_ids_were_drawn_from(max_draft: int) -> None:
    """One distribution for each id of the block, also past the part that was overtaken."""
    probs = tuple(SparseProbs.of([(token, 0.5), (9, 0.5)]) for token in (5, 6, 7, 8))
    session = session_of([1, 2], 40)
    session.mailbox.put(Draft(1, 1, 2, 0, (5, 6, 7, 8), probs), 2)
    session.take(Block((1, 2)), Decision((5,)))  # decided before the draft came
    block = session.next_block(max_draft, 8)
    assert (block.draft, block.draft_probs) == ((6, 7, 8)[:max_draft], probs[1:][:max_draft])


def test_log_probabilities_are_those_of_the_emitted_ids() -> None:
    """However many ids of the block were decided."""
    logprobs = tuple(TokenLogprobs(-float(i), ((i, -0.5),)) for i in range(4))
    for stop_ids, num_emitted in (((), 3), ((5,), 1), ((6,), 2)):
        session = session_of([1, 2], 40, stop_ids, logprobs=1)
        session.mailbox.put(Draft(1, 1, 2, 0, (5, 6, 9)), 2)
        verdict = session.take(session.next_block(8, 8), Decision((5, 6, 7, 8), logprobs=logprobs))
        assert verdict is not None
        assert len(verdict.token_ids) == num_emitted
        assert verdict.logprobs == logprobs[:num_emitted]


@pytest.mark.parametrize("max_draft", range(6))
@pytest.mark.parametrize(
    ("params", "num_emitted"),
    [
        ({"stop_strings": ("%&",)}, 5),
        ({"stop_strings": ("%&", "$%")}, 4),
        ({"stop_strings": ('!"#$%&',)}, 8),  # the first of them are of the prompt
        ({"stop_strings": ("#",)}, 2),
        ({"stop_strings": ("#",), "min_tokens": 2}, 2),
        ({"stop_strings": ("#",), "min_tokens": 3}, 8),
        ({"stop_strings": ("#", "&"), "min_tokens": 3}, 5),
        ({"stop_strings": ("%&",), "stop_ids": (3,)}, 3),
    ],
)
def test_a_stop_string_ends_the_output(params: dict[str, Any], num_emitted: int, max_draft: int) -> None:
    """With the id that completes it, wherever the steps are cut; what the prompt says is no part of it."""
    session = session_of([0], 9, **params)  # ids 0, 1, 2, ... are ! " # $ % & ' (
    output: list[int] = []
    while session.finish is None:
        base = len(session.committed)
        session.mailbox.put(Draft(1, base, base, 0, tuple(range(base, base + 5))), base)
        block = session.next_block(max_draft, 8)
        verdict = session.take(block, Decision(tuple(range(base, base + len(block.draft) + 1))))
        assert verdict is not None
        output += verdict.token_ids
    assert output == list(range(1, 1 + num_emitted))
    assert session.finish is (FinishReason.STOP if num_emitted < 8 else FinishReason.LENGTH)


@pytest.mark.parametrize("num_accepted", [0, 1, 2])
def test_where_no_id_is_left_the_request_is_to_blame(num_accepted: int) -> None:
    """InvalidRequest says at which output position; what comes before it is committed first, as without drafts."""
    session = session_of([1, 2], 40)
    session.take(session.next_block(8, 8), Decision((4,)))
    session.mailbox.put(Draft(1, 1, 3, 0, (5, 6)), 3)
    decided = (5, 6, 7)[:num_accepted] + (NO_ID,) * (3 - num_accepted)
    if num_accepted:
        verdict = session.take(session.next_block(8, 8), Decision(decided))
        assert verdict is not None
        assert verdict.token_ids == decided[:num_accepted]
        assert verdict.num_verified == verdict.num_accepted == num_accepted
    block = session.next_block(8, 8)
    with pytest.raises(InvalidRequest, match=f"no id to choose at output position {1 + num_accepted}"):
        session.take(block, Decision((NO_ID,) * (1 + len(block.draft))))
    assert session.committed == [1, 2, 4, *decided[:num_accepted]]


def test_where_no_id_is_left_past_the_end_nobody_is_to_blame() -> None:
    """The output ended before: at a stop id, or because there is room for no more."""
    for session in (session_of([1, 2], 40, (5,)), session_of([1, 2], 3), session_of([1, 2], 40, stop_strings=("&",))):
        session.mailbox.put(Draft(1, 1, 2, 0, (5,)), 2)
        block = Block((1, 2), (5,), chain_id=1)
        verdict = session.take(block, Decision((5, NO_ID)))
        assert verdict is not None
        assert verdict.token_ids == (5,)

"""The mailbox against a model that keeps everything and looks at everything each time."""

from __future__ import annotations

import struct

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baru_common.errors import InvalidDraft
from baru_common.frames import Draft
from baru_common.sampling import SparseProbs
from baru_hub.mailbox import Mailbox

_SIZE, _MAX_AHEAD = 3, 6  # few ids, so that chains agree with what is committed by chance
_IDS = st.lists(st.integers(0, _SIZE - 1), max_size=_MAX_AHEAD)


def drawn_from(token: int, mark: int) -> SparseProbs:
    """A distribution that is only this id, with a weight that tells it from others."""
    return SparseProbs((token,), struct.pack("<H", 1 + mark % 0x7000))


class MailboxAgainstModel(RuleBasedStateMachine):
    """The model: the newest chain as one list, compared with all committed ids at every look."""

    def __init__(self) -> None:
        super().__init__()
        self.mailbox = Mailbox(_SIZE, _MAX_AHEAD)
        self.committed = [0, 1, 2]
        self.chain_id = self.base = self.num_drafted = self.num_stale = 0
        self.chain: list[int] = []
        self.drawn = self.refused = False
        self.nothing_at = -1

    # -- the model

    @property
    def refuted(self) -> bool:
        overlap = self.committed[self.base : self.base + len(self.chain)]
        return self.refused or self.chain_id == 0 or self.chain[: len(overlap)] != overlap

    @property
    def expected(self) -> list[int]:
        return [] if self.refuted else self.chain[len(self.committed) - self.base :]

    @property
    def expected_probs(self) -> tuple[SparseProbs, ...]:
        start = len(self.chain) - len(self.expected)
        return self.probs_of(self.expected, self.chain_id, start) if self.drawn else ()

    def probs_of(self, ids: list[int], chain_id: int, offset: int) -> tuple[SparseProbs, ...]:
        return tuple(drawn_from(token, 50 * chain_id + offset + i) for i, token in enumerate(ids))

    @property
    def room(self) -> int:
        return len(self.committed) + _MAX_AHEAD - self.base - len(self.chain)

    def put(self, offset: int, ids: list[int], *, chain_id: int | None = None, base: int | None = None) -> None:
        chain_id = self.chain_id if chain_id is None else chain_id
        base = self.base if base is None else base
        probs = self.probs_of(ids, chain_id, offset) if self.drawn else ()
        self.mailbox.put(Draft(1, chain_id, base, offset, tuple(ids), probs), len(self.committed))

    # -- what a node may do

    @initialize()
    def look_at_nothing(self) -> None:
        assert list(self.mailbox.usable(self.committed)) == []

    @rule(back=st.integers(0, 3), skip=st.integers(1, 3), ids=_IDS, right=st.integers(0, 3), drawn=st.booleans())
    def start_a_chain(self, back: int, skip: int, ids: list[int], right: int, drawn: bool) -> None:
        """From a committed length of now or before; its first ids may be the right ones. Picked, or drawn."""
        self.drawn, self.refused = drawn, False
        self.base = len(self.committed) - back
        self.chain = [*self.committed[self.base : self.base + right], *ids][: back + _MAX_AHEAD]
        self.chain_id += skip
        self.num_drafted += len(self.chain)
        self.put(0, self.chain)
        if not self.chain:
            self.nothing_at = self.base

    @precondition(lambda self: not self.refuted)
    @rule(overlap=st.integers(0, 4), ids=_IDS)
    def extend_the_chain(self, overlap: int, ids: list[int]) -> None:
        """The frame may repeat ids that were sent before: only the rest is new."""
        offset = max(len(self.chain) - overlap, 0)
        fresh = ids[: max(self.room, 0)]
        frame = [*self.chain[offset:], *fresh]
        if not fresh and frame:
            self.num_stale += 1
        elif not frame:
            self.nothing_at = self.base + offset
        self.chain += fresh
        self.num_drafted += len(fresh)
        self.put(offset, frame)

    @precondition(lambda self: self.chain_id and self.refuted)
    @rule(ids=_IDS)
    def extend_a_refuted_chain(self, ids: list[int]) -> None:
        """The node does not know yet: what it sends is counted, and of no use."""
        fresh = ids[: max(self.room, 0)]
        self.put(len(self.chain), fresh)
        self.chain += fresh
        self.num_drafted += len(fresh)

    @precondition(lambda self: self.chain_id > 1)
    @rule(ids=_IDS)
    def send_for_an_older_chain(self, ids: list[int]) -> None:
        self.put(0, ids, chain_id=self.chain_id - 1, base=len(self.committed))
        self.num_stale += 1

    @precondition(lambda self: not self.refuted and self.room > 1)
    @rule(ids=st.lists(st.just(0), max_size=1))
    def leave_a_gap(self, ids: list[int]) -> None:
        with pytest.raises(InvalidDraft, match="gap"):
            self.put(len(self.chain) + 1, ids)

    @precondition(lambda self: self.expected and self.room > 0)
    @rule()
    def go_on_drawing_what_was_picked(self) -> None:
        """Or the other way round: a chain is of one kind."""
        self.drawn = not self.drawn
        with pytest.raises(InvalidDraft, match="some of its ids only"):
            self.put(len(self.chain), [0])
        self.drawn = not self.drawn

    @rule(offset=st.integers(1, 3))
    def start_a_chain_in_its_middle(self, offset: int) -> None:
        with pytest.raises(InvalidDraft, match="must start at 0"):
            self.put(offset, [0], chain_id=self.chain_id + 1, base=len(self.committed))

    @rule(beyond=st.integers(1, 3), new=st.booleans())
    def reach_too_far(self, beyond: int, new: bool) -> None:
        ids = [0] * (_MAX_AHEAD + beyond)
        with pytest.raises(InvalidDraft, match="at most"):
            self.put(0, ids, chain_id=self.chain_id + 1, base=len(self.committed))
        if self.chain_id and self.room >= 0:
            with pytest.raises(InvalidDraft, match="at most"):
                self.put(len(self.chain), [0] * (self.room + beyond))

    @rule(base=st.integers(1, 9))
    def start_a_chain_in_the_future(self, base: int) -> None:
        with pytest.raises(InvalidDraft, match="only"):
            self.put(0, [], chain_id=self.chain_id + 1, base=len(self.committed) + base)

    @rule(token=st.sampled_from([_SIZE, _SIZE + 1, (1 << 32) - 1]))
    def draft_an_id_that_does_not_exist(self, token: int) -> None:
        with pytest.raises(InvalidDraft, match=str(token)):
            self.put(0, [0, token], chain_id=self.chain_id + 1, base=len(self.committed))

    @rule()
    def name_no_chain(self) -> None:
        with pytest.raises(InvalidDraft, match="chain_id"):
            self.put(0, [0], chain_id=0)

    # -- what the hub does

    @rule(tokens=st.lists(st.integers(0, _SIZE - 1), min_size=1, max_size=3), follow=st.integers(0, 3))
    def commit(self, tokens: list[int], follow: int) -> None:
        """A step: perhaps some drafted ids, then the target's own; the loop then looks at what is left."""
        self.committed += [*self.expected[:follow], *tokens]
        assert list(self.mailbox.usable(self.committed)) == self.expected

    @rule()
    def refuse_the_chain(self) -> None:
        """Rejection sampling refused one of its ids: what comes after it is of no use, even if it looks right."""
        self.mailbox.refute()
        self.refused = True

    @invariant()
    def agrees(self) -> None:
        """After each move, and however often one looks."""
        for _ in range(2):
            assert list(self.mailbox.usable(self.committed)) == self.expected
            for num_ids in range(len(self.expected) + 1):
                assert self.mailbox.draft_probs(num_ids) == self.expected_probs[:num_ids]
            said_nothing = self.nothing_at >= len(self.committed)
            assert self.mailbox.answered(self.committed) == (bool(self.expected) or said_nothing)
        assert max(len(self.mailbox._tail), len(self.mailbox._probs)) <= _MAX_AHEAD
        assert (self.mailbox.num_drafted, self.mailbox.num_stale_frames) == (self.num_drafted, self.num_stale)


MailboxAgainstModel.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestMailboxAgainstModel = MailboxAgainstModel.TestCase


def test_a_frame_that_is_refused_changes_nothing() -> None:
    """A bad id at the end of a frame leaves none of its good ones behind."""
    mailbox = Mailbox(10, 4)
    mailbox.put(Draft(1, 1, 2, 0, (5, 6)), 2)
    for wrong in (Draft(1, 1, 2, 2, (7, 10)), Draft(1, 1, 2, 3, (7,)), Draft(1, 2, 2, 0, (7, 8, 9, 1, 2))):
        with pytest.raises(InvalidDraft):
            mailbox.put(wrong, 2)
        assert list(mailbox.usable([0, 1])) == [5, 6]
        assert (mailbox.chain_id, mailbox.num_drafted, mailbox.num_stale_frames) == (1, 2, 0)


@pytest.mark.parametrize(
    ("ids", "probs", "words"),
    [
        ((7, 8), (drawn_from(7, 0),), "1 draft_probs came for 2"),
        ((7,), (drawn_from(7, 0), drawn_from(8, 0)), "2 draft_probs came for 1"),
        ((), (drawn_from(7, 0),), "1 draft_probs came for 0"),
        ((7,), (drawn_from(8, 0),), "draft id 7 has no probability"),
        ((7,), (SparseProbs.of([(7, 0.5), (10, 0.5)]),), "10 is outside the vocabulary"),
        ((7,), (), "some of its ids only"),
    ],
)
def test_distributions_that_do_not_fit_the_ids_are_refused(
    ids: tuple[int, ...], probs: tuple[SparseProbs, ...], words: str
) -> None:
    """And change nothing: not one for each id, one without its id, one with an id that does not exist, none at all."""
    mailbox, known = Mailbox(10, 4), (drawn_from(5, 0), drawn_from(6, 1))
    mailbox.put(Draft(1, 1, 2, 0, (5, 6), known), 2)
    with pytest.raises(InvalidDraft, match=words):
        mailbox.put(Draft(1, 1, 2, 2, ids, probs), 2)
    assert list(mailbox.usable([0, 1])) == [5, 6]
    assert mailbox.draft_probs(2) == known


def test_a_chain_that_was_overtaken_is_of_use_past_that_part() -> None:
    """The hub went two ids into the chain by itself, and agreed: the rest continues it."""
    mailbox = Mailbox(10, 4)
    mailbox.put(Draft(1, 1, 2, 0, (5, 6)), 2)
    assert list(mailbox.usable([0, 1, 5, 6, 7])) == []
    mailbox.put(Draft(1, 1, 2, 2, (7, 8, 9)), 5)
    assert list(mailbox.usable([0, 1, 5, 6, 7])) == [8, 9]


def test_one_wrong_id_in_the_overtaken_part_voids_the_chain() -> None:
    """It differs at its first place only; what follows looks right and must not be used."""
    mailbox = Mailbox(10, 4)
    mailbox.put(Draft(1, 1, 2, 0, (4, 6, 7, 8)), 2)
    assert list(mailbox.usable([0, 1, 5])) == []
    assert list(mailbox.usable([0, 1, 5, 6])) == []


# -- what a node decoded by itself


def test_another_stream_begins_anew() -> None:
    """Chains count from 1 again; what was counted stays."""
    mailbox = Mailbox(100, 4)
    mailbox.put(Draft(1, 7, 2, 0, (5, 6)), 2)
    mailbox.put(Draft(1, 6, 2, 0, (5,)), 2)
    mailbox.restart(2)
    assert list(mailbox.usable([1, 2])) == []
    mailbox.put(Draft(2, 1, 2, 0, (8,)), 2)
    assert list(mailbox.usable([1, 2])) == [8]
    assert (mailbox.num_drafted, mailbox.num_stale_frames) == (3, 1)


@pytest.mark.parametrize("num_overtaken", range(8))
def test_provisional_ids_are_counted_down(num_overtaken: int) -> None:
    """They begin chain 1, may be more than is drafted ahead, and what follows them is a draft like any other."""
    ids = [10, 11, 12, 13, 14]
    probs = tuple(SparseProbs.of([(token, 1.0)]) for token in (20, 21))
    mailbox = Mailbox(100, 4)
    mailbox.restart(2, ids)
    committed = [1, 2, *ids, 20, 21][: 2 + num_overtaken]
    if num_overtaken >= 3:
        mailbox.put(Draft(1, 1, 2, 5, (20, 21), probs), len(committed))
    whole = [*ids, 20, 21] if num_overtaken >= 3 else ids
    assert list(mailbox.usable(committed)) == whole[num_overtaken:]
    assert mailbox.num_provisional == max(5 - num_overtaken, 0)
    assert mailbox.draft_probs(2) == (() if num_overtaken < 5 else probs[num_overtaken - 5 :])


def test_a_provisional_id_that_is_contradicted_voids_them_all() -> None:
    """What follows was decoded past an id that does not stand; the next chain is welcome."""
    mailbox = Mailbox(100, 4)
    mailbox.restart(1, [10, 11, 12])
    assert list(mailbox.usable([1, 10, 99])) == []
    assert mailbox.num_provisional == 0
    mailbox.put(Draft(1, 1, 1, 3, (13,)), 3)
    assert list(mailbox.usable([1, 10, 99])) == []
    mailbox.put(Draft(1, 2, 3, 0, (50,)), 3)
    assert list(mailbox.usable([1, 10, 99])) == [50]

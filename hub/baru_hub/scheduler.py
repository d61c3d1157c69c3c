"""Who is verified in the next step, how deep, and whether to wait for a draft: pure decisions.

Scheduling is by goodput, expected ids per second. A step costs what `CostModel` says; draft position j
of a session gains an id with the probability that the session's drafts survive so far. A position is
worth checking while its gain, over the time of one more row, exceeds the ids per second without it:
so depth shrinks to nothing when the batch is large or a drafter is bad, and grows when it pays.

Waiting (patience) is weighed the same way, in ids per second over the time until a draft has been
checked:

    wait     (1 + G) / (rest of the answer time + a step with the draft)
    blind    (n + 1 + S_n G') / (n plain steps + a step with the draft)       n steps until the draft is there

G is the expected number of accepted ids; a draft that was overtaken by n ids counts with the chance
S_n that it agreed with them, and with what is left of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Protocol

from .cost_model import CostModel, StepShape
from .pace import OwnPace
from .session import Block, Session

_MARGIN = 1.02
"""Waiting must promise this much more than going on, because the promise is an estimate."""
_STALL = 2.0
"""A piece of a prompt may stretch a step that others decode in to this many times its length."""
_MIN_PIECE = 16
_PASS_SHARE, _PASS_EWMA = 0.1, 0.1
"""Time of a pass of the hub's own drafter in plain steps until it is known, and how fast it is learned."""
_OWN_MARGIN = 1.03
"""Another depth of the hub's own drafter must promise this much more than the present one."""


@dataclass(frozen=True)
class Plan:
    """The next step."""

    blocks: tuple[tuple[Session, Block], ...] = ()
    wait_s: float | None = None
    """With no blocks: wait this long for a draft, or for ever when None."""

    @property
    def shape(self) -> StepShape:
        """What the step will cost by."""
        return StepShape(
            num_rows=sum(len(block.pending) + len(block.draft) for _, block in self.blocks),
            num_sessions=len(self.blocks),
            num_context=sum(len(session.committed) for session, _ in self.blocks),
        )


class Scheduler(Protocol):
    """Decides steps and learns from them."""

    def plan(self, sessions: Sequence[Session], now_s: float) -> Plan:
        """Return the next step, or how long to wait for a draft before the next one."""

    def learn(self, plan: Plan, step_s: float, draft_s: float = 0.0) -> None:
        """Learn from a step that took `step_s`, after the hub's own drafter had taken `draft_s`."""


@dataclass
class GoodputScheduler:
    """Every session that decodes takes part in every step; ids that are there already, be it a prompt or what a node
    decoded by itself, are fed in pieces beside them."""

    cost: CostModel
    max_prefill: int = 512
    """Most prompt ids, or provisional ones, fed in a step."""
    max_patience_s: float = 0.25
    """Longest wait for a draft, whatever it promises."""
    _pass_s: float = field(init=False)
    """Time of one pass of the hub's own drafter: one position of each session that it drafts for."""

    def __post_init__(self) -> None:
        self._pass_s = _PASS_SHARE * self.cost.predict_s(StepShape(1, 1, 0))

    def plan(self, sessions: Sequence[Session], now_s: float) -> Plan:
        """Return the next step, or how long to wait for a draft before the next one."""
        caught_up = [s for s in sessions if s.num_pending <= _MIN_PIECE]
        for session in caught_up:
            session.tail = session.mailbox.usable(session.committed)
        decoding = [s for s in caught_up if not s.mailbox.num_provisional]
        feeding = [s for s in caught_up if s.mailbox.num_provisional]
        feeding += [s for s in sessions if s.num_pending > _MIN_PIECE]
        self._set_depths(decoding)
        if decoding and not feeding and (wait_s := self._patience(decoding, now_s)) > 0:
            return Plan(wait_s=wait_s)
        for session in decoding:
            session.pace.answers.settle(answered=bool(session.tail))
            if session.own and session.own.depth == 0:
                session.own.rest()
        blocks = [(s, s.next_block(s.pace.checked_depth, self.max_prefill)) for s in decoding]
        blocks += self._pieces(feeding, Plan(tuple(blocks)).shape)
        return Plan(tuple(blocks))

    def learn(self, plan: Plan, step_s: float, draft_s: float = 0.0) -> None:
        """Learn from a step that took `step_s`, after the hub's own drafter had taken `draft_s`."""
        self.cost.observe(plan.shape, step_s)
        num_passes = max((block.num_path for _, block in plan.blocks), default=0)
        if num_passes:
            self._pass_s += _PASS_EWMA * (draft_s / num_passes - self._pass_s)

    # -- depth

    def _set_depths(self, sessions: Sequence[Session]) -> None:
        if not sessions:
            return
        gains = [s.pace.survival.gains() if s.has_drafter else [] for s in sessions]
        num_rows, num_ids = 0, 0.0
        for session, gain in zip(sessions, gains, strict=True):
            depth = min(session.pace.depth, len(session.tail))
            num_rows += session.num_pending + depth
            num_ids += 1 + sum(gain[:depth])
        step_s = self.cost.predict_s(StepShape(num_rows, len(sessions), _context(sessions)))
        price = num_ids / max(step_s, 1e-9) * self.cost.row_s  # ids that a row's time is worth
        for session, gain in zip(sessions, gains, strict=True):
            session.pace.adjust_depth(gain, price)
            ids_per_step = 1 + sum(gain[: session.pace.depth])
            session.pace.adjust_window(step_s, ids_per_step, session.mailbox.max_ahead)
        self._set_own_depths([s for s in sessions if s.own], num_ids, max(step_s, 1e-9))

    # -- the hub's own drafter

    def _set_own_depths(self, sessions: Sequence[Session], num_ids: float, step_s: float) -> None:
        """Say how far the hub itself drafts on for each session: as far as that raises ids per second.

        A position costs a row, and a pass of the drafter that it shares with the other sessions; to go on from a
        node's draft costs a pass for each of its ids, too. Where it earns more without that draft, the node is not
        asked for any, but for a probe now and then.
        """
        for session in sessions:
            if session.own is None:
                continue
            own, pass_s = session.own, self._pass_s / len(sessions)
            chain = session.pace.survival.gains()[: min(session.pace.checked_depth, len(session.tail))]
            rates = self._own_rates(own, chain, num_ids, step_s, pass_s)
            if chain and not session.pace.probing:
                spared_s = step_s - len(chain) * self.cost.row_s
                alone = self._own_rates(own, [], num_ids - sum(chain), max(spared_s, 1e-9), pass_s)
                if max(alone) > _OWN_MARGIN * max(rates):
                    session.pace.stop_asking()
                    chain, rates = [], alone
            best = max(range(len(rates)), key=rates.__getitem__)
            if best == 0 or own.depth >= len(rates) or rates[best] > _OWN_MARGIN * rates[own.depth]:
                own.depth = best
            if own.depth == 0:
                own.depth = int(own.probing)
            own.width = 2 if own.depth and self._leaves_pay(chain, own, rates[0]) else 1

    def _own_rates(
        self, own: OwnPace, chain: Sequence[float], num_ids: float, step_s: float, pass_s: float
    ) -> list[float]:
        """Return the ids per second of a step, with 0, 1, 2 ... positions of the hub's own past this chain."""
        reach = accumulate(own.survival.gains(), initial=0.0)
        before = chain[-1] if chain else 1.0
        return [
            (num_ids + before * gained)
            / (step_s + depth * self.cost.row_s + (len(chain) + depth) * pass_s * (depth > 0))
            for depth, gained in enumerate(reach)
        ]

    def _leaves_pay(self, chain: Sequence[float], own: OwnPace, ids_per_s: float) -> bool:
        """True when a second guess at each position earns more than its row costs, on average over the path."""
        after = chain[-1] if chain else 1.0
        survives = [1.0, *chain, *(after * gain for gain in own.survival.gains()[: own.depth])]
        return (survives[0] - survives[-1]) * own.beside > (len(survives) - 1) * self.cost.row_s * ids_per_s

    # -- patience

    def _patience(self, sessions: Sequence[Session], now_s: float) -> float:
        """Return how long to wait for drafts under way; 0 to take the step now."""
        waiters = sorted(
            (s for s in sessions if _awaits(s) and self._overdue_s(s) > now_s), key=lambda s: _remaining_s(s, now_s)
        )
        if not waiters:
            return 0.0
        blind = self._blind_rate(sessions, waiters, now_s)
        for i in range(len(waiters)):
            wait_s = _remaining_s(waiters[i], now_s)
            if self._wait_rate(sessions, waiters[: i + 1], wait_s) > blind * _MARGIN:
                for session in waiters[: i + 1]:
                    session.pace.answers.wait()
                return max(min(self._overdue_s(s) for s in waiters[: i + 1]) - now_s, 1e-4)
        return 0.0

    def _wait_rate(self, sessions: Sequence[Session], answered: Sequence[Session], wait_s: float) -> float:
        """Expected ids per second when the `answered` have sent their drafts after `wait_s`."""
        num_rows, num_ids = 0.0, 0.0
        for session in sessions:
            length = session.pace.answers.num_ids if session in answered else len(session.tail)
            depth = min(session.pace.checked_depth, length)
            num_rows += session.num_pending + depth
            num_ids += 1 + _partial_sum(session.pace.survival.gains(), depth)
        return num_ids / (wait_s + self._step_s(num_rows, sessions))

    def _blind_rate(self, sessions: Sequence[Session], waiters: Sequence[Session], now_s: float) -> float:
        """Expected ids per second when the step is taken now, over it and the step that has the drafts."""
        depths = [min(s.pace.checked_depth, len(s.tail)) for s in sessions]
        blind_s = self._step_s(sum(s.num_pending for s in sessions) + sum(depths), sessions)
        num_blind = max(1, math.ceil(_remaining_s(waiters[0], now_s) / max(blind_s, 1e-9)))
        num_rows, num_ids = 0.0, 0.0
        for session, depth in zip(sessions, depths, strict=True):
            gains = session.pace.survival.gains()
            if session not in waiters:
                num_ids += (num_blind + 1) * (1 + sum(gains[:depth]))
                num_rows += 1 + depth
                continue
            spare_s = num_blind * blind_s - _remaining_s(session, now_s)
            left = min(session.pace.checked_depth, session.pace.answers.num_ids_after(spare_s) - num_blind)
            overtaken = gains[num_blind - 1] if num_blind <= len(gains) else 0.0
            num_ids += num_blind + 1 + (overtaken * _partial_sum(gains, left) if left > 0 else 0.0)
            num_rows += 1 + max(left, 0)
        return num_ids / (num_blind * blind_s + self._step_s(num_rows, sessions))

    def _step_s(self, num_rows: float, sessions: Sequence[Session]) -> float:
        return self.cost.predict_s(StepShape(round(num_rows), len(sessions), _context(sessions)))

    def _overdue_s(self, session: Session) -> float:
        return session.decided_s + min(session.pace.answers.latest_s, self.max_patience_s)

    # -- ids that are there already

    def _pieces(self, sessions: Sequence[Session], decoding: StepShape) -> list[tuple[Session, Block]]:
        """Feed the first of them, as much as the others' step may be stretched by: provisional ids, whose nodes show
        them to somebody, then the oldest prompts."""
        budget = self.max_prefill
        if decoding.num_sessions and self.cost.row_s > 0:
            spare_s = (_STALL - 1) * self.cost.predict_s(decoding)
            budget = min(budget, max(int(spare_s / self.cost.row_s), _MIN_PIECE))
        blocks = []
        for session in sessions:
            if budget <= 0:
                break
            spare = max(budget - session.num_pending, 0) if session.mailbox.num_provisional else 0
            block = session.next_block(spare, budget)
            budget -= len(block.pending) + len(block.draft)
            blocks.append((session, block))
        return blocks


def _awaits(session: Session) -> bool:
    """The node has been asked for a draft and has not answered yet, and one would be of use."""
    return (
        session.has_drafter
        and not (session.own and session.own.depth)  # it has something to check meanwhile
        and session.pace.checked_depth > 0
        and session.pace.asked > 0
        and session.pace.answers.may_wait
        and session.room > 1
        and not session.mailbox.answered(session.committed)
    )


def _remaining_s(session: Session, now_s: float) -> float:
    return max(session.pace.answers.mean_s - (now_s - session.decided_s), 0.0)


def _context(sessions: Sequence[Session]) -> int:
    return sum(len(session.committed) for session in sessions)


def _partial_sum(gains: Sequence[float], length: float) -> float:
    """Sum of the first `length` gains; a part of the last one for a part of a position."""
    whole = int(length)
    rest = gains[whole] * (length - whole) if 0 <= whole < len(gains) else 0.0
    return sum(gains[:whole]) + rest

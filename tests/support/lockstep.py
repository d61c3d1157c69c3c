"""A schedule that leaves nothing to chance: every draft is waited for, every block goes to full depth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baru_hub.cost_model import CostModel
from baru_hub.scheduler import GoodputScheduler, Plan
from baru_hub.session import Session


@dataclass
class Lockstep:
    """All sessions in every step, `depth` draft ids each, once each has sent something (at most 5 s)."""

    depth: int = 8
    max_prefill: int = 512
    patience_s: float = 5.0

    def plan(self, sessions: Sequence[Session], now_s: float) -> Plan:
        for session in sessions:
            session.pace.window = 2 * self.depth
        waits = [
            session.decided_s + self.patience_s - now_s
            for session in sessions
            if session.has_drafter
            and session.pace.asked
            and session.num_pending <= self.max_prefill
            and session.room > 1
            and not session.mailbox.answered(session.committed)
        ]
        if waits and max(waits) > 0:
            return Plan(wait_s=max(waits))
        return Plan(tuple((s, s.next_block(self.depth, self.max_prefill)) for s in sessions))

    def learn(self, plan: Plan, step_s: float, draft_s: float = 0.0) -> None:
        """Nothing: it is what it is."""


def free_running() -> GoodputScheduler:
    """The real schedule, with a cost model that starts from its default prior."""
    return GoodputScheduler(CostModel())

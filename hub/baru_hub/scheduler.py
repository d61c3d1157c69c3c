"""Who is verified in the next step, and how deep. A pure decision over the sessions' states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .session import Block, Session


@dataclass(frozen=True)
class Plan:
    """The next step."""

    blocks: tuple[tuple[Session, Block], ...] = ()
    wait_s: float | None = None
    """With no blocks: wait this long for a draft, or for ever when None."""


@dataclass
class TurnScheduler:
    """Serves sessions in turn, one a step, and waits a fixed, short time for a draft under way."""

    max_depth: int = 8
    """Most draft ids checked in a step."""
    patience_s: float = 0.01
    """Longest wait for a node's answer to the last verdict."""
    max_prefill: int = 512
    """Most prompt ids fed in a step."""
    _last: Session | None = None

    def plan(self, sessions: Sequence[Session], now_s: float) -> Plan:
        """Return the next step for the first session in turn that need not wait."""
        waits = [self._wait_s(session, now_s) for session in sessions]
        for i in self._turns(sessions):
            if waits[i] <= 0:
                self._last = sessions[i]
                return Plan(((sessions[i], sessions[i].next_block(self.max_depth, self.max_prefill)),))
        return Plan(wait_s=min(waits, default=None))

    def _turns(self, sessions: Sequence[Session]) -> list[int]:
        last = next((i for i, session in enumerate(sessions) if session is self._last), -1)
        return [(last + 1 + i) % len(sessions) for i in range(len(sessions))]

    def _wait_s(self, session: Session, now_s: float) -> float:
        if not session.has_drafter or session.num_pending > self.max_prefill or session.room <= 1:
            return 0.0
        if session.mailbox.answered(session.committed):
            return 0.0
        return session.decided_s + self.patience_s - now_s

"""The trust checkpoint (Kittu): where a request enters and where it leaves, never inside the loop.

At the entry its identity is noted, and nobody is let in unless that can be written down. At the exit the hub signs what
it stands for, and writes that down, too. Without a notary and an audit log it does nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from baru_common.errors import BaruError
from baru_common.folders import state_folder
from baru_common.frames import Finished
from baru_common.receipts import PURPOSE, Statement, digests
from baru_common.signatures import ANYBODY, spelled, utc_now

from .audit_log import AuditLog
from .session import Session
from .signing import Notary, default_folder


class Checkpoint:
    """One hub's."""

    def __init__(
        self,
        notary: Notary | None = None,
        audit: AuditLog | None = None,
        wall_clock: Callable[[], datetime] = utc_now,
    ) -> None:
        self._notary = notary
        self._noted_key = notary.public_key if notary else b""
        self._audit = audit
        self._wall_clock = wall_clock

    @property
    def receipt_key(self) -> bytes:
        """The key that signs; empty: nobody does."""
        return self._notary.public_key if self._notary else b""

    def require_open(self) -> None:
        """HubUnavailable when what happens now could not be written down."""
        if self._audit:
            self._audit.require_room()

    def enter(self, state: Session, identity: str, fingerprint: bytes, clock: Callable[[], float]) -> Visit:
        """Let a session in."""
        visit = Visit(self, state, identity, fingerprint, clock, self._wall_clock(), clock())
        self.note(
            "session_opened",
            identity,
            session=state.session_id,
            num_prompt=state.num_prompt,
            num_given=state.num_given,
        )
        return visit

    def refuse(self, identity: str, error: BaruError) -> None:
        """Somebody was not let in."""
        if self._audit:
            self._audit.note_refusal("session_refused", identity, error.reason)

    def deny(self, identity: str, reason: str) -> None:
        """Somebody may not do what he asked for, whoever he is."""
        if self._audit:
            self._audit.note_refusal("identity_denied", identity, reason)

    def note(self, event: str, identity: str = "", **fields: int | str) -> None:
        """Write down what happened: counts, digests and names, never text or ids of a request."""
        if self._audit:
            self._audit.note(event, identity, **fields)

    def _take_new_key(self) -> None:
        if not self._notary:
            return
        self._notary.refresh()
        if self._notary.public_key != self._noted_key:
            self._noted_key = self._notary.public_key
            self.note("certificate_reloaded", key=self._noted_key.hex())

    def close(self, visit: Visit, frame: Finished) -> Finished:
        """Return the closing frame with its receipt."""
        if not self._notary and not self._audit:
            return frame
        self._take_new_key()
        statement = self._statement(visit, frame)
        receipt = self._notary.sign(PURPOSE, statement.to_bytes()) if self._notary else None
        self.note(
            "session_finished",
            visit.identity,
            session=statement.session_id,
            reason=statement.finish_reason,
            transcript_digest=statement.transcript_digest,
            **{name: value for name, value in vars(statement).items() if name.startswith("num_")},
        )
        return replace(frame, receipt=receipt)

    def _statement(self, visit: Visit, frame: Finished) -> Statement:
        state, usage = visit.state, frame.usage
        params, output = state.sampling.params, state.committed[state.num_prompt :]
        return Statement(
            hub=self._notary.identity if self._notary else ANYBODY,
            node=visit.identity,
            session_id=state.session_id,
            **digests(visit.fingerprint, state.committed[: state.num_prompt], params, output),
            num_prompt=usage.num_prompt,
            num_output=usage.num_emitted,
            num_given=state.num_given,
            num_decided=usage.num_emitted - state.num_given,
            num_steps=usage.num_steps,
            num_drafted=usage.num_drafted,
            num_verified=usage.num_verified,
            num_accepted=usage.num_accepted,
            num_guessed=usage.num_guessed,
            finish_reason=frame.reason.value,
            started_at=spelled(visit.started_at),
            finished_at=spelled(self._wall_clock()),
            elapsed_ns=max(0, round((visit.clock() - visit.started_s) * 1e9)),
        )


@dataclass(frozen=True, eq=False)
class Visit:
    """One session, from the entry to the exit."""

    checkpoint: Checkpoint
    state: Session
    identity: str
    fingerprint: bytes
    clock: Callable[[], float]
    started_at: datetime
    started_s: float

    def resume(self) -> None:
        """Its node is back."""
        self.checkpoint.note("session_resumed", self.identity, session=self.state.session_id, epoch=self.state.epoch)

    def finish(self, frame: Finished) -> Finished:
        """It ended well: return the closing frame with its receipt."""
        return self.checkpoint.close(self, frame)

    def fail(self, reason: str) -> None:
        """It ended without one."""
        self.checkpoint.note(
            "session_failed",
            self.identity,
            session=self.state.session_id,
            reason=reason,
            num_output=len(self.state.committed) - self.state.num_prompt,
        )


@asynccontextmanager
async def open_checkpoint(tls: Path | None, audit_folder: Path | None) -> AsyncIterator[Checkpoint]:
    """Keep a hub's checkpoint while the block runs; the arguments are those settings of `HubConfig`.

    ConfigError when there is no key to sign with, or the audit log cannot be written; AuditBroken when it was changed.
    """
    notary = Notary(tls or state_folder(), certified=tls is not None)
    folder = audit_folder or (default_folder() if tls else None)
    audit = AuditLog(folder, notary) if folder else None
    if audit:
        await asyncio.to_thread(audit.start)
    checkpoint = Checkpoint(notary, audit)
    try:
        yield checkpoint
    finally:
        checkpoint.note("hub_stopped")
        if audit:
            await asyncio.to_thread(audit.close)

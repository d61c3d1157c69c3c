"""A session as the loop serves it, and the streams through which its node is heard: they come and go, it stays."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import AsyncIterator, Callable

from baru_common.errors import BaruError, HubTimeout, Superseded
from baru_common.frames import Draft, DrafterInfo, Finished, FinishReason, Heartbeat, HubFrame, Posture
from baru_common.observers import Told

from .checkpoint import Visit
from .engines import Allocation
from .observing import Ended, HubObserver, Place, Who
from .orphans import LinkPolicy, Orphan
from .session import Session

MAX_OUTBOX = 64
"""Frames that wait for a node to read them; then its session is paused."""
ABANDONED = "ABANDONED"
"""Why a session ended whose node went away, and did not come back in time."""
_NO_FAILURES = {ABANDONED, *(reason.value for reason in FinishReason)}


class Resident:
    """A session that holds memory. It has a stream, or is an orphan, or is closed and about to be released."""

    def __init__(
        self,
        visit: Visit,
        allocation: Allocation,
        who: Who,
        policy: LinkPolicy,
        clock: Callable[[], float],
        wake: Callable[[], None],
        tell: Told[HubObserver],
        max_idle_s: float = math.inf,
    ) -> None:
        self.visit = visit
        self.state = visit.state
        self.sequence = allocation.sequence
        self.who = who
        self.key = secrets.token_bytes(32)
        self.stream: LiveSession | None = None
        self.orphan: Orphan | None = None
        self.reason = ""
        """Why it ended, once it has: a `FinishReason`, the reason of an error, or ABANDONED."""
        self.heard_epoch = 0
        """Last epoch whose node has said something: it knows that it has the session."""
        self.tier = ""
        self.drafter: DrafterInfo | None = None
        """What the node said of itself in the last stream."""
        self.posture: Posture | None = None
        """What it was told that it may do."""
        self.policy = policy
        self.clock = clock
        self.wake = wake
        self.max_idle_s = max_idle_s
        self.born_s = clock()
        self._tell = tell
        self._num_bytes = allocation.num_bytes

    @property
    def identity(self) -> str:
        """Of its node."""
        return self.who.node

    @property
    def closed(self) -> bool:
        """It has ended."""
        return bool(self.reason)

    @property
    def has_work(self) -> bool:
        """There are ids left to decide."""
        return not self.closed and self.state.finish is None

    @property
    def may_step(self) -> bool:
        """The next step may have it: its node can take the verdict, or is gone and has not been for long."""
        if not self.has_work:
            return False
        if self.orphan:
            return self.orphan.may_decode(len(self.state.committed), self.policy)
        return self.stream is not None and not self.stream.full

    @property
    def place(self) -> Place:
        """Where it stands."""
        if not self.has_work:
            return Place.ENDING
        if self.orphan:
            return Place.ORPHANED
        return Place.UNREAD if self.stream and self.stream.full else Place.ATTACHED

    def attach(self) -> LiveSession:
        """Give it a new stream. An older one ends: there is one stream to a session."""
        if self.stream:
            self.stream.end(Superseded("a later stream of this session is there", hint="use that one"))
        self.stream, self.orphan = LiveSession(self), None
        return self.stream

    def abandon(self) -> None:
        """Its node is gone: run on without it for a while, if that is allowed."""
        self.stream = None
        if self.closed or self.policy.orphan_grace_s <= 0:
            self.close()
            return
        self.orphan = Orphan(self.clock(), len(self.state.committed), self._num_bytes)
        self.state.leave()
        self._tell(lambda observer: observer.orphaned(self.who))
        self.wake()

    def finish(self, reason: FinishReason) -> None:
        """End well: the node hears what came of it, with a receipt."""
        if not self.stream or self.closed:
            return
        try:
            self.stream.send(self.visit.finish(self.state.finished(reason)))
        except BaruError as error:
            self.fail(error)
        else:
            self._end(reason.value)

    def fail(self, error: BaruError) -> None:
        """End with an error, which the node hears if it is there."""
        if self.stream and not self.closed:
            self.stream.end(error)
        self.close(error.reason)

    def close(self, reason: str = ABANDONED) -> None:
        """End without a word."""
        if not self.closed:
            self.visit.fail(reason)
            self._end(reason)

    def _end(self, reason: str) -> None:
        """Stop working for it; its memory is given back between two steps."""
        self.reason = reason
        self.wake()

    def ended(self) -> Ended:
        """What is to be said of it when it is over."""
        failed = self.reason not in _NO_FAILURES
        return Ended(self.who, self.reason, failed, self.state.usage())


class LiveSession:
    """A session as one stream sees it: drafts go in, frames come out. Once another stream has the session, nothing
    that this one does concerns it any more."""

    def __init__(self, resident: Resident) -> None:
        self._resident = resident
        self._outbox: asyncio.Queue[HubFrame | BaruError] = asyncio.Queue()
        self._full_since_s: float | None = None
        self._beat_s: float | None = None
        """When the node was last heard, once it sends heartbeats."""
        self._drafted_s: float | None = None
        self._active_s = resident.clock()
        """When the node last sent or took something."""

    @property
    def state(self) -> Session:
        return self._resident.state

    @property
    def sequence(self) -> int:
        return self._resident.sequence

    @property
    def key(self) -> bytes:
        """What proves at a resume that the session is the node's own."""
        return self._resident.key

    @property
    def closed(self) -> bool:
        """The session has ended, or another stream has it."""
        return self._resident.closed or not self._attached

    @property
    def _attached(self) -> bool:
        return self._resident.stream is self

    # -- what the node says

    def draft(self, draft: Draft) -> None:
        """Take in drafted ids; InvalidDraft when they are wrong."""
        state, now_s = self.state, self._resident.clock()
        self._hear(now_s)
        if draft.epoch != state.epoch or not self._attached:
            state.mailbox.num_stale_frames += 1
            return
        fresh = draft.chain_id > state.mailbox.chain_id
        state.mailbox.put(draft, len(state.committed))
        if not fresh:
            if self._drafted_s is not None:
                state.pace.answers.observe_pace(len(draft.token_ids), now_s - self._drafted_s)
        elif (answer_s := state.answer_time_s(draft.base, now_s)) is not None:
            state.pace.answers.observe(answer_s, len(draft.token_ids))
        self._drafted_s = now_s
        self._resident.wake()

    def heartbeat(self, beat: Heartbeat) -> None:
        """Send it back, unless the node leaves too much unread; from now on silence means that the node is gone."""
        if self._beat_s is None:
            self._resident.wake()  # there is a deadline now
        self._beat_s = now_s = self._resident.clock()
        self._hear(now_s)
        if not self.full:
            self.send(beat)

    def said_all(self) -> None:
        """The node has ended its sending side: from now on silence means nothing."""
        self._beat_s = None

    def finish(self, reason: FinishReason) -> None:
        """End well: the closing frame is the last one. Nothing to do when it has ended before."""
        if not self.closed:
            self._resident.finish(reason)

    def fail(self, error: BaruError) -> None:
        """End the session with an error: `frames` raises it after the frames queued so far."""
        if not self.closed:
            self._resident.fail(error)

    def close(self) -> None:
        """End the session without a word."""
        if self._attached:
            self._resident.close(FinishReason.CANCELLED.value)

    def lose(self) -> None:
        """The link broke: the session runs on for a while without its node."""
        if self._attached:
            self._resident.abandon()

    def _hear(self, now_s: float) -> None:
        self._active_s = now_s
        if self._beat_s is not None:
            self._beat_s = now_s
        if self._attached:
            self._resident.heard_epoch = self.state.epoch

    # -- what the node hears

    @property
    def num_unread(self) -> int:
        """Frames that wait for the node."""
        return self._outbox.qsize()

    @property
    def full(self) -> bool:
        """The node has not read for a while."""
        return self.num_unread >= MAX_OUTBOX

    def send(self, frame: HubFrame) -> None:
        """Queue a frame for the node."""
        self._outbox.put_nowait(frame)
        if self.full and self._full_since_s is None:
            self._full_since_s = self._resident.clock()
            self._resident.wake()

    def end(self, error: BaruError) -> None:
        """End this stream, not the session: `frames` raises `error` after the frames queued so far."""
        self._outbox.put_nowait(error)

    async def frames(self) -> AsyncIterator[HubFrame]:
        """Yield frames for the node, `Finished` last; raise what `fail` or `end` was given."""
        while True:
            item = await self._outbox.get()
            self._active_s = self._resident.clock()
            if self._full_since_s is not None and not self.full:
                self._full_since_s = None
                self._resident.wake()
            if isinstance(item, BaruError):
                raise item
            yield item
            if isinstance(item, Finished):
                return

    # -- whether the node is still there

    @property
    def deadline_s(self) -> float:
        """Clock at which it is taken for gone, if nothing happens until then."""
        policy = self._resident.policy
        silent_s = math.inf if self._beat_s is None else self._beat_s + policy.node_silence_s
        unread_s = math.inf if self._full_since_s is None else self._full_since_s + policy.slow_reader_s
        return min(silent_s, unread_s, self._active_s + self._resident.max_idle_s)

    def give_up(self) -> None:
        """The node is gone: tell it why, in case it is not, and let the session run on without it."""
        if self._full_since_s is not None:
            why, hint = "the node leaves its frames unread", "read them as they come"
        elif self._beat_s is None:
            why, hint = "the node neither sends nor takes anything", "send heartbeats"
        else:
            why, hint = "nothing comes from the node", "send heartbeats"
        self.end(HubTimeout(f"{why}, so the hub takes it for gone", hint=f"resume, and {hint}"))
        self.lose()

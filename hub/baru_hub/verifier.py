"""The loop: schedule, forward, accept, commit."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType

from baru_common import __version__
from baru_common.channel_options import MAX_MESSAGE_BYTES
from baru_common.errors import (
    BaruError,
    EngineFailure,
    HubUnavailable,
)
from baru_common.frames import (
    PROTOCOL_REVISION,
    Drain,
    HubDescription,
    Limits,
    Open,
)
from baru_common.observers import Told
from baru_common.signatures import ANYBODY
from baru_common.trace_context import TraceContext
from baru_common.waiting import within

from .acceptance import Acceptance, Decision, accept
from .admission import check_open, max_length
from .bounds import keep_within
from .checkpoint import Checkpoint
from .engines import Engine, EngineSpec, Feed, Paged, Want
from .live import LiveSession, Resident
from .observing import Census, HubObserver, Part, Stepped
from .orphans import LinkPolicy
from .page_pool import PagePool
from .posture import Document
from .posture_keeper import PostureKeeper
from .quotas import Quotas
from .ragged_batch import SCRATCH_SLOTS
from .roster import Roster
from .scene import SceneChange, Scope
from .scheduler import GoodputScheduler, Plan, Scheduler
from .session import Block

__all__ = ["LiveSession", "Verifier"]

MAX_DEPTH = 16

_LEAST_WAIT_S = 1e-3
_LONGEST_STEP_S = 60.0
"""No step takes so long: the engine hangs."""

_log = logging.getLogger(__name__)


class Verifier:
    """Serves sessions on one engine. An async context manager: the loop runs inside it."""

    def __init__(
        self,
        engine: Engine,
        scheduler: Scheduler | None = None,
        limits: Limits | None = None,
        *,
        max_depth: int = MAX_DEPTH,
        link: LinkPolicy | None = None,
        checkpoint: Checkpoint | None = None,
        quotas: Quotas | None = None,
        observers: Iterable[HubObserver] = (),
        posture: PostureKeeper | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`scheduler`: by goodput, calibrated at the start, unless given. `max_depth`: most draft ids checked
        per session and step; 0 turns drafting off. `link`: what is made of links that break. `quotas`: what an
        identity may take, and all of them; `limits` is what nodes are told of it. `checkpoint`: what is done where
        requests enter and leave; nothing, unless given. `observers` are told what happened. `posture`: what drafting
        may be done; None: any."""
        self._engine = engine
        self._scheduler = scheduler
        self._quotas = quotas = (quotas or Quotas(**({"max_sessions": limits.max_sessions} if limits else {}))).within(
            engine.spec.capacity
        )
        self._limits = limits or Limits(
            max_sessions=quotas.max_sessions,
            max_prompt_tokens=engine.spec.context_limit - 1,
            max_draft_ahead=quotas.max_draft_ahead,
            max_message_bytes=MAX_MESSAGE_BYTES,
        )
        self._clock = clock
        self._tell = Told(observers)
        self._unsaid: Stepped | None = None
        """The last step, which observers are told of while the next one runs."""
        self._step_since_s: float | None = None
        """Since when the step under way runs."""
        self._held_since_s: float | None = None
        """Since when the next step is held back for drafts."""
        self._checkpoint = checkpoint or Checkpoint()
        self._posture = posture
        self._stopping = False
        self._awake = asyncio.Event()
        if posture:
            posture.on_change = self._awake.set
            posture.on_document = self._note_document
        self.roster = Roster(
            engine,
            self._limits,
            quotas,
            max_depth=max_depth,
            link=link or LinkPolicy(),
            checkpoint=self._checkpoint,
            posture=posture,
            tell=self._tell,
            clock=clock,
            awaken=self._awake.set,
            before_release=self._say_step,  # it may have been in it
        )
        """Who is here."""
        self._engine_free = asyncio.Lock()
        self._loop_task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Verifier:
        scheduler = self._scheduler or GoodputScheduler(await self._engine.calibrate())
        self._loop_task = asyncio.create_task(self._run(scheduler), name="baru-verifier")
        self._loop_task.add_done_callback(self._loop_ended)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.dismiss()
        self._stopping = True
        self._awake.set()
        if self._loop_task:
            await asyncio.wait([self._loop_task])  # a step under way ends by itself
        await self.roster.close()

    # -- what streams call

    @property
    def spec(self) -> EngineSpec:
        return self._engine.spec

    @property
    def num_sessions(self) -> int:
        """Sessions that hold memory."""
        return len(self.roster.residents)

    @property
    def num_orphans(self) -> int:
        """Those of them whose node is gone."""
        return len(self.roster.orphans())

    @property
    def draining(self) -> bool:
        """Nobody is admitted any more."""
        return self.roster.draining

    @property
    def pool(self) -> PagePool | None:
        """The engine's pages, if it has some."""
        return self._engine.pool if isinstance(self._engine, Paged) else None

    def census(self) -> Census:
        """Count the sessions by how they stand; from any thread."""
        return self.roster.census()

    def goes_on(self) -> bool:
        """Whether the loop runs, and no step takes longer than any step does: else only a new start helps."""
        if self._loop_task is None or self._loop_task.done():
            return False
        return self._step_since_s is None or self._clock() - self._step_since_s < _LONGEST_STEP_S

    def describe(self) -> HubDescription:
        """Say what is served, within which limits."""
        spec = self.spec
        return HubDescription(
            protocol_revision=PROTOCOL_REVISION,
            hub_version=__version__,
            engine=spec.engine,
            target_name=spec.target_name,
            target_fingerprint=spec.fingerprint,
            tokenizer_digest=spec.bundle.digest,
            vocabulary_digest=spec.vocabulary.digest,
            vocabulary_size=spec.vocabulary.size,
            eos_ids=spec.eos_ids,
            context_limit=spec.context_limit,
            limits=self._limits,
            posture_version=self._posture.document.version if self._posture else 0,
            posture_digest=self._posture.document.digest if self._posture else b"",
        )

    async def open(self, request: Open, identity: str = ANYBODY, trace: TraceContext | None = None) -> LiveSession:
        """Admit a session of `identity`, or go on with the one that `request` resumes, and queue what its node has to
        know first; a BaruError says why not. `trace`: the request that it serves."""
        try:
            return await self._open(request, identity, trace or TraceContext.new())
        except BaruError as error:
            self._checkpoint.refuse(identity, error)
            reason = error.reason
            self._tell(lambda observer: observer.refused(reason))
            raise

    async def _open(self, request: Open, identity: str, trace: TraceContext) -> LiveSession:
        check_open(request, self.spec, self._limits, self._quotas)
        self.roster.require_open()
        if request.resume:
            async with self._engine_free:  # between two steps, so that nothing under way is of the stream before
                if live := self.roster.go_on(request, request.resume, identity):
                    return live
        with self.roster.reserved(identity, max_length(request, self.spec, self._quotas)):
            sampling = await self.roster.sampling(request, identity)
            if not self.roster.orphans():
                return self.roster.admit(request, sampling, identity, trace)
            async with self._engine_free:  # between two steps memory may be freed
                return self.roster.admit(request, sampling, identity, trace)

    def _note_document(self, document: Document) -> None:
        self._checkpoint.note("posture_changed", version=document.version, digest=document.digest.hex())

    def has(self, session_id: str) -> bool:
        """Whether a session of this id holds memory."""
        return session_id in self.roster.residents

    def close(self, session_id: str, reason: str) -> None:
        """End a session without a word to its node, whether that is there or not."""
        if resident := self.roster.residents.get(session_id):
            resident.close(reason)

    def follow_change(self, found: SceneChange) -> None:
        """Forget what a session's drafts were worth before its acceptance changed."""
        if found.scope is Scope.SESSION and (resident := self.roster.residents.get(found.who.session_id)):
            resident.state.pace.survival.restart(found.change.after)

    async def check(
        self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], identity: str = ANYBODY
    ) -> list[Acceptance]:
        """Verify each (context, draft) pair, all in one forward pass, with no session: for scripts and tests.

        The result says how much of each draft the target agrees with, and what it emits instead.
        """
        allocations = []
        try:
            feeds = []
            for context, draft in pairs:
                allocation = self._engine.allocate(context, len(context) + len(draft), identity)
                allocations.append(allocation)
                block = Block(tuple(context[allocation.num_cached :]), tuple(draft))
                feeds.append(Feed(allocation.sequence, allocation.num_cached, block))
            async with self._engine_free:
                decisions = await self._engine.verify(feeds)
        finally:
            for allocation in allocations:
                self._engine.free(allocation.sequence)
        return [accept(draft, _sound(found)) for (_, draft), found in zip(pairs, decisions, strict=True)]

    async def drain(self, grace_s: float) -> None:
        """Admit nobody any more, tell those who run, and wait until they ended, at most `grace_s`. Orphans end now."""
        self.roster.draining = True
        self._checkpoint.note("drain", num_sessions=self.num_sessions)
        deadline = self._clock() + grace_s
        for resident in self.roster.residents.values():
            if resident.stream and not resident.closed:
                resident.stream.send(Drain(grace_s))
        self._awake.set()
        while any(r.stream and r.has_work for r in self.roster.residents.values()) and self._clock() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.02)

    def dismiss(self) -> None:
        """End the sessions that still run: their nodes are told that the hub is stopping."""
        for resident in self.roster.residents.values():
            resident.fail(HubUnavailable("the hub is stopping", hint="try again when it is back"))

    # -- the loop

    async def _run(self, scheduler: Scheduler) -> None:
        while not self._stopping:
            self._awake.clear()
            try:
                async with self._engine_free:
                    self.roster.tend()
                    if self._posture:
                        keep_within(self.roster.residents.values(), self._posture)
                    plan = scheduler.plan(
                        [r.state for r in self.roster.residents.values() if r.may_step], self._clock()
                    )
                    if plan.blocks:
                        await self._step(plan, scheduler)
                    self._note_wait(plan)
                if not plan.blocks:
                    self._say_step()
                    await self._sleep(plan.wait_s)
            except Exception:  # a fault of ours must not leave anybody waiting, nor keep others from being served
                _log.exception("the verification loop failed; its %d sessions are ended", len(self.roster.residents))
                for resident in self.roster.residents.values():
                    resident.fail(EngineFailure("the hub failed", hint="try again"))
                await asyncio.sleep(_LEAST_WAIT_S)  # should it fail again and again, the rest of the hub goes on

    async def _step(self, plan: Plan, scheduler: Scheduler) -> None:
        work = [(self.roster.residents[state.session_id], block) for state, block in plan.blocks]
        start_s = draft_end_s = self._step_since_s = self._clock()
        try:
            work = await self._extend(work)
            draft_end_s = self._clock()
            feeds = [Feed(resident.sequence, resident.state.num_cached, block) for resident, block in work]
            decisions = await self._verified(feeds)
            if len(decisions) != len(feeds):
                raise EngineFailure(f"the engine returned {len(decisions)} results for {len(feeds)} sequences")
        except Exception as error:  # the engine may fail in its own ways; only its own batch pays
            _log.exception("a verification step of %d sessions failed", len(work))
            failure = error if isinstance(error, BaruError) else EngineFailure(f"the target failed: {error}")
            for resident, _ in work:
                resident.fail(failure)
            return
        finally:
            self._step_since_s = None
        taken = Plan(tuple((resident.state, block) for resident, block in work))
        verify_s = self._clock() - draft_end_s
        scheduler.learn(taken, verify_s, draft_end_s - start_s)
        parts = []
        for (resident, block), decision in zip(work, decisions, strict=True):
            try:
                parts.append(self._commit(resident, block, _sound(decision)))
            except BaruError as error:
                resident.fail(error)
        waited_s = 0.0 if self._held_since_s is None else start_s - self._held_since_s
        draft_s = draft_end_s - start_s if any(block.own_depth for _, block in plan.blocks) else 0.0
        self._unsaid = Stepped([part for part in parts if part], verify_s, draft_s, waited_s)

    async def _verified(self, feeds: Sequence[Feed]) -> Sequence[Decision | BaruError]:
        """A step that is cancelled from within fails like any other; the loop is not cancelled with it."""
        step = asyncio.ensure_future(self._engine.verify(feeds))
        try:
            await asyncio.sleep(0)  # it has begun
            self._say_step()
            await asyncio.wait([step])
        finally:
            step.cancel()
        if step.cancelled():
            raise EngineFailure("the target's step was cancelled")
        return step.result()

    def _loop_ended(self, _: asyncio.Task[None]) -> None:
        """Nobody decides anything any more: whoever runs is told, and nobody is admitted."""
        if not self._stopping:
            _log.error("the verification loop has ended; its %d sessions are ended", len(self.roster.residents))
            self.roster.draining = True
            for resident in self.roster.residents.values():
                resident.fail(EngineFailure("the hub's loop has ended", hint="restart the hub"))

    async def _extend(self, work: list[tuple[Resident, Block]]) -> list[tuple[Resident, Block]]:
        """Let the engine's own drafter add to the blocks for which the plan says so."""
        wanting = [(resident, block) for resident, block in work if block.own_depth]
        if not wanting:
            return work
        wants = [
            Want(resident.sequence, resident.state.committed, block.draft, block.own_depth, block.own_width)
            for resident, block in wanting
        ]
        try:
            guesses = await self._engine.draft(wants)
        except Exception:  # drafts are hints: these sessions go on without
            _log.exception("drafting for %d sessions failed; they are served without the hub's drafter", len(wants))
            for resident, _ in wanting:
                resident.state.own = None
            return work
        extended, room = {}, SCRATCH_SLOTS
        for (resident, block), made in zip(wanting, guesses, strict=True):
            num_beside = sum(map(len, made.leaves))
            leaves = made.leaves if num_beside <= room else ()  # a full pass does without these
            room -= num_beside if leaves else 0
            extended[resident] = block.extended(made.path, leaves)
        return [(resident, extended.get(resident, block)) for resident, block in work]

    def _commit(self, resident: Resident, block: Block, decision: Decision) -> Part | None:
        if resident.closed:  # cancelled while its block was under way
            return None
        state, stream = resident.state, resident.stream
        depth, since_s, now_s = state.pace.checked_depth, state.decided_s, self._clock()
        verdict = state.take(block, decision)
        state.stamp(now_s)
        if self._posture and block.draft and verdict and verdict.num_verified and not block.provisional:
            self._posture.observe(resident.drafter, verdict.num_verified, verdict.num_accepted)
        if verdict and stream:
            stream.send(verdict)
        if state.finish and stream:
            stream.finish(state.finish)
        return Part(
            resident.who,
            num_prefilled=len(block.pending) - block.decides,
            depth=depth,
            num_verified=verdict.num_verified if verdict else 0,
            num_accepted=verdict.num_accepted if verdict else 0,
            num_guessed=verdict.num_guessed if verdict else 0,
            num_emitted=len(verdict.token_ids) if verdict else 0,
            num_steps=state.num_steps,
            num_waits=state.pace.answers.num_waits,
            num_won=state.pace.answers.num_won,
            interval_s=now_s - since_s,
        )

    def _say_step(self) -> None:
        if step := self._unsaid:
            self._unsaid = None
            self._tell(lambda observer: observer.stepped(step))

    def _note_wait(self, plan: Plan) -> None:
        if plan.blocks or plan.wait_s is None:
            self._held_since_s = None
        elif self._held_since_s is None:
            self._held_since_s = self._clock()

    async def _sleep(self, wait_s: float | None) -> None:
        """Until something happens, or is due."""
        due_s = [r.stream.deadline_s for r in self.roster.residents.values() if r.stream and not r.closed]
        due_s += [resident.born_s + self._quotas.max_session_age_s for resident in self.roster.residents.values()]
        due_s += [orphan.since_s + self.roster.link.orphan_grace_s for orphan in self.roster.orphans().values()]
        if (first_s := min(due_s, default=math.inf)) < math.inf:
            due_wait_s = max(first_s - self._clock(), _LEAST_WAIT_S)
            wait_s = due_wait_s if wait_s is None else min(wait_s, due_wait_s)
        with contextlib.suppress(asyncio.TimeoutError):
            await within(self._awake.wait(), wait_s)


def _sound(decision: Decision | BaruError) -> Decision:
    if isinstance(decision, BaruError):
        raise decision
    return decision

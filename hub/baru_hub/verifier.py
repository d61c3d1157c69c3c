"""The loop: schedule, forward, accept, commit; and the sessions that it serves."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from types import TracebackType

from baru_common import __version__
from baru_common.channel_options import MAX_MESSAGE_BYTES
from baru_common.errors import (
    BaruError,
    CapacityExhausted,
    EngineFailure,
    HubUnavailable,
    Superseded,
)
from baru_common.frames import (
    PROTOCOL_REVISION,
    Drain,
    HubDescription,
    Limits,
    Open,
    Opened,
    Resume,
)
from baru_common.observers import Told
from baru_common.sampling import SamplingContext, SamplingParams
from baru_common.sampling.guide import Guide
from baru_common.signatures import ANYBODY
from baru_common.trace_context import TraceContext
from baru_common.waiting import within

from .acceptance import Acceptance, Decision, accept
from .admission import check_claim, check_open, goes_on, max_length
from .bounds import keep_within, obey
from .checkpoint import Checkpoint
from .engines import Allocation, Engine, EngineSpec, Feed, Paged, Want
from .grammar_trials import GrammarTrials
from .live import LiveSession, Resident
from .mailbox import Mailbox
from .observing import Begin, Census, HubObserver, Part, Place, Stepped, Who
from .orphans import LinkPolicy, Orphan, by_age, to_drop
from .pace import OwnPace, Pace
from .page_pool import PagePool
from .posture import Document
from .posture_keeper import PostureKeeper
from .quotas import Load, Quotas, over_own, over_total, too_old
from .ragged_batch import SCRATCH_SLOTS
from .scene import SceneChange, Scope
from .scheduler import GoodputScheduler, Plan, Scheduler
from .session import Block, Session

__all__ = ["LiveSession", "Verifier"]

MAX_DEPTH = 16

_LEAST_WAIT_S = 1e-3

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
        self._max_depth = max_depth
        self._clock = clock
        self._tell = Told(observers)
        self._unsaid: Stepped | None = None
        """The last step, which observers are told of while the next one runs."""
        self._held_since_s: float | None = None
        """Since when the next step is held back for drafts."""
        self._link = link or LinkPolicy()
        self._checkpoint = checkpoint or Checkpoint()
        self._posture = posture
        self._residents: dict[str, Resident] = {}
        """By session id, the longest there first."""
        self._opening: dict[str, Load] = {}
        """What identities are about to hold: their sessions are being opened."""
        self._trials = GrammarTrials(engine.spec.bundle, engine.spec.eos_ids, quotas)
        self._draining = False
        self._stopping = False
        self._awake = asyncio.Event()
        if posture:
            posture.on_change = self._awake.set
            posture.on_document = self._note_document
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
        self._release_closed()
        await self._trials.close()

    # -- what streams call

    @property
    def spec(self) -> EngineSpec:
        return self._engine.spec

    @property
    def num_sessions(self) -> int:
        """Sessions that hold memory."""
        return len(self._residents)

    @property
    def num_orphans(self) -> int:
        """Those of them whose node is gone."""
        return len(self._orphans())

    @property
    def draining(self) -> bool:
        """Nobody is admitted any more."""
        return self._draining

    @property
    def pool(self) -> PagePool | None:
        """The engine's pages, if it has some."""
        return self._engine.pool if isinstance(self._engine, Paged) else None

    def census(self) -> Census:
        """Count the sessions by how they stand; from any thread."""
        residents = list(self._residents.values())
        running = [r for r in residents if r.may_step]
        return Census(
            states=dict.fromkeys(Place, 0) | Counter(r.place for r in residents),
            num_running=len(running),
            num_prefilling=sum(r.state.num_pending > 1 for r in running),
            num_unread=sum(r.stream.num_unread for r in residents if r.stream),
        )

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
        self._require_open()
        if request.resume:
            async with self._engine_free:  # between two steps, so that nothing under way is of the stream before
                if live := self._continue(request, request.resume, identity):
                    return live
        with self._reserved(identity, max_length(request, self.spec, self._quotas)):
            sampling = await self._sampling(request, identity)
            if not self._orphans():
                return self._admit(request, sampling, identity, trace)
            async with self._engine_free:  # between two steps memory may be freed
                return self._admit(request, sampling, identity, trace)

    def _note_document(self, document: Document) -> None:
        self._checkpoint.note("posture_changed", version=document.version, digest=document.digest.hex())

    def has(self, session_id: str) -> bool:
        """Whether a session of this id holds memory."""
        return session_id in self._residents

    def close(self, session_id: str, reason: str) -> None:
        """End a session without a word to its node, whether that is there or not."""
        if resident := self._residents.get(session_id):
            resident.close(reason)

    def follow_change(self, found: SceneChange) -> None:
        """Forget what a session's drafts were worth before its acceptance changed."""
        if found.scope is Scope.SESSION and (resident := self._residents.get(found.who.session_id)):
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
        self._draining = True
        self._checkpoint.note("drain", num_sessions=self.num_sessions)
        deadline = self._clock() + grace_s
        for resident in self._residents.values():
            if resident.stream and not resident.closed:
                resident.stream.send(Drain(grace_s))
        self._awake.set()
        while any(r.stream and r.has_work for r in self._residents.values()) and self._clock() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.02)

    def dismiss(self) -> None:
        """End the sessions that still run: their nodes are told that the hub is stopping."""
        for resident in self._residents.values():
            resident.fail(HubUnavailable("the hub is stopping", hint="try again when it is back"))

    # -- the loop

    async def _run(self, scheduler: Scheduler) -> None:
        while not self._stopping:
            self._awake.clear()
            try:
                async with self._engine_free:
                    self._tend()
                    if self._posture:
                        keep_within(self._residents.values(), self._posture)
                    plan = scheduler.plan([r.state for r in self._residents.values() if r.may_step], self._clock())
                    if plan.blocks:
                        await self._step(plan, scheduler)
                    self._note_wait(plan)
                if not plan.blocks:
                    self._say_step()
                    await self._sleep(plan.wait_s)
            except Exception:  # a fault of ours must not leave anybody waiting, nor keep others from being served
                _log.exception("the verification loop failed; its %d sessions are ended", len(self._residents))
                for resident in self._residents.values():
                    resident.fail(EngineFailure("the hub failed", hint="try again"))
                await asyncio.sleep(_LEAST_WAIT_S)  # should it fail again and again, the rest of the hub goes on

    async def _step(self, plan: Plan, scheduler: Scheduler) -> None:
        work = [(self._residents[state.session_id], block) for state, block in plan.blocks]
        start_s = draft_end_s = self._clock()
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
            _log.error("the verification loop has ended; its %d sessions are ended", len(self._residents))
            self._draining = True
            for resident in self._residents.values():
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
        due_s = [r.stream.deadline_s for r in self._residents.values() if r.stream and not r.closed]
        due_s += [resident.born_s + self._quotas.max_session_age_s for resident in self._residents.values()]
        due_s += [orphan.since_s + self._link.orphan_grace_s for orphan in self._orphans().values()]
        if (first_s := min(due_s, default=math.inf)) < math.inf:
            due_wait_s = max(first_s - self._clock(), _LEAST_WAIT_S)
            wait_s = due_wait_s if wait_s is None else min(wait_s, due_wait_s)
        with contextlib.suppress(asyncio.TimeoutError):
            await within(self._awake.wait(), wait_s)

    # -- admission and release

    @contextlib.contextmanager
    def _reserved(self, identity: str, num_tokens: int) -> Iterator[None]:
        """Count a session that is being opened, so that many at once do not all pass. CapacityExhausted if it is one
        too many even when orphans give their places."""
        asked = Load(1, num_tokens)
        self._opening[identity] = self._opening.get(identity, Load()) + asked
        try:
            if error := self._over(identity, self._orphans()):
                raise error[0]
            yield
        finally:
            self._opening[identity] -= asked
            if not self._opening[identity].num_sessions:
                del self._opening[identity]

    def _over(self, identity: str, without: Container[str] = ()) -> tuple[CapacityExhausted, bool] | None:
        """Return the error that says which limit what is held and asked for is over, and whether it is one of this
        identity's own; sessions in `without` are left out."""
        held = [r for name, r in self._residents.items() if not r.closed and name not in without]
        loads = [(r.identity, Load(1, r.state.max_length)) for r in held] + list(self._opening.items())
        own = sum((load for name, load in loads if name == identity), Load())
        if error := over_own(own, identity, self._quotas):
            return error, True
        if error := over_total(sum((load for _, load in loads), Load()), self._quotas):
            return error, False
        return None

    async def _sampling(self, request: Open, identity: str) -> SamplingContext:
        spec, params = self.spec, request.params.with_seed(secrets.randbits(64))
        guide = None
        if params.grammar:  # a stranger's; what it takes is tried apart first. In a thread: nobody else shall wait
            start_s = self._clock()
            await self._trials.require_good(params.grammar, identity)
            step_s = self._quotas.grammar_step_ms / 1e3
            guide = await asyncio.to_thread(Guide.compile, params.grammar, spec.bundle, spec.eos_ids, step_s)
            elapsed_s = self._clock() - start_s
            self._tell(lambda observer: observer.compiled(elapsed_s))
        return SamplingContext(params, len(request.prompt_ids), spec.vocabulary, spec.eos_ids, guide)

    def _require_open(self) -> None:
        if self._draining:
            raise HubUnavailable("the hub is draining", hint="use another hub, or try again when it is back")
        self._checkpoint.require_open()

    def _admit(self, request: Open, sampling: SamplingContext, identity: str, trace: TraceContext) -> LiveSession:
        """Begin with all that stands at the node: the prompt, and the output so far."""
        self._require_open()
        spec, params = self.spec, request.params
        state = Session(
            session_id=secrets.token_urlsafe(16),
            epoch=1,
            sampling=sampling,
            max_length=max_length(request, spec, self._quotas),
            mailbox=Mailbox(spec.vocabulary.size, self._limits.max_draft_ahead),
            pace=Pace(self._max_depth),
            has_drafter=request.drafter is not None,
            own=OwnPace(self._max_depth) if self._drafts_itself(params) else None,
            committed=list(request.committed),
        )
        state.stamp(self._clock())
        allocation = self._find_room(request, sampling, identity)
        state.num_cached = allocation.num_cached
        if request.resume:
            state.mailbox.restart(len(state.committed), request.resume.provisional_ids)
        visit = self._checkpoint.enter(state, identity, spec.fingerprint, self._clock)
        who = Who(state.session_id, identity, request.drafter.family if request.drafter else "", trace)
        resident = Resident(
            visit, allocation, who, self._link, self._clock, self._awake.set, self._tell, self._quotas.max_idle_s
        )
        self._residents[state.session_id] = resident
        begin = Begin.REBUILT if request.resume else Begin.NEW
        return self._greet(resident, request, len(state.committed), begin, allocation.num_cached)

    def _find_room(self, request: Open, sampling: SamplingContext, identity: str) -> Allocation:
        """Reserve a place and memory; orphans give theirs, the oldest first. CapacityExhausted if it is not enough."""
        length = max_length(request, self.spec, self._quotas)
        while True:
            over = self._over(identity)
            try:
                if over:
                    raise over[0]
                return self._engine.allocate(request.committed, length, identity, sampling)
            except CapacityExhausted:
                orphans = self._orphans()
                if over and over[1]:  # its own limit: then its own orphans
                    orphans = {name: o for name, o in orphans.items() if self._residents[name].identity == identity}
                if not orphans:
                    raise
                self._drop(by_age(orphans)[:1])

    def _continue(self, request: Open, resume: Resume, identity: str) -> LiveSession | None:
        """Hand the session over to this stream. None if it is not here, or has to be made anew."""
        self._require_open()
        resident = self._residents.get(resume.session_id)
        if resident is None or resident.closed:
            return None
        check_claim(resume, resident, identity)
        if not goes_on(request, resident):
            resident.fail(Superseded("the session begins anew in a later stream", hint="use that one"))
            self._release_closed()
            return None
        num_known = len(request.committed)
        resident.state.come_back(num_known, resume.provisional_ids, request.drafter is not None, self._clock())
        resident.visit.resume()
        return self._greet(resident, request, num_known, Begin.RESUMED, resident.state.num_cached)

    def _greet(self, resident: Resident, request: Open, num_known: int, begin: Begin, num_cached: int) -> LiveSession:
        """Attach a stream, and queue what its node has to know: who it is, what it may do, and what was decided without
        it."""
        state, live = resident.state, resident.attach()
        resident.tier, resident.drafter = request.tier, request.drafter
        if self._posture:
            obey(resident, self._posture, sum(other.has_work for other in self._residents.values()))
        state.pace.asked = state.pace.window if state.has_drafter else 0
        live.send(
            Opened(
                state.session_id,
                state.epoch,
                num_known,
                state.pace.asked,
                resident.key,
                continued=begin is Begin.RESUMED,
                receipt_key=self._checkpoint.receipt_key,
                posture=resident.posture,
            )
        )
        if verdict := state.since(num_known):
            live.send(verdict)
        if state.finish:
            live.finish(state.finish)
        self._tell(lambda observer: observer.opened(resident.who, begin, num_known, num_cached))
        self._awake.set()
        return live

    def _drafts_itself(self, params: SamplingParams) -> bool:
        # Rejection sampling checks one chain against the distributions that it was drawn from: the node's.
        return self.spec.drafter is not None and self._max_depth > 0 and not params.by_rejection

    def _orphans(self) -> dict[str, Orphan]:
        return {name: r.orphan for name, r in self._residents.items() if r.orphan and not r.closed}

    def _tend(self) -> None:
        """Between two steps: see who is gone and for how long, and give back the memory of those that have ended."""
        now_s = self._clock()
        for resident in self._residents.values():
            if resident.stream and not resident.closed and resident.stream.deadline_s <= now_s:
                resident.stream.give_up()
            if resident.born_s + self._quotas.max_session_age_s <= now_s:
                resident.fail(too_old(self._quotas))
        orphans = self._orphans()
        self._drop(orphans if self._draining else to_drop(orphans, self._link, now_s))

    def _drop(self, names: Iterable[str]) -> None:
        for name in names:
            self._residents[name].close()
        self._release_closed()

    def _release_closed(self) -> None:
        for name in [name for name, resident in self._residents.items() if resident.closed]:
            self._release(self._residents.pop(name))

    def _release(self, resident: Resident) -> None:
        self._engine.free(resident.sequence)
        self._say_step()  # it may have been in it
        end = resident.ended()
        self._tell(lambda observer: observer.ended(end))


def _sound(decision: Decision | BaruError) -> Decision:
    if isinstance(decision, BaruError):
        raise decision
    return decision

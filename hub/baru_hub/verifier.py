"""The loop: schedule, forward, accept, commit; and the sessions that it serves."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType

from baru_common import __version__
from baru_common.channel_options import MAX_MESSAGE_BYTES
from baru_common.errors import (
    BaruError,
    CapacityExhausted,
    EmptyPrompt,
    EngineFailure,
    HubUnavailable,
    InvalidRequest,
    PromptTooLong,
    ProtocolMismatch,
    TargetMismatch,
    TokenizerMismatch,
    VocabularyMismatch,
)
from baru_common.frames import (
    PROTOCOL_REVISION,
    Draft,
    Finished,
    FinishReason,
    HubDescription,
    HubFrame,
    Limits,
    Open,
    Opened,
)
from baru_common.sampling import SamplingContext, SamplingParams
from baru_common.sampling.guide import Guide

from .acceptance import Acceptance, Decision, accept
from .engines import Engine, EngineSpec, Feed, Want
from .mailbox import Mailbox
from .pace import OwnPace, Pace
from .ragged_batch import SCRATCH_SLOTS
from .scheduler import GoodputScheduler, Plan, Scheduler
from .session import Block, Session

MAX_SESSIONS, MAX_DEPTH, MAX_DRAFT_AHEAD = 16, 16, 64
ANYBODY = "loopback"
"""Identity of all sessions while connections carry none."""

_log = logging.getLogger(__name__)


class LiveSession:
    """One session as its stream sees it: drafts go in, frames come out."""

    def __init__(self, state: Session, sequence: int, clock: Callable[[], float], wake: Callable[[], None]) -> None:
        self.state = state
        self.sequence = sequence
        self.closed = False
        self._drafted_s = 0.0
        self._clock = clock
        self._wake = wake
        self._outbox: asyncio.Queue[HubFrame | BaruError] = asyncio.Queue()

    @property
    def runs(self) -> bool:
        """The loop still has work to do for it."""
        return not self.closed and self.state.finish is None

    def draft(self, draft: Draft) -> None:
        """Take in drafted ids; InvalidDraft when they are wrong."""
        state, now_s = self.state, self._clock()
        if draft.epoch != state.epoch:
            state.mailbox.num_stale_frames += 1
            return
        fresh = draft.chain_id > state.mailbox.chain_id
        state.mailbox.put(draft, len(state.committed))
        if not fresh:
            state.pace.answers.observe_pace(len(draft.token_ids), now_s - self._drafted_s)
        elif (answer_s := state.answer_time_s(draft.base, now_s)) is not None:
            state.pace.answers.observe(answer_s, len(draft.token_ids))
        self._drafted_s = now_s
        self._wake()

    def send(self, frame: HubFrame) -> None:
        """Queue a frame for the node."""
        self._outbox.put_nowait(frame)

    def finish(self, reason: FinishReason) -> None:
        """End well: the closing frame is the last one. Nothing to do when it has ended before."""
        if not self.closed:
            self.send(self.state.finished(reason))
            self.close()

    def fail(self, error: BaruError) -> None:
        """End with an error: `frames` raises it after the frames queued so far."""
        if not self.closed:
            self._outbox.put_nowait(error)
            self.close()

    def close(self) -> None:
        """Stop working for this session; its memory is given back before the next step."""
        self.closed = True
        self._wake()

    async def frames(self) -> AsyncIterator[HubFrame]:
        """Yield frames for the node, `Finished` last; raise what `fail` was given."""
        while True:
            item = await self._outbox.get()
            if isinstance(item, BaruError):
                raise item
            yield item
            if isinstance(item, Finished):
                return


class Verifier:
    """Serves sessions on one engine. An async context manager: the loop runs inside it."""

    def __init__(
        self,
        engine: Engine,
        scheduler: Scheduler | None = None,
        limits: Limits | None = None,
        *,
        max_depth: int = MAX_DEPTH,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`scheduler`: by goodput, calibrated at the start, unless given. `max_depth`: most draft ids checked
        per session and step; 0 turns drafting off."""
        self._engine = engine
        self._scheduler = scheduler
        self._limits = limits or Limits(
            max_sessions=MAX_SESSIONS,
            max_prompt_tokens=engine.spec.context_limit - 1,
            max_draft_ahead=MAX_DRAFT_AHEAD,
            max_message_bytes=MAX_MESSAGE_BYTES,
        )
        self._max_depth = max_depth
        self._clock = clock
        self._live: list[LiveSession] = []
        self._draining = False
        self._stopping = False
        self._awake = asyncio.Event()
        self._engine_free = asyncio.Lock()
        self._loop_task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Verifier:
        scheduler = self._scheduler or GoodputScheduler(await self._engine.calibrate())
        self._loop_task = asyncio.create_task(self._run(scheduler), name="baru-verifier")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.dismiss()
        self._stopping = True
        self._awake.set()
        if self._loop_task:
            await self._loop_task  # a step under way ends by itself
        self._release_closed()

    # -- what streams call

    @property
    def spec(self) -> EngineSpec:
        return self._engine.spec

    @property
    def num_sessions(self) -> int:
        """Sessions that hold memory."""
        return len(self._live)

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
        )

    async def open(self, request: Open, identity: str = ANYBODY) -> LiveSession:
        """Admit a session of `identity` and queue its `Opened`; a BaruError says why not."""
        check_open(request, self.spec, self._limits)
        sampling = await self._sampling(request)
        if self._draining:
            raise HubUnavailable("the hub is draining", hint="use another hub, or try again when it is back")
        if sum(not live.closed for live in self._live) >= self._limits.max_sessions:
            raise CapacityExhausted(f"all {self._limits.max_sessions} sessions are taken", hint="try again later")
        live = self._admit(request, sampling, identity)
        self._live.append(live)
        state = live.state
        state.pace.asked = state.pace.window if state.has_drafter else 0
        live.send(Opened(state.session_id, state.epoch, len(state.committed), state.pace.asked))
        self._awake.set()
        return live

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
        """Admit nobody any more and wait until the running sessions ended, at most `grace_s`."""
        self._draining = True
        deadline = self._clock() + grace_s
        while any(live.runs for live in self._live) and self._clock() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.02)

    def dismiss(self) -> None:
        """End the sessions that still run: their nodes are told that the hub is stopping."""
        for live in self._live:
            live.fail(HubUnavailable("the hub is stopping", hint="try again when it is back"))

    # -- the loop

    async def _run(self, scheduler: Scheduler) -> None:
        while not self._stopping:
            self._awake.clear()
            self._release_closed()
            try:
                plan = scheduler.plan([live.state for live in self._live], self._clock())
                if plan.blocks:
                    await self._step(plan, scheduler)
                else:
                    await self._sleep(plan.wait_s)
            except Exception:  # a fault of ours must not leave anybody waiting, nor keep others from being served
                _log.exception("the verification loop failed; its %d sessions are ended", len(self._live))
                for live in self._live:
                    live.fail(EngineFailure("the hub failed", hint="try again"))

    async def _step(self, plan: Plan, scheduler: Scheduler) -> None:
        lives = {live.state.session_id: live for live in self._live}
        work = [(lives[state.session_id], block) for state, block in plan.blocks]
        start_s = draft_end_s = self._clock()
        try:
            async with self._engine_free:
                work = await self._extend(work)
                draft_end_s = self._clock()
                feeds = [Feed(live.sequence, live.state.num_cached, block) for live, block in work]
                decisions = await self._engine.verify(feeds)
            if len(decisions) != len(feeds):
                raise EngineFailure(f"the engine returned {len(decisions)} results for {len(feeds)} sequences")
        except Exception as error:  # the engine may fail in its own ways; only its own batch pays
            _log.exception("a verification step of %d sessions failed", len(work))
            failure = error if isinstance(error, BaruError) else EngineFailure(f"the target failed: {error}")
            for live, _ in work:
                live.fail(failure)
            return
        taken = Plan(tuple((live.state, block) for live, block in work))
        scheduler.learn(taken, self._clock() - draft_end_s, draft_end_s - start_s)
        for (live, block), decision in zip(work, decisions, strict=True):
            try:
                self._commit(live, block, _sound(decision))
            except BaruError as error:
                live.fail(error)

    async def _extend(self, work: list[tuple[LiveSession, Block]]) -> list[tuple[LiveSession, Block]]:
        """Let the engine's own drafter add to the blocks for which the plan says so."""
        wanting = [(live, block) for live, block in work if block.own_depth]
        if not wanting:
            return work
        wants = [
            Want(live.sequence, live.state.committed, block.draft, block.own_depth, block.own_width)
            for live, block in wanting
        ]
        try:
            guesses = await self._engine.draft(wants)
        except Exception:  # drafts are hints: these sessions go on without
            _log.exception("drafting for %d sessions failed; they are served without the hub's drafter", len(wants))
            for live, _ in wanting:
                live.state.own = None
            return work
        extended, room = {}, SCRATCH_SLOTS
        for (live, block), made in zip(wanting, guesses, strict=True):
            num_beside = sum(map(len, made.leaves))
            leaves = made.leaves if num_beside <= room else ()  # a full pass does without these
            room -= num_beside if leaves else 0
            extended[live] = block.extended(made.path, leaves)
        return [(live, extended.get(live, block)) for live, block in work]

    def _commit(self, live: LiveSession, block: Block, decision: Decision) -> None:
        if live.closed:  # cancelled while its block was under way
            return
        verdict = live.state.take(block, decision)
        live.state.stamp(self._clock())
        if verdict:
            live.send(verdict)
        if live.state.finish:
            live.finish(live.state.finish)

    async def _sleep(self, wait_s: float | None) -> None:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._awake.wait(), wait_s)

    # -- admission and release

    async def _sampling(self, request: Open) -> SamplingContext:
        spec, params = self.spec, request.params.with_seed(secrets.randbits(64))
        guide = None
        if params.grammar:  # in a thread, for it may take long, and nobody else shall wait
            guide = await asyncio.to_thread(Guide.compile, params.grammar, spec.bundle, spec.eos_ids)
        return SamplingContext(params, len(request.prompt_ids), spec.vocabulary, spec.eos_ids, guide)

    def _admit(self, request: Open, sampling: SamplingContext, identity: str) -> LiveSession:
        spec, params = self.spec, request.params
        room = spec.context_limit - len(request.prompt_ids)
        max_length = len(request.prompt_ids) + min(params.max_tokens or room, room)
        allocation = self._engine.allocate(request.prompt_ids, max_length, identity, sampling)
        state = Session(
            session_id=secrets.token_urlsafe(16),
            epoch=1,
            sampling=sampling,
            max_length=max_length,
            mailbox=Mailbox(spec.vocabulary.size, self._limits.max_draft_ahead),
            pace=Pace(self._max_depth),
            has_drafter=request.drafter is not None,
            own=OwnPace(self._max_depth) if self._drafts_itself(params) else None,
            committed=list(request.prompt_ids),
            num_cached=allocation.num_cached,
        )
        state.stamp(self._clock())
        return LiveSession(state, allocation.sequence, self._clock, self._awake.set)

    def _drafts_itself(self, params: SamplingParams) -> bool:
        # Rejection sampling checks one chain against the distributions that it was drawn from: the node's.
        return self.spec.drafter is not None and self._max_depth > 0 and not params.by_rejection

    def _release_closed(self) -> None:
        for live in [live for live in self._live if live.closed]:
            self._engine.free(live.sequence)
            self._live.remove(live)


def _sound(decision: Decision | BaruError) -> Decision:
    if isinstance(decision, BaruError):
        raise decision
    return decision


def check_open(request: Open, spec: EngineSpec, limits: Limits) -> None:
    """Raise the BaruError that says why `request` cannot be served here, if it cannot."""
    if request.protocol_revision != PROTOCOL_REVISION:
        raise ProtocolMismatch(
            f"the node speaks protocol revision {request.protocol_revision}, this hub {PROTOCOL_REVISION}",
            hint="use the same release on hub and node",
        )
    if request.target_fingerprint != spec.fingerprint:
        raise TargetMismatch("the hub serves another target than the node expects", hint="connect again")
    if request.tokenizer_digest != spec.bundle.digest:
        raise TokenizerMismatch("the node uses another tokenizer than the target's", hint="connect again to fetch it")
    if request.drafter and request.drafter.vocabulary_digest not in (b"", spec.vocabulary.digest):
        raise VocabularyMismatch(
            f"the node's {request.drafter.family} drafter has another vocabulary than the target",
            hint="use a drafter that was made for this target's tokenizer",
        )
    if not request.prompt_ids:
        raise EmptyPrompt("the prompt is empty", hint="send at least one token", details={"param": "prompt_ids"})
    most = min(limits.max_prompt_tokens, spec.context_limit - 1)
    if len(request.prompt_ids) > most:
        raise PromptTooLong(
            f"the prompt has {len(request.prompt_ids)} tokens, at most {most} are allowed",
            hint="shorten the prompt",
            details={"param": "prompt_ids"},
        )
    if not spec.samples and (param := _needs_logits(request.params)):
        raise InvalidRequest(
            f"{param} cannot be served: the {spec.engine} engine decides by script and has no logits",
            hint="leave it out, or use a hub with a real target",
            details={"param": param},
        )
    if max(request.prompt_ids) >= spec.vocabulary.size:
        raise InvalidRequest(
            f"prompt_ids holds {max(request.prompt_ids)}, which is outside the vocabulary of {spec.vocabulary.size}",
            details={"param": "prompt_ids"},
        )
    request.params.require_ids_below(spec.vocabulary.size)


def _needs_logits(params: SamplingParams) -> str | None:
    """Return the name of a parameter that asks for more than the likeliest id of a script."""
    if not params.is_greedy:
        return "temperature"
    return next(iter(params.adjustments), None if params.logprobs is None else "logprobs")

"""Who is here: sessions are admitted, found again, watched and let go; each holds a place and memory while it is."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator

from baru_common.errors import CapacityExhausted, HubUnavailable, Superseded
from baru_common.frames import Limits, Open, Opened, Resume
from baru_common.observers import Told
from baru_common.sampling import SamplingContext, SamplingParams
from baru_common.sampling.guide import Guide
from baru_common.trace_context import TraceContext

from .admission import check_claim, goes_on, max_length
from .bounds import obey
from .checkpoint import Checkpoint
from .engines import Allocation, Engine
from .grammar_trials import GrammarTrials
from .live import LiveSession, Resident
from .mailbox import Mailbox
from .observing import Begin, Census, HubObserver, Place, Who
from .orphans import LinkPolicy, Orphan, by_age, to_drop
from .pace import OwnPace, Pace
from .posture_keeper import PostureKeeper
from .quotas import Load, Quotas, over_own, over_total, too_old
from .session import Session


class Roster:
    """The sessions of one engine."""

    def __init__(
        self,
        engine: Engine,
        limits: Limits,
        quotas: Quotas,
        *,
        max_depth: int,
        link: LinkPolicy,
        checkpoint: Checkpoint,
        posture: PostureKeeper | None,
        tell: Told[HubObserver],
        clock: Callable[[], float],
        awaken: Callable[[], None],
        before_release: Callable[[], None],
    ) -> None:
        """`awaken` is called when there may be something to do; `before_release` before a session gives its memory
        back. Else as `Verifier`."""
        self._engine = engine
        self._limits = limits
        self._quotas = quotas
        self._max_depth = max_depth
        self.link = link
        self._checkpoint = checkpoint
        self._posture = posture
        self._tell = tell
        self._clock = clock
        self._awaken = awaken
        self._before_release = before_release
        self.residents: dict[str, Resident] = {}
        """By session id, the longest there first."""
        self.opening: dict[str, Load] = {}
        """What identities are about to hold: their sessions are being opened."""
        self._trials = GrammarTrials(engine.spec.bundle, engine.spec.eos_ids, quotas)
        self.draining = False
        """Nobody is admitted any more."""

    async def close(self) -> None:
        """Let go of all that have ended; nobody comes any more."""
        self.release_closed()
        await self._trials.close()

    def census(self) -> Census:
        """Count the sessions by how they stand; from any thread."""
        residents = list(self.residents.values())
        running = [r for r in residents if r.may_step]
        return Census(
            states=dict.fromkeys(Place, 0) | Counter(r.place for r in residents),
            num_running=len(running),
            num_prefilling=sum(r.state.num_pending > 1 for r in running),
            num_unread=sum(r.stream.num_unread for r in residents if r.stream),
        )

    # -- who comes

    @contextlib.contextmanager
    def reserved(self, identity: str, num_tokens: int) -> Iterator[None]:
        """Count a session that is being opened, so that many at once do not all pass. CapacityExhausted if it is one
        too many even when orphans give their places."""
        asked = Load(1, num_tokens)
        self.opening[identity] = self.opening.get(identity, Load()) + asked
        try:
            if error := self._over(identity, self.orphans()):
                raise error[0]
            yield
        finally:
            self.opening[identity] -= asked
            if not self.opening[identity].num_sessions:
                del self.opening[identity]

    def _over(self, identity: str, without: Container[str] = ()) -> tuple[CapacityExhausted, bool] | None:
        """Return the error that says which limit what is held and asked for is over, and whether it is one of this
        identity's own; sessions in `without` are left out."""
        held = [r for name, r in self.residents.items() if not r.closed and name not in without]
        loads = [(r.identity, Load(1, r.state.max_length)) for r in held] + list(self.opening.items())
        own = sum((load for name, load in loads if name == identity), Load())
        if error := over_own(own, identity, self._quotas):
            return error, True
        if error := over_total(sum((load for _, load in loads), Load()), self._quotas):
            return error, False
        return None

    async def sampling(self, request: Open, identity: str) -> SamplingContext:
        spec, params = self._engine.spec, request.params.with_seed(secrets.randbits(64))
        guide = None
        if params.grammar:  # a stranger's; what it takes is tried apart first. In a thread: nobody else shall wait
            start_s = self._clock()
            await self._trials.require_good(params.grammar, identity)
            step_s = self._quotas.grammar_step_ms / 1e3
            guide = await asyncio.to_thread(Guide.compile, params.grammar, spec.bundle, spec.eos_ids, step_s)
            elapsed_s = self._clock() - start_s
            self._tell(lambda observer: observer.compiled(elapsed_s))
        return SamplingContext(params, len(request.prompt_ids), spec.vocabulary, spec.eos_ids, guide)

    def require_open(self) -> None:
        if self.draining:
            raise HubUnavailable("the hub is draining", hint="use another hub, or try again when it is back")
        self._checkpoint.require_open()

    def admit(self, request: Open, sampling: SamplingContext, identity: str, trace: TraceContext) -> LiveSession:
        """Begin with all that stands at the node: the prompt, and the output so far."""
        self.require_open()
        spec, params = self._engine.spec, request.params
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
            visit, allocation, who, self.link, self._clock, self._awaken, self._tell, self._quotas.max_idle_s
        )
        self.residents[state.session_id] = resident
        begin = Begin.REBUILT if request.resume else Begin.NEW
        return self._greet(resident, request, len(state.committed), begin, allocation.num_cached)

    def _find_room(self, request: Open, sampling: SamplingContext, identity: str) -> Allocation:
        """Reserve a place and memory; orphans give theirs, the oldest first. CapacityExhausted if it is not enough."""
        length = max_length(request, self._engine.spec, self._quotas)
        while True:
            over = self._over(identity)
            try:
                if over:
                    raise over[0]
                return self._engine.allocate(request.committed, length, identity, sampling)
            except CapacityExhausted:
                orphans = self.orphans()
                if over and over[1]:  # its own limit: then its own orphans
                    orphans = {name: o for name, o in orphans.items() if self.residents[name].identity == identity}
                if not orphans:
                    raise
                self._drop(by_age(orphans)[:1])

    def go_on(self, request: Open, resume: Resume, identity: str) -> LiveSession | None:
        """Hand the session over to this stream. None if it is not here, or has to be made anew."""
        self.require_open()
        resident = self.residents.get(resume.session_id)
        if resident is None or resident.closed:
            return None
        check_claim(resume, resident, identity)
        if not goes_on(request, resident):
            resident.fail(Superseded("the session begins anew in a later stream", hint="use that one"))
            self.release_closed()
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
            obey(resident, self._posture, sum(other.has_work for other in self.residents.values()))
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
        self._awaken()
        return live

    def _drafts_itself(self, params: SamplingParams) -> bool:
        # Rejection sampling checks one chain against the distributions that it was drawn from: the node's.
        return self._engine.spec.drafter is not None and self._max_depth > 0 and not params.by_rejection

    def orphans(self) -> dict[str, Orphan]:
        return {name: r.orphan for name, r in self.residents.items() if r.orphan and not r.closed}

    def tend(self) -> None:
        """Between two steps: see who is gone and for how long, and give back the memory of those that have ended."""
        now_s = self._clock()
        for resident in self.residents.values():
            if resident.stream and not resident.closed and resident.stream.deadline_s <= now_s:
                resident.stream.give_up()
            if resident.born_s + self._quotas.max_session_age_s <= now_s:
                resident.fail(too_old(self._quotas))
        orphans = self.orphans()
        self._drop(orphans if self.draining else to_drop(orphans, self.link, now_s))

    def _drop(self, names: Iterable[str]) -> None:
        for name in names:
            self.residents[name].close()
        self.release_closed()

    def release_closed(self) -> None:
        for name in [name for name, resident in self.residents.items() if resident.closed]:
            self._release(self.residents.pop(name))

    def _release(self, resident: Resident) -> None:
        self._engine.free(resident.sequence)
        self._before_release()
        end = resident.ended()
        self._tell(lambda observer: observer.ended(end))

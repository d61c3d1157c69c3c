"""One generation at the node: draft ahead, send, take verdicts, tell the caller; and go on when the link breaks.

    reach a hub -> follow its stream -> finished
         ^              | link lost
         +--- meanwhile +  the node's own model decodes, if it is to

Two tasks share the chain while a stream is followed. The reader (the caller's own `async for`) applies verdicts; the
drafting task keeps the chain as far ahead of the committed ids as the hub can use.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import Executor
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import count

from baru_common.drafters import Drafter, Proposal, started
from baru_common.errors import BaruError, HubTimeout, HubUnavailable, InvalidDraft, ProtocolViolation, Unauthenticated
from baru_common.frames import (
    Draft,
    Drain,
    Finished,
    FinishReason,
    Heartbeat,
    HubFrame,
    Open,
    Opened,
    Posture,
    PostureChange,
    Resume,
    Usage,
    Verdict,
)
from baru_common.observers import Told
from baru_common.sampling import SamplingContext
from baru_common.signatures import ANYBODY, Trust
from baru_common.trace_context import TraceContext

from .chain import DraftChain
from .events import Event, Finish, Kind, LinkChanged, PostureChanged, Started, StepStats
from .fallback import LocalDecoder
from .link import LinkEvent, LinkState, Timers
from .observing import NodeObserver, Request
from .proof import Proof, Seen, prove
from .reach import LINK_ERRORS, Attached, Reach
from .transcript import Transcript
from .transport import HubChannel, HubStream

_GRACE_S = 0.05


class Fallback(Enum):
    """What a generation does while no hub answers."""

    LOCAL = "local"
    """The node's own model decodes; what it says is provisional."""
    WAIT = "wait"
    """It stands still."""
    FAIL = "fail"
    """It ends with an error."""


class Reconcile(Enum):
    """What becomes of provisional ids when a hub is back."""

    REWRITE = "rewrite"
    """They are checked: those that the target would have said stand, the rest is withdrawn."""
    KEEP = "keep"
    """They stand, marked, and the hub goes on from them: for those who cannot take anything back."""


@dataclass
class Generation:
    """State of one generation."""

    reach: Reach
    start: Open
    """What the first stream begins with."""
    sampling: SamplingContext
    max_length: int
    """Most ids of the session, prompt and output."""
    drafter: Drafter | None
    local: LocalDecoder | None
    """Decodes while no hub answers; None: nobody does."""
    executor: Executor
    """Runs models that block."""
    target: str
    fallback: Fallback = Fallback.WAIT
    obeys_fallback: bool = False
    """The hub's posture may choose another fallback."""
    reconcile: Reconcile = Reconcile.REWRITE
    timers: Timers = field(default_factory=Timers)
    trust: Trust = field(default_factory=Trust)
    """Whose receipts count."""
    identity: str = ANYBODY
    """Who this node is."""
    clock: Callable[[], float] = time.monotonic
    observed: Request = field(default_factory=lambda: Request(TraceContext.new(), "", 0))
    """What observers know it as."""
    tell: Told[NodeObserver] = field(default_factory=Told)
    _chain: DraftChain = field(init=False)
    _transcript: Transcript = field(init=False)
    _attached: Attached | None = None
    """The stream to follow next."""
    _news: Event = field(init=False)
    """What to say of it first."""
    _last: HubChannel | None = None
    """The hub that had the session last."""
    _opened: Opened | None = None
    """Of the last stream."""
    _num_given: int = 0
    """Output ids that the hub's present session began with."""
    _window: int = 0
    _posture: Posture | None = None
    """What the hub lets this node do; None: it does not say."""
    _may_be_local: bool = True
    _turn: asyncio.Event = field(default_factory=asyncio.Event)
    _may_decode: asyncio.Event = field(default_factory=asyncio.Event)
    """Cleared while a hub is being told what stands."""
    _round_trips_s: list[float] = field(default_factory=list)
    _seen: Usage = field(init=False)
    """Counted from the verdicts of the hub's present session, and `_before` of sessions that were lost."""
    _before: Usage = field(init=False)
    _started_s: float = 0.0
    _heard_s: float = 0.0
    _first_token_s: float | None = None

    def __post_init__(self) -> None:
        self._transcript = Transcript(self.sampling)
        self._seen = self._before = _no_usage(len(self.start.prompt_ids))
        self._may_decode.set()

    async def events(self) -> AsyncGenerator[Event, None]:
        """Run the generation; raise the BaruError that ends it if it does not finish well.

        Leaving the iterator early ends the session at the hub.
        """
        self._started_s = self.clock()
        try:
            self._attached = await self.reach.first(self)
            self._news = self._begun(self._attached.opened.session_id)
        except LINK_ERRORS as error:
            if self.fallback is Fallback.FAIL:
                raise
            yield self._begun("")
            yield self._lost(error)
        while True:
            async with aclosing(self._with_hub() if self._attached else self._without_hub()) as phase:
                async for event in phase:
                    yield event
                    if isinstance(event, Finish):
                        return

    async def _with_hub(self) -> AsyncGenerator[Event, None]:
        """Follow the stream to the end of the output, or until the link is lost."""
        attached, self._attached = self._attached, None
        try:
            if attached:
                async with aclosing(self._follow(attached, self._news)) as following:
                    async for event in following:
                        yield event
        except (*LINK_ERRORS, Unauthenticated) as error:
            is_final = isinstance(error, Unauthenticated) and not (attached and attached.stream.is_outdated)
            if is_final or self.fallback is Fallback.FAIL:
                raise
            yield self._lost(error)

    async def _without_hub(self) -> AsyncGenerator[Event, None]:
        """Try to reach a hub, and decode meanwhile if that is wanted."""
        self._may_decode.set()  # the last hub was told, and answered
        reaching = asyncio.create_task(self.reach.again(self, self._last))
        try:
            async with aclosing(self._meanwhile(reaching)) as meanwhile:
                async for event in meanwhile:
                    yield event
            self._attached = await reaching
            self._news = LinkChanged(LinkState.UP, self._attached.stream.channel.address)
        except LINK_ERRORS:
            if not self._is_complete():
                raise
            yield self._finish_alone()
        finally:
            await asyncio.shield(_end(reaching, unless=self._attached))  # its caller may lose patience meanwhile

    def _lost(self, error: BaruError) -> LinkChanged:
        return LinkChanged(LinkState.DOWN, self.reach.hubs.current.address, str(error))

    def _begun(self, session_id: str) -> Started:
        return Started(session_id, self.target, len(self.start.prompt_ids))

    # -- while a stream is followed

    async def _follow(self, attached: Attached, news: Event) -> AsyncGenerator[Event, None]:
        """Yield `news`, and all that a stream brings; in the end the hub is told that it is over, if it can be."""
        tasks: list[asyncio.Task[None]] = []
        self._last = attached.stream.channel
        try:
            yield news
            for event in self._obey(attached.opened.posture, attached):
                yield event
            tasks += self._attach(attached)
            async for frame in attached.frames:
                self._heard_s = self.clock()
                for event in self._take(frame, attached):
                    yield event
                _raise_failure(tasks)
                if isinstance(frame, Drain) and self._can_move(attached):
                    raise HubUnavailable("the hub goes down; the session moves to another one")
            raise ProtocolViolation("the hub ended the stream without a word")
        finally:
            for task in tasks:
                task.cancel()
            try:
                await asyncio.gather(*tasks, return_exceptions=True)
            finally:  # its caller may lose patience meanwhile
                await attached.stream.leave()

    def _can_move(self, attached: Attached) -> bool:
        return self.fallback is not Fallback.FAIL and self.reach.hubs.has_other(attached.stream.channel)

    def _attach(self, attached: Attached) -> list[asyncio.Task[None]]:
        opened, request = attached.opened, attached.request
        if opened.num_committed != len(request.committed):
            raise ProtocolViolation(f"the hub committed {opened.num_committed} ids of {len(request.committed)}")
        provisional = request.resume.provisional_ids if request.resume else ()
        self._chain = DraftChain.start(request.committed, opened.epoch)
        if provisional:
            self._chain.extend(provisional)  # sent with the request
        if not opened.continued:
            self._num_given = len(request.committed) - len(request.prompt_ids)
        if self._opened and not opened.continued:
            self._before, self._seen = _sum(self._before, self._seen), _no_usage(0)
        self._opened, self._window, self._heard_s = opened, opened.max_draft_ahead, self.clock()
        tasks = [asyncio.create_task(self._beat(attached))]
        if self.drafter:
            tasks.append(asyncio.create_task(self._draft(attached, self.drafter)))
            self._turn.set()
        return tasks

    def _take(self, frame: HubFrame, attached: Attached) -> list[Event]:
        if isinstance(frame, Heartbeat):
            self._round_trips_s.append(self.clock() - frame.sent_ns / 1e9)
            attached.stream.channel.link.sample(self._round_trips_s[-1])
            return []
        if isinstance(frame, Drain):
            attached.stream.channel.link.happen(LinkEvent.DRAIN)
            return [LinkChanged(LinkState.DRAINING, attached.stream.channel.address)]
        if isinstance(frame, PostureChange):
            return self._obey(frame.posture, attached)
        if isinstance(frame, Finished):
            return self._finish(frame, attached.opened)
        if isinstance(frame, Verdict):
            return self._decide(frame)
        raise ProtocolViolation(f"the hub sent {type(frame).__name__} out of turn")

    def _obey(self, posture: Posture | None, attached: Attached) -> list[Event]:
        """Keep to what the hub lets this node do. The caller hears of it when it changes, and when it is nothing."""
        before, self._posture = self._posture, posture
        if posture is None:
            return []
        hubs = self.reach.hubs
        hubs.posture = posture
        hubs.note_document(attached.stream.channel.address, posture.document_version, posture.document_digest)
        if self.obeys_fallback and posture.fallback:
            wanted = Fallback(posture.fallback)
            self._may_be_local = wanted is Fallback.LOCAL
            self.fallback = Fallback.WAIT if self._may_be_local and not self.local else wanted
        self._turn.set()
        is_news = posture != before if before else not posture.drafting
        return [PostureChanged(posture)] if self.drafter and is_news else []

    def _decide(self, verdict: Verdict) -> list[Event]:
        if max(verdict.token_ids) >= self.sampling.vocabulary.size:
            raise ProtocolViolation(f"the hub emitted {max(verdict.token_ids)}, which is outside the vocabulary")
        if len(verdict.logprobs) != (0 if self.sampling.params.logprobs is None else len(verdict.token_ids)):
            raise ProtocolViolation(
                f"the hub sent {len(verdict.logprobs)} log-probabilities for {len(verdict.token_ids)} ids"
            )
        self._note_first_token()
        self._chain.apply(verdict)
        self._window = verdict.depth_hint
        self._turn.set()
        self._seen = _sum(self._seen, _counted(verdict))
        round_trip_s = self._round_trips_s[-1] if self._round_trips_s else None
        stats = StepStats(verdict.num_verified, verdict.num_accepted, round_trip_s)
        logprobs = verdict.logprobs or [None] * len(verdict.token_ids)
        return self._transcript.decided(verdict.token_ids, _kinds(verdict), logprobs, stats)

    def _note_first_token(self) -> None:
        if self._first_token_s is None:
            self._first_token_s = self.clock()

    async def _beat(self, attached: Attached) -> None:
        """Sample the round trip, at once and then now and again; a stream that is silent for too long is lost."""
        stream, link = attached.stream, attached.stream.channel.link
        for sequence in count(1):
            stream.send(Heartbeat(sequence, round(self.clock() * 1e9)))
            await asyncio.sleep(self.timers.heartbeat_s)
            link.tick()
            if self._silence_s(stream) >= self.timers.down_s:
                await asyncio.sleep(_GRACE_S)  # this program may itself have been asleep, and what came not yet read
            if (silence_s := self._silence_s(stream)) >= self.timers.down_s:
                link.happen(LinkEvent.SILENT)
                silence = f"nothing was heard from {stream.channel.address} for {silence_s:.1f} s"
                stream.abort(HubTimeout(silence))
                await stream.renew()
                return

    def _silence_s(self, stream: HubStream) -> float:
        return min(self.clock() - self._heard_s, stream.silence_s)

    # -- while no hub answers

    def request(self) -> Open:
        """See `Caller`."""
        opened = self._opened or Opened("", 0, 0, 0)
        if not self._opened and not self._transcript.ids:
            return self.start
        if self.reconcile is Reconcile.KEEP:
            self._transcript.keep()
            self._may_decode.clear()
        settled, provisional = tuple(self._transcript.settled), tuple(self._transcript.provisional)
        resume = Resume(opened.session_id, opened.session_key, opened.epoch, settled, provisional)
        return replace(self.start, resume=resume)

    def request_failed(self) -> None:
        """See `Caller`."""
        self._may_decode.set()

    @property
    def trace(self) -> TraceContext:
        """See `Caller`."""
        return self.observed.trace

    @contextmanager
    def attempt(self, hub: str) -> Iterator[None]:
        """See `Caller`."""
        start_s, reason = self.clock(), "left"
        try:
            yield
            reason = ""
        except BaruError as error:
            reason = error.reason
            raise
        finally:
            elapsed_s = self.clock() - start_s
            self.tell(lambda observer: observer.attempted(self.observed, hub, elapsed_s, reason))

    async def _meanwhile(self, reaching: asyncio.Task[Attached]) -> AsyncGenerator[Event, None]:
        """Decode locally, if that is wanted, until a hub is reached.

        HubUnavailable when the output is complete without one, and is to stand as it is.
        """
        loop = asyncio.get_running_loop()
        while self.local and self._may_be_local and not reaching.done() and not self._is_complete():
            ids = [*self.start.prompt_ids, *self._transcript.ids]
            token = await loop.run_in_executor(self.executor, self.local.next_id, ids)
            if not self._may_decode.is_set():  # a hub is being told what stands: nothing may be added to that
                await _either(self._may_decode, reaching)
            if reaching.done() or token is None:
                break
            self._note_first_token()
            yield self._transcript.decoded(token)
        if self._is_complete() and self.reconcile is Reconcile.KEEP and not reaching.done():
            raise HubUnavailable("the output was completed while no hub answered")
        await asyncio.wait([reaching])

    def _is_complete(self) -> bool:
        """True when what was shown needs nothing more."""
        transcript = self._transcript
        is_full = len(self.start.prompt_ids) + len(transcript.ids) >= self.max_length
        return bool(transcript.ids) and (is_full or transcript.stopped_by is not None)

    # -- the end

    def _finish(self, frame: Finished, opened: Opened) -> list[Event]:
        withdrawn = self._transcript.withdraw()
        if len(self._transcript.ids) != frame.usage.num_emitted:
            raise ProtocolViolation(
                f"the hub emitted {frame.usage.num_emitted} ids, {len(self._transcript.ids)} arrived"
            )
        if frame.reason is FinishReason.STOP and self._transcript.stopped_by is None:
            raise ProtocolViolation("the hub stopped where the request does not")
        usage = _sum(frame.usage, replace(self._before, num_prompt=0, num_emitted=0))
        ids, num_own = self._transcript.ids, self._transcript.num_provisional
        seen = Seen(self.identity, self.start, opened, ids, self._num_given, num_own)
        return [*withdrawn, self._finished(frame.reason, usage, prove(frame, seen, self.trust))]

    def _finish_alone(self) -> Finish:
        self._transcript.keep()
        usage = replace(_sum(self._before, self._seen), num_emitted=len(self._transcript.ids))
        reason = FinishReason.LENGTH if self._transcript.stopped_by is None else FinishReason.STOP
        return self._finished(reason, usage, Proof(reason="no hub answered to the end"))

    def _finished(self, reason: FinishReason, usage: Usage, proof: Proof) -> Finish:
        now, transcript = self.clock(), self._transcript
        tail = transcript.finish()
        return Finish(
            reason=reason,
            text=transcript.text,
            ids=tuple(transcript.ids),
            spans=transcript.spans(),
            usage=usage,
            elapsed_s=now - self._started_s,
            time_to_first_token_s=(self._first_token_s or now) - self._started_s,
            round_trip_s=statistics.median(self._round_trips_s) if self._round_trips_s else None,
            tail=tail,
            logprobs=tuple(transcript.logprobs) if self.sampling.params.logprobs is not None else (),
            stopped_by=transcript.stopped_by if reason is FinishReason.STOP else None,
            proof=proof,
        )

    # -- what the node says

    async def _draft(self, attached: Attached, drafter: Drafter) -> None:
        """Keep the chain ahead of the committed ids, as far as there is room and something to propose."""
        drafts = started(drafter, self.sampling)
        while True:
            await self._turn.wait()
            self._turn.clear()
            while frame := await self._next_draft(drafter, drafts.propose):
                attached.stream.send(frame)
                await asyncio.sleep(0)  # let a verdict in before drafting further

    async def _next_draft(self, drafter: Drafter, propose: Callable[[list[int], int, int], Proposal]) -> Draft | None:
        chain, window = self._chain, self._allowed_window
        # The hub emits one id in any case, so the last position is never worth a draft.
        room = min(window - chain.ahead, self.max_length - 1 - len(chain.ids))
        proposed = Proposal()
        if room > 0:
            version = chain.version
            arguments = (chain.ids, chain.num_committed, min(room, drafter.tokens_per_call))
            start_s = self.clock()
            if drafter.blocking:
                loop = asyncio.get_running_loop()
                proposed = await loop.run_in_executor(self.executor, propose, list(chain.ids), *arguments[1:])
            else:
                proposed = propose(*arguments)
            self._note_proposal(len(proposed.ids), self.clock() - start_s)
            self._check(drafter, proposed, arguments[-1])
            if chain.version != version:  # a verdict came meanwhile and made it void
                self._turn.set()
                return None
        if not proposed.ids and not (chain.wants_answer and window):
            return None  # nothing to say, or nobody waits for it
        return chain.extend(proposed.ids, proposed.draft_probs)

    @property
    def _allowed_window(self) -> int:
        """Drafted ids past the committed ones that the hub wants, as far as its posture goes."""
        posture = self._posture
        if posture is None:
            return self._window
        return min(self._window, posture.max_ahead or self._window) if posture.drafting else 0

    def _note_proposal(self, num_ids: int, elapsed_s: float) -> None:
        self.tell(lambda observer: observer.drafted(self.observed, num_ids, elapsed_s))

    def _check(self, drafter: Drafter, proposal: Proposal, max_tokens: int) -> None:
        """InvalidDraft for what no hub would take: it is the drafter's fault, and said here."""
        proposed = proposal.ids
        wrong = next((i for i in proposed if not 0 <= i < self.sampling.vocabulary.size), None)
        if wrong is not None:
            raise InvalidDraft(f"the {drafter.family} drafter proposed {wrong}, which is outside the vocabulary")
        if len(proposed) > max_tokens:
            raise InvalidDraft(f"the {drafter.family} drafter proposed {len(proposed)} ids, asked for {max_tokens}")


async def _either(event: asyncio.Event, reaching: asyncio.Task[Attached]) -> None:
    waiting = asyncio.create_task(event.wait())
    await asyncio.wait([waiting, reaching], return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()


async def _end(reaching: asyncio.Task[Attached], *, unless: Attached | None) -> None:
    """Stop trying; a stream that was opened meanwhile and is not wanted any more is left."""
    reaching.cancel()
    (found,) = await asyncio.gather(reaching, return_exceptions=True)
    if isinstance(found, Attached) and found is not unless:
        await found.stream.leave()


def _kinds(verdict: Verdict) -> list[Kind]:
    own = Kind.PLAIN
    if verdict.num_verified:
        own = Kind.BONUS if verdict.num_accepted == verdict.num_verified else Kind.CORRECTION
    kinds = [Kind.ACCEPTED] * verdict.num_accepted + [Kind.GUESSED] * verdict.num_guessed
    return [*kinds, *[own] * len(verdict.token_ids)][: len(verdict.token_ids)]


def _no_usage(num_prompt: int) -> Usage:
    return Usage(num_prompt, 0, 0, 0, 0, 0, 0, 0, 0)


def _counted(verdict: Verdict) -> Usage:
    """What a verdict alone says of its session's usage."""
    return replace(
        _no_usage(0),
        num_emitted=len(verdict.token_ids),
        num_steps=1,
        num_drafted=verdict.num_verified,
        num_verified=verdict.num_verified,
        num_accepted=verdict.num_accepted,
        num_rejected=verdict.num_verified - verdict.num_accepted,
        num_guessed=verdict.num_guessed,
    )


def _sum(a: Usage, b: Usage) -> Usage:
    counts = {name: value + getattr(b, name) for name, value in vars(a).items() if name != "seed"}
    return Usage(**counts, seed=a.seed if a.seed is not None else b.seed)


def _raise_failure(tasks: list[asyncio.Task[None]]) -> None:
    """A drafter that failed ends the generation with its own error, not in silence."""
    for task in tasks:
        if task.done() and not task.cancelled() and (error := task.exception()):
            if isinstance(error, BaruError):
                raise error
            raise BaruError(f"the drafter failed: {error!r}") from error

"""One generation at the node: draft ahead, send, take verdicts, tell the caller.

Two tasks share the chain. The reader (the caller's own `async for`) applies verdicts; the drafting
task keeps the chain as far ahead of the committed ids as the hub can use.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from itertools import count

from baru_common.drafters import Drafter, Proposal, started
from baru_common.errors import BaruError, InvalidDraft, ProtocolViolation
from baru_common.frames import (
    Draft,
    Finished,
    FinishReason,
    Heartbeat,
    HubFrame,
    Open,
    Opened,
    TokenLogprobs,
    Verdict,
)
from baru_common.sampling import SamplingContext
from baru_common.tokens import TextStream

from .chain import DraftChain
from .events import Event, Finish, Kind, Piece, Provenance, Span, Started, Step, StepStats
from .transport import HubStream

HEARTBEAT_S = 0.2


@dataclass
class Generation:
    """State of one generation."""

    stream: HubStream
    request: Open
    sampling: SamplingContext
    max_length: int
    """Most ids of the session, prompt and output."""
    drafter: Drafter | None
    executor: Executor
    """Runs a drafter that blocks."""
    target: str
    clock: Callable[[], float] = time.monotonic
    _chain: DraftChain = field(init=False)
    _window: int = 0
    _turn: asyncio.Event = field(default_factory=asyncio.Event)
    _logprobs: list[TokenLogprobs] = field(default_factory=list)
    _round_trips_s: list[float] = field(default_factory=list)
    _started_s: float = 0.0
    _first_token_s: float | None = None

    async def events(self) -> AsyncGenerator[Event, None]:
        """Run the generation; raise the BaruError that ends it if it does not finish well.

        Leaving the iterator early ends the session at the hub.
        """
        self._started_s = self.clock()
        params = self.sampling.params
        self._text = TextStream(self.sampling.vocabulary, params.stop_strings, params.min_tokens)
        self._parts: list[str] = []
        tasks: list[asyncio.Task[None]] = []
        try:
            self.stream.send(self.request)
            async for frame in self.stream.frames():
                if isinstance(frame, Opened) is bool(tasks) and not isinstance(frame, Heartbeat):
                    raise ProtocolViolation(f"the hub sent {type(frame).__name__} out of turn")
                if isinstance(frame, Opened):
                    tasks = self._open(frame)
                    yield Started(frame.session_id, self.target, len(self.request.prompt_ids))
                elif isinstance(frame, Finished):
                    yield self._finish(frame)
                    return
                elif step := self._take(frame):
                    yield step
                _raise_failure(tasks)
            raise ProtocolViolation("the hub ended the stream without a word")
        finally:
            self.stream.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    # -- what the hub says

    def _open(self, opened: Opened) -> list[asyncio.Task[None]]:
        if opened.num_committed != len(self.request.prompt_ids):
            raise ProtocolViolation(
                f"the hub committed {opened.num_committed} prompt ids of {len(self.request.prompt_ids)}"
            )
        self._chain = DraftChain.start(self.request.prompt_ids, opened.epoch)
        self._window = opened.max_draft_ahead
        tasks = [asyncio.create_task(self._beat())]
        if self.drafter:
            tasks.append(asyncio.create_task(self._draft(self.drafter)))
            self._turn.set()
        return tasks

    def _take(self, frame: HubFrame) -> Step | None:
        if isinstance(frame, Heartbeat):
            self._round_trips_s.append(self.clock() - frame.sent_ns / 1e9)
            return None
        if not isinstance(frame, Verdict):
            raise ProtocolViolation(f"the hub sent {type(frame).__name__} in mid-stream")
        if max(frame.token_ids) >= self.sampling.vocabulary.size:
            raise ProtocolViolation(f"the hub emitted {max(frame.token_ids)}, which is outside the vocabulary")
        if self._first_token_s is None:
            self._first_token_s = self.clock()
        if len(frame.logprobs) != (0 if self.sampling.params.logprobs is None else len(frame.token_ids)):
            raise ProtocolViolation(
                f"the hub sent {len(frame.logprobs)} log-probabilities for {len(frame.token_ids)} ids"
            )
        self._chain.apply(frame)
        self._logprobs.extend(frame.logprobs)
        self._window = frame.depth_hint
        self._turn.set()
        logprobs = frame.logprobs or [None] * len(frame.token_ids)
        pieces = tuple(map(self._piece, frame.token_ids, _kinds(frame), logprobs))
        round_trip_s = self._round_trips_s[-1] if self._round_trips_s else None
        stats = StepStats(frame.num_verified, frame.num_accepted, round_trip_s)
        return Step(frame.base, pieces, Provenance.VERIFIED, stats)

    def _piece(self, token_id: int, kind: Kind, logprobs: TokenLogprobs | None) -> Piece:
        text = self._text.push(token_id)
        self._parts.append(text)
        return Piece(token_id, text, kind, logprobs)

    def _finish(self, frame: Finished) -> Finish:
        now = self.clock()
        tail = self._text.finish()
        ids = tuple(self._chain.ids[len(self.request.prompt_ids) : self._chain.num_committed])
        if len(ids) != frame.usage.num_emitted:
            raise ProtocolViolation(f"the hub emitted {frame.usage.num_emitted} ids, {len(ids)} arrived")
        return Finish(
            reason=frame.reason,
            text="".join(self._parts) + tail,
            ids=ids,
            spans=(Span(0, len(ids), Provenance.VERIFIED),) if ids else (),
            usage=frame.usage,
            elapsed_s=now - self._started_s,
            time_to_first_token_s=(self._first_token_s or now) - self._started_s,
            round_trip_s=statistics.median(self._round_trips_s) if self._round_trips_s else None,
            tail=tail,
            logprobs=tuple(self._logprobs),
            stopped_by=self._stopped_by(ids) if frame.reason is FinishReason.STOP else None,
        )

    def _stopped_by(self, ids: tuple[int, ...]) -> int | str:
        text = self._text.stopped_by
        if text is None and not self.sampling.stop_ids.intersection(ids[-1:]):
            raise ProtocolViolation("the hub stopped where the request does not")
        return ids[-1] if text is None else text

    # -- what the node says

    async def _draft(self, drafter: Drafter) -> None:
        """Keep the chain ahead of the committed ids, as far as there is room and something to propose."""
        drafts = started(drafter, self.sampling)
        while True:
            await self._turn.wait()
            self._turn.clear()
            while frame := await self._next_draft(drafter, drafts.propose):
                self.stream.send(frame)
                await asyncio.sleep(0)  # let a verdict in before drafting further

    async def _next_draft(self, drafter: Drafter, propose: Callable[[list[int], int, int], Proposal]) -> Draft | None:
        chain = self._chain
        # The hub emits one id in any case, so the last position is never worth a draft.
        room = min(self._window - chain.ahead, self.max_length - 1 - len(chain.ids))
        proposed = Proposal()
        if room > 0:
            version = chain.version
            arguments = (chain.ids, chain.num_committed, min(room, drafter.tokens_per_call))
            if drafter.blocking:
                loop = asyncio.get_running_loop()
                proposed = await loop.run_in_executor(self.executor, propose, list(chain.ids), *arguments[1:])
            else:
                proposed = propose(*arguments)
            self._check(drafter, proposed, arguments[-1])
            if chain.version != version:  # a verdict came meanwhile and made it void
                self._turn.set()
                return None
        if not proposed.ids and not (chain.wants_answer and self._window):
            return None  # nothing to say, or nobody waits for it
        return chain.extend(proposed.ids, proposed.draft_probs)

    def _check(self, drafter: Drafter, proposal: Proposal, max_tokens: int) -> None:
        """InvalidDraft for what no hub would take: it is the drafter's fault, and said here."""
        proposed = proposal.ids
        wrong = next((i for i in proposed if not 0 <= i < self.sampling.vocabulary.size), None)
        if wrong is not None:
            raise InvalidDraft(f"the {drafter.family} drafter proposed {wrong}, which is outside the vocabulary")
        if len(proposed) > max_tokens:
            raise InvalidDraft(f"the {drafter.family} drafter proposed {len(proposed)} ids, asked for {max_tokens}")

    async def _beat(self) -> None:
        """Sample the round trip, at once and then now and again."""
        for sequence in count(1):
            self.stream.send(Heartbeat(sequence, round(self.clock() * 1e9)))
            await asyncio.sleep(HEARTBEAT_S)


def _kinds(verdict: Verdict) -> list[Kind]:
    own = Kind.PLAIN
    if verdict.num_verified:
        own = Kind.BONUS if verdict.num_accepted == verdict.num_verified else Kind.CORRECTION
    kinds = [Kind.ACCEPTED] * verdict.num_accepted + [Kind.GUESSED] * verdict.num_guessed + [own]
    return kinds[: len(verdict.token_ids)]


def _raise_failure(tasks: list[asyncio.Task[None]]) -> None:
    """A drafter that failed ends the generation with its own error, not in silence."""
    for task in tasks:
        if task.done() and not task.cancelled() and (error := task.exception()):
            if isinstance(error, BaruError):
                raise error
            raise BaruError(f"the drafter failed: {error!r}") from error

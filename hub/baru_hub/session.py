"""The state of one session at the hub, and the two moves it makes: hand out a block, take in a result.

ids        [0, num_prompt)  [num_prompt, num_committed)      committed; the node's copy is the truth
KV cache   [0, num_cached)                                   num_cached <= num_committed - 1
pending    [num_cached, num_committed)                       committed, not yet fed: a whole prompt at
                                                             first, one id from then on
one step   feeds pending, then k draft ids                   rows from the last pending id on decide
after it   committed += accepted + 1, cached = committed - 1 rows fed but rejected are gone
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from baru_common.errors import InvalidRequest
from baru_common.frames import Finished, FinishReason, Usage, Verdict
from baru_common.sampling import NO_ID, SamplingContext, SparseProbs
from baru_common.tokens import StopScanner

from .acceptance import Acceptance, Decision, accept, stop
from .mailbox import Mailbox
from .pace import Pace

_MAX_STAMPS = 512


@dataclass(frozen=True)
class Block:
    """What one session feeds in one step."""

    pending: tuple[int, ...]
    """Committed ids not yet in the cache, at least one."""
    draft: tuple[int, ...] = ()
    """Draft ids to check, none unless `decides`."""
    decides: bool = True
    """The last pending row and the draft rows decide ids; False for a piece of a prompt with more to come."""
    chain_id: int = 0
    """Chain that the draft is of."""
    draft_probs: tuple[SparseProbs, ...] = ()
    """What each draft id was drawn from; none at all: they were picked, not drawn."""


@dataclass(eq=False)
class Session:
    """One generation. Pure state: no clock, no I/O, no model."""

    session_id: str
    epoch: int
    sampling: SamplingContext
    max_length: int
    """Most committed ids: prompt and output, bounded by request and context."""
    mailbox: Mailbox
    has_drafter: bool
    committed: list[int]
    pace: Pace = field(default_factory=Pace)
    num_cached: int = 0
    finish: FinishReason | None = None
    num_steps: int = 0
    num_verified: int = 0
    num_accepted: int = 0
    decided_at: dict[int, float] = field(default_factory=dict)
    """Committed length -> clock when it was reached, for lengths that a chain may still fork from."""
    tail: Sequence[int] = ()
    """Drafted ids that continue the committed ones, as of the last plan."""
    _stop_ids: frozenset[int] = field(init=False)
    _scanner: StopScanner = field(init=False)

    def __post_init__(self) -> None:
        self._stop_ids = self.sampling.stop_ids
        self._scanner = StopScanner(self.sampling.params.stop_strings, self.sampling.params.min_tokens)

    @property
    def decided_s(self) -> float:
        """Clock of the last verdict, or of the start: since then the node may be drafting."""
        return next(reversed(self.decided_at.values()))

    def stamp(self, now_s: float) -> None:
        """Note when the committed length was reached."""
        self.decided_at[len(self.committed)] = now_s
        if len(self.decided_at) > _MAX_STAMPS:
            del self.decided_at[next(iter(self.decided_at))]

    def answer_time_s(self, base: int, now_s: float) -> float | None:
        """Time from the verdict that reached `base` until now; None when it is not known any more."""
        reached_s = self.decided_at.get(base)
        for length in [length for length in self.decided_at if length < base]:
            del self.decided_at[length]  # later chains fork later
        return None if reached_s is None else now_s - reached_s

    @property
    def num_prompt(self) -> int:
        return self.sampling.num_prompt

    @property
    def num_pending(self) -> int:
        return len(self.committed) - self.num_cached

    @property
    def room(self) -> int:
        """Ids that may still be emitted."""
        return self.max_length - len(self.committed)

    def next_block(self, max_draft: int, max_pending: int) -> Block:
        """Return what to feed next: at most `max_pending` committed ids and `max_draft` draft ids."""
        pending = self.committed[self.num_cached : self.num_cached + max_pending]
        if len(pending) < self.num_pending:
            return Block(tuple(pending), decides=False)
        # One id is emitted in any case, so a draft of all the room could not be used whole.
        depth = min(max_draft, self.room - 1)
        draft = tuple(self.mailbox.usable(self.committed)[:depth])
        return Block(tuple(pending), draft, True, self.mailbox.chain_id, self.mailbox.draft_probs(len(draft)))

    def take(self, block: Block, decision: Decision) -> Verdict | None:
        """Commit what the target decided for `block`; None for a piece of a prompt.

        After it `num_cached` says how many ids the engine's cache must be cut to. InvalidRequest when the request
        leaves no id to choose.
        """
        if not block.decides:
            self.num_cached += len(block.pending)
            return None
        outcome = self._stopped(accept(block.draft, decision))
        base = len(self.committed)
        if outcome.num_accepted < outcome.num_verified:
            self.mailbox.refute()
        self.committed.extend(outcome.emitted)
        self.num_cached = len(self.committed) - 1
        self.finish = outcome.finish
        self.num_steps += 1
        self.num_verified += outcome.num_verified
        self.num_accepted += outcome.num_accepted
        self.pace.learn(outcome.num_verified, outcome.num_accepted)
        self.pace.asked = self.pace.window
        return Verdict(
            epoch=self.epoch,
            base=base,
            num_verified=outcome.num_verified,
            num_accepted=outcome.num_accepted,
            token_ids=outcome.emitted,
            chain_id=block.chain_id if outcome.num_verified else 0,
            depth_hint=self.pace.window,
            logprobs=decision.logprobs[: len(outcome.emitted)],
        )

    def _stopped(self, acceptance: Acceptance) -> Acceptance:
        """Cut what is emitted where the output ends, if it ends here."""
        text_end = None
        if self.sampling.params.stop_strings:
            pieces = (self.sampling.vocabulary.text_bytes(i) for i in acceptance.emitted if i >= 0)
            text_end = next((i + 1 for i, piece in enumerate(pieces) if self._scanner.push(piece)), None)
        outcome = stop(acceptance, self._stop_ids, self.room, text_end)
        if min(outcome.emitted) < 0:
            position = len(self.committed) + outcome.emitted.index(NO_ID) - self.num_prompt
            raise InvalidRequest(
                f"the request leaves no id to choose at output position {position}",
                hint="check what grammar, allowed_ids, banned_ids and min_tokens forbid together",
            )
        return outcome

    def finished(self, reason: FinishReason) -> Finished:
        """Return the closing frame."""
        num_drafted = self.mailbox.num_drafted
        usage = Usage(
            num_prompt=self.num_prompt,
            num_emitted=len(self.committed) - self.num_prompt,
            num_steps=self.num_steps,
            num_drafted=num_drafted,
            num_verified=self.num_verified,
            num_accepted=self.num_accepted,
            num_rejected=self.num_verified - self.num_accepted,
            num_discarded=num_drafted - self.num_verified,
            num_stale_frames=self.mailbox.num_stale_frames,
            seed=None if self.sampling.params.is_greedy else self.sampling.params.seed,
        )
        return Finished(reason, usage)

"""The state of one session at the hub, and the two moves it makes: hand out a block, take in a result.

ids        [0, num_prompt)  [num_prompt, num_committed)      committed; the node's copy is the truth
                            [first_decided, num_committed)   decided here; what is before was there when it began
KV cache   [0, num_cached)                                   num_cached <= num_committed - 1
pending    [num_cached, num_committed)                       committed, not yet fed: a whole prompt at
                                                             first, one id from then on
one step   feeds pending, then k draft ids                   rows from the last pending id on decide
after it   committed += accepted + 1, cached = committed - 1 rows fed but rejected are gone
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from baru_common.errors import InvalidRequest
from baru_common.frames import Finished, FinishReason, Posture, TokenLogprobs, Usage, Verdict
from baru_common.sampling import NO_ID, SamplingContext, SparseProbs
from baru_common.tokens import StopScanner

from .acceptance import Acceptance, Decision, accept, stop
from .mailbox import Mailbox
from .pace import OwnPace, Pace
from .tree import TokenTree

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
    parents: tuple[int, ...] | None = None
    """As of `TokenTree`, when the draft is a tree; None: it is a chain."""
    num_chain: int | None = None
    """Leading draft ids that the node drafted; those after them are the hub's own. None: all."""
    own_depth: int = 0
    """Positions that the hub's own drafter is to add to the draft; 0: none."""
    own_width: int = 1
    """Guesses that it makes at each position."""
    num_path: int = 0
    """Leading draft ids that are one path: the node's, and the hub's on from there. Those after them are leaves."""
    provisional: bool = False
    """The draft is what the node decoded by itself while the link was down."""

    @property
    def tree(self) -> TokenTree:
        """The draft as a tree."""
        return TokenTree.chain(self.draft) if self.parents is None else TokenTree(self.draft, self.parents)

    def extended(self, path: Sequence[int], leaves: Sequence[Sequence[int]]) -> Block:
        """Return the block with the hub's own guesses: `path` begins with the node's draft and goes on from it, each
        leaf is a path that ends in one other guess."""
        tree = TokenTree.merged([path, *leaves])
        return replace(self, draft=tree.ids, parents=tree.parents, num_chain=len(self.draft), num_path=len(path))

    def has_leaf(self, depth: int) -> bool:
        """True when there is a guess beside the path at this depth."""
        return self.parents is not None and depth - 1 in self.parents[self.num_path :]


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
    num_guessed: int = 0
    """Ids emitted that the hub's own drafter had guessed."""
    own: OwnPace | None = None
    """What is known of the hub's own drafter in this session; None: there is none."""
    decided_at: dict[int, float] = field(default_factory=dict)
    """Committed length -> clock when it was reached, for lengths that a chain may still fork from."""
    tail: Sequence[int] = ()
    """Drafted ids that continue the committed ones, as of the last plan."""
    first_decided: int = field(init=False)
    """Committed length at the start: only what comes after it is known to be the target's own."""
    _stop_ids: frozenset[int] = field(init=False)
    _scanner: StopScanner = field(init=False)
    _logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Of each id from `first_decided` on, if asked for: a verdict may have to be told again."""

    def __post_init__(self) -> None:
        self.first_decided = len(self.committed)
        self._stop_ids = self.sampling.stop_ids
        self._scanner = StopScanner(self.sampling.params.stop_strings, self.sampling.params.min_tokens)
        self._replay()

    def _replay(self) -> None:
        """Go through the output that is there at the start, to where it has ended or may go on."""
        for token in self.committed[self.num_prompt :]:
            if self.finish:
                raise InvalidRequest("the output goes on after its end", details={"param": "resume"})
            completes = self._scanner.push(self.sampling.vocabulary.text_bytes(token))
            if token in self._stop_ids or completes:
                self.finish = FinishReason.STOP
        if not self.room and not self.finish:
            self.finish = FinishReason.LENGTH

    # -- the node goes and comes back

    def leave(self) -> None:
        """The node is gone: nothing is to come from it, nor waited for."""
        self.has_drafter = False
        self.pace.asked = self.pace.window = 0

    def come_back(self, num_known: int, provisional: Sequence[int], has_drafter: bool, now_s: float) -> None:
        """Go on for another stream of the session, whose node has the first `num_known` committed ids and decoded
        `provisional` after them by itself."""
        self.epoch += 1
        self.has_drafter = has_drafter
        self.mailbox.restart(num_known, provisional)
        self.pace.restart()
        self.decided_at.clear()  # what was decided while the node was away says nothing of how fast it answers
        self.stamp(now_s)

    def since(self, num_known: int) -> Verdict | None:
        """Return all that was decided past the first `num_known` ids as one verdict; None if nothing was."""
        if num_known == len(self.committed):
            return None
        return Verdict(
            epoch=self.epoch,
            base=num_known,
            num_verified=0,
            num_accepted=0,
            token_ids=tuple(self.committed[num_known:]),
            depth_hint=self.pace.asked,
            logprobs=tuple(self._logprobs[num_known - self.first_decided :]),
        )

    # -- what it may do

    def obey(self, posture: Posture, own_depth: int | None, *, drafts: bool) -> None:
        """Keep to a posture from now on: a ceiling for the node's drafts, and for the hub's own; None: none. `drafts`:
        there is a node that would."""
        pace = self.pace
        self.has_drafter = drafts and posture.drafting
        pace.survival.ceiling = _least(pace.max_depth, posture.max_depth) if posture.drafting else 0
        pace.depth = min(pace.depth, pace.survival.ceiling)
        pace.most_ahead = posture.max_ahead
        pace.window = min(pace.window, posture.max_ahead or pace.window) if posture.drafting else 0
        if self.own:
            self.own.survival.ceiling = _least(self.own.max_depth, own_depth)

    # -- what it knows

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
    def num_given(self) -> int:
        """Output ids that were there when it began: nobody here has decided them."""
        return self.first_decided - self.num_prompt

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
        most = self.room - 1
        usable = self.mailbox.usable(self.committed)
        provisional = self.mailbox.num_provisional
        draft = tuple(usable[: min(max_draft, most, provisional or self.pace.survival.ceiling)])
        own_depth, own_width = 0, 1
        # The hub's drafter reads what was computed before the last id.
        if self.own and len(pending) == 1 and not provisional:
            own_depth = min(self.own.depth, self.own.survival.ceiling, most - len(draft))
            own_width = self.own.width
        return Block(
            tuple(pending),
            draft,
            chain_id=self.mailbox.chain_id,
            draft_probs=self.mailbox.draft_probs(len(draft)),
            own_depth=own_depth,
            own_width=own_width,
            provisional=provisional > 0,
        )

    def take(self, block: Block, decision: Decision) -> Verdict | None:
        """Commit what the target decided for `block`; None for a piece of a prompt.

        After it `num_cached` says how many ids the engine's cache must be cut to. InvalidRequest when the request
        leaves no id to choose.
        """
        if not block.decides:
            self.num_cached += len(block.pending)
            return None
        outcome = self._stopped(accept(block.tree, decision, block.num_chain))
        base = len(self.committed)
        if outcome.num_accepted < outcome.num_verified:
            self.mailbox.refute()
        self.committed.extend(outcome.emitted)
        self.num_cached = len(self.committed) - 1
        self.finish = outcome.finish
        self.num_steps += 1
        self.num_verified += outcome.num_verified
        self.num_accepted += outcome.num_accepted
        self.num_guessed += outcome.num_guessed
        if not block.provisional:  # how well the node does alone says little of how well it drafts
            self.pace.learn(outcome.num_verified, outcome.num_accepted)
        self._learn_own(block, outcome)
        logprobs = _emitted_logprobs(decision, outcome)
        self._logprobs.extend(logprobs)
        self.pace.asked = self.pace.window
        return Verdict(
            epoch=self.epoch,
            base=base,
            num_verified=outcome.num_verified,
            num_accepted=outcome.num_accepted,
            token_ids=outcome.emitted,
            chain_id=block.chain_id if outcome.num_verified else 0,
            depth_hint=self.pace.window,
            num_guessed=outcome.num_guessed,
            logprobs=logprobs,
        )

    def _learn_own(self, block: Block, outcome: Acceptance) -> None:
        """Tell the hub's drafter how far its own path held, from where the node's draft ended, and its leaves."""
        if self.own is None or block.num_chain is None:
            return
        nodes = [place - 1 for place in outcome.places[1:]]
        num_held = sum(node < block.num_path for node in nodes)
        if num_held >= block.num_chain:
            self.own.learn(block.num_path - block.num_chain, num_held - block.num_chain)
        if block.has_leaf(num_held):
            self.own.learn_beside(hit=len(nodes) > num_held)

    def _stopped(self, acceptance: Acceptance) -> Acceptance:
        """Cut what is emitted where the output ends, if it ends here."""
        text_end = None
        if self.sampling.params.stop_strings:
            pieces = (self.sampling.vocabulary.text_bytes(i) for i in acceptance.emitted if i >= 0)
            text_end = next((i + 1 for i, piece in enumerate(pieces) if self._scanner.push(piece)), None)
        outcome = stop(acceptance, self._stop_ids, self.room, text_end)
        if outcome.emitted[-1] == NO_ID:
            if before := outcome.emitted[:-1]:  # emitted first, as it would be without drafts
                return replace(outcome, num_verified=outcome.num_accepted, emitted=before, finish=None)
            position = len(self.committed) - self.num_prompt
            raise InvalidRequest(
                f"the request leaves no id to choose at output position {position}",
                hint="check what grammar, allowed_ids, banned_ids and min_tokens forbid together",
            )
        return outcome

    def finished(self, reason: FinishReason) -> Finished:
        """Return the closing frame."""
        return Finished(reason, self.usage())

    def usage(self) -> Usage:
        """Return what it came to so far."""
        num_drafted = self.mailbox.num_drafted
        return Usage(
            num_prompt=self.num_prompt,
            num_emitted=len(self.committed) - self.num_prompt,
            num_steps=self.num_steps,
            num_drafted=num_drafted,
            num_verified=self.num_verified,
            num_accepted=self.num_accepted,
            num_rejected=self.num_verified - self.num_accepted,
            num_discarded=num_drafted - self.num_verified,
            num_stale_frames=self.mailbox.num_stale_frames,
            num_guessed=self.num_guessed,
            seed=None if self.sampling.params.is_greedy else self.sampling.params.seed,
        )


def _least(most: int, limit: int | None) -> int:
    return most if limit is None else min(most, limit)


def _emitted_logprobs(decision: Decision, outcome: Acceptance) -> tuple[TokenLogprobs, ...]:
    if not decision.logprobs:
        return ()
    return tuple(decision.logprobs[place] for place in outcome.places[: len(outcome.emitted)])

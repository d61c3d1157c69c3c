"""What a verification step decides. Pure functions; no model, no clock, no I/O.

    draft       ids that a drafter proposed for the positions after the committed ones: a chain, or a tree
    decided     the target's own id after the committed ones, and after each draft id;
                each holds for the case that the path to it is right, so it counts only up to there
    accepted    draft ids that equal the decided ones; always a prefix of the draft, or the start of a path
    guessed     the same, of what the hub's own drafter put beside or after the node's draft
    correction  the target's own id where the draft first differs
    bonus       the target's own id after a draft that was accepted whole
    emitted     accepted ids, guessed ones, then the correction or the bonus

With noise that is a function of position (coupled sampling), and greedily without noise, the decided
ids do not depend on the draft: comparing is all there is to it, and the output is the target's own.
Rejection sampling (`rejection`) decides how much is accepted itself; what follows is the same.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from baru_common.errors import EngineFailure
from baru_common.frames import FinishReason, TokenLogprobs

from .tree import TokenTree


@dataclass(frozen=True)
class Decision:
    """What the target decided for one block."""

    ids: tuple[int, ...] = ()
    """Its own id for each position of the block and the one after; with `num_accepted`, the emitted ids."""
    num_accepted: int | None = None
    """Draft ids that rejection sampling accepted; None: those that equal `ids`."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Of each of `ids`, if the request asks for them."""


@dataclass(frozen=True)
class Acceptance:
    """Outcome of one step for one session."""

    num_verified: int
    num_accepted: int
    emitted: tuple[int, ...]
    finish: FinishReason | None = None
    num_guessed: int = 0
    """Ids emitted after the accepted ones that the hub's own drafter had guessed."""
    places: tuple[int, ...] = field(default=(), compare=False)
    """For each emitted id its place in the decision."""


def standing(tree: TokenTree, decision: Decision) -> list[int]:
    """Return the nodes of the draft that stand, from the root on. EngineFailure if `decision` does not fit it.

    Greedily and with coupled sampling the target's own id picks the child; rejection sampling checks chains only, and
    says itself how many stand.
    """
    decided, num_accepted = decision.ids, decision.num_accepted
    if num_accepted is not None:
        if not (0 <= num_accepted <= len(tree) and len(decided) == num_accepted + 1):
            raise EngineFailure(f"{num_accepted} of {len(tree)} draft ids accepted, and {len(decided)} ids emitted")
        return list(range(num_accepted))
    if len(decided) != len(tree) + 1:
        raise EngineFailure(f"{len(decided)} decided ids for a draft of {len(tree)}; must be one more")
    return tree.accepted(decided)


def accept(draft: TokenTree | Sequence[int], decision: Decision, num_chain: int | None = None) -> Acceptance:
    """Return how much of `draft` stands, and what is emitted.

    The first `num_chain` nodes (None: all) are the node's draft, the rest the hub's own guesses.
    """
    tree = draft if isinstance(draft, TokenTree) else TokenTree.chain(draft)
    nodes = standing(tree, decision)
    places = (0, *(node + 1 for node in nodes))
    emitted = (*(tree.ids[node] for node in nodes), decision.ids[places[-1]])
    num_chain = len(tree) if num_chain is None else num_chain
    num_accepted = sum(node < num_chain for node in nodes)
    return Acceptance(num_chain, num_accepted, emitted, None, len(nodes) - num_accepted, places)


def stop(acceptance: Acceptance, stop_ids: Collection[int], room: int, text_end: int | None = None) -> Acceptance:
    """Cut a step's emitted ids at the first stop id, at the id that completes a stop string (the first `text_end`
    ids go up to it), or when `room` more ids are there: whichever comes first.

    What ends the output is kept as its last id. Draft ids after the cut count as neither verified nor accepted.
    """
    emitted = acceptance.emitted[:room]
    ends = [i + 1 for i, token in enumerate(emitted) if token in stop_ids][:1]
    if text_end is not None and text_end <= len(emitted):
        ends.append(text_end)
    if ends:
        emitted, finish = emitted[: min(ends)], FinishReason.STOP
    elif len(emitted) == room:
        finish = FinishReason.LENGTH
    else:
        return acceptance
    num_accepted = min(acceptance.num_accepted, len(emitted))
    num_verified = acceptance.num_verified if len(emitted) > num_accepted else len(emitted)
    num_guessed = min(acceptance.num_guessed, len(emitted) - num_accepted)
    return Acceptance(num_verified, num_accepted, emitted, finish, num_guessed, acceptance.places)

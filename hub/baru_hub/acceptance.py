"""What a verification step decides. Pure functions; no model, no clock, no I/O.

    draft       ids that a drafter proposed for the positions after the committed ones
    decided     the target's own id at each of those positions, and at the one after the last;
                entry i holds for the case that draft[:i] is right, so it counts only up to there
    accepted    draft ids that equal the decided ones; always a prefix of the draft
    correction  the target's own id where the draft first differs
    bonus       the target's own id after a draft that was accepted whole
    emitted     accepted ids, then the correction or the bonus: decided[:num_accepted + 1]

With noise that is a function of position (coupled sampling), and greedily without noise, the decided
ids do not depend on the draft: comparing is all there is to it, and the output is the target's own.
Rejection sampling (`rejection`) decides how much is accepted itself; what follows is the same.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from baru_common.errors import EngineFailure
from baru_common.frames import FinishReason, TokenLogprobs


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


def accept(draft: Sequence[int], decision: Decision) -> Acceptance:
    """Return how much of `draft` stands, and what is emitted. EngineFailure if `decision` does not fit it."""
    decided, num_accepted = decision.ids, decision.num_accepted
    if num_accepted is not None:
        if not (0 <= num_accepted <= len(draft) and len(decided) == num_accepted + 1):
            raise EngineFailure(f"{num_accepted} of {len(draft)} draft ids accepted, and {len(decided)} ids emitted")
        return Acceptance(len(draft), num_accepted, decided)
    if len(decided) != len(draft) + 1:
        raise EngineFailure(f"{len(decided)} decided ids for a draft of {len(draft)}; must be one more")
    num_accepted = next((i for i, (d, t) in enumerate(zip(draft, decided, strict=False)) if d != t), len(draft))
    return Acceptance(len(draft), num_accepted, decided[: num_accepted + 1])


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
    num_verified = acceptance.num_verified if len(emitted) > acceptance.num_accepted else len(emitted)
    return Acceptance(num_verified, min(acceptance.num_accepted, len(emitted)), emitted, finish)

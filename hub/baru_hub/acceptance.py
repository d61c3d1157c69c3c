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
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from baru_common.errors import EngineFailure
from baru_common.frames import FinishReason

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Acceptance:
    """Outcome of one step for one session."""

    num_verified: int
    num_accepted: int
    emitted: tuple[int, ...]
    finish: FinishReason | None = None


def decide(logits: torch.Tensor, vocabulary_size: int, holes: Sequence[int] = ()) -> list[int]:
    """Return the greedy id of each row of `logits` ([num_rows, width], width >= vocabulary_size).

    Ties go to the lowest id, on every device. Padding and `holes` are never chosen.
    EngineFailure when a row holds no finite maximum.
    """
    logits = logits[:, :vocabulary_size]  # [num_rows, vocabulary]
    if holes:
        logits = logits.index_fill(1, logits.new_tensor(holes).long(), float("-inf"))
    best = logits.amax(dim=1, keepdim=True)
    if not best.isfinite().all():
        raise EngineFailure("the target's logits are not finite", hint="check the weights and the numeric type")
    # Not argmax: which of several maxima it returns is documented, yet differs between kernels in the field.
    width = logits.shape[1]
    ids = best.new_zeros(1).long() + _iota(width, logits)
    lowest = ids.expand_as(logits).masked_fill(logits != best, width).amin(dim=1)
    return [int(i) for i in lowest.tolist()]


def _iota(width: int, like: torch.Tensor) -> torch.Tensor:
    import torch

    return torch.arange(width, device=like.device)


def accept(draft: Sequence[int], decided: Sequence[int]) -> Acceptance:
    """Compare `draft` with the target's own ids; `decided` has one more entry than `draft`."""
    if len(decided) != len(draft) + 1:
        raise EngineFailure(f"{len(decided)} decided ids for a draft of {len(draft)}; must be one more")
    num_accepted = next((i for i, (d, t) in enumerate(zip(draft, decided, strict=False)) if d != t), len(draft))
    return Acceptance(len(draft), num_accepted, tuple(decided[: num_accepted + 1]))


def stop(acceptance: Acceptance, stop_ids: Collection[int], room: int) -> Acceptance:
    """Cut a step's emitted ids at the first stop id or when `room` more ids are there, if either comes.

    The stop id is kept as the last one. Draft ids after the cut count as neither verified nor accepted.
    """
    emitted = acceptance.emitted[:room]
    end = next((i + 1 for i, token in enumerate(emitted) if token in stop_ids), None)
    if end is not None:
        emitted, finish = emitted[:end], FinishReason.STOP
    elif len(emitted) == room:
        finish = FinishReason.LENGTH
    else:
        return acceptance
    num_verified = acceptance.num_verified if len(emitted) > acceptance.num_accepted else len(emitted)
    return Acceptance(num_verified, min(acceptance.num_accepted, len(emitted)), emitted, finish)

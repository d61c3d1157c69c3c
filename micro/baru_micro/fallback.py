"""Decoding by the node's own model while no hub answers: one id after the other, as the request says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from baru_common.drafters import Drafter, DraftStream, TextDrafter
from baru_common.errors import ConfigError
from baru_common.sampling import SamplingContext, SamplingMode


@runtime_checkable
class LocalModel(Protocol):
    """A drafter that can decode by itself: it has a model of the target's vocabulary."""

    def decoder(self, sampling: SamplingContext) -> DraftStream:
        """Begin a text: a stream that proposes one id at a time, chosen as `sampling` says, whatever its confidence."""


def local_model(drafter: Drafter | TextDrafter | None) -> LocalModel | None:
    """Return the model in a drafter, or in one of a cascade, if there is one."""
    parts: Sequence[object] = getattr(drafter, "parts", (drafter,))
    for part in parts:
        if isinstance(part, LocalModel):
            return part
    return None


def require_model(drafter: Drafter | None) -> LocalModel:
    """Return the model in a drafter; ConfigError if it has none."""
    if model := local_model(drafter):
        return model
    name = drafter.family if drafter else "none"
    raise ConfigError(
        f"fallback is local, but the drafter ({name}) has no model to decode with",
        hint="use a drafter with a model of the target's vocabulary, e.g. suffix+causal_lm, or fallback wait or fail",
    )


@dataclass
class LocalDecoder:
    """One generation's local decoding. It keeps its cache from one outage to the next."""

    model: LocalModel
    sampling: SamplingContext
    _stream: DraftStream | None = None

    def next_id(self, ids: Sequence[int]) -> int | None:
        """Return the id that the node's own model puts after `ids`; None when it has nothing to say: its context is
        full, or the request leaves it no choice."""
        if self._stream is None:
            # Nobody checks what is drawn here, so it is drawn as a target would, not from what can be sent.
            coupled = replace(self.sampling.params, sampling_mode=SamplingMode.COUPLED, verify_blocks=False)
            self._stream = self.model.decoder(replace(self.sampling, params=coupled))
        proposed = self._stream.propose(ids, len(ids), 1).ids
        return proposed[0] if proposed else None

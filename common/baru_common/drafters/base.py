"""The one interface of all drafters, and how to name them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from baru_common.corpus import Corpus
from baru_common.errors import ConfigError
from baru_common.model_files import SHIPPED_DRAFTER
from baru_common.sampling import SamplingContext, SparseProbs
from baru_common.tokens import Tokenizer, Vocabulary

DRAFTERS = (
    "ngram",
    "suffix[:CORPUS]",
    "causal_lm[:PATH]",
    "foreign_lm:PATH",
    "simulated:ACCEPTANCE[:TOKEN_MS[:SEED]]",
    "none",
)
_NAMES = "|".join(re.split("[:[]", name)[0] for name in DRAFTERS)
_BETWEEN = re.compile(rf"\+(?=(?:{_NAMES})(?:[:+]|$))")
"""A plus between two names; one within a path is part of it."""
_CHOOSY = 2
"""Ids that must match before what was said once is repeated in place of a model's draft."""


@dataclass(frozen=True)
class Proposal:
    """Drafted ids."""

    ids: Sequence[int] = ()
    draft_probs: Sequence[SparseProbs] = ()
    """What each id was drawn from, for rejection sampling; none at all when they were picked."""


class DraftStream(Protocol):
    """The drafting side of one session. Keeps whatever state makes the next proposal cheap."""

    def propose(self, ids: Sequence[int], num_committed: int, max_tokens: int) -> Proposal:
        """Return up to `max_tokens` ids that may follow `ids`; none when there is nothing to say.

        `ids[:num_committed]` are committed: a prefix of them was passed before and has not changed.
        The rest are this session's own drafts, any of which may differ from call to call. What an
        earlier call drafted and the target refused has no effect on the result.

        For rejection sampling an id that was drawn must not be withheld because of what it is: that would
        change the distribution.
        """


class Drafter(Protocol):
    """A loaded drafter."""

    @property
    def family(self) -> str:
        """Name of the kind, e.g. "ngram"."""

    @property
    def vocabulary(self) -> Vocabulary | None:
        """The drafter's own id -> bytes map; None when it just repeats ids it has seen."""

    @property
    def tokens_per_call(self) -> int:
        """Most ids worth asking for at once: a slow drafter streams, a fast one proposes a block."""

    @property
    def blocking(self) -> bool:
        """`propose` takes long enough that it must run in a thread."""

    def start(self, sampling: SamplingContext | None = None) -> DraftStream:
        """Begin a session. `sampling` says how the target's ids are chosen, so that drafts can be chosen alike;
        None: greedily. A drafter that cannot choose may leave it unread."""


@runtime_checkable
class TextDrafter(Protocol):
    """What drafts from texts: a drafter only once it is bound to a target's tokenizer."""

    def bound(self, tokenizer: Tokenizer) -> Drafter:
        """Return the drafter for targets with this tokenizer. May take long: run it in a thread."""


def load_drafter(spec: str) -> Drafter | TextDrafter | None:
    """Return the drafter that `spec` names: one of `DRAFTERS`, or several with a plus between, the first choice first.

    ConfigError for an unknown name, ModelFileError for a model that cannot be loaded.
    """
    specs = _BETWEEN.split(spec)
    return _cascade(specs) if len(specs) > 1 else _load_one(spec)


def _cascade(specs: Sequence[str]) -> Drafter | TextDrafter:
    from .cascade import CascadeDrafter, UnboundCascade

    parts: list[Drafter | TextDrafter] = []
    for spec in specs:
        # What only repeats must be surer where something else could draft instead.
        part = _load_one(spec, shortest=1 if spec is specs[-1] else _CHOOSY)
        if part is None:
            raise ConfigError(f"{spec!r} cannot be one of several drafters", hint="leave it out")
        parts.append(part)
    if any(isinstance(part, TextDrafter) for part in parts):
        return UnboundCascade(tuple(parts))
    return CascadeDrafter(tuple(part for part in parts if not isinstance(part, TextDrafter)))


def _load_one(spec: str, shortest: int = 1) -> Drafter | TextDrafter | None:
    name, colon, argument = spec.partition(":")
    if name == "none" and not argument:
        return None
    if name == "ngram" and not argument:
        from .ngram import NgramDrafter

        return NgramDrafter(shortest=shortest)
    if name == "suffix" and bool(colon) is bool(argument):
        from .corpus_drafter import CorpusDrafter
        from .suffix import SuffixDrafter

        return CorpusDrafter(Corpus(argument), shortest) if argument else SuffixDrafter(shortest=shortest)
    if name == "causal_lm" and bool(colon) is bool(argument):
        try:
            from .causal_lm import CausalLmDrafter
        except ImportError as error:
            raise ConfigError(f"causal_lm needs torch: {error}", hint="pip install 'baru-drafting[torch]'") from error

        return CausalLmDrafter.load(argument or SHIPPED_DRAFTER)
    if name == "foreign_lm" and argument:
        try:
            from .foreign_lm import ForeignLmDrafter
        except ImportError as error:
            raise ConfigError(f"foreign_lm needs torch: {error}", hint="pip install 'baru-drafting[torch]'") from error

        return ForeignLmDrafter.load(argument)
    if name == "simulated" and argument:
        from .simulated import SimulatedDrafter

        return SimulatedDrafter.parse(argument)
    raise ConfigError(f"there is no drafter {spec!r}", hint=f"use one of: {', '.join(DRAFTERS)}")

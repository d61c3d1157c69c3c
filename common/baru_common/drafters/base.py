"""The one interface of all drafters, and how to name them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from baru_common.errors import ConfigError
from baru_common.tokens import Vocabulary

DRAFTERS = ("ngram", "causal_lm:PATH", "simulated:ACCEPTANCE[:TOKEN_MS[:SEED]]", "none")


class DraftStream(Protocol):
    """The drafting side of one session. Keeps whatever state makes the next proposal cheap."""

    def propose(self, ids: Sequence[int], num_committed: int, max_tokens: int) -> list[int]:
        """Return up to `max_tokens` ids that may follow `ids`; none when there is nothing to say.

        `ids[:num_committed]` are committed: a prefix of them was passed before and has not changed.
        The rest are this session's own drafts, any of which may differ from call to call. What an
        earlier call drafted and the target refused has no effect on the result.
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

    def start(self) -> DraftStream:
        """Begin a session."""


def load_drafter(spec: str) -> Drafter | None:
    """Return the drafter that `spec` names: one of `DRAFTERS`.

    ConfigError for an unknown name, ModelFileError for a model that cannot be loaded.
    """
    name, _, argument = spec.partition(":")
    if name == "none" and not argument:
        return None
    if name == "ngram" and not argument:
        from .ngram import NgramDrafter

        return NgramDrafter()
    if name == "causal_lm" and argument:
        try:
            from .causal_lm import CausalLmDrafter
        except ImportError as error:
            raise ConfigError(f"causal_lm needs torch: {error}", hint="pip install 'baru-drafting[torch]'") from error

        return CausalLmDrafter.load(argument)
    if name == "simulated" and argument:
        from .simulated import SimulatedDrafter

        return SimulatedDrafter.parse(argument)
    raise ConfigError(f"there is no drafter {spec!r}", hint=f"use one of: {', '.join(DRAFTERS)}")

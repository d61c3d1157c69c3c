"""What a generation tells its caller, in order: one `Started`, many `Step`s, one `Finish`.

While the hub is away there may be steps of provisional ids; afterwards some are `Confirmed`, others `Retracted`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from baru_common.frames import FinishReason, Posture, TokenLogprobs, Usage

from .link import LinkState
from .proof import Proof


class Provenance(Enum):
    """Who stands behind an id."""

    VERIFIED = "verified"
    """The target decided it."""
    PROVISIONAL = "provisional"
    """Decoded by the node's own model while the link was down."""


class Kind(Enum):
    """How a verified id came about."""

    ACCEPTED = "accepted"
    """Drafted by the node, and equal to the target's own choice."""
    GUESSED = "guessed"
    """Guessed by the hub's own drafter, and equal to the target's own choice."""
    CORRECTION = "correction"
    """The target's own, where the draft first differed."""
    BONUS = "bonus"
    """The target's own, after a draft accepted whole."""
    PLAIN = "plain"
    """The target's own, in a step without a draft."""
    LOCAL = "local"
    """The node's own, while the hub was away: provisional."""


@dataclass(frozen=True)
class LinkChanged:
    """The way to the hub has changed, as this generation sees it."""

    state: LinkState
    hub: str
    """Address."""
    reason: str = ""
    """Why, where that is known."""


@dataclass(frozen=True)
class PostureChanged:
    """The hub lets this node draft otherwise than before, or not at all from the start. The output is the same."""

    posture: Posture


@dataclass(frozen=True)
class Confirmed:
    """Provisional ids turned out to be what the target says; nothing that was shown changes."""

    start: int
    """Output position of the first."""
    end: int
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    """The target's, of each, if the request asks for them."""


@dataclass(frozen=True)
class Retracted:
    """Provisional ids, the last ones that were shown, are withdrawn."""

    start: int
    """Output position of the first."""
    ids: tuple[int, ...]
    text: str
    """What to take off the end of the text."""


@dataclass(frozen=True)
class Started:
    """The generation has begun."""

    session_id: str
    """At the hub; empty when none answered, so that the node begins by itself."""
    target: str
    num_prompt: int


@dataclass(frozen=True)
class Piece:
    """One id and the text that it completes: none for a control id or a part of a character, and while what it says
    may be the start of a stop string."""

    token_id: int
    text: str
    kind: Kind
    logprobs: TokenLogprobs | None = None
    """The target's, if the request asks for them; a provisional id has none."""


@dataclass(frozen=True)
class StepStats:
    """One verification step."""

    num_verified: int
    num_accepted: int
    round_trip_s: float | None
    """Latest sample of the link's round trip, None before the first."""


@dataclass(frozen=True)
class Step:
    """What one verification step committed."""

    base: int
    """Position of the first id in the session."""
    pieces: tuple[Piece, ...]
    provenance: Provenance
    stats: StepStats

    @property
    def text(self) -> str:
        """Text delta."""
        return "".join(piece.text for piece in self.pieces)

    @property
    def ids(self) -> tuple[int, ...]:
        """Ids in order."""
        return tuple(piece.token_id for piece in self.pieces)


@dataclass(frozen=True)
class Span:
    """A run of output positions, counted from the first output id, and who stands behind it."""

    start: int
    end: int
    provenance: Provenance


@dataclass(frozen=True)
class Finish:
    """The generation ended."""

    reason: FinishReason
    text: str
    """All of it, as the deltas gave it."""
    ids: tuple[int, ...]
    spans: tuple[Span, ...]
    usage: Usage
    elapsed_s: float
    """From the request to its end."""
    time_to_first_token_s: float
    round_trip_s: float | None
    """Median of the samples."""
    tail: str = ""
    """Text held back to the end, of an incomplete character or a stop string that did not come: not in any step's
    delta."""
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    """The target's, of each of `ids`, if the request asks for them; None for a provisional id."""
    stopped_by: int | str | None = None
    """The stop id, end-of-sequence id or stop string that ended the output."""
    proof: Proof = field(default_factory=Proof)
    """What the hub stands for, as far as this node could check it."""

    @property
    def verified(self) -> bool:
        """The hub has signed that its target decided each of `ids`, and all that it signed is what this node saw."""
        return self.proof.verified

    @property
    def tokens_per_s(self) -> float:
        """Output ids per second, the prompt's processing included."""
        return len(self.ids) / self.elapsed_s if self.elapsed_s else 0.0


Event = Started | LinkChanged | PostureChanged | Step | Confirmed | Retracted | Finish

"""The frames of the protocol as plain values. `wire` turns them into messages and back.

Fields mean what `protos/baru/drafting/v1/drafting.proto` says of their namesakes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from .sampling import SamplingParams, SparseProbs
from .signatures import SignedStatement

PROTOCOL_REVISION = 1


@dataclass(frozen=True)
class Limits:
    max_sessions: int
    max_prompt_tokens: int
    max_draft_ahead: int
    max_message_bytes: int


@dataclass(frozen=True)
class TrafficShape:
    cell_bytes: int = 512
    tick_ms: int = 20
    round_ms: int = 4000
    required: bool = False


@dataclass(frozen=True)
class HubDescription:
    protocol_revision: int
    hub_version: str
    engine: str
    target_name: str
    target_fingerprint: bytes
    tokenizer_digest: bytes
    vocabulary_digest: bytes
    vocabulary_size: int
    eos_ids: tuple[int, ...]
    context_limit: int
    limits: Limits
    traffic_shape: TrafficShape | None = None
    posture_version: int = 0
    posture_digest: bytes = b""


@dataclass(frozen=True)
class DrafterInfo:
    family: str
    vocabulary_digest: bytes = b""
    model: str = ""
    digest: bytes = b""
    engine: str = ""


@dataclass(frozen=True)
class Resume:
    session_id: str
    session_key: bytes
    epoch: int
    output_ids: tuple[int, ...] = ()
    provisional_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Open:
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    target_fingerprint: bytes
    tokenizer_digest: bytes
    drafter: DrafterInfo | None = None
    resume: Resume | None = None
    tier: str = ""
    workload: str = ""
    protocol_revision: int = PROTOCOL_REVISION

    @property
    def committed(self) -> tuple[int, ...]:
        """Ids that stand: the prompt's, and those of the output so far."""
        return self.prompt_ids + (self.resume.output_ids if self.resume else ())


@dataclass(frozen=True)
class Draft:
    epoch: int
    chain_id: int
    base: int
    offset: int
    token_ids: tuple[int, ...]
    draft_probs: tuple[SparseProbs, ...] = ()

    @property
    def start(self) -> int:
        """Position of the frame's first id."""
        return self.base + self.offset

    @property
    def end(self) -> int:
        """Position after the frame's last id."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True)
class Cancel:
    pass


@dataclass(frozen=True)
class Heartbeat:
    sequence: int
    sent_ns: int


@dataclass(frozen=True)
class Posture:
    drafting: bool = True
    max_depth: int | None = None
    max_ahead: int | None = None
    drafters: tuple[str, ...] = ()
    fallback: str = ""
    reason: str = ""
    rule: str = ""
    document_version: int = 0
    document_digest: bytes = b""
    probation: bool = False


@dataclass(frozen=True)
class PostureChange:
    posture: Posture


@dataclass(frozen=True)
class Opened:
    session_id: str
    epoch: int
    num_committed: int
    max_draft_ahead: int
    session_key: bytes = b""
    continued: bool = False
    receipt_key: bytes = b""
    posture: Posture | None = None


@dataclass(frozen=True)
class Drain:
    grace_s: float


@dataclass(frozen=True)
class TokenLogprobs:
    """The target's log-probabilities at one position, of its plain logits."""

    logprob: float
    """Of the emitted id."""
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest ids, most likely first, each with its own."""


@dataclass(frozen=True)
class Verdict:
    epoch: int
    base: int
    num_verified: int
    num_accepted: int
    token_ids: tuple[int, ...]
    chain_id: int = 0
    depth_hint: int = 0
    num_guessed: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


@dataclass(frozen=True)
class Usage:
    """Counts of one session; `num_drafted = num_accepted + num_rejected + num_discarded`."""

    num_prompt: int
    num_emitted: int
    num_steps: int
    num_drafted: int
    num_verified: int
    num_accepted: int
    num_rejected: int
    num_discarded: int
    num_stale_frames: int
    num_guessed: int = 0
    seed: int | None = None

    @property
    def mean_accepted_length(self) -> float:
        """Emitted ids per verification step; correction and bonus count. 0 before the first step."""
        return self.num_emitted / self.num_steps if self.num_steps else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted share of the verified draft ids; 0 when none was verified."""
        return self.num_accepted / self.num_verified if self.num_verified else 0.0


@dataclass(frozen=True)
class Finished:
    reason: FinishReason
    usage: Usage
    receipt: SignedStatement | None = None


NodeFrame = Open | Draft | Cancel | Heartbeat
HubFrame = Opened | Verdict | Heartbeat | Drain | PostureChange | Finished

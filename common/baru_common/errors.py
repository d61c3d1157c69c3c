"""The error tree. One class per thing a caller can act on; the gRPC status belongs to the class.

BaruError
├── InvalidRequest        INVALID_ARGUMENT      the request itself is wrong; do not repeat it
│   ├── EmptyPrompt
│   ├── PromptTooLong
│   ├── InvalidDraft
│   └── WorkloadRefused
├── Incompatible          FAILED_PRECONDITION   both sides are fine, but not for each other
│   ├── ProtocolMismatch
│   │   └── UnknownFrame  UNIMPLEMENTED         the peer is of a later revision
│   ├── TargetMismatch
│   ├── TokenizerMismatch
│   └── VocabularyMismatch
├── Superseded            FAILED_PRECONDITION   a later stream of the session has taken its place
├── Unauthenticated       UNAUTHENTICATED       one side's certificate is missing, expired, revoked or of another kit
├── PermissionDenied      PERMISSION_DENIED     it is not the caller's
├── NotFound              NOT_FOUND
├── CapacityExhausted     RESOURCE_EXHAUSTED    try again after `retry_after_s`
├── HubUnavailable        UNAVAILABLE           nobody answers, or the hub is draining
│   └── ClockError
├── HubTimeout            DEADLINE_EXCEEDED
├── ProtocolViolation     INTERNAL              the peer broke the contract
├── ReceiptInvalid        DATA_LOSS             what a hub signed is not what is here; `details["field"]` differs
├── AuditBroken           DATA_LOSS             the audit log is not what was written; `details` say where
├── EngineFailure         INTERNAL              the target failed; other sessions go on
├── ModelFileError        FAILED_PRECONDITION   a local model file is missing or unusable
└── ConfigError           INVALID_ARGUMENT      an option is wrong or contradicts another
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar


class BaruError(Exception):
    """Base of all errors this project raises on purpose.

    `hint` says what to do about it; `details` are machine-readable facts that travel with the status.
    """

    reason: ClassVar[str] = "BARU_ERROR"
    """Stable name of the error on the wire, UPPER_SNAKE_CASE, unique in the tree."""
    status: ClassVar[str] = "UNKNOWN"
    """Name of the gRPC status code."""

    def __init__(self, message: str, *, hint: str = "", details: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.details = dict(details or {})

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class InvalidRequest(BaruError):
    reason, status = "INVALID_REQUEST", "INVALID_ARGUMENT"


class EmptyPrompt(InvalidRequest):
    reason = "EMPTY_PROMPT"


class PromptTooLong(InvalidRequest):
    reason = "PROMPT_TOO_LONG"


class InvalidDraft(InvalidRequest):
    reason = "INVALID_DRAFT"


class WorkloadRefused(InvalidRequest):
    reason = "WORKLOAD_REFUSED"


class Incompatible(BaruError):
    reason, status = "INCOMPATIBLE", "FAILED_PRECONDITION"


class ProtocolMismatch(Incompatible):
    reason = "PROTOCOL_MISMATCH"


class UnknownFrame(ProtocolMismatch):
    reason, status = "UNKNOWN_FRAME", "UNIMPLEMENTED"


class TargetMismatch(Incompatible):
    reason = "TARGET_MISMATCH"


class TokenizerMismatch(Incompatible):
    reason = "TOKENIZER_MISMATCH"


class VocabularyMismatch(Incompatible):
    reason = "VOCABULARY_MISMATCH"


class Superseded(BaruError):
    reason, status = "SUPERSEDED", "FAILED_PRECONDITION"


class Unauthenticated(BaruError):
    reason, status = "UNAUTHENTICATED", "UNAUTHENTICATED"


class PermissionDenied(BaruError):
    reason, status = "PERMISSION_DENIED", "PERMISSION_DENIED"


class NotFound(BaruError):
    reason, status = "NOT_FOUND", "NOT_FOUND"


class CapacityExhausted(BaruError):
    """No room now; `retry_after_s` is the hub's estimate of when there will be."""

    reason, status = "CAPACITY_EXHAUSTED", "RESOURCE_EXHAUSTED"

    def __init__(
        self,
        message: str,
        *,
        retry_after_s: float = 1.0,
        hint: str = "",
        details: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message, hint=hint, details=details)
        self.retry_after_s = retry_after_s


class HubUnavailable(BaruError):
    reason, status = "HUB_UNAVAILABLE", "UNAVAILABLE"


class ClockError(HubUnavailable):
    """This machine's clock is wrong, and no certificate can be judged. Like a hub that is away: it passes."""

    reason = "CLOCK_WRONG"


class HubTimeout(BaruError):
    reason, status = "HUB_TIMEOUT", "DEADLINE_EXCEEDED"


class ProtocolViolation(BaruError):
    reason, status = "PROTOCOL_VIOLATION", "INTERNAL"


class ReceiptInvalid(BaruError):
    reason, status = "RECEIPT_INVALID", "DATA_LOSS"


class AuditBroken(BaruError):
    reason, status = "AUDIT_BROKEN", "DATA_LOSS"


class EngineFailure(BaruError):
    reason, status = "ENGINE_FAILURE", "INTERNAL"


class ModelFileError(BaruError):
    reason, status = "MODEL_FILE_ERROR", "FAILED_PRECONDITION"


class ConfigError(BaruError):
    reason, status = "CONFIG_ERROR", "INVALID_ARGUMENT"


def error_tree(root: type[BaruError] = BaruError) -> Iterator[type[BaruError]]:
    """Yield `root` and every class below it, parents first: those that are drawn above, and may go over the wire."""
    yield root
    for child in root.__subclasses__():
        if child.__module__ == __name__:
            yield from error_tree(child)


def error_class(reason: str) -> type[BaruError]:
    """Return the class with this wire name; `BaruError` for one that this version does not know."""
    return next((cls for cls in error_tree() if cls.reason == reason), BaruError)

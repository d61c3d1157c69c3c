"""What one identity may take of the hub, and all of them together. Pure decisions over plain counts."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from baru_common.errors import BaruError, CapacityExhausted, ConfigError, InvalidRequest, PromptTooLong
from baru_common.frames import Open
from baru_common.sampling.grammar import MAX_GRAMMAR_BYTES
from baru_common.sampling.params import MAX_STOP_IDS, MAX_STOP_STRINGS
from baru_common.signatures import ANYBODY

_DRAFT_ID_BYTES = 512
"""Most bytes that a drafted id takes in a frame, with the distribution it was drawn from."""
_LEAST = {
    "max_sessions": 1,
    "max_identity_sessions": 1,
    "max_tokens_in_flight": 1,
    "max_identity_tokens_in_flight": 1,
    "max_prompt_tokens": 1,
    "max_output_tokens": 1,
    "max_stops": 0,
    "max_draft_ahead": 0,
    "max_frame_bytes": 1024,
    "max_frames_per_s": 10,  # heartbeats alone are five
    "max_calls": 1,
    "max_identity_calls": 1,
    "max_calls_per_s": 0.1,
    "max_connections": 1,
    "max_idle_s": 1,
    "max_session_age_s": 1,
    "max_grammar_bytes": 0,
    "grammar_cpu_s": 0.1,
    "grammar_mb": 16,
    "grammar_step_ms": 1,
}


@dataclass(frozen=True)
class Quotas:
    """Limits; ConfigError names one that is out of range."""

    max_sessions: int = 16
    """Most sessions at a time."""
    max_identity_sessions: int = 8
    """Most of them of one identity."""
    max_tokens_in_flight: int = 1 << 21
    """Most ids that all sessions together may come to hold, prompts and outputs; memory bounds them, too."""
    max_identity_tokens_in_flight: int = 1 << 20
    """Most of them of one identity."""
    max_prompt_tokens: int = 1 << 17
    """Most ids of one prompt; the context limit bounds it, too."""
    max_output_tokens: int = 1 << 20
    """Most that `max_tokens` may be, and most ids emitted where it is absent; the context limit bounds them, too."""
    max_stops: int = MAX_STOP_IDS + MAX_STOP_STRINGS
    """Most stop ids and stop strings of one request."""
    max_draft_ahead: int = 64
    """Most drafted ids past the committed length that the hub keeps per session."""
    max_frame_bytes: int = 1 << 17
    """Most bytes of a frame after Open."""
    max_frames_per_s: float = 500.0
    """Frames read per second and stream, a second's worth of them at once; one counts once for each KiB begun. A
    node that stays above it for long is cut off."""
    max_calls: int = 1024
    """Most calls at a time, of whatever kind."""
    max_identity_calls: int = 64
    """Most of them of one identity."""
    max_calls_per_s: float = 20.0
    """Calls begun per second and identity, five seconds' worth of them at once; a tokenizer counts as ten."""
    max_connections: int = 1024
    """Most connections at a time."""
    max_idle_s: float = 300.0
    """A node that has neither sent nor taken a frame for so long is gone."""
    max_session_age_s: float = 4 * 3600.0
    """A session ends when it is so old."""
    max_grammar_bytes: int = MAX_GRAMMAR_BYTES
    """Most bytes of a grammar; 0: none is compiled."""
    grammar_cpu_s: float = 2.0
    """CPU time that compiling a grammar and trying it may take."""
    grammar_mb: int = 512
    """Memory that it may take, MB."""
    grammar_step_ms: float = 20.0
    """CPU time that following it may take, on average over a session's steps."""

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            if not least <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} is {getattr(self, name)}, must be at least {least}")
        if self.max_frame_bytes < self.max_draft_ahead * _DRAFT_ID_BYTES:
            raise ConfigError(
                f"max_frame_bytes is {self.max_frame_bytes}, too few for a draft of {self.max_draft_ahead} ids",
                hint=f"use at least {self.max_draft_ahead * _DRAFT_ID_BYTES}",
            )

    def within(self, capacity: int | None) -> Quotas:
        """Return these quotas for a hub whose memory holds `capacity` ids: no identity may have more than half."""
        if capacity is None:
            return self
        most = max(min(self.max_identity_tokens_in_flight, capacity // 2), 1)
        return replace(self, max_identity_tokens_in_flight=most)

    def identity_calls(self, identity: str) -> int:
        """Most calls of this identity at a time."""
        return self.max_calls if identity == ANYBODY else min(self.max_identity_calls, self.max_calls)


DEFAULT_QUOTAS = Quotas()


@dataclass(frozen=True)
class Load:
    """What is held, or about to be."""

    num_sessions: int = 0
    num_tokens: int = 0

    def __add__(self, other: Load) -> Load:
        return Load(self.num_sessions + other.num_sessions, self.num_tokens + other.num_tokens)

    def __sub__(self, other: Load) -> Load:
        return Load(self.num_sessions - other.num_sessions, self.num_tokens - other.num_tokens)


def over_own(load: Load, identity: str, quotas: Quotas) -> CapacityExhausted | None:
    """Return the error of an identity that holds `load`, when that is more than it may."""
    if identity == ANYBODY:
        return None
    if load.num_sessions > quotas.max_identity_sessions:
        return CapacityExhausted(
            f"{identity} has all {quotas.max_identity_sessions} sessions that one node may have",
            hint="end one first, or raise max_identity_sessions at the hub",
            details={"limit": "max_identity_sessions"},
        )
    if load.num_tokens > quotas.max_identity_tokens_in_flight:
        return CapacityExhausted(
            f"the sessions of {identity} would come to {load.num_tokens} tokens, one node may have"
            f" {quotas.max_identity_tokens_in_flight}",
            hint="set max_tokens, end a session first, or raise max_identity_tokens_in_flight at the hub",
            details={"limit": "max_identity_tokens_in_flight"},
        )
    return None


def over_total(load: Load, quotas: Quotas) -> CapacityExhausted | None:
    """Return the error of a hub that holds `load`, when that is more than it may."""
    if load.num_sessions > quotas.max_sessions:
        return CapacityExhausted(
            f"all {quotas.max_sessions} sessions are taken",
            hint="try again later, or raise max_sessions at the hub",
            details={"limit": "max_sessions"},
        )
    if load.num_tokens > quotas.max_tokens_in_flight:
        return CapacityExhausted(
            f"all sessions would come to {load.num_tokens} tokens, at most {quotas.max_tokens_in_flight} are served",
            hint="set max_tokens, try again later, or raise max_tokens_in_flight at the hub",
            details={"limit": "max_tokens_in_flight"},
        )
    return None


def too_old(quotas: Quotas) -> CapacityExhausted:
    """Return the error of a session that has reached its age."""
    return CapacityExhausted(
        f"the session is {quotas.max_session_age_s:.0f} s old, as old as one may be",
        hint="open a new one that goes on from its output, or raise max_session_age_s at the hub",
        details={"limit": "max_session_age_s"},
    )


def check_request(request: Open, quotas: Quotas) -> None:
    """Raise the error that says which of its sizes no session may have."""
    params = request.params
    if len(request.prompt_ids) > quotas.max_prompt_tokens:
        raise prompt_too_long(len(request.prompt_ids), quotas.max_prompt_tokens)
    if (params.max_tokens or 0) > quotas.max_output_tokens:
        raise _too_much("max_tokens", f"is {params.max_tokens}", quotas.max_output_tokens, "max_output_tokens")
    num_stops = len(params.stop_ids) + len(params.stop_strings)
    if num_stops > quotas.max_stops:
        kind = "stop_strings" if params.stop_strings else "stop_ids"
        raise _too_much(kind, f"and other stops are {num_stops}", quotas.max_stops, "max_stops")
    size = len(params.grammar.text.encode()) if params.grammar else 0
    if size > quotas.max_grammar_bytes:
        raise _too_much("grammar", f"has {size} bytes", quotas.max_grammar_bytes, "max_grammar_bytes")


def prompt_too_long(num_ids: int, most: int) -> PromptTooLong:
    """Return the error of a prompt of more than `most` ids."""
    return PromptTooLong(
        f"the prompt has {num_ids} tokens, at most {most} are allowed",
        hint="shorten the prompt",
        details={"param": "prompt_ids"},
    )


def _too_much(param: str, what: str, most: int, limit: str) -> BaruError:
    return InvalidRequest(
        f"{param} {what}, at most {most} are allowed",
        hint=f"ask for less, or raise {limit} at the hub",
        details={"param": param, "limit": limit},
    )

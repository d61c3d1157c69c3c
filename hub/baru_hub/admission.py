"""Whether a request can be served here: pure checks, with the error that says why not."""

from __future__ import annotations

import hmac

from baru_common.errors import (
    CapacityExhausted,
    EmptyPrompt,
    InvalidRequest,
    PermissionDenied,
    ProtocolMismatch,
    Superseded,
    TargetMismatch,
    TokenizerMismatch,
    VocabularyMismatch,
)
from baru_common.frames import PROTOCOL_REVISION, Limits, Open, Resume
from baru_common.sampling import SamplingParams
from baru_common.workloads import check_workload

from .engines import EngineSpec
from .live import Resident
from .quotas import DEFAULT_QUOTAS, Quotas, check_request, prompt_too_long


def check_open(request: Open, spec: EngineSpec, limits: Limits, quotas: Quotas = DEFAULT_QUOTAS) -> None:
    """Raise the BaruError that says why `request` cannot be served here, if it cannot."""
    _check_fit(request, spec)
    check_workload(request.workload)
    if not request.prompt_ids:
        raise EmptyPrompt("the prompt is empty", hint="send at least one token", details={"param": "prompt_ids"})
    most = min(limits.max_prompt_tokens, spec.context_limit - 1)
    if len(request.prompt_ids) > most:
        raise prompt_too_long(len(request.prompt_ids), most)
    check_request(request, quotas)
    if not spec.samples and (param := _needs_logits(request.params)):
        raise InvalidRequest(
            f"{param} cannot be served: the {spec.engine} engine decides by script and has no logits",
            hint="leave it out, or use a hub with a real target",
            details={"param": param},
        )
    _check_ids("prompt_ids", request.prompt_ids, spec)
    if request.resume:
        _check_resume(request, request.resume, spec, quotas)
    request.params.require_ids_below(spec.vocabulary.size)
    if spec.capacity is not None and (length := max_length(request, spec, quotas)) > spec.capacity:
        raise CapacityExhausted(
            f"the session may come to {length} ids, the hub's KV cache holds {spec.capacity}",
            hint="set max_tokens lower, or give the hub more memory for keys and values",
            details={"limit": "kv_cache_mb"},
        )


def max_length(request: Open, spec: EngineSpec, quotas: Quotas = DEFAULT_QUOTAS) -> int:
    """Return the most ids that the session may come to hold, prompt and output."""
    room = min(spec.context_limit - len(request.prompt_ids), quotas.max_output_tokens)
    return len(request.prompt_ids) + min(request.params.max_tokens or room, room)


def check_claim(resume: Resume, resident: Resident, identity: str) -> None:
    """Raise the BaruError that says why this node may not have this session, if it may not.

    An epoch counts once its node has said something in it: an `Opened` that got lost shuts nobody out.
    """
    owns = hmac.compare_digest(resume.session_key, resident.key)
    if not owns or identity != resident.identity:
        raise PermissionDenied("the session is not this node's own", hint="open a new one")
    if resume.epoch < resident.heard_epoch:
        raise Superseded(
            f"epoch {resume.epoch} of the session is over, {resident.heard_epoch} has begun",
            hint="use the later stream",
        )


def goes_on(request: Open, resident: Resident) -> bool:
    """True when what the node says stands is the start of what `resident` has decided, for the same request."""
    state, num_known = resident.state, len(request.committed)
    ours = state.sampling.params
    return (
        state.num_prompt == len(request.prompt_ids)
        and state.first_decided <= num_known
        and tuple(state.committed[:num_known]) == request.committed
        and request.params.with_seed(ours.seed or 0) == ours
    )


def _check_fit(request: Open, spec: EngineSpec) -> None:
    if request.protocol_revision != PROTOCOL_REVISION:
        raise ProtocolMismatch(
            f"the node speaks protocol revision {request.protocol_revision}, this hub {PROTOCOL_REVISION}",
            hint="use the same release on hub and node",
        )
    if request.target_fingerprint != spec.fingerprint:
        raise TargetMismatch("the hub serves another target than the node expects", hint="connect again")
    if request.tokenizer_digest != spec.bundle.digest:
        raise TokenizerMismatch("the node uses another tokenizer than the target's", hint="connect again to fetch it")
    if request.drafter and request.drafter.vocabulary_digest not in (b"", spec.vocabulary.digest):
        raise VocabularyMismatch(
            f"the node's {request.drafter.family} drafter has another vocabulary than the target",
            hint="use a drafter that was made for this target's tokenizer",
        )


def _check_resume(request: Open, resume: Resume, spec: EngineSpec, quotas: Quotas) -> None:
    _check_ids("resume", resume.output_ids + resume.provisional_ids, spec)
    most, length = max_length(request, spec, quotas), len(request.committed) + len(resume.provisional_ids)
    if length > most:
        raise InvalidRequest(
            f"resume makes {length} ids with the prompt, the request allows {most}", details={"param": "resume"}
        )


def _check_ids(param: str, ids: tuple[int, ...], spec: EngineSpec) -> None:
    if max(ids, default=0) >= spec.vocabulary.size:
        raise InvalidRequest(
            f"{param} holds {max(ids)}, which is outside the vocabulary of {spec.vocabulary.size}",
            details={"param": param},
        )


def _needs_logits(params: SamplingParams) -> str | None:
    """Return the name of a parameter that asks for more than the likeliest id of a script."""
    if not params.is_greedy:
        return "temperature"
    return next(iter(params.adjustments), None if params.logprobs is None else "logprobs")

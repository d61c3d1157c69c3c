"""The only translation between frames and protobuf messages, and between errors and gRPC statuses."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from baru.drafting.v1 import drafting_pb2 as pb

from . import errors, frames
from .sampling import Grammar, GrammarKind, SamplingMode, SamplingParams, SparseProbs
from .sampling.params import MAX_IDS, MAX_STOP_IDS, MAX_STOP_STRINGS
from .shaping import check_shape
from .signatures import SignedStatement

ERROR_DOMAIN = "drafting.baru"
_MAX_NAME, _MAX_TITLE = 64, 128
# What grpc.aio puts in the place of the hub's own status when the stream ends during a write.
_STREAM_BROKE = "Internal error from Core"
_SAMPLING_MODES: dict[int, SamplingMode] = {0: SamplingMode.COUPLED} | {
    pb.SamplingMode.Value(f"SAMPLING_MODE_{mode.name}"): mode for mode in SamplingMode
}
_GRAMMAR_NUMBERS = {kind: pb.GrammarKind.Value(f"GRAMMAR_KIND_{kind.name}") for kind in GrammarKind}
_GRAMMAR_KINDS: dict[int, GrammarKind] = {number: kind for kind, number in _GRAMMAR_NUMBERS.items()}
_FINISH_REASONS: dict[int, frames.FinishReason] = {
    pb.FinishReason.Value(f"FINISH_REASON_{reason.name}"): reason for reason in frames.FinishReason
}

_MOST_PARAMS = dict.fromkeys(("logit_bias", "banned_ids", "allowed_ids", "forced_ids"), MAX_IDS) | {
    "stop_ids": MAX_STOP_IDS,
    "stop_strings": MAX_STOP_STRINGS,
}

# -- frames to messages


def encode_request(frame: frames.NodeFrame) -> pb.DecodeRequest:
    """Return the message of a frame from node to hub."""
    if isinstance(frame, frames.Draft):
        return pb.DecodeRequest(
            draft=pb.Draft(
                epoch=frame.epoch,
                chain_id=frame.chain_id,
                base=frame.base,
                offset=frame.offset,
                token_ids=frame.token_ids,
                draft_probs=[pb.SparseProbs(token_ids=p.ids, weights=p.weights) for p in frame.draft_probs],
            )
        )
    if isinstance(frame, frames.Open):
        return pb.DecodeRequest(open=_encode_open(frame))
    if isinstance(frame, frames.Heartbeat):
        return pb.DecodeRequest(heartbeat=pb.Heartbeat(sequence=frame.sequence, sent_ns=frame.sent_ns))
    return pb.DecodeRequest(cancel=pb.Cancel())


def encode_response(frame: frames.HubFrame) -> pb.DecodeResponse:
    """Return the message of a frame from hub to node."""
    if isinstance(frame, frames.Verdict):
        return pb.DecodeResponse(
            verdict=pb.Verdict(
                epoch=frame.epoch,
                base=frame.base,
                num_verified=frame.num_verified,
                num_accepted=frame.num_accepted,
                token_ids=frame.token_ids,
                chain_id=frame.chain_id,
                depth_hint=frame.depth_hint,
                num_guessed=frame.num_guessed,
                logprobs=[
                    pb.TokenLogprobs(
                        logprob=entry.logprob,
                        top_ids=[token for token, _ in entry.top],
                        top_logprobs=[logprob for _, logprob in entry.top],
                    )
                    for entry in frame.logprobs
                ],
            )
        )
    if isinstance(frame, frames.Heartbeat):
        return pb.DecodeResponse(heartbeat=pb.Heartbeat(sequence=frame.sequence, sent_ns=frame.sent_ns))
    if isinstance(frame, frames.Opened):
        return pb.DecodeResponse(
            opened=pb.Opened(
                session_id=frame.session_id,
                epoch=frame.epoch,
                num_committed=frame.num_committed,
                max_draft_ahead=frame.max_draft_ahead,
                session_key=frame.session_key,
                continued=frame.continued,
                receipt_key=frame.receipt_key,
                posture=pb.Posture(**vars(frame.posture)) if frame.posture else None,
            )
        )
    if isinstance(frame, frames.Drain):
        return pb.DecodeResponse(drain=pb.Drain(grace_ms=round(frame.grace_s * 1000)))
    if isinstance(frame, frames.PostureChange):
        return pb.DecodeResponse(posture_change=pb.PostureChange(posture=pb.Posture(**vars(frame.posture))))
    reason = pb.FinishReason.Value(f"FINISH_REASON_{frame.reason.name}")
    receipt = pb.Receipt(**vars(frame.receipt)) if frame.receipt else None
    return pb.DecodeResponse(finished=pb.Finished(reason=reason, usage=pb.Usage(**vars(frame.usage)), receipt=receipt))


def _encode_open(frame: frames.Open) -> pb.Open:
    return pb.Open(
        protocol_revision=frame.protocol_revision,
        target_fingerprint=frame.target_fingerprint,
        tokenizer_digest=frame.tokenizer_digest,
        prompt_ids=frame.prompt_ids,
        params=_encode_params(frame.params),
        drafter=pb.DrafterInfo(**vars(frame.drafter)) if frame.drafter else None,
        resume=pb.Resume(**vars(frame.resume)) if frame.resume else None,
        tier=frame.tier,
        workload=frame.workload,
    )


def _encode_params(params: SamplingParams) -> pb.SamplingParams:
    grammar = params.grammar
    special: dict[str, Any] = {
        "logit_bias": [pb.LogitBias(token_id=token, bias=bias) for token, bias in params.biases],
        "sampling_mode": f"SAMPLING_MODE_{params.sampling_mode.name}",
        "grammar": grammar and pb.Grammar(kind=_GRAMMAR_NUMBERS[grammar.kind], text=grammar.text),
    }
    return pb.SamplingParams(**(vars(params) | special))


def encode_description(hub: frames.HubDescription) -> pb.DescribeResponse:
    """Return the message that describes a hub."""
    shape = pb.TrafficShape(**vars(hub.traffic_shape)) if hub.traffic_shape else None
    return pb.DescribeResponse(**(vars(hub) | {"limits": pb.Limits(**vars(hub.limits)), "traffic_shape": shape}))


# -- messages to frames


def decode_request(message: pb.DecodeRequest, max_ids: int | None = None) -> frames.NodeFrame:
    """Return the frame of a message from a node.

    `max_ids`: most entries of any of its lists of ids; nothing is made of one that has more.

    UnknownFrame for one of a later revision; InvalidRequest for values that are wrong whatever the
    session's state. Limits that depend on the session are checked there.
    """
    kind = message.WhichOneof("frame")
    if max_ids is not None:
        _require_short(message, max_ids)
    if kind == "draft":
        draft = message.draft
        probs = tuple(SparseProbs(tuple(p.token_ids), p.weights) for p in draft.draft_probs)
        return frames.Draft(draft.epoch, draft.chain_id, draft.base, draft.offset, tuple(draft.token_ids), probs)
    if kind == "heartbeat":
        return frames.Heartbeat(message.heartbeat.sequence, message.heartbeat.sent_ns)
    if kind == "open":
        return _decode_open(message.open)
    if kind == "cancel":
        return frames.Cancel()
    raise errors.UnknownFrame(
        "a frame of a kind that this hub does not know", hint="use the same release on hub and node"
    )


def _require_short(message: pb.DecodeRequest, most: int) -> None:
    """Refuse lists that are too long while counting them is all that they have cost."""
    if message.HasField("draft"):
        num_ids = max(len(message.draft.token_ids), len(message.draft.draft_probs))
        if num_ids > most:
            raise errors.InvalidDraft(f"a draft holds {num_ids} ids, at most {most} may be drafted ahead")
    if message.HasField("open"):
        opening = message.open
        if len(opening.prompt_ids) > most:
            raise errors.PromptTooLong(
                f"the prompt has {len(opening.prompt_ids)} tokens, more than the context of {most}",
                hint="shorten the prompt",
                details={"param": "prompt_ids"},
            )
        if len(opening.resume.output_ids) + len(opening.resume.provisional_ids) > most:
            raise errors.InvalidRequest(
                f"resume holds more ids than the context of {most}", details={"param": "resume"}
            )
        _require_short_params(opening.params)


def _require_short_params(params: pb.SamplingParams) -> None:
    for name, most in _MOST_PARAMS.items():
        if (num := len(getattr(params, name))) > most:
            raise errors.InvalidRequest(
                f"{name} has {num} entries, at most {most} are allowed", details={"param": name}
            )


def _decode_open(message: pb.Open) -> frames.Open:
    for param in ("tier", "workload"):
        if len(getattr(message, param)) > _MAX_NAME:
            raise errors.InvalidRequest(f"{param} has more than {_MAX_NAME} characters", details={"param": param})
    return frames.Open(
        prompt_ids=tuple(message.prompt_ids),
        params=_decode_params(message.params),
        target_fingerprint=message.target_fingerprint,
        tokenizer_digest=message.tokenizer_digest,
        drafter=_decode_drafter(message.drafter) if message.HasField("drafter") else None,
        resume=_decode_resume(message.resume) if message.HasField("resume") else None,
        tier=message.tier,
        workload=message.workload,
        protocol_revision=message.protocol_revision,
    )


def _decode_drafter(message: pb.DrafterInfo) -> frames.DrafterInfo:
    if not 1 <= len(message.family) <= _MAX_NAME:
        raise errors.InvalidRequest(f"drafter.family must have 1 to {_MAX_NAME} characters")
    if max(len(message.model), len(message.engine)) > _MAX_TITLE or len(message.digest) not in (0, 32):
        raise errors.InvalidRequest(
            f"drafter.model and drafter.engine may have {_MAX_TITLE} characters, drafter.digest 32 bytes",
            details={"param": "drafter"},
        )
    return frames.DrafterInfo(**_fields(message))


def _decode_resume(message: pb.Resume) -> frames.Resume:
    _require_known("resume", message)
    if len(message.session_id) > 64 or len(message.session_key) > 32:
        raise errors.InvalidRequest("resume names no session of this hub's making", details={"param": "resume"})
    return frames.Resume(
        message.session_id,
        message.session_key,
        message.epoch,
        tuple(message.output_ids),
        tuple(message.provisional_ids),
    )


def _decode_params(message: pb.SamplingParams) -> SamplingParams:
    """Absent fields get their defaults; what this revision does not know is refused, not passed over."""
    _require_known("params", message)
    for entry in message.logit_bias:
        _require_known("logit_bias", entry)
    _require_known("grammar", message.grammar)
    mode = _SAMPLING_MODES.get(message.sampling_mode)
    if mode is None:
        raise errors.InvalidRequest(
            f"sampling_mode is {message.sampling_mode}, which this hub does not know",
            details={"param": "sampling_mode"},
        )
    values: dict[str, Any] = {
        field.name: tuple(value) if field.is_repeated else value for field, value in message.ListFields()
    }
    special = {
        "logit_bias": tuple((entry.token_id, entry.bias) for entry in message.logit_bias),
        "sampling_mode": mode,
        "grammar": _decode_grammar(message.grammar) if message.HasField("grammar") else None,
    }
    return SamplingParams(**(values | special))


def _require_known(param: str, message: Any) -> None:
    unknown_fields: Any = UnknownFieldSet(message)  # its stub leaves out that it is iterable
    if unknown := sorted({field.field_number for field in unknown_fields}):
        raise errors.InvalidRequest(
            f"{param} has fields that this hub does not know (numbers {', '.join(map(str, unknown))})",
            hint="use the same release on hub and node",
            details={"param": param},
        )


def _decode_grammar(message: pb.Grammar) -> Grammar:
    kind = _GRAMMAR_KINDS.get(message.kind)
    if kind is None:
        raise errors.InvalidRequest(
            f"grammar is of kind {message.kind}, which this hub does not know", details={"param": "grammar"}
        )
    return Grammar(kind, message.text)


def decode_response(message: pb.DecodeResponse) -> frames.HubFrame:
    """Return the frame of a message from a hub; ProtocolViolation for one that makes no sense."""
    kind = message.WhichOneof("frame")
    if kind == "verdict":
        return _decode_verdict(message.verdict)
    if kind == "heartbeat":
        return frames.Heartbeat(message.heartbeat.sequence, message.heartbeat.sent_ns)
    if kind == "opened":
        o = message.opened
        return frames.Opened(
            o.session_id,
            o.epoch,
            o.num_committed,
            o.max_draft_ahead,
            o.session_key,
            continued=o.continued,
            receipt_key=o.receipt_key,
            posture=_decode_posture(o.posture) if o.HasField("posture") else None,
        )
    if kind == "drain":
        return frames.Drain(message.drain.grace_ms / 1000)
    if kind == "posture_change":
        return frames.PostureChange(_decode_posture(message.posture_change.posture))
    if kind == "finished":
        reason = _FINISH_REASONS.get(message.finished.reason)
        if reason is None:
            raise errors.ProtocolViolation(f"the hub finished for an unknown reason ({message.finished.reason})")
        usage = message.finished.usage
        seed = usage.seed if usage.HasField("seed") else None
        receipt = message.finished.receipt if message.finished.HasField("receipt") else None
        signed = receipt and SignedStatement(receipt.statement, receipt.signature, receipt.certificate)
        return frames.Finished(reason, frames.Usage(**(_fields(usage) | {"seed": seed})), signed)
    raise errors.ProtocolViolation(
        "the hub sent a frame of an unknown kind", hint="use the same release on hub and node"
    )


def _decode_posture(message: pb.Posture) -> frames.Posture:
    limits = {name: getattr(message, name) if message.HasField(name) else None for name in ("max_depth", "max_ahead")}
    if message.fallback not in ("", "local", "wait", "fail"):
        raise errors.ProtocolViolation(f"the hub's posture names an unknown fallback: {message.fallback!r}")
    return frames.Posture(**(_fields(message) | {"drafters": tuple(message.drafters)} | limits))


def _decode_verdict(v: pb.Verdict) -> frames.Verdict:
    num_emitted = len(v.token_ids)
    num_drafted = v.num_accepted + v.num_guessed
    # Several steps at a time are all the target's own.
    adds_up = num_drafted == 0 or num_emitted - 1 <= num_drafted <= num_emitted
    if not num_emitted or not adds_up or v.num_accepted > v.num_verified:
        counts = f"{num_emitted} ids, {v.num_verified} verified, {v.num_accepted} accepted, {v.num_guessed} guessed"
        raise errors.ProtocolViolation(f"the hub sent a verdict that contradicts itself: {counts}")
    if len(v.logprobs) not in (0, num_emitted):
        raise errors.ProtocolViolation(f"the hub sent {len(v.logprobs)} log-probabilities for {num_emitted} ids")
    if any(len(entry.top_ids) != len(entry.top_logprobs) for entry in v.logprobs):
        raise errors.ProtocolViolation("the hub sent likeliest ids without their log-probabilities")
    if any(map(math.isnan, (x for entry in v.logprobs for x in (entry.logprob, *entry.top_logprobs)))):
        raise errors.ProtocolViolation("the hub sent a log-probability that is not a number")
    logprobs = tuple(
        frames.TokenLogprobs(entry.logprob, tuple(zip(entry.top_ids, entry.top_logprobs, strict=True)))
        for entry in v.logprobs
    )
    return frames.Verdict(
        epoch=v.epoch,
        base=v.base,
        num_verified=v.num_verified,
        num_accepted=v.num_accepted,
        token_ids=tuple(v.token_ids),
        chain_id=v.chain_id,
        depth_hint=v.depth_hint,
        num_guessed=v.num_guessed,
        logprobs=logprobs,
    )


def decode_description(message: pb.DescribeResponse) -> frames.HubDescription:
    """Return what a hub says of itself; ProtocolViolation for what makes no sense."""
    shape = frames.TrafficShape(**_fields(message.traffic_shape)) if message.HasField("traffic_shape") else None
    if shape:
        check_shape(shape, errors.ProtocolViolation)
    fields = _fields(message) | {
        "eos_ids": tuple(message.eos_ids),
        "limits": frames.Limits(**_fields(message.limits)),
        "traffic_shape": shape,
    }
    return frames.HubDescription(**fields)


def _fields(message: Any) -> dict[str, Any]:
    return {field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields}


# -- errors


def to_status(error: errors.BaruError) -> grpc.Status:
    """Return the gRPC status of `error`, with `google.rpc.ErrorInfo` (and RetryInfo) as details."""
    described: grpc.Status = rpc_status.to_status(_described(error))
    return described


def encode_error(error: errors.BaruError) -> bytes:
    """Return `error` as a stream of cells carries it."""
    return bytes(_described(error).SerializeToString())


def _described(error: errors.BaruError) -> status_pb2.Status:
    info = error_details_pb2.ErrorInfo(
        reason=error.reason,
        domain=ERROR_DOMAIN,
        metadata=error.details | ({"hint": error.hint} if error.hint else {}),
    )
    details = [_pack(info)]
    if isinstance(error, errors.CapacityExhausted):
        delay = Duration()
        delay.FromMilliseconds(round(error.retry_after_s * 1000))
        details.append(_pack(error_details_pb2.RetryInfo(retry_delay=delay)))
    code = getattr(grpc.StatusCode, error.status)
    return status_pb2.Status(code=code.value[0], message=error.message, details=details)


def _pack(message: Any) -> AnyMessage:
    packed = AnyMessage()
    packed.Pack(message)
    return packed


def from_rpc_error(error: grpc.aio.AioRpcError) -> errors.BaruError:
    """Return the error that `to_status` described, or the nearest one for a bare status."""
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            with suppress(DecodeError):  # what a proxy put there may be anything
                if told := _told(_read_details(status_pb2.Status.FromString(value)), error.details() or ""):
                    return told
    return _from_bare_status(error)


def decode_error(data: bytes) -> errors.BaruError:
    """Return the error that `encode_error` encoded; ProtocolViolation when it is none."""
    with suppress(DecodeError):
        status = status_pb2.Status.FromString(data)
        if told := _told(_read_details(status), status.message):
            return told
    return errors.ProtocolViolation("the hub ended the stream with an error that cannot be read")


def _told(found: dict[str, Any], message: str) -> errors.BaruError | None:
    if "info" not in found:
        return None
    details = dict(found["info"].metadata)
    arguments: dict[str, Any] = {"hint": details.pop("hint", ""), "details": details}
    cls = errors.error_class(found["info"].reason)
    if issubclass(cls, errors.CapacityExhausted) and "retry" in found:
        arguments["retry_after_s"] = found["retry"].retry_delay.ToMilliseconds() / 1000
    return cls(message, **arguments)


def _read_details(status: status_pb2.Status) -> dict[str, Any]:
    readers: dict[str, Callable[[], Any]] = {
        "info": error_details_pb2.ErrorInfo,
        "retry": error_details_pb2.RetryInfo,
    }
    found = {}
    for detail in status.details:
        for name, reader in readers.items():
            message = reader()
            if detail.Unpack(message):
                found[name] = message
    return found


def _from_bare_status(error: grpc.aio.AioRpcError) -> errors.BaruError:
    message = error.details() or error.code().name
    if message == _STREAM_BROKE:
        return errors.HubUnavailable("the hub ended the stream while a frame was being sent", hint="try again")
    bare: dict[grpc.StatusCode, type[errors.BaruError]] = {
        grpc.StatusCode.UNAVAILABLE: errors.HubUnavailable,
        grpc.StatusCode.DEADLINE_EXCEEDED: errors.HubTimeout,
        grpc.StatusCode.RESOURCE_EXHAUSTED: errors.CapacityExhausted,
        grpc.StatusCode.INVALID_ARGUMENT: errors.InvalidRequest,
        grpc.StatusCode.NOT_FOUND: errors.NotFound,
        grpc.StatusCode.PERMISSION_DENIED: errors.PermissionDenied,
        grpc.StatusCode.FAILED_PRECONDITION: errors.Incompatible,
        grpc.StatusCode.UNIMPLEMENTED: errors.ProtocolMismatch,
        grpc.StatusCode.INTERNAL: errors.ProtocolViolation,
    }
    return bare.get(error.code(), errors.BaruError)(message)

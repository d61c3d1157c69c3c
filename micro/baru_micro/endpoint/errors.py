"""Errors as they go over HTTP: one mapping from our tree to status, type and code."""

from __future__ import annotations

from typing import Any

import pydantic
from fastapi.responses import JSONResponse

from baru_common.errors import (
    BaruError,
    CapacityExhausted,
    HubTimeout,
    HubUnavailable,
    InvalidRequest,
    NotFound,
    PromptTooLong,
)
from baru_common.out_of_memory import OUT_OF_MEMORY

RETRY_AFTER_S = 5
"""For a client to wait while no hub answers."""
_PARAMS = {"stop_strings": "stop", "stop_ids": "stop_token_ids", "grammar": "response_format"}
"""Names of ours that requests spell otherwise."""


class Unauthorized(BaruError):
    """No API key, or a wrong one."""

    reason, status = "UNAUTHORIZED", "UNAUTHENTICATED"


class UnknownModel(NotFound):
    """The request names a model that is not served."""

    reason = "UNKNOWN_MODEL"


class TooLarge(InvalidRequest):
    """The body has more bytes than are read."""

    reason = "TOO_LARGE"


def wrong_body(error: pydantic.ValidationError) -> InvalidRequest:
    """Return the error that names the first thing that is wrong with a body."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    # Of several forms that a value may have, each adds its own name.
    param = ".".join(str(part) for part in first["loc"] if not (isinstance(part, str) and "[" in part))
    if first["type"] == "extra_forbidden":
        return InvalidRequest(f"{param} is not a parameter that is served", details={"param": param})
    what = first["msg"][0].lower() + first["msg"][1:]
    return InvalidRequest(f"{param}: {what}" if param else f"the body: {what}", details={"param": param})


def http_status(error: BaruError) -> int:
    """Return the status that an error has over HTTP."""
    if isinstance(error, TooLarge):
        return 413
    if isinstance(error, InvalidRequest):
        return 400
    if isinstance(error, Unauthorized):
        return 401
    if isinstance(error, NotFound):
        return 404
    if isinstance(error, CapacityExhausted):
        return 503 if error.details.get("cause") == OUT_OF_MEMORY else 429
    return 503 if isinstance(error, (HubUnavailable, HubTimeout)) else 500


def error_body(error: BaruError) -> dict[str, Any]:
    """Return what a client is told."""
    status = http_status(error)
    kinds = {401: "authentication_error", 429: "rate_limit_error", 503: "service_unavailable_error"}
    param = error.details.get("param")
    return {
        "error": {
            "message": str(error),
            "type": kinds.get(status, "invalid_request_error" if status < 500 else "server_error"),
            "param": _PARAMS.get(param, param) if param else None,
            "code": _code(error),
        }
    }


def _code(error: BaruError) -> str:
    known = {PromptTooLong: "context_length_exceeded", UnknownModel: "model_not_found", Unauthorized: "invalid_api_key"}
    return known.get(type(error), error.reason.lower())


def error_response(error: BaruError) -> JSONResponse:
    """Return the whole answer for an error."""
    headers = {}
    if isinstance(error, CapacityExhausted):
        headers["Retry-After"] = str(max(round(error.retry_after_s), 1))
    elif http_status(error) == 503:
        headers["Retry-After"] = str(RETRY_AFTER_S)
    if isinstance(error, Unauthorized):
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(error_body(error), http_status(error), headers)

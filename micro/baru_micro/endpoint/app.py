"""The HTTP face of a node: routes, keys, and the end of requests whose client is gone."""

from __future__ import annotations

import asyncio
import hmac
import json
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

import pydantic
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException

from baru_common.errors import BaruError, NotFound
from baru_common.waiting import within
from baru_micro.client import MicroNode
from baru_micro.decoding import Fallback

from .answers import Answer, ChatWriter, TextWriter, Writer
from .errors import TooLarge, Unauthorized, UnknownModel, error_body, error_response, wrong_body
from .event_stream import EventStream, until_gone
from .requests import Ask, ChatRequest, Common, CompletionRequest
from .serving import Room, Serving

MAX_BODY_BYTES = 4 << 20
_READY_S = 1.0
_ANSWER_S = 2.0
"""A hub that takes longer is not there."""
_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
RECONCILE_HEADER = "X-Baru-Reconcile"

_T = TypeVar("_T")
_R = TypeVar("_R", bound=Common)


@dataclass(frozen=True)
class EndpointConfig:
    """How the node serves HTTP."""

    api_keys: tuple[str, ...] = ()
    """One of them must come with each request; none: nobody is asked."""
    max_running: int = 16
    """Most generations at a time."""
    max_waiting: int = 256
    """Most generations that wait for their turn."""


class ClientGone(Exception):
    """Nobody is there to be answered."""


def make_app(node: MicroNode, config: EndpointConfig, metrics: Callable[[], bytes] | None = None) -> FastAPI:
    """Return the application that serves `node`; `metrics` gives what /metrics shows."""
    app = FastAPI(title="Baru node", openapi_url=None, docs_url=None, redoc_url=None)
    endpoint = _Endpoint(node, config, metrics)
    app.get("/livez")(_alive)
    app.get("/readyz")(endpoint.ready)
    app.get("/metrics")(endpoint.metrics)
    app.get("/v1/models")(endpoint.models)
    app.get("/v1/models/{name:path}")(endpoint.model)
    app.post("/v1/chat/completions")(endpoint.chat)
    app.post("/v1/completions")(endpoint.complete)
    app.add_exception_handler(BaruError, _refused)
    app.add_exception_handler(ClientGone, _nobody)
    app.add_exception_handler(HTTPException, _not_here)
    app.add_exception_handler(Exception, _refused)
    return app


class _Endpoint:
    def __init__(self, node: MicroNode, config: EndpointConfig, metrics: Callable[[], bytes] | None) -> None:
        self._node, self._config, self._metrics = node, config, metrics
        self._room = Room(config.max_running, config.max_waiting)
        self._asked: asyncio.Future[bool] | None = None
        self._asked_s = 0.0

    async def ready(self) -> Response:
        """200 when a request would be answered: by a hub, or else by the node itself."""
        serves = await self._hub_serves()
        ready = serves or self._node.fallback is Fallback.LOCAL
        facts = {"ready": ready, "link": self._node.link.state.value, "hub": self._node.hub_address}
        return JSONResponse(facts, 200 if ready else 503)

    async def _hub_serves(self) -> bool:
        """Whoever asks shares one question, whose answer holds for a second: anybody may ask."""
        if self._asked is None or (self._asked.done() and time.monotonic() - self._asked_s > _READY_S):
            self._asked = asyncio.ensure_future(within(self._node.hub_serves(), _ANSWER_S))
            self._asked_s = time.monotonic()
        try:
            return await asyncio.shield(self._asked)
        except asyncio.TimeoutError:
            return False

    async def metrics(self, request: Request) -> Response:
        """In Prometheus' text format."""
        self._authorise(request)
        if self._metrics is None:
            raise NotFound("metrics are not kept here")
        return PlainTextResponse(await asyncio.to_thread(self._metrics), media_type=_PROMETHEUS)

    async def models(self, request: Request) -> Any:
        self._authorise(request)
        return {"object": "list", "data": [self._model()]}

    async def model(self, request: Request, name: str) -> Any:
        self._authorise(request)
        self._require_model(name)
        return self._model()

    async def chat(self, request: Request) -> Response:
        wish = await self._read(request, ChatRequest)
        ask = wish.ask(request.headers.get(RECONCILE_HEADER))
        vocabulary = self._node.tokenizer.vocabulary
        writer = ChatWriter(vocabulary, bool(wish.logprobs), bool(ask.tools) or ask.calls_only, ask.calls_only)
        return await self._answer(request, wish, ask, "chatcmpl-", writer)

    async def complete(self, request: Request) -> Response:
        wish = await self._read(request, CompletionRequest)
        ask = wish.ask(request.headers.get(RECONCILE_HEADER))
        writer = TextWriter(self._node.tokenizer.vocabulary, wish.logprobs is not None)
        return await self._answer(request, wish, ask, "cmpl-", writer)

    async def _answer(self, request: Request, wish: Common, ask: Ask, prefix: str, writer: Writer) -> Response:
        hub = self._node.hub
        answer = Answer(
            id=prefix + uuid.uuid4().hex,
            created=int(time.time()),
            model=wish.model,
            fingerprint=hub.target_fingerprint.hex()[:16],
            vocabulary=self._node.tokenizer.vocabulary,
        )
        serving = Serving(self._node, self._room, ask, answer, writer)
        if not wish.streams:
            return JSONResponse(await _unless_gone(request, _whole(serving)))
        lines = _lines(serving, include_usage=wish.includes_usage)
        first = await _unless_gone(request, anext(lines))  # what is wrong is said by the status
        return EventStream(_all(first, lines))

    async def _read(self, request: Request, kind: type[_R]) -> _R:
        """Who asks, then what: nothing is read for a stranger."""
        self._authorise(request)
        data = bytearray()
        async for chunk in request.stream():
            data += chunk
            if len(data) > MAX_BODY_BYTES:
                raise TooLarge(f"the body is larger than {MAX_BODY_BYTES} bytes")
        try:
            wish = kind.model_validate_json(bytes(data))
        except pydantic.ValidationError as error:
            raise wrong_body(error) from None
        self._require_model(wish.model)
        return wish

    def _authorise(self, request: Request) -> None:
        keys = self._config.api_keys
        if not keys:
            return
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        known = [hmac.compare_digest(key.strip().encode(), each.encode()) for each in keys]
        if scheme.lower() != "bearer" or not any(known):
            raise Unauthorized("the API key is missing or wrong", hint="send Authorization: Bearer KEY")

    def _require_model(self, name: str) -> None:
        if name != self._node.hub.target_name:
            raise UnknownModel(
                f"there is no model {name[:100]!r} here",
                hint=f"use {self._node.hub.target_name}",
                details={"param": "model"},
            )

    def _model(self) -> dict[str, Any]:
        hub = self._node.hub
        return {
            "id": hub.target_name,
            "object": "model",
            "created": 0,
            "owned_by": "baru",
            "max_model_len": hub.context_limit,
        }


async def _alive() -> Response:
    return PlainTextResponse("ok")


async def _whole(serving: Serving) -> dict[str, Any]:
    async with serving:
        return await serving.whole()


async def _lines(serving: Serving, *, include_usage: bool) -> AsyncGenerator[str, None]:
    """Yield server-sent events; an error after the first is one of them."""
    begun = False
    try:
        async with serving:
            async for chunk in serving.chunks(include_usage=include_usage):
                yield _event(chunk)
                begun = True
    except BaruError as error:
        if not begun:
            raise
        yield _event(error_body(error))
    yield "data: [DONE]\n\n"


def _event(chunk: dict[str, Any]) -> str:
    return f"data: {json.dumps(chunk, ensure_ascii=False, separators=(',', ':'))}\n\n"


async def _all(first: str, rest: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
    async with aclosing(rest):
        yield first
        async for line in rest:
            yield line


async def _unless_gone(request: Request, work: Awaitable[_T]) -> _T:
    """Do the work while its client is there; ClientGone ends it."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(until_gone(request.receive))
    try:
        await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _refused(_: Request, error: Exception) -> Response:
    return error_response(error if isinstance(error, BaruError) else BaruError("the node failed"))


async def _nobody(_: Request, error: Exception) -> Response:  # noqa: ARG001
    return Response(status_code=499)  # as nginx writes it down; nobody reads it


async def _not_here(_: Request, error: Exception) -> Response:
    response = error_response(NotFound("there is no such path", hint="POST /v1/chat/completions, for one"))
    response.status_code = error.status_code if isinstance(error, HTTPException) else 500
    return response

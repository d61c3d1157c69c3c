"""The page and its events."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
import time
from collections.abc import AsyncIterator, Callable, Collection
from importlib import resources
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

MAX_VIEWERS = 16
TICK_S = 0.5
_RETRY_MS = 1000
_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}

Refusal = Callable[[Request], str]
"""Why who asks may not look; empty: they may."""


class Broadcast:
    """One view for all viewers, made once a tick while anybody looks. A viewer that is slow gets the latest, and misses
    what was between."""

    def __init__(self, look: Callable[[], dict[str, Any]]) -> None:
        self._look = look
        self._made_s = 0.0
        self._made = ""
        self.num_viewers = 0

    @property
    def is_full(self) -> bool:
        """Whether nobody else may look now."""
        return self.num_viewers >= MAX_VIEWERS

    def now(self) -> str:
        """Return the view as JSON, as old as a tick at most."""
        if time.monotonic() - self._made_s > TICK_S / 2:
            self._made = json.dumps(self._look(), separators=(",", ":"))
            self._made_s = time.monotonic()
        return self._made

    async def events(self, allowed: Callable[[], bool]) -> AsyncIterator[str]:
        """Yield server-sent events for as long as it is allowed."""
        yield f"retry: {_RETRY_MS}\n"
        while allowed():
            yield f"data: {self.now()}\n\n"
            await asyncio.sleep(TICK_S)


class _Viewed(StreamingResponse):
    """The events; takes a viewer's place in the same turn in which it was found free."""

    def __init__(self, broadcast: Broadcast, allowed: Callable[[], bool]) -> None:
        super().__init__(broadcast.events(allowed), media_type="text/event-stream", headers=_HEADERS)
        self._broadcast = broadcast

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._broadcast.num_viewers += 1
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._broadcast.num_viewers -= 1


def make_app(look: Callable[[], dict[str, Any]], hosts: Collection[str], refusal: Refusal) -> Starlette:
    """Return the application. `hosts`: names by which it may be called besides those of loopback, so that no foreign
    page can."""
    page = resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    headers = {**_HEADERS, "Content-Security-Policy": _policy(page)}
    broadcast = Broadcast(look)

    async def show(_: Request) -> Response:
        return HTMLResponse(page, headers=headers)

    async def state(_: Request) -> Response:
        return Response(broadcast.now(), media_type="application/json", headers=_HEADERS)

    async def events(request: Request) -> Response:
        if broadcast.is_full:
            return PlainTextResponse("too many viewers", 503, {**_HEADERS, "Retry-After": "30"})
        return _Viewed(broadcast, lambda: not refusal(request))

    def allowed(show: Callable[[Request], Any]) -> Callable[[Request], Any]:
        async def judged(request: Request) -> Response:
            if why := refusal(request):
                return JSONResponse({"error": why}, 403, _HEADERS)
            response: Response = await show(request)
            return response

        return judged

    routes = [Route(path, allowed(show)) for path, show in (("/", show), ("/state", state), ("/events", events))]
    names = [f"[{host}]" if ":" in host else host for host in (*hosts, "localhost", "127.0.0.1", "::1")]
    return Starlette(routes=routes, middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=names)])


def _policy(page: str) -> str:
    """Nothing may be loaded, and nothing may run but what is in the page."""
    hashes = {
        tag: " ".join(f"'sha256-{_digest(body)}'" for body in re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL))
        for tag in ("script", "style")
    }
    return (
        f"default-src 'none'; script-src {hashes['script']}; style-src {hashes['style']}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()

"""Lets nobody past whose certificate does not allow it: every call is judged before it costs anything, and judged again
while it lasts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar, cast

import grpc

from baru_common.certificates import Certificate, revoked_serials
from baru_common.errors import BaruError, ConfigError, Unauthenticated
from baru_common.identity import Role
from baru_common.reread import Reread
from baru_common.signatures import ANYBODY
from baru_common.tls import TlsFiles

from .access import EVERYBODY, Policy, allow_list, check_method
from .checkpoint import Checkpoint
from .interceptors import Context, abort, around
from .verifier import Verifier

_JUDGED_S = 0.5
"""Time between two looks at the calls that last."""

_T = TypeVar("_T")


@dataclass(frozen=True)
class Holder:
    """A certificate as it was shown."""

    certificate: Certificate
    ends_s: float
    """Monotonic clock at which it expires: a wall clock that is set meanwhile ends nobody's session."""


@dataclass(eq=False)
class Call:
    """A call under way."""

    holder: Holder
    task: asyncio.Task[Any]
    holds: Callable[[str], None]
    refusal: BaruError | None = None
    """Why it is being ended."""

    def end(self, refusal: BaruError) -> None:
        """End it with an error, wherever it is."""
        self.refusal = refusal
        self.task.cancel()


_call: ContextVar[Call | None] = ContextVar("call", default=None)


def caller() -> str:
    """Return the identity behind the call under way; that of all on a plain loopback connection."""
    call = _call.get()
    return str(call.holder.certificate.identity) if call else ANYBODY


def hold(session_id: str) -> None:
    """Note that the call under way has this session: should its certificate be refused later, the session ends."""
    if call := _call.get():
        call.holds(session_id)


class Guard(grpc.aio.ServerInterceptor):
    """Judges callers by what the files of `policy` say now."""

    def __init__(self, policy: Reread[Policy], verifier: Verifier, checkpoint: Checkpoint | None = None) -> None:
        self._policy = policy
        self._checkpoint = checkpoint or Checkpoint()
        """Notes who is denied."""
        self._verifier = verifier
        self._calls: set[Call] = set()
        self._holders: dict[str, Holder] = {}
        """By session id: whose call had it last; orphans, too."""

    # -- each call

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Put the judgement before the method's own handler."""
        method = handler_call_details.method
        handler = await continuation(handler_call_details) or grpc.stream_stream_rpc_method_handler(_nothing)
        return around(handler, lambda context: self._admitted(method, context))

    @asynccontextmanager
    async def _admitted(self, method: str, context: Context) -> AsyncIterator[None]:
        """Refuse the call, or see it through; it is in `_calls` meanwhile."""
        self._policy.refresh()
        holder = None
        try:
            holder = _holder(context)
            if refusal := self._refusal(holder) or check_method(holder.certificate.identity, method):
                raise refusal
        except BaruError as error:
            self._deny(holder, error)
            await _abort(context, error)
            raise
        task = cast("asyncio.Task[Any]", asyncio.current_task())
        call = Call(holder, task, lambda session_id: self._holders.update({session_id: holder}))
        self._calls.add(call)
        _call.set(call)
        try:
            yield
        except asyncio.CancelledError:
            if not call.refusal:
                raise
            await _abort(context, call.refusal)
            raise
        finally:
            self._calls.discard(call)

    def _refusal(self, holder: Holder) -> BaruError | None:
        certificate = holder.certificate
        return self._policy.value.refusal(certificate.identity, certificate.serial, holder.ends_s - time.monotonic())

    # -- while calls last

    async def watch(self) -> None:
        """End calls and sessions of certificates that are revoked, have expired, or are no longer on the list."""
        while True:
            self._policy.refresh()
            self.judge()
            await asyncio.sleep(_JUDGED_S)

    def judge(self) -> None:
        """Look at everybody who is in, once."""
        for session_id, holder in list(self._holders.items()):
            if not self._verifier.has(session_id):
                del self._holders[session_id]
            elif refusal := self._refusal(holder):
                self._verifier.close(session_id, refusal.reason)
        for call in list(self._calls):
            if refusal := self._refusal(call.holder):
                self._deny(call.holder, refusal)
                call.end(refusal)

    def _deny(self, holder: Holder | None, error: BaruError) -> None:
        self._checkpoint.deny(str(holder.certificate.identity) if holder else "", error.reason)


def policy_of(files: TlsFiles, allow: tuple[str, ...] = (EVERYBODY,), allow_file: Path | None = None) -> Reread[Policy]:
    """Return whom a hub with these files lets in; ConfigError names the file that is wrong."""
    kit, revoked = files.load(Role.HUB).own.identity.kit, files.revoked
    if revoked is None:
        raise ConfigError("the hub has no revocation list", hint="name the crl.pem of the kit")

    def read() -> Policy:
        serials = _said_by(revoked, lambda said: revoked_serials(said, files.authority.read_bytes()))
        names = _said_by(allow_file, lambda said: allow_list(said.decode().splitlines())) if allow_file else None
        return Policy(kit, allow_list(allow) if names is None else names, serials)

    return Reread([path for path in (revoked, allow_file) if path], read)


def _said_by(path: Path, parse: Callable[[bytes], frozenset[_T]]) -> frozenset[_T]:
    try:
        return parse(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", hint="copy it there again") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message}", hint=error.hint) from error


def _holder(context: Context) -> Holder:
    shown = (context.auth_context() or {}).get("x509_pem_cert")
    if not shown:
        raise Unauthenticated("no certificate was shown", hint="connect with one of this kit")
    certificate = _certificate(bytes(next(iter(shown))))
    left = certificate.ends - datetime.now(timezone.utc)
    return Holder(certificate, time.monotonic() + left.total_seconds())


@lru_cache(maxsize=1024)
def _certificate(pem: bytes) -> Certificate:
    try:
        return Certificate.read(pem)
    except ConfigError as error:
        raise Unauthenticated(error.message, hint=error.hint) from error


async def _nothing(_requests: Any, context: Context) -> None:
    """In the place of a method that does not exist: whoever asks is judged first, and it is on nobody's list."""
    await context.abort(grpc.StatusCode.UNIMPLEMENTED, "there is no such method")


async def _abort(context: Context, error: BaruError) -> None:
    with suppress(grpc.aio.UsageError):  # it is ending already
        await abort(context, error)

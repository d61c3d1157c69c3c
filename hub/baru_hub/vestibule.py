"""Who knocks while the target still loads is told so, instead of being left before a closed door."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from baru_common.channel_options import server_options
from baru_common.errors import ConfigError, HubUnavailable
from baru_common.identity import Role
from baru_common.tls import TlsFiles, server_credentials
from baru_common.wire import to_status

from .config import HubConfig, split_address
from .servicer import SERVICE

_THREADS = 8
_MOST_CALLS = 64


class _Loading(grpc.GenericRpcHandler):
    """Answers every call alike."""

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any]:  # noqa: ARG002
        return grpc.stream_stream_rpc_method_handler(_refuse)


def _refuse(_: Any, context: grpc.ServicerContext) -> Iterator[Any]:
    context.abort_with_status(to_status(HubUnavailable("the hub loads its target", hint="try again in a moment")))
    return iter(())  # type: ignore[unreachable]


@contextmanager
def vestibule(config: HubConfig) -> Iterator[None]:
    """While the block runs, health checks at the hub's address say NOT_SERVING, and nodes are told to try again.

    With a free port (0), which nobody knows yet, nothing is done. ConfigError when the address cannot be taken.
    """
    if split_address(config.listen)[1] == 0:
        yield
        return
    server = grpc.server(
        ThreadPoolExecutor(_THREADS),
        maximum_concurrent_rpcs=_MOST_CALLS,
        options=server_options(
            max_streams=config.max_identity_calls,
            max_connections=config.max_connections,
            max_connection_age_s=config.max_session_age_s,
        ),
    )
    checks = health.HealthServicer()
    for name in ("", SERVICE):
        checks.set(name, health_pb2.HealthCheckResponse.NOT_SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    server.add_generic_rpc_handlers((_Loading(),))
    try:
        if config.tls:
            server.add_secure_port(config.listen, server_credentials(TlsFiles.of(config.tls, Role.HUB)))
        else:
            server.add_insecure_port(config.listen)
    except RuntimeError as error:
        raise ConfigError(f"cannot listen on {config.listen}", hint="another program may use the port") from error
    server.start()
    try:
        yield
    finally:
        server.stop(None).wait()

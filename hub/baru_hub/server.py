"""The hub service: a gRPC server with health, and its end."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from baru.drafting.v1 import drafting_pb2, drafting_pb2_grpc
from baru_common.channel_options import SERVER_OPTIONS
from baru_common.errors import ConfigError
from baru_common.frames import Limits

from .config import HubConfig, split_address
from .engines import Engine
from .observing import HubObserver
from .scheduler import GoodputScheduler, Scheduler
from .servicer import DraftingServicer
from .session_log import SessionLog
from .telemetry import HubTelemetry
from .verifier import Verifier

SERVICE = drafting_pb2.DESCRIPTOR.services_by_name["DraftingService"].full_name
_LAST_FRAMES_S = 0.5
"""Time for the last frames of sessions that have ended to go out."""


@dataclass(frozen=True)
class Hub:
    """A running hub."""

    address: str
    """Where it listens, with the port that was taken."""
    verifier: Verifier
    server: grpc.aio.Server
    health: health.aio.HealthServicer
    metrics: str
    """Where its metrics are scraped; empty: nowhere."""

    async def drain(self, grace_s: float) -> None:
        """Tell health checks, admit nobody, and give running sessions `grace_s` to end."""
        await self.health.enter_graceful_shutdown()
        await self.verifier.drain(grace_s)


@asynccontextmanager
async def running_hub(
    engine: Engine, config: HubConfig, *, scheduler: Scheduler | None = None, observers: Sequence[HubObserver] = ()
) -> AsyncIterator[Hub]:
    """Serve `engine` while the block runs, scheduled by goodput unless `scheduler` is given; `observers` are told what
    happens.

    ConfigError when the address cannot be taken, EngineFailure when the target cannot take a step.
    """
    limits = Limits(
        max_sessions=config.max_sessions,
        max_prompt_tokens=engine.spec.context_limit - 1,
        max_draft_ahead=config.max_draft_ahead,
        max_message_bytes=config.max_message_bytes,
    )
    if scheduler is None:
        scheduler = GoodputScheduler(await engine.calibrate(), config.max_prefill, config.max_patience_ms / 1000)
    async with AsyncExitStack() as stack:
        metrics, keepers = "", list[HubTelemetry]()
        if config.telemetry.is_on:  # it sees the last session end
            keepers.append(HubTelemetry(config.max_depth))
            metrics = stack.enter_context(keepers[0].exporting(config.telemetry, engine.spec.target_name))
        told = [*observers, *keepers, *([SessionLog()] if config.log_sessions else [])]
        verifier = await stack.enter_async_context(
            Verifier(engine, scheduler, limits, max_depth=config.max_depth, link=config.link, observers=told)
        )
        for keeper in keepers:
            keeper.watch(verifier)
        server = grpc.aio.server(options=SERVER_OPTIONS)
        drafting_pb2_grpc.add_DraftingServiceServicer_to_server(DraftingServicer(verifier), server)
        health_servicer = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
        if config.reflection:
            _add_reflection(server)
        address = _bind(server, config.listen)
        await server.start()
        for name in ("", SERVICE):
            await health_servicer.set(name, health_pb2.HealthCheckResponse.SERVING)
        try:
            yield Hub(address, verifier, server, health_servicer, metrics)
        finally:
            verifier.dismiss()
            await server.stop(_LAST_FRAMES_S)  # a session has ended when its last frames are queued, not yet sent


def _bind(server: grpc.aio.Server, listen: str) -> str:
    host, _ = split_address(listen)
    try:
        port = server.add_insecure_port(listen)
    except RuntimeError as error:
        raise ConfigError(f"cannot listen on {listen}", hint="another program may use the port") from error
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _add_reflection(server: grpc.aio.Server) -> None:
    from grpc_reflection.v1alpha import reflection

    reflection.enable_server_reflection([SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME], server)

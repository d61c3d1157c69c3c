"""The hub service: a gRPC server with health, and its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from baru_common import __version__
from baru_common.channel_options import server_options
from baru_common.errors import ConfigError
from baru_common.frames import Limits
from baru_common.identity import Role
from baru_common.tls import TlsFiles, server_credentials

from .call_limits import CallLimits, Identify
from .checkpoint import open_checkpoint
from .config import HubConfig, split_address
from .engines import Engine
from .guard import Guard, policy_of
from .observing import HubObserver
from .posture_keeper import PostureKeeper
from .scene import SceneChange, SceneStability
from .scheduler import GoodputScheduler, Scheduler
from .servicer import SERVICE, DraftingServicer, add_to, identified
from .session_log import SessionLog
from .telemetry import HubTelemetry
from .verifier import Verifier

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
    engine: Engine,
    config: HubConfig,
    *,
    scheduler: Scheduler | None = None,
    identify: Identify = identified,
    observers: Sequence[HubObserver] = (),
    posture: PostureKeeper | None = None,
    on_change: Sequence[Callable[[SceneChange], None]] = (),
) -> AsyncIterator[Hub]:
    """Serve `engine` while the block runs, scheduled by goodput unless `scheduler` is given; `observers` are told what
    happens.

    `on_change` is told of changes of acceptance. `posture` says what drafting may be done; None: any. ConfigError when
    the address cannot be taken or a certificate is wrong, ClockError when the clock is, EngineFailure when the target
    cannot take a step.
    """
    files = TlsFiles.of(config.tls, Role.HUB) if config.tls else None
    credentials = server_credentials(files) if files else None
    limits = Limits(
        max_sessions=config.max_sessions,
        max_prompt_tokens=min(config.max_prompt_tokens, engine.spec.context_limit - 1),
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
        watches = keepers or on_change or config.log_sessions or config.follow_changes
        scenes = [SceneStability(on_change)] if watches else []
        checkpoint = await stack.enter_async_context(open_checkpoint(config.tls, config.audit))
        if posture:
            await stack.enter_async_context(posture.watching())
        verifier = await stack.enter_async_context(
            Verifier(
                engine,
                scheduler,
                limits,
                max_depth=config.max_depth,
                link=config.link,
                checkpoint=checkpoint,
                quotas=config,
                observers=[*observers, *keepers, *scenes, *([SessionLog()] if config.log_sessions else [])],
                posture=posture,
            )
        )
        for keeper in keepers:
            keeper.watch(verifier)
        for scene in scenes:
            scene.listeners += [keeper.changed for keeper in keepers]
            scene.listeners += [verifier.follow_change] if config.follow_changes else []
        guard = Guard(policy_of(files, config.allow, config.allow_file), verifier, checkpoint) if files else None
        limited = CallLimits(config, identify)
        server = grpc.aio.server(
            interceptors=[guard, limited] if guard else [limited],  # who calls is known before it is counted
            options=server_options(
                max_streams=config.max_identity_calls if files else config.max_calls,
                max_connections=config.max_connections,
                max_connection_age_s=config.max_session_age_s,
            ),
            maximum_concurrent_rpcs=config.max_calls,
        )
        servicer = DraftingServicer(
            verifier, config, shape=config.shape, slow_reader_s=config.slow_reader_s, identify=identify
        )
        add_to(server, servicer)
        health_servicer = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
        if config.reflection:
            _add_reflection(server)
        address = _bind(server, config.listen, credentials)
        await server.start()
        watching = asyncio.create_task(guard.watch(), name="baru-guard") if guard else None
        checkpoint.note("hub_started", listen=address, version=__version__, target=engine.spec.fingerprint.hex())
        for name in ("", SERVICE):
            await health_servicer.set(name, health_pb2.HealthCheckResponse.SERVING)
        try:
            yield Hub(address, verifier, server, health_servicer, metrics)
        finally:
            if watching:
                watching.cancel()
            verifier.dismiss()
            await server.stop(_LAST_FRAMES_S)  # a session has ended when its last frames are queued, not yet sent


def _bind(server: grpc.aio.Server, listen: str, credentials: grpc.ServerCredentials | None) -> str:
    host, _ = split_address(listen)
    try:
        port = server.add_secure_port(listen, credentials) if credentials else server.add_insecure_port(listen)
    except RuntimeError as error:
        raise ConfigError(f"cannot listen on {listen}", hint="another program may use the port") from error
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _add_reflection(server: grpc.aio.Server) -> None:
    from grpc_reflection.v1alpha import reflection

    reflection.enable_server_reflection([SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME], server)

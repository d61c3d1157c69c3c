"""`baru-micro serve`."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Annotated

import typer
import uvloop

from baru_common.addresses import split_address
from baru_common.cli_support import ConfigOption, LogFormatOption, OtlpOption, Say, configure_logs, given, stop_signal
from baru_common.errors import ConfigError
from baru_common.logs import LogFormat
from baru_common.service_manager import notify, watched
from baru_common.telemetry import TelemetryConfig
from baru_common.workloads import DEFAULT_WORKLOAD
from baru_micro.cli_options import (
    DEFAULT_HUBS,
    DrafterOption,
    FallbackOption,
    HubsOption,
    ShapingOption,
    TierOption,
    TlsOption,
    WorkloadOption,
)
from baru_micro.config import NodeConfig
from baru_micro.fit import Shaping
from baru_micro.telemetry import observing


def serve(
    context: typer.Context,
    config: ConfigOption = None,
    hub: HubsOption = DEFAULT_HUBS,
    tls: TlsOption = None,
    listen: Annotated[
        str, typer.Option(help="HOST:PORT to serve HTTP on; port 0 takes a free one.")
    ] = NodeConfig.listen,
    drafter: DrafterOption = NodeConfig.drafter,
    fallback: FallbackOption = None,
    traffic_shape: ShapingOption = Shaping.AUTO,
    tier: TierOption = None,
    workload: WorkloadOption = DEFAULT_WORKLOAD,
    api_key_file: Annotated[
        Path | None, typer.Option(help="File of API keys, one a line; a request must bring one of them.")
    ] = None,
    certificate: Annotated[Path | None, typer.Option(help="Certificate (PEM) to serve HTTPS with.")] = None,
    key: Annotated[Path | None, typer.Option(help="Its key (PEM).")] = None,
    max_running: Annotated[int, typer.Option(min=1, help="Most generations at a time.")] = NodeConfig.max_running,
    max_waiting: Annotated[
        int, typer.Option(min=0, help="Most generations that wait for their turn.")
    ] = NodeConfig.max_waiting,
    otlp: OtlpOption = "",
    log_format: LogFormatOption = LogFormat.TEXT,
    json_output: Annotated[bool, typer.Option("--json", help="Say what happens as JSON lines.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log more.")] = False,
) -> None:
    """Serve this node as an OpenAI-compatible HTTP endpoint until SIGTERM or Ctrl-C."""
    settings = NodeConfig.read(config, given(context))
    configure_logs(verbose=verbose, log_format=settings.log_format)
    try:
        from .app import EndpointConfig
        from .server import Listen
    except ImportError as error:
        raise ConfigError(f"{error.name} is not installed", hint="pip install 'baru-drafting[serve]'") from error
    serving = EndpointConfig(_keys(settings.api_key_file), settings.max_running, settings.max_waiting)
    where = Listen(*split_address(settings.listen), settings.certificate, settings.key)
    where.check(serving)
    telemetry = TelemetryConfig(otlp=settings.otlp, page=True)
    logs = verbose or settings.log_format is LogFormat.JSON

    async def work() -> None:
        from .arrival import first_hub
        from .server import running_endpoint

        stop, say = stop_signal(), Say(json_output=json_output)
        with observing(telemetry, log=logs) as observed:
            async with AsyncExitStack() as stack:
                await stack.enter_async_context(watched(lambda: True))  # that the loop runs is all there is to say
                if node := await first_hub(settings, observed.observers, stack, say, stop):
                    url = await stack.enter_async_context(running_endpoint(node, serving, where, observed.page))
                    say.event("ready", url=f"{url}/v1", model=node.hub.target_name)
                    notify(READY="1", STATUS=f"serving {node.hub.target_name} at {url}")
                    await stop.wait()
                notify(STOPPING="1")
        say.event("stopped")

    uvloop.run(work())


def _keys(path: Path | None) -> tuple[str, ...]:
    if path is None:
        return ()
    try:
        keys = tuple(line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not keys:
        raise ConfigError(f"{path} holds no key", hint="write one key a line")
    return keys

"""`baru-micro chat`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
import uvloop

from baru_common.cli_support import ConfigOption, LogFormatOption, configure_logs, given
from baru_common.errors import ConfigError
from baru_common.folders import data_folder
from baru_common.logs import LogFormat
from baru_common.sampling import SamplingParams
from baru_micro.cli_options import (
    DEFAULT_HUBS,
    DrafterOption,
    FallbackOption,
    HubsOption,
    ShapingOption,
    TierOption,
    TlsOption,
)
from baru_micro.config import NodeConfig
from baru_micro.decoding import Reconcile
from baru_micro.fit import Shaping
from baru_micro.request_options import with_settings

from .conversation import Conversation


def chat(
    context: typer.Context,
    config: ConfigOption = None,
    hub: HubsOption = DEFAULT_HUBS,
    tls: TlsOption = None,
    drafter: DrafterOption = NodeConfig.drafter,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of a reply.")] = 1024,
    temperature: Annotated[float, typer.Option("--temperature", "-t", help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Only the likeliest tokens with this probability together.")] = 1.0,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Any other sampling parameter, NAME=JSON; may be given again.")
    ] = None,
    fallback: FallbackOption = None,
    reconcile: Annotated[
        Reconcile, typer.Option(help="What becomes of provisional tokens when a hub is back.")
    ] = Reconcile.REWRITE,
    traffic_shape: ShapingOption = Shaping.AUTO,
    tier: TierOption = None,
    history: Annotated[
        bool, typer.Option(help="Keep what you write, for the arrow keys, in a file that only you can read.")
    ] = True,
    log_format: LogFormatOption = LogFormat.TEXT,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log more.")] = False,
) -> None:
    """Talk with the hub's target. Provisional text, from this node while no hub answers, is dim until it stands."""
    node_config = NodeConfig.read(config, given(context))
    configure_logs(verbose=verbose, log_format=node_config.log_format)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError("chat needs a terminal", hint="use `baru-micro generate` in scripts and pipes")
    try:
        from .terminal import Chat
    except ImportError as error:
        raise ConfigError(f"{error.name} is not installed", hint="pip install 'baru-drafting[chat]'") from error
    params = with_settings(SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p), settings or ())
    kept: Path | None = data_folder() / "chat_history" if history else None

    async def talk() -> None:
        async with node_config.connect(reconcile=reconcile) as node:
            await Chat(node, params, Conversation(system), reconcile=reconcile, history=kept).run()

    uvloop.run(talk())

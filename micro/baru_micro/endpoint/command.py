"""`baru-micro serve`."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Annotated

import typer
import uvloop

from baru_common.cli_support import configure_logs, print_json
from baru_common.drafters import DRAFTERS
from baru_common.errors import ConfigError
from baru_micro.client import LinkOptions, MicroNode
from baru_micro.decoding import Fallback

DEFAULT_HUBS = ["127.0.0.1:7443"]


def serve(
    hub: Annotated[
        list[str],
        typer.Option(
            "--hub", envvar="BARU_HUB", help="Hub to use, HOST:PORT; may be given again, the first choice first."
        ),
    ] = DEFAULT_HUBS,
    listen: Annotated[
        str, typer.Option(help="HOST:PORT to serve HTTP on; port 0 takes a free one.")
    ] = "127.0.0.1:8000",
    drafter: Annotated[
        str, typer.Option("--drafter", help=f"One of {', '.join(DRAFTERS)}; or several, as suffix+causal_lm.")
    ] = "ngram",
    fallback: Annotated[
        Fallback | None,
        typer.Option(help="While no hub answers; default: local if the drafter has a model, else wait."),
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="File of API keys, one a line; a request must bring one of them.")
    ] = None,
    certificate: Annotated[Path | None, typer.Option(help="Certificate (PEM) to serve HTTPS with.")] = None,
    key: Annotated[Path | None, typer.Option(help="Its key (PEM).")] = None,
    max_running: Annotated[int, typer.Option(min=1, help="Most generations at a time.")] = 16,
    max_waiting: Annotated[int, typer.Option(min=0, help="Most generations that wait for their turn.")] = 256,
    json_output: Annotated[bool, typer.Option("--json", help="Say what happens as JSON lines.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log more.")] = False,
) -> None:
    """Serve this node as an OpenAI-compatible HTTP endpoint until SIGTERM or Ctrl-C."""
    configure_logs(verbose=verbose)
    try:
        from .app import EndpointConfig
        from .server import Listen
    except ImportError as error:
        raise ConfigError(f"{error.name} is not installed", hint="pip install 'baru-drafting[serve]'") from error
    config = EndpointConfig(_keys(api_key_file), max_running, max_waiting)
    host, port = _address(listen)
    where = Listen(host, port, certificate, key)
    where.check(config)

    async def work() -> None:
        from .server import running_endpoint

        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        async with (
            MicroNode.connect(hub, drafter=drafter, options=LinkOptions(fallback=fallback)) as node,
            running_endpoint(node, config, where) as url,
        ):
            _say("ready", json_output=json_output, url=f"{url}/v1", model=node.hub.target_name)
            await stop.wait()
        _say("stopped", json_output=json_output)

    uvloop.run(work())


def _say(event: str, *, json_output: bool, **facts: str) -> None:
    if json_output:
        print_json({"event": event, **facts})
    else:
        typer.echo("  ".join((event, *(f"{name} {value}" for name, value in facts.items()))), err=True)


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


def _address(listen: str) -> tuple[str, int]:
    host, colon, port = listen.rpartition(":")
    if not (colon and host and port.isdecimal() and int(port) < 1 << 16):
        raise ConfigError(f"{listen!r} is not an address", hint="use HOST:PORT, e.g. 127.0.0.1:8000")
    return host.strip("[]"), int(port)

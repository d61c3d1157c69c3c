"""`baru-hub top`: a kit in the terminal, live."""

from __future__ import annotations

import ssl
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from baru_common.cli_support import NO_TLS, harmless, print_json
from baru_common.errors import BaruError, ConfigError, HubUnavailable
from baru_common.scrape import Scrape, scrape

from .top import HubRow, LinkRow, NodeRow, Readings, View, view

DEFAULT_METRICS = ["127.0.0.1:9464"]
_LINK_STYLES = {"up": "green", "suspect": "yellow", "connecting": "yellow", "draining": "yellow", "down": "bold red"}


def top(
    metrics: Annotated[
        list[str],
        typer.Option("--metrics", help="HOST:PORT of a hub's or a node's --metrics; may be given again."),
    ] = DEFAULT_METRICS,
    metrics_tls: Annotated[
        tuple[str, str, str],
        typer.Option("--metrics-tls", metavar="CERT KEY CA", help="PEM files to scrape past loopback with."),
    ] = NO_TLS,
    interval: Annotated[float, typer.Option(min=0.2, help="Seconds between two readings.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Read twice, show what that says, and end.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="With --once: one JSON object.")] = False,
) -> None:
    """Show hubs, nodes and links: tokens/s, acceptance, depth, batches, memory. Ctrl-C ends it.

    Rates are over the last interval. One program that does not answer is shown as such; none that does ends it.
    """
    if json_output and not once:
        raise ConfigError("--json goes with --once", hint="give both, as often as you like")
    watcher = Watcher(metrics, _tls(metrics_tls))
    watcher.read(need_one=True)
    if not once and sys.stdout.isatty():
        _watch(watcher, interval)
        return
    time.sleep(interval)
    watcher.read(need_one=True)
    if json_output:
        print_json({**asdict(watcher.view()), "missing": watcher.missing})
    else:
        Console().print(drawn(watcher.view(), watcher.missing))


class Watcher:
    """Reads again and again, and remembers the reading before."""

    def __init__(self, addresses: Sequence[str], tls: ssl.SSLContext | None) -> None:
        self._addresses, self._tls = addresses, tls
        self._before: dict[str, Scrape] = {}
        self._now: dict[str, Scrape] = {}
        self.missing: dict[str, str] = {}
        """Who does not answer, and why."""

    def read(self, *, need_one: bool = False) -> None:
        """Read all; HubUnavailable, or the only one's error, if nobody answers and one must."""
        self._before, self._now, self.missing = self._now, {}, {}
        error: BaruError | None = None
        for address in self._addresses:
            try:
                self._now[address] = scrape(address, tls=self._tls)
            except BaruError as caught:
                error, self.missing[address] = caught, caught.message
        if need_one and error and not self._now:
            raise (
                error
                if len(self._addresses) == 1
                else HubUnavailable(f"none of {', '.join(self._addresses)} shows metrics", hint=error.hint)
            )

    def view(self) -> View:
        """Return what the last two readings say."""
        return view(Readings(now, self._before.get(address)) for address, now in self._now.items())


def _watch(watcher: Watcher, interval_s: float) -> None:
    with Live(drawn(watcher.view(), watcher.missing), screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(interval_s)
            watcher.read()
            live.update(drawn(watcher.view(), watcher.missing), refresh=True)


def _tls(files: tuple[str, str, str]) -> ssl.SSLContext | None:
    if not any(files):
        return None
    certificate, key, authority = files
    try:
        context = ssl.create_default_context(cafile=authority)
        context.load_cert_chain(Path(certificate), Path(key))
    except OSError as error:
        raise ConfigError(f"the files of --metrics-tls cannot be used: {error}") from error
    return context


# -- how it looks


def drawn(shown: View, missing: Mapping[str, str]) -> RenderableType:
    """Return the tables: hubs, then nodes, then links, then who is missing."""
    parts: list[RenderableType] = [_hub_table(shown.hubs)] if shown.hubs else []
    if shown.hubs:
        parts.append(_node_table(shown.nodes) if shown.nodes else Text("no session yet", style="dim"))
    if shown.links:
        parts.append(_link_table(shown.links))
    parts += [Text(harmless(f"{address}: {why}"), style="bold red") for address, why in missing.items()]
    return Group(*parts)


def _hub_table(hubs: Sequence[HubRow]) -> Table:
    rates = ("tokens/s", "steps/s", "step ms", "batch", "depth", "waits won", "cache")
    table = _table("hub", "target", "sessions", *rates)
    for hub in hubs:
        held = sum(hub.sessions.values())
        state = " draining" if hub.draining else ""
        orphans = f" ({hub.sessions['orphaned']} orphaned)" if hub.sessions.get("orphaned") else ""
        table.add_row(
            harmless(hub.address),
            harmless(hub.target),
            f"{held}/{hub.max_sessions}{orphans}{state}",
            *(_number(value) for value in (hub.tokens_per_s, hub.steps_per_s, hub.step_ms, hub.batch, hub.depth)),
            _share(hub.waits_won),
            _share(hub.kv_cache_usage),
        )
    return table


def _node_table(nodes: Sequence[NodeRow]) -> Table:
    table = _table("node", "drafter", "tokens/s", "accepted", "length", "tokens", "lost streams")
    for node in nodes:
        lost = Text(str(node.streams_lost), style="yellow" if node.streams_lost else "")
        table.add_row(
            harmless(node.node),
            harmless(node.drafter),
            _number(node.tokens_per_s),
            _share(node.acceptance),
            _number(node.mean_accepted_length, 2),
            str(node.tokens),
            lost,
        )
    return table


def _link_table(links: Sequence[LinkRow]) -> Table:
    table = _table("scraped at", "hub", "link", "round trip ms", "outages")
    for link in links:
        state = Text(link.state, style=_LINK_STYLES.get(link.state, ""))
        table.add_row(harmless(link.node), harmless(link.hub), state, _number(link.round_trip_ms), str(link.outages))
    return table


def _table(*headings: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    words = {"hub", "target", "node", "drafter", "scraped at", "link"}
    for heading in headings:
        table.add_column(heading, justify="left" if heading in words else "right", overflow="fold")
    return table


def _number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"

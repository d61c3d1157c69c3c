"""`baru-hub top`: a kit in the terminal, live."""

from __future__ import annotations

import signal
import ssl
import sys
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live

from baru_common.addresses import split_address
from baru_common.cli_support import NO_TLS, print_json
from baru_common.errors import BaruError, ConfigError, HubUnavailable
from baru_common.scrape import Scrape, scrape

from .top import Readings, View, view
from .top_screen import Cropped, drawn

DEFAULT_METRICS = ["127.0.0.1:9464"]
_ENDS = {signal.SIGINT, signal.SIGTERM}


def top(
    metrics: Annotated[
        list[str],
        typer.Option("--metrics", help="HOST:PORT of a hub's or a node's --metrics; may be given again."),
    ] = DEFAULT_METRICS,
    metrics_tls: Annotated[
        tuple[str, str, str],
        typer.Option("--metrics-tls", metavar="CERT KEY CA", help="PEM files to scrape past loopback with."),
    ] = NO_TLS,
    interval: Annotated[float, typer.Option(min=0.2, max=3600, help="Seconds between two readings.")] = 2.0,
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
    console = Console(highlight=False)
    if not once and sys.stdout.isatty() and not console.is_dumb_terminal:
        _watch(watcher, interval, console)
        return
    time.sleep(interval)
    watcher.read(need_one=True)
    if json_output:
        print_json({**asdict(watcher.view()), "missing": watcher.missing})
    else:
        console.print(drawn(watcher.view(), watcher.missing))


class Watcher:
    """Reads again and again, and remembers the reading before. ConfigError for what is no address."""

    def __init__(self, addresses: Iterable[str], tls: ssl.SSLContext | None) -> None:
        self._addresses, self._tls = list(dict.fromkeys(addresses)), tls
        for address in self._addresses:
            split_address(address)
        self._before: Mapping[str, Scrape] = {}
        self._now: dict[str, Scrape] = {}
        self.missing: dict[str, str] = {}
        """Who does not answer, and why."""

    def read(self, *, need_one: bool = False) -> None:
        """Read all at once; HubUnavailable, or the only one's error, if nobody answers and one must."""
        self._before, self._now, self.missing = self._now, {}, {}
        error: BaruError | None = None
        with ThreadPoolExecutor(len(self._addresses)) as pool:  # those that are gone are waited for together
            answers = list(pool.map(self._scrape, self._addresses))
        for address, answer in zip(self._addresses, answers, strict=True):
            if isinstance(answer, Scrape):
                self._now[address] = answer
            else:
                error, self.missing[address] = answer, answer.message
        if need_one and error and not self._now:
            raise (
                error
                if len(self._addresses) == 1
                else HubUnavailable(f"none of {', '.join(self._addresses)} shows metrics", hint=error.hint)
            )

    def _scrape(self, address: str) -> Scrape | BaruError:
        try:
            return scrape(address, tls=self._tls)
        except BaruError as error:
            return error

    def view(self) -> View:
        """Return what the last two readings say."""
        return view(Readings(now, self._before.get(address)) for address, now in self._now.items())


def _watch(watcher: Watcher, interval_s: float, console: Console) -> None:
    """Until it is told to end. It looks for that between two readings: an exception out of a signal, in the midst of
    starting threads, can leave one that is waited for at the end for good."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDS)
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            told = None
            while told is None:
                live.update(Cropped(drawn(watcher.view(), watcher.missing)), refresh=True)
                if (told := signal.sigtimedwait(_ENDS, interval_s)) is None:
                    watcher.read()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if told.si_signo == signal.SIGINT:
        raise KeyboardInterrupt
    raise typer.Exit(128 + told.si_signo)


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

"""What both command lines do alike: clear errors, exit codes, quiet logs."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated, Any

import tomli_w
import typer
from rich.console import Console
from rich.text import Text

from .config_file import in_force
from .errors import BaruError
from .logs import JsonFormatter, LogFormat, TextFormatter

ConfigOption = Annotated[
    Path | None,
    typer.Option(envvar="BARU_CONFIG", help="Settings file (TOML) of this machine; options go before it."),
]
MetricsOption = Annotated[
    str, typer.Option("--metrics", help="HOST:PORT for Prometheus to scrape; port 0 takes a free one.")
]
MetricsTlsOption = Annotated[
    tuple[str, str, str],
    typer.Option(
        "--metrics-tls",
        metavar="CERT KEY CA",
        help="PEM files for scraping past loopback: certificate, key, and who signs those of scrapers.",
    ),
]
OtlpOption = Annotated[
    str, typer.Option("--otlp", help="URL to push metrics and traces to; default: $OTEL_EXPORTER_OTLP_ENDPOINT.")
]
LogFormatOption = Annotated[LogFormat, typer.Option("--log-format", help="How log lines look, on stderr.")]
NO_TLS = ("", "", "")

EXIT_ERROR = 1
EXIT_UNTRUSTED = 3
"""What was checked is whole, but nothing says whose it is."""
EXIT_INTERRUPTED = 130


_CONTROLS = {c: "\ufffd" for c in (*range(0x20), 0x7F, *range(0x80, 0xA0)) if c not in (0x09, 0x0A)}


def harmless(text: str) -> str:
    """Return foreign text (a model's, a peer's, a file name) so that it cannot drive the terminal."""
    return text.translate(_CONTROLS)


def run(app: typer.Typer, name: str) -> None:
    """Run a command line. A BaruError becomes two lines on stderr and exit code 1; Ctrl-C gives 130."""
    console = Console(stderr=True, emoji=False, highlight=False, soft_wrap=True)
    try:
        app(prog_name=name)
    except BaruError as error:
        console.print(Text.assemble(("error:", "bold red"), " ", harmless(error.message)))
        if error.hint:
            console.print(Text.assemble(("what to do:", "bold"), " ", harmless(error.hint)))
        sys.exit(EXIT_ERROR)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)


def given(context: typer.Context) -> dict[str, Any]:
    """Return the options that the command line or the environment says: they go before a settings file."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    said = [name for name, source in sources.items() if source and source.name in ("COMMANDLINE", "ENVIRONMENT")]
    return {name: context.params[name] for name in said}


def configure_logs(*, verbose: bool, log_format: LogFormat = LogFormat.TEXT) -> None:
    """Log to stderr: warnings, or everything of ours when `verbose`."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if log_format is LogFormat.JSON else TextFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    for name in ("baru_common", "baru_hub", "baru_micro"):
        logging.getLogger(name).setLevel(logging.DEBUG if verbose else logging.INFO)


def print_json(value: Any) -> None:
    """Print one JSON object on one line of stdout."""
    sys.stdout.write(json.dumps(value, ensure_ascii=False) + "\n")
    sys.stdout.flush()


def print_settings(tables: Mapping[str, Any], *, json_output: bool) -> None:
    """Print settings as a file would say them, or as one JSON object."""
    found = {name: in_force(settings) for name, settings in tables.items()}
    if json_output:
        print_json(found)
    else:
        sys.stdout.write(tomli_w.dumps(found))


class Say:
    """Tells a person, or a script, what a service is doing."""

    def __init__(self, *, json_output: bool) -> None:
        self._json = json_output
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)

    def loading(self, target: str) -> AbstractContextManager[object]:
        """Show that the target loads, while it does."""
        self.event("loading", target=target)
        return self._console.status(Text(harmless(f"loading {target} ...")))

    def event(self, event: str, **facts: str) -> None:
        """Report one event: a JSON line, or a line of text."""
        if self._json:
            print_json({"event": event, **facts})
        elif event != "loading":
            self._console.print(
                Text.assemble((event, "bold"), "  ", harmless("  ".join(f"{k} {v}" for k, v in facts.items())))
            )


def stop_signal() -> asyncio.Event:
    """Return what SIGTERM and Ctrl-C set from now on, in the running loop."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop

"""What both command lines do alike: clear errors, exit codes, quiet logs."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

import typer
from rich.console import Console
from rich.text import Text

from .errors import BaruError

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


def configure_logs(*, verbose: bool) -> None:
    """Log to stderr: warnings, or everything of ours when `verbose`."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for name in ("baru_common", "baru_hub", "baru_micro"):
        logging.getLogger(name).setLevel(logging.DEBUG if verbose else logging.INFO)


def print_json(value: Any) -> None:
    """Print one JSON object on one line of stdout."""
    sys.stdout.write(json.dumps(value, ensure_ascii=False) + "\n")
    sys.stdout.flush()

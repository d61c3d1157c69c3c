"""`baru-micro preflight`: does this machine's system go with the image that the node runs in?"""

from __future__ import annotations

from typing import Annotated

import typer

from baru_common.cli_support import print_json
from baru_common.preflight import look, require_fitting


def preflight(json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False) -> None:
    """Does this machine's system go with the image that the program runs in? Exit code 1: no."""
    system = look()
    require_fitting(system)
    if json_output:
        print_json({"found": str(system)})
    else:
        typer.echo(f"the node can run here ({system})")

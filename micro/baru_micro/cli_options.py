"""Options that several of the node's commands take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from baru_common.drafters import DRAFTERS
from baru_common.workloads import AUTOREGRESSIVE

from .config import NodeConfig
from .decoding import Fallback
from .fit import Shaping

DEFAULT_HUBS = list(NodeConfig.hub)

HubsOption = Annotated[
    list[str],
    typer.Option("--hub", envvar="BARU_HUB", help="Hub to use, HOST:PORT; may be given again, the first choice first."),
]
DrafterOption = Annotated[
    str, typer.Option("--drafter", help=f"One of {', '.join(DRAFTERS)}; or several, as suffix+causal_lm.")
]
TlsOption = Annotated[
    Path | None,
    typer.Option(
        "--tls", envvar="BARU_TLS", help="Folder with this machine's certificate, from `baru-hub certs issue`."
    ),
]
TierOption = Annotated[
    str | None, typer.Option("--tier", help="Tier of this node in the hub's posture; default: by the board's name.")
]
FallbackOption = Annotated[
    Fallback | None,
    typer.Option(help="While no hub answers; default: local if the drafter has a model, else wait."),
]
ShapingOption = Annotated[
    Shaping,
    typer.Option(help="Constant size and pace, so that traffic says nothing; auto: if the hub requires it."),
]
WorkloadOption = Annotated[str, typer.Option(help=f"Kind of work that the answer is: {', '.join(AUTOREGRESSIVE)}.")]

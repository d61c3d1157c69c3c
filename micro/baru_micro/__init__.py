"""The node: drafts candidate tokens, has a hub's target verify them, and streams the text.

>>> async with MicroNode.connect("127.0.0.1:7443") as node:
...     async for event in node.generate("Once upon a time"):
...         ...
"""

from baru_common.drafters import load_drafter
from baru_common.errors import BaruError
from baru_common.frames import FinishReason, HubDescription, Posture, TokenLogprobs, Usage
from baru_common.sampling import Grammar, SamplingMode, SamplingParams

from .client import LinkOptions, MicroNode
from .decoding import Fallback, Reconcile
from .events import (
    Confirmed,
    Event,
    Finish,
    Kind,
    LinkChanged,
    Piece,
    PostureChanged,
    Provenance,
    Retracted,
    Span,
    Started,
    Step,
    StepStats,
)
from .fit import Shaping
from .hubs import FailBack
from .link import LinkState, Timers
from .proof import Proof
from .sync import SyncMicroNode

__all__ = [
    "BaruError",
    "Confirmed",
    "Event",
    "FailBack",
    "Fallback",
    "Finish",
    "FinishReason",
    "Grammar",
    "HubDescription",
    "Kind",
    "LinkChanged",
    "LinkOptions",
    "LinkState",
    "MicroNode",
    "Piece",
    "Posture",
    "PostureChanged",
    "Proof",
    "Provenance",
    "Reconcile",
    "Retracted",
    "SamplingMode",
    "SamplingParams",
    "Shaping",
    "Span",
    "Started",
    "Step",
    "StepStats",
    "SyncMicroNode",
    "Timers",
    "TokenLogprobs",
    "Usage",
    "load_drafter",
]

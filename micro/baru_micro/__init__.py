"""The node: drafts candidate tokens, has a hub's target verify them, and streams the text.

>>> async with MicroNode.connect("127.0.0.1:7443") as node:
...     async for event in node.generate("Once upon a time"):
...         ...
"""

from baru_common.drafters import load_drafter
from baru_common.errors import BaruError
from baru_common.frames import FinishReason, HubDescription, TokenLogprobs, Usage
from baru_common.sampling import Grammar, SamplingMode, SamplingParams

from .client import MicroNode
from .events import Event, Finish, Kind, Piece, Provenance, Span, Started, Step, StepStats
from .sync import SyncMicroNode

__all__ = [
    "BaruError",
    "Event",
    "Finish",
    "FinishReason",
    "Grammar",
    "HubDescription",
    "Kind",
    "MicroNode",
    "Piece",
    "Provenance",
    "SamplingMode",
    "SamplingParams",
    "Span",
    "Started",
    "Step",
    "StepStats",
    "SyncMicroNode",
    "TokenLogprobs",
    "Usage",
    "load_drafter",
]

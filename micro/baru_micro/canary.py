"""The canary of a node's drafter: the fixed prompts through a hub, which measures and judges."""

from __future__ import annotations

from dataclasses import dataclass

from baru_common.canary_prompts import NUM_TOKENS, canary_prompts
from baru_common.errors import ConfigError
from baru_common.frames import Posture
from baru_common.sampling import SamplingParams

from .client import MicroNode
from .events import Finish

_ROUNDS = 4
"""Times that the prompts are gone through, until the hub has seen enough."""


@dataclass(frozen=True)
class CanaryReport:
    """What came of it."""

    num_verified: int
    num_accepted: int
    posture: Posture | None
    """What the hub lets the drafter do now; None: it follows no posture document."""

    @property
    def standing(self) -> str:
        """In a word."""
        if self.posture is None:
            return "not asked for"
        if self.posture.probation:
            return "on probation"
        return "admitted" if self.posture.drafting else "refused"


async def run_canary(node: MicroNode) -> CanaryReport:
    """Decode the fixed prompts until the hub has judged the node's drafter; ConfigError when the node has none."""
    if node.drafter is None:
        raise ConfigError("there is no drafter to measure", hint="name one with --drafter")
    params = SamplingParams(max_tokens=NUM_TOKENS)
    num_verified = num_accepted = 0
    for _ in range(_ROUNDS):
        for text in canary_prompts().texts:
            async for event in node.generate(text, params):
                if isinstance(event, Finish):
                    num_verified += event.usage.num_verified
                    num_accepted += event.usage.num_accepted
        if node.posture is None or not node.posture.probation:
            break
    return CanaryReport(num_verified, num_accepted, node.posture)

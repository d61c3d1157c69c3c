"""A sequence driven by hand through an engine, without a hub: what a session does, in a few lines."""

from __future__ import annotations

from collections.abc import Sequence

from baru_common.errors import BaruError
from baru_common.sampling import SamplingContext
from baru_hub.acceptance import Decision, accept
from baru_hub.engines import Feed
from baru_hub.engines.transformers import TransformersEngine
from baru_hub.session import Block


def ids_of(result: Decision | BaruError) -> list[int]:
    """The target's own ids of one feed; raises what the engine returned instead."""
    if isinstance(result, BaruError):
        raise result
    return list(result.ids)


class Line:
    """One sequence: committed ids, and how many of them are cached."""

    def __init__(
        self,
        engine: TransformersEngine,
        prompt: Sequence[int],
        num_tokens: int,
        identity: str | None = None,
        sampling: SamplingContext | None = None,
    ) -> None:
        self.engine = engine
        self.committed = list(prompt)
        self.num_prompt = len(prompt)
        self.num_tokens = num_tokens
        self.allocation = engine.allocate(prompt, len(prompt) + num_tokens, identity, sampling)
        self.num_cached = self.allocation.num_cached

    @property
    def output(self) -> list[int]:
        return self.committed[self.num_prompt :]

    @property
    def room(self) -> int:
        return self.num_tokens - len(self.output)

    @property
    def done(self) -> bool:
        return self.room <= 0

    def feed(self, draft: Sequence[int] = (), max_pending: int = 1 << 20) -> Feed:
        """What to feed next; the draft only once the prompt is through."""
        pending = self.committed[self.num_cached :][:max_pending]
        whole = len(pending) == len(self.committed) - self.num_cached
        self.block = Block(tuple(pending), tuple(draft[: self.room - 1]) if whole else (), decides=whole)
        return Feed(self.allocation.sequence, self.num_cached, self.block)

    def take(self, decision: Decision | BaruError) -> int:
        """Commit what was decided; return how many draft ids were accepted."""
        if isinstance(decision, BaruError):
            raise decision
        if not self.block.decides:
            self.num_cached += len(self.block.pending)
            return 0
        acceptance = accept(self.block.draft, decision)
        self.committed.extend(acceptance.emitted)
        self.num_cached = len(self.committed) - 1
        return acceptance.num_accepted

    def free(self) -> None:
        self.engine.free(self.allocation.sequence)


async def write_plainly(
    engine: TransformersEngine, prompt: Sequence[int], num_tokens: int, identity: str | None = None
) -> list[int]:
    """Decode alone, one row a step."""
    line = Line(engine, prompt, num_tokens, identity)
    while not line.done:
        (decided,) = await engine.verify([line.feed()])
        line.take(decided)
    line.free()
    return line.output


async def write_together(
    engine: TransformersEngine, prompts: Sequence[Sequence[int]], num_tokens: int
) -> list[list[int]]:
    """Decode several at a time, one row each a step."""
    lines = [Line(engine, prompt, num_tokens) for prompt in prompts]
    while not all(line.done for line in lines):
        for line, decided in zip(lines, await engine.verify([line.feed() for line in lines]), strict=True):
            line.take(decided)
    for line in lines:
        line.free()
    return [line.output for line in lines]

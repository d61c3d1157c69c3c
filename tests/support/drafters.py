"""Drafters for tests: they know the right answer, or make a point of being wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baru_common.drafters import Proposal
from baru_common.sampling import SamplingContext
from baru_common.tokens import Vocabulary

Propose = Callable[[Sequence[int], int, int], list[int]]


@dataclass(frozen=True)
class FunctionDrafter:
    """Proposes what a function says; it is its own stream, because the function keeps no state."""

    function: Propose
    family: str = "test"
    vocabulary: Vocabulary | None = None
    tokens_per_call: int = 64
    blocking: bool = False

    def start(self, sampling: SamplingContext | None = None) -> FunctionDrafter:
        return self

    def propose(self, ids: Sequence[int], num_committed: int, max_tokens: int) -> Proposal:
        return Proposal(self.function(ids, num_committed, max_tokens))


def oracle(prompt: Sequence[int], answer: Sequence[int], depth: int = 64) -> FunctionDrafter:
    """Drafts what the target will say, at most `depth` ids past the committed ones."""
    whole = [*prompt, *answer]

    def propose(ids: Sequence[int], num_committed: int, max_tokens: int) -> list[int]:
        return whole[len(ids) : min(len(ids) + max_tokens, num_committed + depth)]

    return FunctionDrafter(propose, "oracle")


def wrong_at(
    prompt: Sequence[int], answer: Sequence[int], depth: int, wrong: Callable[[int], bool], size: int
) -> FunctionDrafter:
    """Drafts blocks of `depth` ids that are right but where `wrong(index in block)` holds."""
    whole = [*prompt, *answer]

    def propose(ids: Sequence[int], num_committed: int, max_tokens: int) -> list[int]:
        block = []
        for position in range(len(ids), min(len(ids) + max_tokens, num_committed + depth, len(whole))):
            right = whole[position]
            block.append((right + 1) % size if wrong(position - num_committed) else right)
        return block

    return FunctionDrafter(propose, "wrong-at")

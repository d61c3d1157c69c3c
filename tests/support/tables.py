"""A target and a drafter that are tables: what may come after which id, and how likely it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from baru_common.drafters import DraftStream, NgramDrafter, Proposal
from baru_common.drafters.causal_lm import CausalLmStream
from baru_common.sampling import SamplingContext
from baru_common.sampling.sampler import Sampler

from .sampling import context, letters

CPU = torch.device("cpu")
KINDS = ("ngram", "argmax", "sampling")
Rows = Sequence[Sequence[float]]


@dataclass(frozen=True)
class Toy:
    """A target and a drafter: the probability of each id after each id."""

    target: Rows
    drafter: Rows

    @property
    def size(self) -> int:
        return len(self.target)

    def sampling(self, **params: Any) -> SamplingContext:
        return context(1, vocabulary=letters(self.size), temperature=1.0, **params)

    def rows(self, ids: Sequence[int]) -> torch.Tensor:
        """The target's logits after each of `ids`."""
        return torch.tensor([self.target[token] for token in ids]).log()

    def stream(self, kind: str, sampling: SamplingContext) -> DraftStream:
        """A drafting stream of one of `KINDS`; only the last draws what it proposes."""
        if kind == "ngram":
            return NgramDrafter().start(sampling)
        return Argmax(self.drafter) if kind == "argmax" else table_lm(self.drafter, sampling)


@dataclass(frozen=True)
class Argmax:
    """Picks the likeliest id each time, and so has no distribution to tell."""

    table: Rows

    def propose(self, ids: Sequence[int], num_committed: int, max_tokens: int) -> Proposal:
        drafted = [ids[-1]]
        for _ in range(max_tokens):
            row = self.table[drafted[-1]]
            drafted.append(row.index(max(row)))
        return Proposal(drafted[1:])


def table_lm(table: Rows, sampling: SamplingContext) -> CausalLmStream:
    """The real drafting stream, on a model that is a table."""
    logits = torch.tensor(table).log()

    def forward(input_ids: torch.Tensor, **_: Any) -> Any:
        return SimpleNamespace(logits=logits[input_ids[:, -1:]], cache=SimpleNamespace(crop=lambda _: None))

    class Model:
        device = CPU
        __call__ = staticmethod(forward)

    loaded: Any = SimpleNamespace(model=Model(), vocabulary=sampling.vocabulary, eos_ids=(), context_limit=1 << 20)
    return CausalLmStream(loaded, Sampler(sampling, CPU))

"""Contexts of requests, for what is tested without a hub."""

from __future__ import annotations

from typing import Any

from baru_common.sampling import SamplingContext, SamplingParams
from baru_common.tokens import Vocabulary


def letters(size: int = 300) -> Vocabulary:
    """A vocabulary of one-character pieces; no control ids."""
    return Vocabulary(tuple(chr(33 + i).encode() for i in range(size)), frozenset())


def context(
    num_prompt: int = 1, *, vocabulary: Vocabulary | None = None, eos_ids: tuple[int, ...] = (), **params: Any
) -> SamplingContext:
    """The context of a request with these parameters; greedy unless they say otherwise."""
    return SamplingContext(SamplingParams(**params), num_prompt, vocabulary or letters(), eos_ids)

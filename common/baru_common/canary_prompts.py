"""The fixed prompts of the canary: the same everywhere, so that figures can be compared."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib import resources

import tomli

NUM_TOKENS = 32
"""Ids decoded for each prompt, greedily."""


@dataclass(frozen=True)
class CanaryPrompts:
    """The shipped set."""

    texts: tuple[str, ...]
    digest: str
    """SHA-256, hex."""


@cache
def canary_prompts() -> CanaryPrompts:
    """Return the shipped prompts."""
    data = (resources.files("baru_common") / "data" / "canary" / "prompts.toml").read_bytes()
    texts = tuple(prompt["text"] for prompt in tomli.loads(data.decode())["prompts"])
    return CanaryPrompts(texts, hashlib.sha256(data).hexdigest())

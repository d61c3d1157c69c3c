"""The prompt set, and what transformers' own greedy decoding answers to it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

DATA = Path(__file__).parent.parent / "data"


@dataclass(frozen=True)
class Golden:
    """One prompt and its reference answer (fp32, greedy, 128 ids or up to EOS)."""

    name: str
    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]


@cache
def golden() -> tuple[Golden, ...]:
    """All prompts with their answers, in the order of the prompt file."""
    answers = json.loads((DATA / "greedy_smollm2_fp32.json").read_text())["answers"]
    return tuple(Golden(name, tuple(a["prompt_ids"]), tuple(a["ids"])) for name, a in answers.items())

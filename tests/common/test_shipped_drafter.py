"""The small model that comes with the package: of the default target's vocabulary, small, and worth asking."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
import torch

from baru_common.drafters import load_drafter
from baru_common.drafters.causal_lm import CausalLmDrafter
from baru_common.model_files import SHIPPED_DRAFTER, LoadedModel, locate

_ANSWERS = Path(__file__).parents[1] / "data" / "greedy_smollm2_fp32.json"
_DEPTH = 4


@cache
def shipped() -> CausalLmDrafter:
    drafter = load_drafter("causal_lm")
    assert isinstance(drafter, CausalLmDrafter)
    return drafter


@pytest.mark.target
def test_it_is_of_the_targets_vocabulary_and_small(default_target: LoadedModel) -> None:
    target = default_target.vocabulary
    shipped().loaded.vocabulary.require_same(target, ours="the shipped drafter", theirs="the target")
    assert locate(SHIPPED_DRAFTER).weights[0].stat().st_size <= 12_000_000
    assert shipped().min_confidence > 0


def right_guesses(prompt: list[int], answer: list[int]) -> list[bool]:
    """For each id of a greedy answer after the first: whether the drafter would have guessed it."""
    ids = torch.tensor([[*prompt, *answer[:-1]]])
    with torch.inference_mode():
        guessed = shipped().loaded.model(input_ids=ids).logits[0, len(prompt) :].argmax(-1)
    right: list[bool] = (guessed == torch.tensor(answer[1:])).tolist()
    return right


def num_steps(right: list[bool]) -> int:
    """Steps of a hub to which the drafter sends chains of four."""
    steps = at = 0
    while at < len(right):
        held = next((n for n in range(_DEPTH) if at + n >= len(right) or not right[at + n]), _DEPTH)
        at += held + 1
        steps += 1
    return steps


@pytest.mark.timeout(120)
def test_it_is_worth_asking() -> None:
    """Mean accepted length over the prompt set, greedy, chains of four."""
    answers = json.loads(_ANSWERS.read_text())["answers"].values()
    runs = [right_guesses(answer["prompt_ids"], answer["ids"]) for answer in answers]
    length = sum(map(len, runs)) / sum(map(num_steps, runs))
    print(f"mean accepted length {length:.3f}")  # noqa: T201
    assert length >= 1.5

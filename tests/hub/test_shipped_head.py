"""The EAGLE-3 head that comes with the package: small, for the default target alone, and worth asking."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from baru_common.errors import ConfigError
from baru_common.model_files import LoadedModel
from baru_common.sampling import SamplingParams
from baru_hub.distill.eagle3 import Trainee
from baru_hub.distill.observed import observe
from baru_hub.distill.texts import Text
from baru_hub.drafters import _DATA, _SHIPPED, drafter_digest, hub_drafter
from baru_hub.drafters.eagle3 import load_eagle3
from baru_hub.engines.transformers import TransformersEngine
from support.hubs import generate, hub_of
from support.lockstep import free_running
from support.tiny import tiny_target, twin

_ANSWERS = json.loads((Path(__file__).parents[1] / "data" / "greedy_smollm2_fp32.json").read_text())["answers"]
_FOLDER = _DATA / "smollm2-135m-eagle3"


@pytest.mark.target
def test_it_is_the_default_targets_and_small(default_target: LoadedModel) -> None:
    assert _SHIPPED[default_target.files.digest] == _FOLDER.name
    assert drafter_digest("eagle3", default_target) == drafter_digest(f"eagle3:{_FOLDER}", default_target)
    assert (_FOLDER / "model.safetensors").stat().st_size <= 20_000_000


def test_other_targets_have_none() -> None:
    with pytest.raises(ConfigError, match=r"no eagle3 head for tiny-0-0\.0 comes with this package") as refused:
        hub_drafter("eagle3", tiny_target())
    assert "distill" in refused.value.hint


@pytest.mark.target
@pytest.mark.timeout(180)
def test_it_is_worth_asking(default_target: LoadedModel) -> None:
    """Mean accepted length over every other prompt of the set, greedy, chains of four."""
    config = default_target.model.config
    head, taps = load_eagle3(str(_FOLDER), config.hidden_size, config.num_hidden_layers)
    trainee = Trainee(head.to(default_target.model.dtype), default_target.model.get_input_embeddings())
    counts = []
    for answer in list(_ANSWERS.values())[::2]:
        text = Text((*answer["prompt_ids"], *answer["ids"]), len(answer["prompt_ids"]))
        counts.append(trainee.accepted(observe(default_target, taps, head.target_ids(), [text]), depth=4))
    length = sum(emitted for emitted, _ in counts) / sum(steps for _, steps in counts)
    print(f"mean accepted length {length:.3f}")  # noqa: T201
    assert length >= 1.6


@pytest.mark.target
@pytest.mark.timeout(180)
async def test_a_hub_serves_with_it_and_says_the_same(default_target: LoadedModel) -> None:
    answer = _ANSWERS["list-01"]
    engine = TransformersEngine(twin(default_target), kv_cache_mb=64, drafter="eagle3")
    async with hub_of(engine, scheduler=free_running()) as hub:
        finish, _ = await generate(hub.address, answer["prompt_ids"], SamplingParams(max_tokens=48))
    assert list(finish.ids) == answer["ids"][:48]
    assert finish.usage.num_guessed > 0

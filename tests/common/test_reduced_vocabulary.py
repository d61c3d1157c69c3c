"""A model over some of its tokenizer's ids says what it would say over all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from baru_common.drafters.causal_lm import CausalLmDrafter
from baru_common.errors import ModelFileError
from baru_common.model_files import LoadedModel, load
from support.sampling import context
from support.tiny import save, tiny_bundle, tiny_target

SIZE = 300
KNOWN = sorted({0, 1, 2, *range(10, 250, 2)})
"""The tokenizer's ids that the model knows."""


def reduced(folder: Path, **changes: torch.Tensor | None) -> Path:
    """`tiny_target` cut to KNOWN, with the tokenizer of all 300 ids."""
    small = tiny_target(num_ids=len(KNOWN), padded_to=len(KNOWN))
    save(small, folder)
    (folder / "tokenizer.json").write_text(tiny_bundle(num_ids=SIZE).tokenizer_json)
    stand_in = [min(range(len(KNOWN)), key=lambda i: abs(KNOWN[i] - token)) for token in range(SIZE)]
    tensors: dict[str, Any] = {
        "draft_to_target": torch.tensor(KNOWN),
        "target_to_draft": torch.tensor(stand_in),
        **changes,
    }
    save_file({name: t for name, t in tensors.items() if t is not None}, folder / "vocab_map.safetensors")
    return folder


@pytest.fixture
def loaded(tmp_path: Path) -> LoadedModel:
    return load(str(reduced(tmp_path / "small")), dtype="float32")


def test_it_reads_and_writes_the_tokenizers_ids(loaded: LoadedModel) -> None:
    """Ids it does not know are read as those that stand in for them, and are impossible to predict."""
    small: Any = tiny_target(num_ids=len(KNOWN), padded_to=len(KNOWN)).model
    ids = [1, 10, 12, 15, 299, 2, 20]
    stand_in = torch.tensor([[min(range(len(KNOWN)), key=lambda i: abs(KNOWN[i] - token)) for token in ids]])
    logits = loaded.model(input_ids=torch.tensor([ids])).logits
    assert logits.shape == (1, len(ids), SIZE)
    assert torch.equal(logits[..., KNOWN], small(input_ids=stand_in).logits)
    unknown = [i for i in range(SIZE) if i not in KNOWN]
    assert (logits[..., unknown] == float("-inf")).all()
    assert loaded.vocabulary.size == loaded.model.config.vocab_size == SIZE


def test_it_drafts_in_the_tokenizers_ids(loaded: LoadedModel) -> None:
    """Greedily and by draws; what it draws from is its own distribution over the ids that it knows."""
    for temperature in (0.0, 1.0):
        sampling = context(2, vocabulary=loaded.vocabulary, ignore_eos=True, temperature=temperature, seed=4)
        ids = [1, 15]
        for _ in range(6):
            ids += CausalLmDrafter(loaded).start(sampling).propose(ids, 2, 1).ids
        assert len(ids) == 8
        assert set(ids[2:]) <= set(KNOWN)


def test_the_map_is_part_of_the_digest(tmp_path: Path) -> None:
    one = load(str(reduced(tmp_path / "one")), dtype="float32")
    other = load(str(reduced(tmp_path / "two", target_to_draft=torch.zeros(SIZE, dtype=torch.long))), dtype="float32")
    assert one.fingerprint != other.fingerprint


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"draft_to_target": torch.tensor(KNOWN[:-1])}, "does not name"),
        ({"draft_to_target": torch.tensor([*KNOWN[:-1], KNOWN[0]])}, "does not name"),
        ({"draft_to_target": torch.tensor([*KNOWN[:-1], SIZE])}, "do not exist"),
        ({"draft_to_target": torch.tensor([*KNOWN[:-1], -1])}, "do not exist"),
        ({"target_to_draft": torch.full((SIZE,), len(KNOWN))}, "do not exist"),
        ({"target_to_draft": torch.zeros(2, SIZE, dtype=torch.long)}, "do not exist"),
        ({"target_to_draft": None}, "cannot be read"),
    ],
)
def test_a_map_that_does_not_fit_is_refused(changes: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=f"vocab_map.*{complaint}"):
        load(str(reduced(tmp_path / "small", **changes)))


def test_a_map_that_is_no_safetensors_is_refused(tmp_path: Path) -> None:
    folder = reduced(tmp_path / "small")
    (folder / "vocab_map.safetensors").write_bytes(b"nonsense")
    with pytest.raises(ModelFileError, match="vocab_map"):
        load(str(folder))

"""Models with another tokenizer that still predict text: another's weights, with the ids renamed."""

from __future__ import annotations

import copy
import json
import random
from dataclasses import replace
from functools import cache
from string import ascii_uppercase
from typing import Any

import torch
from torch import nn

from baru_common.drafters.causal_lm import CausalLmDrafter
from baru_common.drafters.foreign_lm import BoundForeignLmDrafter, ForeignLmDrafter
from baru_common.model_files import LoadedModel
from baru_common.tokens import Tokenizer, TokenizerBundle

from .tiny import tiny_target, twin


def bound(own: LoadedModel, target: LoadedModel) -> BoundForeignLmDrafter:
    """`own` as a drafter for `target`."""
    return ForeignLmDrafter(CausalLmDrafter(own)).bound(Tokenizer(target.bundle))


def renamed(loaded: LoadedModel, *, longest: int | None = None, seed: int = 0) -> LoadedModel:
    """Give `loaded` another tokenizer: pieces of more than `longest` bytes and their merges are gone, so that long
    words fall into several, and the ids of the rest are shuffled. The rows of embedding and head move along."""
    vocabulary = loaded.vocabulary
    kept = [
        i
        for i, piece in enumerate(vocabulary.pieces)
        if piece is not None and (longest is None or len(piece) <= longest or i in vocabulary.control_ids)
    ]
    random.Random(seed).shuffle(kept)
    new_id = {old: new for new, old in enumerate(kept)}
    changed = replace(loaded, model=_with_rows(loaded.model, kept), bundle=_with_ids(loaded.bundle, new_id))
    changed.__dict__["eos_ids"] = tuple(new_id[i] for i in loaded.eos_ids)
    return changed


def _with_rows(model: Any, rows: list[int]) -> Any:
    """The model of these ids; all other weights are shared."""
    changed = copy.deepcopy(model, memo={id(p): p for p in model.parameters()})
    changed.config.vocab_size = len(rows)
    changed.lm_head = _linear(model.lm_head.weight[rows])
    changed.model.embed_tokens = nn.Embedding(len(rows), changed.config.hidden_size)
    changed.model.embed_tokens.weight = nn.Parameter(model.model.embed_tokens.weight[rows], requires_grad=False)
    return changed


def _linear(weight: torch.Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer


def _with_ids(bundle: TokenizerBundle, new_id: dict[int, int]) -> TokenizerBundle:
    spec = json.loads(bundle.tokenizer_json)
    vocab = {token: new_id[i] for token, i in spec["model"]["vocab"].items() if i in new_id}
    spec["model"]["vocab"] = vocab
    spec["model"]["merges"] = [pair for pair in spec["model"]["merges"] if "".join(pair) in vocab]
    for token in spec["added_tokens"]:
        token["id"] = new_id[token["id"]]
    spec["added_tokens"].sort(key=lambda token: token["id"])
    return replace(bundle, tokenizer_json=json.dumps(spec))


@cache
def shouting(*more: bytes, noise: float = 0.0) -> LoadedModel:
    """A tiny target that says nothing but capital letters, spaces and line ends, and `more` pieces: for these every
    tokenizer of its kind has one id each, so that a drafter with its weights must always be right."""
    target = twin(tiny_target(noise=noise))
    said = {*(letter.encode() for letter in ascii_uppercase + " \n"), *more}
    model: Any = target.model
    weight = model.lm_head.weight.clone()
    pieces = target.vocabulary.pieces
    weight[[i for i in range(len(weight)) if i >= len(pieces) or pieces[i] not in said]] = 0
    model.lm_head = _linear(weight)
    return target


def spelled(target: LoadedModel, text: str) -> list[int]:
    """Ids of `text` within an answer."""
    return Tokenizer(target.bundle).encode_inside(text)

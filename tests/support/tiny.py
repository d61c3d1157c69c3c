"""A tiny but real target: two Llama layers with random weights and a byte-level tokenizer of 300 ids."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from baru_common.model_files import LoadedModel, ModelFiles
from baru_common.tokens import TokenizerBundle

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer(num_ids: int = 300, specials: tuple[str, ...] = SPECIALS) -> tokenizers.Tokenizer:
    """Byte-level BPE: `specials`, the 256 bytes, then pairs of letters, cut or filled up to `num_ids`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[: num_ids - len(specials)]
    vocab = {token: i for i, token in enumerate((*specials, *alphabet))}
    merges: list[tuple[str, str]] = []
    for first in "etaoinshrdlu":
        for second in "etaoinshrdlu":
            if len(vocab) < num_ids:
                merges.append((first, second))
                vocab[first + second] = len(vocab)
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(specials))
    return tokenizer


def tiny_bundle(**options: Any) -> TokenizerBundle:
    """The bundle of `byte_tokenizer` with a template that renders BOS."""
    special = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
    return TokenizerBundle(byte_tokenizer(**options).to_str(), CHAT_TEMPLATE, special)


@cache
def tiny_target(
    *,
    seed: int = 0,
    num_ids: int = 300,
    padded_to: int = 320,
    context_limit: int = 512,
    noise: float = 0.0,
) -> LoadedModel:
    """A random model in fp32; the same arguments give the same weights. `noise` blurs them a little."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=padded_to,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context_limit,
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=0,
        initializer_range=0.3,  # wide enough that the output is no short loop
        tie_word_embeddings=False,
    )
    model: Any = LlamaForCausalLM(config)
    model.eval().requires_grad_(False)
    with torch.no_grad():
        for weight in model.parameters() if noise else ():
            weight.add_(noise * weight.std() * torch.randn_like(weight))
    files = ModelFiles(f"tiny-{seed}-{noise}", Path("tiny"))
    files.__dict__["digest"] = json.dumps([seed, num_ids, padded_to, context_limit, noise])
    return LoadedModel(files, model, tiny_bundle(num_ids=num_ids), "float32")


def save(loaded: LoadedModel, folder: Path) -> Path:
    """Write the model as a Hugging Face folder."""
    loaded.model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(loaded.bundle.tokenizer_json)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **loaded.bundle.special_tokens}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(loaded.bundle.chat_template or "")
    return folder


@torch.inference_mode()
def plain_greedy(loaded: LoadedModel, prompt: list[int], num_tokens: int, stop_ids: tuple[int, ...] = ()) -> list[int]:
    """The slow, plain reference: recompute everything for each id, take the first maximum."""
    ids = list(prompt)
    while len(ids) < len(prompt) + num_tokens:
        logits = loaded.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1, : loaded.vocabulary.size]
        ids.append(int(torch.nonzero(logits == logits.max())[0, 0]))
        if ids[-1] in stop_ids:
            break
    return ids[len(prompt) :]


def with_eos(loaded: LoadedModel, *eos_ids: int) -> LoadedModel:
    """The same model, with other end-of-sequence ids."""
    changed = replace(loaded)
    changed.__dict__["eos_ids"] = eos_ids
    return changed


def twin(loaded: LoadedModel) -> LoadedModel:
    """The same weights in another module: an engine changes how its model attends."""
    weights = {id(p): p for p in loaded.model.parameters()}
    copied = replace(loaded, model=copy.deepcopy(loaded.model, memo=weights))
    copied.__dict__["eos_ids"] = loaded.eos_ids
    return copied

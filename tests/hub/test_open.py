"""What a hub asks of an `Open` before it admits it: pure, so no hub runs here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from baru_common.errors import (
    BaruError,
    EmptyPrompt,
    InvalidRequest,
    PromptTooLong,
    ProtocolMismatch,
    TargetMismatch,
    TokenizerMismatch,
    VocabularyMismatch,
)
from baru_common.frames import PROTOCOL_REVISION, DrafterInfo, Limits, Open
from baru_common.sampling import Grammar, SamplingParams
from baru_common.tokens import Tokenizer
from baru_hub.admission import check_open
from baru_hub.engines import EngineSpec
from support.tiny import tiny_bundle

_BUNDLE = tiny_bundle()
_VOCABULARY = Tokenizer(_BUNDLE).vocabulary
_SIZE = _VOCABULARY.size
_SPEC = EngineSpec("mock", "mock-target", b"f" * 32, _BUNDLE, _VOCABULARY, (2,), context_limit=64)
_LIMITS = Limits(max_sessions=4, max_prompt_tokens=40, max_draft_ahead=8, max_message_bytes=1 << 20)
_OPEN = Open((5, 6, 7), SamplingParams(max_tokens=6), _SPEC.fingerprint, _BUNDLE.digest)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"protocol_revision": 0}, ProtocolMismatch),
        ({"protocol_revision": PROTOCOL_REVISION + 1}, ProtocolMismatch),
        ({"target_fingerprint": b""}, TargetMismatch),
        ({"target_fingerprint": b"g" * 32}, TargetMismatch),
        ({"tokenizer_digest": b""}, TokenizerMismatch),
        ({"tokenizer_digest": b"g" * 32}, TokenizerMismatch),
        ({"drafter": DrafterInfo("mine", b"g" * 32)}, VocabularyMismatch),
        ({"prompt_ids": ()}, EmptyPrompt),
        ({"prompt_ids": (1,) * 41}, PromptTooLong),
        ({"prompt_ids": (1, _SIZE, 2)}, InvalidRequest),
        ({"prompt_ids": ((1 << 32) - 1,)}, InvalidRequest),
        ({"params": SamplingParams(stop_ids=(3, _SIZE))}, InvalidRequest),
        ({"params": SamplingParams(banned_ids=(3, _SIZE))}, InvalidRequest),
        ({"params": SamplingParams(allowed_ids=(_SIZE, 3))}, InvalidRequest),
        ({"params": SamplingParams(forced_ids=(3, _SIZE))}, InvalidRequest),
        ({"params": SamplingParams(logit_bias={3: 1.0, _SIZE: 1.0})}, InvalidRequest),
    ],
)
def test_what_does_not_fit_is_refused_by_name(changes: dict[str, Any], error: type[BaruError]) -> None:
    """One class for each thing that a caller can act on, and words on what to do."""
    with pytest.raises(error) as refused:
        check_open(replace(_OPEN, **changes), _SPEC, _LIMITS)
    assert type(refused.value) is error
    assert refused.value.hint or refused.value.details


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"prompt_ids": (0,)},
        {"prompt_ids": (_SIZE - 1,) * 40},
        {"drafter": DrafterInfo("ngram")},
        {"drafter": DrafterInfo("mine", _VOCABULARY.digest)},
        {"params": SamplingParams(stop_ids=(0, _SIZE - 1))},
        {"params": SamplingParams(banned_ids=(0, _SIZE - 1))},
        {"params": SamplingParams(allowed_ids=(0, _SIZE - 1))},
        {"params": SamplingParams(forced_ids=(0, _SIZE - 1))},
        {"params": SamplingParams(logit_bias={0: 1.0, _SIZE - 1: 1.0})},
        {"params": SamplingParams(temperature=0.7)},
    ],
)
def test_what_fits_is_admitted(changes: dict[str, Any]) -> None:
    """Up to the last id and the longest prompt; a drafter without a vocabulary of its own fits any target."""
    check_open(replace(_OPEN, **changes), _SPEC, _LIMITS)


def test_a_prompt_leaves_room_for_one_id() -> None:
    """The context limits the prompt even where the hub's own limit is wider."""
    wide = replace(_LIMITS, max_prompt_tokens=1000)
    check_open(replace(_OPEN, prompt_ids=(1,) * 63), _SPEC, wide)
    with pytest.raises(PromptTooLong, match="at most 63"):
        check_open(replace(_OPEN, prompt_ids=(1,) * 64), _SPEC, wide)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.5},
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.5},
        {"frequency_penalty": 0.5},
        {"logit_bias": {5: 1.0}},
        {"banned_ids": (5,)},
        {"allowed_ids": (5,)},
        {"forced_ids": (5,)},
        {"min_tokens": 1},
        {"logprobs": 0},
        {"grammar": Grammar.regex("a*")},
    ],
)
def test_an_engine_without_logits_refuses_what_needs_them(params: dict[str, Any]) -> None:
    """Rather than pass over it; with what it does serve."""
    with pytest.raises(InvalidRequest, match="mock engine decides by script") as refused:
        check_open(replace(_OPEN, params=SamplingParams(**params)), replace(_SPEC, samples=False), _LIMITS)
    assert refused.value.hint
    check_open(replace(_OPEN, params=SamplingParams(**params)), _SPEC, _LIMITS)


@pytest.mark.parametrize(
    "params", [{}, {"max_tokens": 3}, {"stop_ids": (5,)}, {"stop_strings": ("x",)}, {"ignore_eos": True}, {"seed": 3}]
)
def test_an_engine_without_logits_serves_what_needs_none(params: dict[str, Any]) -> None:
    """Where the output ends is found from ids and text alone."""
    check_open(replace(_OPEN, params=SamplingParams(**params)), replace(_SPEC, samples=False), _LIMITS)

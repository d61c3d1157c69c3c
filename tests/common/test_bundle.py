from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import Any

import pytest

from baru_common.errors import TokenizerMismatch
from baru_common.tokens import Tokenizer, TokenizerBundle
from support.tiny import CHAT_TEMPLATE, byte_tokenizer, tiny_bundle


def digest_of(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


@pytest.mark.parametrize(
    "bundle",
    [
        tiny_bundle(),
        TokenizerBundle(byte_tokenizer().to_str()),
        TokenizerBundle(byte_tokenizer().to_str(), "{{ 'é 🦉 \u2028' }}", {"bos_token": "<｜begin▁of｜>"}),
    ],
)
def test_a_bundle_comes_back_from_its_bytes(bundle: TokenizerBundle) -> None:
    """Same template, same special tokens, same tokenizer, and the same bytes again."""
    found = TokenizerBundle.from_bytes(bundle.data, bundle.digest)
    assert found.chat_template == bundle.chat_template
    assert dict(found.special_tokens) == dict(bundle.special_tokens)
    assert json.loads(found.tokenizer_json) == json.loads(bundle.tokenizer_json)
    assert found.data == bundle.data
    assert found.digest == bundle.digest == digest_of(bundle.data)
    messages = [{"role": "user", "content": "ünï"}]
    if bundle.chat_template:
        assert Tokenizer(found).encode_chat(messages) == Tokenizer(bundle).encode_chat(messages)


def test_the_bytes_are_canonical() -> None:
    """Layout and order of the file and of the mapping do not matter."""
    spec = json.loads(byte_tokenizer().to_str())
    one = TokenizerBundle(json.dumps(spec, indent=2), CHAT_TEMPLATE, {"a": "1", "b": "2"})
    other = TokenizerBundle(json.dumps(dict(reversed(spec.items()))), CHAT_TEMPLATE, {"b": "2", "a": "1"})
    assert one.data == other.data


@pytest.mark.parametrize(
    "changes",
    [
        {"chat_template": CHAT_TEMPLATE + " "},
        {"chat_template": None},
        {"special_tokens": {"bos_token": "<|im_end|>"}},
        {"tokenizer_json": byte_tokenizer(num_ids=299).to_str()},
    ],
)
def test_whatever_changes_ids_changes_the_digest(changes: dict[str, Any]) -> None:
    assert replace(tiny_bundle(), **changes).digest != tiny_bundle().digest


@pytest.mark.parametrize("change", [lambda d: d[:-1], lambda d: d + b" ", lambda d: d[:0], bytes.upper])
def test_other_bytes_than_promised_are_refused(change: Any) -> None:
    bundle = tiny_bundle()
    with pytest.raises(TokenizerMismatch, match="digest"):
        TokenizerBundle.from_bytes(change(bundle.data), bundle.digest)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xfe",
        b"{",
        b"[]",
        b"null",
        b"{}",
        b'{"format": 1}',
        b'{"format": 1, "tokenizer": {}, "chat_template": null}',
    ],
)
def test_what_is_no_bundle_is_refused(data: bytes) -> None:
    """Though it has the digest that the hub promised."""
    with pytest.raises(TokenizerMismatch, match="cannot be read"):
        TokenizerBundle.from_bytes(data, digest_of(data))


def test_another_format_is_refused_by_number() -> None:
    """The error says which format came, and what to do."""
    data = json.dumps(json.loads(tiny_bundle().data) | {"format": 2}).encode()
    with pytest.raises(TokenizerMismatch, match="format 2") as caught:
        TokenizerBundle.from_bytes(data, digest_of(data))
    assert "same release" in caught.value.hint

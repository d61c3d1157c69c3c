"""The id -> bytes map. Two tokenizers are the same for drafting when, and only when, these agree."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from baru_common.errors import Incompatible, VocabularyMismatch

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_METASPACE = "▁"
MAX_SIZE = 1 << 20
"""Most ids; the largest vocabulary in use has 262,144."""


@dataclass(frozen=True)
class Vocabulary:
    """What each id stands for, and which ids are control ids that no text may produce."""

    pieces: tuple[bytes | None, ...]
    """Bytes of each id; None for an id without a meaning (a hole)."""
    control_ids: frozenset[int]
    """Ids of special tokens: they are never part of the text."""

    @property
    def size(self) -> int:
        """One more than the highest id with a meaning, whatever the embedding was padded to."""
        return len(self.pieces)

    def text_bytes(self, token_id: int) -> bytes:
        """Return what `token_id` adds to a text; nothing if it is a control id or a hole."""
        return b"" if token_id in self.control_ids else self.pieces[token_id] or b""

    @cached_property
    def holes(self) -> tuple[int, ...]:
        """Ids below `size` that stand for nothing; never emitted, never drafted."""
        return tuple(i for i, piece in enumerate(self.pieces) if piece is None)

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 over the whole map, 32 bytes."""
        digest = hashlib.sha256()
        for i, piece in enumerate(self.pieces):
            kind = b"-" if piece is None else b"c" if i in self.control_ids else b"t"
            digest.update(kind + len(piece or b"").to_bytes(4, "big") + (piece or b""))
        return digest.digest()

    def require_same(self, other: Vocabulary, *, ours: str, theirs: str) -> None:
        """Raise VocabularyMismatch that names the first id whose meaning differs from `other`'s."""
        if self.digest == other.digest:
            return
        for i in range(max(self.size, other.size)):
            mine, yours = self._meaning(i), other._meaning(i)
            if mine != yours:
                raise VocabularyMismatch(
                    f"{ours} and {theirs} have different vocabularies: "
                    f"id {i} is {mine} to the one, {yours} to the other",
                    hint="use a drafter that was made for this target's tokenizer, or this one as foreign_lm:PATH",
                    details={"first_differing_id": str(i)},
                )

    def _meaning(self, i: int) -> str:
        if i >= self.size or self.pieces[i] is None:
            return "nothing"
        return f"{'control ' if i in self.control_ids else ''}{self.pieces[i]!r}"

    @classmethod
    def from_tokenizer_json(cls, tokenizer_json: str) -> Vocabulary:
        """Read the map from a `tokenizer.json` of a byte-level or byte-fallback tokenizer.

        Incompatible for other kinds: their ids have no bytes of their own, so text cannot be streamed.
        """
        try:
            return cls._read(json.loads(tokenizer_json))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise Incompatible(f"the tokenizer's vocabulary cannot be read: {error!r}") from error

    @classmethod
    def _read(cls, spec: Mapping[str, Any]) -> Vocabulary:
        to_bytes = _byte_level if "ByteLevel" in _decoder_types(spec) else _byte_fallback
        if to_bytes is _byte_fallback and "ByteFallback" not in _decoder_types(spec):
            raise Incompatible(
                "the tokenizer is neither byte-level nor byte-fallback, so its ids have no bytes of their own",
                hint="use a model with a byte-level BPE or SentencePiece byte-fallback tokenizer",
            )
        pieces = {i: to_bytes(token) for token, i in _model_vocab(spec["model"])}
        # Added tokens are literal text, whatever the model's own alphabet.
        pieces |= {t["id"]: t["content"].encode() for t in spec.get("added_tokens", [])}
        if not all(type(i) is int and 0 <= i < MAX_SIZE for i in pieces):  # before anything of that size is made
            raise Incompatible(f"the tokenizer has ids that are not within 0 .. {MAX_SIZE - 1}")
        control = frozenset(t["id"] for t in spec.get("added_tokens", []) if t["special"])
        return cls(tuple(pieces.get(i) for i in range(max(pieces, default=-1) + 1)), control)


def _model_vocab(model: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    vocab = model["vocab"]
    if isinstance(vocab, list):  # Unigram: [token, score] in id order
        return ((token, i) for i, (token, _) in enumerate(vocab))
    return iter(vocab.items())


def _decoder_types(spec: Mapping[str, Any]) -> set[str]:
    decoder = spec.get("decoder") or {}
    return {decoder.get("type", "")} | {d["type"] for d in decoder.get("decoders", [])}


def _byte_level_alphabet() -> dict[str, int]:
    """The printable stand-in of each byte, as GPT-2's encoder defines it."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}


BYTE_LEVEL_ALPHABET = _byte_level_alphabet()
"""Printable stand-in -> byte."""


def _byte_level(token: str) -> bytes:
    if all(c in BYTE_LEVEL_ALPHABET for c in token):
        return bytes(BYTE_LEVEL_ALPHABET[c] for c in token)
    return token.encode()


def _byte_fallback(token: str) -> bytes:
    if match := _BYTE_TOKEN.fullmatch(token):
        return bytes([int(match[1], 16)])
    return token.replace(_METASPACE, " ").encode()

from __future__ import annotations

import json
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from baru_common.errors import Incompatible, VocabularyMismatch
from baru_common.tokens import Vocabulary
from support.tiny import SPECIALS, byte_tokenizer


def sentencepiece_tokenizer(scheme: str = "first") -> tokenizers.Tokenizer:
    """Byte-fallback BPE in the manner of Llama 2: a metaspace, 256 byte tokens, a few merges."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "h", "e", "l", "o", "▁h", "▁he", "ll"]
    merges = [("▁", "h"), ("▁h", "e"), ("l", "l")]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)  # noqa: S106
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def edited(tokenizer: tokenizers.Tokenizer, **changes: Any) -> str:
    """The tokenizer's JSON with some of its parts replaced."""
    return json.dumps(json.loads(tokenizer.to_str()) | changes)


def of(*pieces: bytes | None, control: tuple[int, ...] = ()) -> Vocabulary:
    return Vocabulary(pieces, frozenset(control))


# -- reading


def test_every_byte_of_a_byte_level_vocabulary_is_itself() -> None:
    """Each of the 256 bytes is the piece of one id; merged ids are the bytes of their parts."""
    tokenizer = byte_tokenizer()
    vocabulary = Vocabulary.from_tokenizer_json(tokenizer.to_str())
    assert vocabulary.size == 300
    assert sorted(p for p in vocabulary.pieces[3:259] if p is not None) == [bytes([b]) for b in range(256)]
    assert vocabulary.pieces[:3] == tuple(s.encode() for s in SPECIALS)
    assert vocabulary.control_ids == {0, 1, 2}
    assert vocabulary.pieces[tokenizer.encode("et").ids[0]] == b"et"
    for text in (" a\tb\n", "naïve – 日本 🦉", "\x00\x7f\xa0\xad"):
        ids = tokenizer.encode(text).ids
        assert b"".join(vocabulary.pieces[i] or b"" for i in ids) == text.encode()


def test_every_byte_of_a_byte_fallback_vocabulary_is_itself() -> None:
    """`<0xE2>` is the byte, and the metaspace is a space."""
    tokenizer = sentencepiece_tokenizer("never")
    vocabulary = Vocabulary.from_tokenizer_json(tokenizer.to_str())
    assert vocabulary.pieces[3:259] == tuple(bytes([b]) for b in range(256))
    assert vocabulary.pieces[259:] == (b" ", b"h", b"e", b"l", b"o", b" h", b" he", b"ll")
    assert vocabulary.control_ids == {0, 1, 2}
    for text in (" hello hello", "hé – 日本 🦉\n"):
        ids = tokenizer.encode(text).ids
        assert b"".join(vocabulary.pieces[i] or b"" for i in ids) == text.encode()


def test_a_unigram_vocabulary_is_read_in_order() -> None:
    """Its ids are the indices of a list of tokens and scores."""
    tokens = [("<unk>", 0.0), ("▁a", -1.0), ("<0x0A>", -2.0), ("b", -3.0)]
    tokenizer = tokenizers.Tokenizer(models.Unigram(tokens, unk_id=0, byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    assert Vocabulary.from_tokenizer_json(tokenizer.to_str()).pieces == (b"<unk>", b" a", b"\n", b"b")


def test_added_tokens_are_literal_text() -> None:
    """They keep the characters that mean a byte or a space elsewhere; special or not decides what is control."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<think>", "Ġé"])
    tokenizer.add_special_tokens(["<|tool|>"])
    vocabulary = Vocabulary.from_tokenizer_json(tokenizer.to_str())
    assert vocabulary.pieces[300:] == (b"<think>", "Ġé".encode(), b"<|tool|>")
    assert vocabulary.control_ids == {0, 1, 2, 302}


def test_an_id_without_a_token_is_a_hole() -> None:
    """Holes lie below the highest id with a meaning; past it there is nothing, and no hole."""
    spec = json.loads(byte_tokenizer().to_str())
    spec["model"]["merges"] = [m for m in spec["model"]["merges"] if "".join(m) not in ("et", "te")]
    removed = sorted(spec["model"]["vocab"].pop(token) for token in ("et", "te"))
    vocabulary = Vocabulary.from_tokenizer_json(json.dumps(spec))
    assert vocabulary.holes == tuple(removed)
    assert [vocabulary.pieces[i] for i in removed] == [None, None]
    assert vocabulary.size == 300


def test_a_vocabulary_without_tokens_is_empty() -> None:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.decoder = decoders.ByteLevel()
    assert Vocabulary.from_tokenizer_json(tokenizer.to_str()).size == 0


@pytest.mark.parametrize(
    "decoder", [None, decoders.WordPiece(), decoders.Metaspace(), decoders.Sequence([decoders.Fuse()])]
)
def test_a_tokenizer_without_bytes_is_refused(decoder: Any) -> None:
    """Its ids have no bytes of their own, so its text cannot be streamed."""
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    tokenizer.normalizer = normalizers.Lowercase()
    if decoder is not None:
        tokenizer.decoder = decoder
    with pytest.raises(Incompatible, match="byte-fallback"):
        Vocabulary.from_tokenizer_json(tokenizer.to_str())


def test_a_decoder_within_a_sequence_counts() -> None:
    tokenizer = byte_tokenizer()
    inside = edited(tokenizer, decoder={"type": "Sequence", "decoders": [json.loads(tokenizer.to_str())["decoder"]]})
    assert Vocabulary.from_tokenizer_json(inside) == Vocabulary.from_tokenizer_json(tokenizer.to_str())


# -- comparing


@pytest.mark.parametrize(
    ("ours", "theirs", "first"),
    [
        pytest.param(of(b"a", b"b", b"c"), of(b"a", b"x", b"y"), 1, id="other bytes"),
        pytest.param(of(b"a", b"b"), of(b"a", b"b", b"c"), 2, id="longer"),
        pytest.param(of(b"a", b"b", b"c"), of(b"a", b"b"), 2, id="shorter"),
        pytest.param(of(b"a", None, b"c"), of(b"a", b"b", b"c"), 1, id="a hole"),
        pytest.param(of(b"a", b""), of(b"a", None), 1, id="an empty piece is no hole"),
        pytest.param(of(b"a", b"b", control=(1,)), of(b"a", b"b"), 1, id="control or text"),
        pytest.param(of(b"ab", b"c"), of(b"a", b"bc"), 0, id="the same bytes cut elsewhere"),
    ],
)
def test_the_first_id_that_differs_is_named(ours: Vocabulary, theirs: Vocabulary, first: int) -> None:
    """In the message, for people, and in the details, for programs; both sides are named."""
    assert ours.digest != theirs.digest
    with pytest.raises(VocabularyMismatch, match=f"id {first} is") as caught:
        ours.require_same(theirs, ours="the drafter", theirs="the target")
    assert caught.value.details == {"first_differing_id": str(first)}
    assert "the drafter and the target" in str(caught.value)


def test_the_same_map_is_the_same_whatever_it_was_read_from() -> None:
    """Merges, normalizers and order of the file do not matter, and neither does padding: it has no tokens."""
    tokenizer = byte_tokenizer()
    ours = Vocabulary.from_tokenizer_json(tokenizer.to_str())
    theirs = Vocabulary.from_tokenizer_json(edited(tokenizer, normalizer={"type": "NFC"}, pre_tokenizer=None))
    assert ours.digest == theirs.digest
    ours.require_same(theirs, ours="a", theirs="b")

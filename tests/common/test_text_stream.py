from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baru_common.tokens import TextStream, Tokenizer, TokenizerBundle, Vocabulary
from support.tiny import tiny_bundle

from .test_vocabulary import sentencepiece_tokenizer

NUM_IDS = 300


@cache
def byte_level() -> Tokenizer:
    return Tokenizer(tiny_bundle())


@cache
def byte_fallback() -> Tokenizer:
    return Tokenizer(TokenizerBundle(sentencepiece_tokenizer().to_str()))


def streamed(vocabulary: Vocabulary, ids: list[int]) -> list[str]:
    stream = TextStream(vocabulary)
    return [*map(stream.push, ids), stream.finish()]


# U+FDD0 is the noncharacter that `Tokenizer` takes out of every text.
texts = st.text(st.characters(codec="utf-8", exclude_characters="\ufdd0"), min_size=1)


@given(texts)
def test_text_comes_out_as_it_went_in(text: str) -> None:
    """Any Unicode text, in whole characters: what came so far is always a prefix of it, and nothing is held back."""
    tokenizer = byte_level()
    pieces = streamed(tokenizer.vocabulary, tokenizer.encode_text(text))
    assert "".join(pieces) == text
    assert pieces[-1] == ""
    for end in range(len(pieces)):
        assert text.startswith("".join(pieces[:end]))


@given(st.lists(st.integers(0, NUM_IDS - 1)))
def test_any_ids_give_what_decoding_them_at_once_gives(ids: list[int]) -> None:
    """Broken bytes and control ids in the middle of a character included."""
    tokenizer = byte_level()
    assert "".join(streamed(tokenizer.vocabulary, ids)) == tokenizer.decode(ids)


@given(st.lists(texts, min_size=2, max_size=4), st.lists(st.integers(3, 258), min_size=1, max_size=4))
def test_a_replacement_stands_for_invalid_bytes_only(texts: list[str], noise: list[int]) -> None:
    """Each U+FFFD is one that a plain decoding of all the bytes has, too."""
    vocabulary = byte_level().vocabulary
    ids = noise.copy()
    for text in texts:
        ids += [*byte_level().encode_text(text), *noise]
    data = b"".join(vocabulary.pieces[i] or b"" for i in ids)
    assert "".join(streamed(vocabulary, ids)) == data.decode(errors="replace")


@given(texts.filter(lambda text: "▁" not in text))
def test_byte_fallback_text_comes_out_as_it_went_in(text: str) -> None:
    """The space that such tokenizers put before a text is real text to a stream, which may be in mid-sentence."""
    tokenizer = byte_fallback()
    ids = tokenizer.encode_text(text)
    assert "".join(streamed(tokenizer.vocabulary, ids)).removeprefix(" ") == text.removeprefix(" ")
    assert tokenizer.decode(ids).removeprefix(" ") == text.removeprefix(" ")


def test_a_character_is_held_back_until_its_last_byte() -> None:
    """The owl has four bytes, so four ids: three give nothing."""
    tokenizer = byte_level()
    ids = tokenizer.encode_text("🦉a")
    assert streamed(tokenizer.vocabulary, ids) == ["", "", "", "🦉", "a", ""]


def test_half_a_character_at_the_end_is_replaced() -> None:
    """And only then: the stream cannot know before that nothing follows."""
    tokenizer = byte_level()
    ids = tokenizer.encode_text("a€")[:-1]
    assert streamed(tokenizer.vocabulary, ids) == ["a", "", "", "\ufffd"]


@pytest.mark.parametrize("control", [0, 1, 2])
def test_a_control_id_gives_no_text(control: int) -> None:
    """Nor does it break the character around it."""
    tokenizer = byte_level()
    first, second, third = tokenizer.encode_text("€")
    pieces = streamed(tokenizer.vocabulary, [control, first, control, second, third, control])
    assert pieces == ["", "", "", "", "€", "", ""]


def test_a_hole_gives_no_text() -> None:
    assert streamed(Vocabulary((b"a", None, b"b"), frozenset()), [0, 1, 2]) == ["a", "", "b", ""]


def test_a_finished_stream_starts_anew() -> None:
    """What was held back for the one text is no part of the next."""
    tokenizer = byte_level()
    stream = TextStream(tokenizer.vocabulary)
    stream.push(tokenizer.encode_text("€")[0])
    assert stream.finish() == "\ufffd"
    assert [stream.push(i) for i in tokenizer.encode_text("ok")] == ["o", "k"]
    assert stream.finish() == ""

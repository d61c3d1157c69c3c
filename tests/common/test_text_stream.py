from __future__ import annotations

import codecs
from functools import cache

import pytest
from hypothesis import example, given
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


# -- stop strings

_PIECES = (b"a", b"b", b"ab", b"aba", b"\xc3", b"\xa9", None, b"<end>")
_SMALL = Vocabulary(_PIECES, frozenset({7}))


def stop_of(pieces: list[bytes], stop_strings: list[str], min_tokens: int) -> tuple[int, str] | None:
    """Where in the joined pieces a stop string starts, and which: the one that ends first, the longest of several."""
    text = b"".join(pieces)
    done = 0
    for num_ids, piece in enumerate(pieces, start=1):
        for end in range(done + 1, done + len(piece) + 1):
            ending = [s for s in stop_strings if text[:end].endswith(s.encode())]
            if ending and num_ids >= min_tokens:
                longest = max(ending, key=lambda s: len(s.encode()))
                return end - len(longest.encode()), longest
        done += len(piece)
    return None


def shown_of(text: bytes, stop_strings: list[str]) -> str:
    """What may be shown of an unfinished text: no part of a character, nothing that may begin a stop string."""
    encoded = [s.encode() for s in stop_strings]
    starts = [e[:n] for e in encoded for n in range(1, len(e)) if text.endswith(e[:n])]
    held = max(map(len, starts), default=0)
    return codecs.getincrementaldecoder("utf-8")(errors="replace").decode(text[: len(text) - held])


@given(
    ids=st.lists(st.integers(0, len(_PIECES) - 1), max_size=12),
    stop_strings=st.lists(st.text("abé", min_size=1, max_size=4), max_size=3),
    min_tokens=st.integers(0, 6),
)
@example([3], ["aba", "b"], 0)  # one id: the one that ends first counts, not the one that starts first
@example([2], ["b", "ab"], 0)  # both end together: the longest counts
@example([4, 0], ["a"], 0)  # half a character before it
def test_text_ends_before_the_stop_string(ids: list[int], stop_strings: list[str], min_tokens: int) -> None:
    """Nothing of it is ever shown, nor anything after it; what cannot be part of one is shown at once."""
    stream = TextStream(_SMALL, stop_strings, min_tokens)
    pieces = [_SMALL.text_bytes(i) for i in ids]
    stop = stop_of(pieces, stop_strings, min_tokens)
    shown = ""
    for i, token in enumerate(ids):
        shown += stream.push(token)
        if stream.stopped_by is None:
            assert shown == shown_of(b"".join(pieces[: i + 1]), stop_strings)
    whole = b"".join(pieces)
    expected = whole if stop is None else whole[: stop[0]]
    assert shown + stream.finish() == expected.decode(errors="replace")
    assert stream.stopped_by == (stop and stop[1])


def test_what_was_held_back_comes_when_it_can_be_no_stop_string() -> None:
    """Or at the end, if nothing follows."""
    stream = TextStream(byte_level().vocabulary, ("abc",))
    ids = byte_level().encode_text
    assert [stream.push(i) for i in ids("xabdab")] == ["x", "", "", "abd", "", ""]
    assert stream.finish() == "ab"
    assert stream.stopped_by is None

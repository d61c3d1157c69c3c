from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baru_common.tokens import StopScanner, TextStream, Vocabulary

# Every byte is an id, then pieces that are whole words, half characters and nothing at all.
PIECES = (
    *(bytes([b]) for b in range(256)),
    b"ab",
    b"aab",
    b"ba",
    "é".encode(),
    "a🦉b".encode(),
    b"\xf0\x9f",
    b"\xa6\x89a",
)
CONTROL, HOLE = len(PIECES), len(PIECES) + 1
VOCABULARY = Vocabulary((*PIECES, b"<end>", None), frozenset({CONTROL}))


def ids_of(*pieces: str | bytes) -> list[int]:
    """One id for each piece, or for each byte of one that is none."""
    encoded = [piece.encode() if isinstance(piece, str) else piece for piece in pieces]
    return [i for piece in encoded for i in ([PIECES.index(piece)] if piece in PIECES else piece)]


def first_stop(pieces: Sequence[bytes], stops: Sequence[str], min_tokens: int) -> tuple[int, int, int] | None:
    """Where the stop string starts and ends that is the first to be complete, and how many ids it takes; the slow way.

    Every end is tried from the first byte on, and at each the longest stop string first.
    """
    text, lengths = b"".join(pieces), [len(b"".join(pieces[: i + 1])) for i in range(len(pieces))]
    for end in range(len(text) + 1):
        num_ids = next((i + 1 for i, length in enumerate(lengths) if length >= end), 0)
        for stop in sorted({stop.encode() for stop in stops}, key=len, reverse=True):
            if text[:end].endswith(stop) and num_ids >= max(min_tokens, 1):
                return end - len(stop), end, num_ids
    return None


letters = st.sampled_from(["a", "b", "é", "🦉", "ab", "aab"])
stop_lists = st.lists(st.lists(letters, min_size=1, max_size=4).map("".join), min_size=1, max_size=4)
id_lists = st.lists(
    st.sampled_from([*ids_of(*"ab", "ab", "aab", "ba", "é", "a🦉b"), *range(256, HOLE + 1)]), max_size=25
)
byte_lists = st.lists(st.sampled_from([*"abé🦉".encode(), 0x80, 0xC3, 0xF0, CONTROL]), max_size=25)


@given(id_lists | byte_lists, stop_lists, st.integers(0, 12))
def test_a_scanner_finds_what_a_search_of_the_whole_text_finds(
    ids: list[int], stops: list[str], min_tokens: int
) -> None:
    """The first to be complete, the longest of those that end together, whatever the pieces."""
    pieces = list(map(VOCABULARY.text_bytes, ids))
    expected = first_stop(pieces, stops, min_tokens)
    scanner = StopScanner(stops, min_tokens)
    for i, piece in enumerate(pieces):
        before = len(b"".join(pieces[:i]))
        if found := scanner.push(piece):
            assert (before + found[0], before + found[1], i + 1) == expected
            return
        text = b"".join(pieces[: i + 1])
        starts = [stop.encode()[:size] for stop in stops for size in range(1, len(stop.encode()))]
        assert scanner.num_held == max((len(start) for start in starts if text.endswith(start)), default=0)
    assert expected is None


@given(id_lists | byte_lists, stop_lists, st.integers(0, 12))
def test_a_stream_shows_what_comes_before_the_stop_string(ids: list[int], stops: list[str], min_tokens: int) -> None:
    """All of it, and at no time anything of the stop string, or what the next ids could still make one."""
    pieces = list(map(VOCABULARY.text_bytes, ids))
    data = b"".join(pieces)
    stop = first_stop(pieces, stops, min_tokens)
    expected = (data[: stop[0]] if stop else data).decode(errors="replace")
    stream, shown = TextStream(VOCABULARY, stops, min_tokens), ""
    for i, token in enumerate(ids):
        shown += stream.push(token)
        assert expected.startswith(shown)
        assert stream.stopped_by == (data[stop[0] : stop[1]].decode() if stop and i + 1 >= stop[2] else None)
        so_far = b"".join(pieces[: i + 1])
        if stop is None or i + 1 < stop[2]:  # all is shown but half a character and what may start a stop string
            starts = [s.encode()[:size] for s in stops for size in range(1, len(s.encode()))]
            num_held = max((len(start) for start in starts if so_far.endswith(start)), default=0)
            certain = so_far[: len(so_far) - num_held].decode(errors="replace").rstrip("\ufffd")
            assert len(shown) >= len(certain)
    assert shown + stream.finish() == expected


@given(id_lists, st.integers(0, 5))
def test_without_stop_strings_nothing_is_held(ids: list[int], min_tokens: int) -> None:
    scanner, stream = StopScanner((), min_tokens), TextStream(VOCABULARY, (), min_tokens)
    for token in ids:
        assert scanner.push(VOCABULARY.text_bytes(token)) is None
        assert scanner.num_held == 0
        stream.push(token)
    assert stream.stopped_by is None


def test_a_long_text_is_not_kept() -> None:
    """Only as much of its end as a stop string may reach back."""
    scanner, stream = StopScanner(["long", "x"]), TextStream(VOCABULARY, ["long", "x"])
    for token in ids_of(*"lon" * 1000):
        scanner.push(VOCABULARY.text_bytes(token))
        stream.push(token)
    assert len(scanner._tail) == len(stream._held) == 3


# -- single cases, to be read


def streamed(ids: list[int], stops: Sequence[str], min_tokens: int = 0) -> tuple[list[str], str | None]:
    stream = TextStream(VOCABULARY, stops, min_tokens)
    return [*map(stream.push, ids), stream.finish()], stream.stopped_by


def test_a_stop_string_across_ids_is_never_shown() -> None:
    """What turns out to be none comes with the id that shows it."""
    assert streamed(ids_of(*"xSTOP!"), ["STOP"]) == (["x", "", "", "", "", "", ""], "STOP")
    assert streamed(ids_of(*"xSTO!"), ["STOP"]) == (["x", "", "", "", "STO!", ""], None)
    assert streamed(ids_of(*"SSTOP"), ["STOP"]) == (["", "S", "", "", "", ""], "STOP")
    assert streamed(ids_of(*"xST"), ["STOP"]) == (["x", "", "", "ST"], None)


def test_the_rest_of_an_id_behind_a_stop_string_is_dropped() -> None:
    assert streamed(ids_of("x", "aab", "x"), ["a"]) == (["x", "", "", ""], "a")
    assert streamed(ids_of("x", "aab", "x"), ["ab"]) == (["x", "a", "", ""], "ab")


def test_the_first_to_be_complete_ends_the_text_and_the_longest_of_those() -> None:
    """Not the first to begin, and not the first of the list."""
    assert streamed(ids_of(*"abcd"), ["abcd", "bc"]) == (["", "", "a", "", ""], "bc")
    assert streamed(ids_of(*"abc"), ["c", "bc", "abc"]) == (["", "", "", ""], "abc")
    assert streamed(ids_of("aab"), ["aab", "a"]) == (["", ""], "a")
    assert streamed(ids_of(*"aaab"), ["aab"]) == (["", "", "a", "", ""], "aab")


def test_a_stop_string_before_min_tokens_is_text() -> None:
    """It is passed over, and may overlap with the one that counts."""
    assert streamed(ids_of(*"aXbX"), ["X"], 3) == (["a", "X", "b", "", ""], "X")
    assert streamed(ids_of(*"aXbX"), ["X"], 2) == (["a", "", "", "", ""], "X")
    assert streamed(ids_of(*"aXbX"), ["X"], 5) == (["a", "X", "b", "X", ""], None)
    assert streamed(ids_of(*"ababa"), ["aba"], 4) == (["", "", "ab", "", "", ""], "aba")
    assert streamed([CONTROL, *ids_of("X", "X")], ["X"], 3) == (["", "X", "", ""], "X"), "an id without text is one"


def test_half_a_character_before_a_stop_string_is_replaced() -> None:
    """And the stop string is found all the same."""
    assert streamed(ids_of(b"\xe2", b"\x82", *"STOP"), ["STOP"]) == (["", "", "", "", "", "", "\ufffd"], "STOP")
    assert streamed(ids_of("x", b"\xf0\x9f", "é"), ["é"]) == (["x", "", "", "\ufffd"], "é")


def test_a_stop_string_may_begin_as_another_character_ends() -> None:
    """Bytes are compared, in whole characters: a part of one is no stop string."""
    assert streamed(ids_of(b"\xc3", b"\xa9"), ["é"]) == (["", "", ""], "é")
    assert streamed(ids_of(b"\xc3", b"\xa8", "x"), ["é"]) == (["", "è", "x", ""], None)
    assert streamed(ids_of("a🦉b"), ["🦉"]) == (["a", ""], "🦉")


@pytest.mark.parametrize("after", [ids_of("x"), [CONTROL], [HOLE], ids_of(*"STOP")])
def test_nothing_comes_after_the_end(after: list[int]) -> None:
    stream = TextStream(VOCABULARY, ["STOP"])
    for token in ids_of(*"xSTOP"):
        stream.push(token)
    assert [stream.push(token) for token in after] == [""] * len(after)
    assert stream.finish() == ""
    assert stream.stopped_by == "STOP"

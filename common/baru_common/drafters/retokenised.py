"""A session's ids in another tokenizer, kept up as they grow, and text drafted in that one as the target's ids.

    target ids   [0, cut)  [cut, cut)  ...  [cut, end)
    own ids      one run for each piece     the open piece: encoded anew as it grows

Between pieces a tokenizer splits anyway: at control ids, before a word, after a line. So pieces can be encoded one by
one, and only the open one needs to be looked back at. Where the cuts are depends on the ids alone, never on how
they came.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from baru_common.errors import EmptyPrompt
from baru_common.prefixes import common_prefix
from baru_common.tokens import Tokenizer

_LONGEST = 64
"""Ids after which a piece is cut anywhere: some scripts have no spaces."""
_ROLES = ("bos_token", "eos_token")


@dataclass(frozen=True)
class OpenText:
    """What the drafter goes on from."""

    own_ids: list[int]
    behind: bytes
    """The open piece."""
    held: bytes
    """How `behind` ends, if within a character: not in `own_ids`, what is drafted must begin with it."""


@dataclass(frozen=True)
class Retokeniser:
    """From one tokenizer to another, and back."""

    target: Tokenizer
    own: Tokenizer
    """The drafter's."""

    @cached_property
    def opening(self) -> list[int]:
        """What the drafter's tokenizer puts before every text."""
        try:
            return self.own.encode_text("")
        except EmptyPrompt:
            return []

    @cached_property
    def controls(self) -> dict[int, list[int]]:
        """What the drafter reads for each control id of the target: its own of that spelling or role, or the text."""
        own, target = self.own.vocabulary, self.target.vocabulary
        spelled = {own.pieces[i]: i for i in own.control_ids}
        names, own_names = self.target.bundle.special_tokens, self.own.bundle.special_tokens
        roles = {names[r].encode(): own_names[r].encode() for r in _ROLES if r in names and r in own_names}
        read = {}
        for i in target.control_ids:
            piece = target.pieces[i] or b""
            same = spelled.get(piece, spelled.get(roles.get(piece)))
            read[i] = self._own_ids(piece) if same is None else [same]
        return read

    def cuts(self, before: int, after: int, length: int) -> bool:
        """Whether a piece of `length` ids that ends with `before` is complete when `after` follows."""
        vocabulary = self.target.vocabulary
        if before in vocabulary.control_ids or after in vocabulary.control_ids:
            return True
        left, right = vocabulary.text_bytes(before)[-1:], vocabulary.text_bytes(after)[:1]
        begins_word = right == b" " and not left.isspace()
        begins_line = left == b"\n" and not right.isspace()
        return begins_word or begins_line or (length >= _LONGEST and _starts_character(right))

    def read(self, piece: Sequence[int], *, is_open: bool) -> tuple[list[int], bytes]:
        """Return the drafter's ids of a piece, and the bytes held back because they do not complete a character."""
        if piece[0] in self.controls:
            return self.controls[piece[0]], b""
        text = self.text_of(piece)
        held = _incomplete(text) if is_open else b""
        return self._own_ids(text[: len(text) - len(held)]), held

    def text_of(self, ids: Sequence[int]) -> bytes:
        """Bytes of target ids; control ids have none."""
        return b"".join(map(self.target.vocabulary.text_bytes, ids))

    def written(self, behind: bytes, text: bytes) -> list[int]:
        """Return target ids that spell `text`, less a last incomplete character, where `behind` comes before it.

        None when the target's tokenizer would not split there.
        """
        text = text[: len(text) - len(_incomplete(behind + text))]
        # Alone, where the two would merge: a target that split there goes on from there.
        return _ids_after(self.target, behind, text) or _ids_alone(self.target, text)

    def _own_ids(self, text: bytes) -> list[int]:
        readable = text.decode(errors="replace")
        return _ids_alone(self.own, readable.encode()) or self.own.encode_inside(readable)  # which may be normalised


class RetokenisedContext:
    """One session's ids as the drafter's: a call encodes what is new, and the open piece."""

    def __init__(self, retokeniser: Retokeniser) -> None:
        self._retokeniser = retokeniser
        self._ids: list[int] = []
        self._own = list(retokeniser.opening)
        self._cuts = [(0, len(self._own))]
        """Where the pieces begin: index in the target's ids, in the drafter's."""

    def follow(self, ids: Sequence[int]) -> OpenText:
        """Return the drafter's view of `ids`, whatever was passed before."""
        self._rewind(common_prefix(self._ids, ids))
        for at in range(len(self._ids), len(ids)):
            start = self._cuts[-1][0]
            if at > start and self._retokeniser.cuts(ids[at - 1], ids[at], at - start):
                self._own += self._read(ids[start:at], is_open=False)[0]
                self._cuts.append((at, len(self._own)))
        self._ids = list(ids)
        piece = self._ids[self._cuts[-1][0] :]
        own_ids, held = self._read(piece, is_open=True)
        return OpenText(self._own + own_ids, self._retokeniser.text_of(piece), held)

    def _rewind(self, length: int) -> None:
        del self._ids[length:]
        while len(self._cuts) > 1 and self._cuts[-1][0] >= length:  # the id after a cut made it one
            self._cuts.pop()
        del self._own[self._cuts[-1][1] :]

    def _read(self, piece: Sequence[int], *, is_open: bool) -> tuple[list[int], bytes]:
        own_ids, held = self._retokeniser.read(piece, is_open=is_open)
        if own_ids == self._own == self._retokeniser.opening:  # the prompt says it itself
            return [], held
        return own_ids, held


def _ids_alone(tokenizer: Tokenizer, text: bytes) -> list[int]:
    """Ids of `text` with nothing that belongs to it before it; none if none spell it."""
    return _ids_after(tokenizer, b"", text) or _ids_after(tokenizer, b"\n", text)  # some put a space before any text


def _ids_after(tokenizer: Tokenizer, before: bytes, text: bytes) -> list[int]:
    """The last ids of both that spell `text`; none if one begins earlier. Not found by the ids of `before`: in this
    company they may be others than they were."""
    vocabulary = tokenizer.vocabulary
    ids = tokenizer.encode_inside((before + text).decode(errors="replace"))
    length, at = 0, len(ids)
    while length < len(text) and at > 0:
        at -= 1
        length += len(vocabulary.text_bytes(ids[at]))
    found = ids[at:]
    is_plain = vocabulary.control_ids.isdisjoint(found)  # an unknown character has a control id
    return found if is_plain and b"".join(map(vocabulary.text_bytes, found)) == text else []


def _incomplete(data: bytes) -> bytes:
    """The bytes at the end that do not complete a character."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    decoder.decode(data)
    return decoder.getstate()[0]


def _starts_character(data: bytes) -> bool:
    return not b"\x80" <= data[:1] < b"\xc0"

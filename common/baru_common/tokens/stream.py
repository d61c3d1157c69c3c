"""Text from ids as they come, never half a character, and nothing of a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from .stops import StopScanner
from .vocabulary import Vocabulary


class TextStream:
    """Turns ids into text incrementally.

    Held back are bytes that do not complete a character, and those that may be the start of a stop string, until
    what follows decides or `finish` is called. The joined pieces equal decoding all ids at once, up to the stop
    string. Control ids give no text.
    """

    def __init__(self, vocabulary: Vocabulary, stop_strings: Sequence[str] = (), min_tokens: int = 0) -> None:
        self._vocabulary = vocabulary
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._scanner = StopScanner(stop_strings, min_tokens)
        self._held = b""
        self.stopped_by: str | None = None
        """The stop string that ended the text; what comes after it is ignored."""

    def push(self, token_id: int) -> str:
        """Return the text that `token_id` completes, maybe none."""
        if self.stopped_by is not None:
            return ""
        piece = self._vocabulary.text_bytes(token_id)
        known = len(self._held)
        self._held += piece
        if stop := self._scanner.push(piece):
            start, end = known + stop[0], known + stop[1]
            self.stopped_by = self._held[start:end].decode()
            before, self._held = self._held[:start], b""
            return self._decoder.decode(before)
        certain = len(self._held) - self._scanner.num_held
        text = self._decoder.decode(self._held[:certain])
        self._held = self._held[certain:]
        return text

    def finish(self) -> str:
        """Return what was held back; the stream is of no further use."""
        held, self._held = self._held, b""
        return self._decoder.decode(held, final=True)

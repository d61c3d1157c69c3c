"""Text from ids as they come, never half a character."""

from __future__ import annotations

import codecs

from .vocabulary import Vocabulary


class TextStream:
    """Turns ids into text incrementally.

    Bytes that do not complete a character are held back until they do, or until `finish`, which turns
    them into U+FFFD. The joined pieces equal decoding all ids at once. Control ids give no text.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """Return the text that `token_id` completes, maybe none."""
        if token_id in self._vocabulary.control_ids:
            return ""
        return self._decoder.decode(self._vocabulary.pieces[token_id] or b"")

    def finish(self) -> str:
        """Return what was held back; the stream starts anew."""
        tail = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return tail

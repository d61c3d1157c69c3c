"""Stop strings: found in bytes that come piece by piece, and never shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class StopScanner:
    """Looks for stop strings in a text that grows by one id's bytes at a time.

    The one whose last byte comes first ends the text; of several that end there, the longest counts. One that is
    complete before `min_tokens` ids are there is passed over.
    """

    stop_strings: Sequence[str]
    min_tokens: int = 0
    _patterns: list[bytes] = field(init=False)
    _tail: bytes = b""
    """End of the text so far, as long as a stop string that is not complete may reach back."""
    _num_ids: int = 0

    def __post_init__(self) -> None:
        self._patterns = [text.encode() for text in self.stop_strings]

    def push(self, piece: bytes) -> tuple[int, int] | None:
        """Take in the next id's bytes. Return where the stop string that they complete starts and ends, counted
        from the first byte of `piece`: the start may be negative. None if they complete none."""
        text, known = self._tail + piece, len(self._tail)
        self._num_ids += 1
        found = [
            (at + len(pattern), at)
            for pattern in self._patterns
            if (at := text.find(pattern, max(known - len(pattern) + 1, 0))) >= 0
        ]
        self._tail = text[max(len(text) - self._reach, 0) :]
        if not found or self._num_ids < self.min_tokens:
            return None
        end, start = min(found)
        return start - known, end - known

    @property
    def num_held(self) -> int:
        """Bytes at the end of the text that may turn out to be the start of a stop string."""
        starts = (pattern[:size] for pattern in self._patterns for size in range(1, len(pattern)))
        return max((len(start) for start in starts if self._tail.endswith(start)), default=0)

    @property
    def _reach(self) -> int:
        return max(map(len, self._patterns), default=1) - 1

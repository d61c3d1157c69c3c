"""Messages cut into cells of one size and put together again, so that no size tells; see `Cell` in the contract.

cell      | size, 2 bytes | so much of the stream | zeros |
stream    | kind, 1 byte | size, 4 bytes | message | kind | size | ...
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterator

from .errors import BaruError

MESSAGE, END = 0x00, 0x80
_CELL = struct.Struct(">H")
_PART = struct.Struct(">BI")
CELL_OVERHEAD_BYTES = _CELL.size


class CellWriter:
    """Cuts what is put in."""

    def __init__(self, cell_bytes: int) -> None:
        self._cell_bytes = cell_bytes
        self._waiting: deque[bytes] = deque()
        self._cut = 0
        """Bytes of the first one that have left."""
        self.ended = False
        """Nothing more may be put in."""

    def put(self, message: bytes) -> None:
        """Queue a message."""
        self._waiting.append(_PART.pack(MESSAGE, len(message)) + message)

    def end(self, status: bytes = b"") -> None:
        """Queue the last word: an error's, or none."""
        self._waiting.append(_PART.pack(END, len(status)) + status)
        self.ended = True

    @property
    def num_queued(self) -> int:
        """Messages that have not left whole."""
        return len(self._waiting)

    @property
    def num_cells(self) -> int:
        """Cells that they fill."""
        num_bytes = sum(map(len, self._waiting)) - self._cut
        return -(-num_bytes // (self._cell_bytes - CELL_OVERHEAD_BYTES))

    def next_cell(self) -> bytes:
        """Return the next cell; one of zeros when nothing is queued."""
        room, pieces = self._cell_bytes - CELL_OVERHEAD_BYTES, []
        while self._waiting and room:
            first = self._waiting[0]
            piece = first[self._cut : self._cut + room]
            pieces.append(piece)
            room -= len(piece)
            self._cut += len(piece)
            if self._cut == len(first):
                self._waiting.popleft()
                self._cut = 0
        content = b"".join(pieces)
        return (_CELL.pack(len(content)) + content).ljust(self._cell_bytes, b"\0")


class CellReader:
    """Puts messages together from cells; what is wrong with them raises `blame`."""

    def __init__(self, cell_bytes: int, max_message_bytes: int, blame: type[BaruError]) -> None:
        self._cell_bytes = cell_bytes
        self._max_message_bytes = max_message_bytes
        self._blame = blame
        self._stream = bytearray()
        self.last_word: bytes | None = None
        """What ended the stream, when it has ended."""

    def take(self, cell: bytes) -> Iterator[bytes]:
        """Take in a cell; yield the messages that it completes."""
        self._stream += self._content(cell)
        while self.last_word is None and len(self._stream) >= _PART.size:
            kind, size = _PART.unpack_from(self._stream)
            if kind not in (MESSAGE, END):
                raise self._blame(f"a cell holds something of kind {kind}", hint="use the same release on both ends")
            if size > self._max_message_bytes:
                raise self._blame(
                    f"a message of {size} bytes is announced, at most {self._max_message_bytes} are taken"
                )
            if len(self._stream) < (end := _PART.size + size):
                return
            message = bytes(self._stream[_PART.size : end])
            del self._stream[:end]
            if kind == MESSAGE:
                yield message
            else:
                self.last_word = message
        if self.last_word is not None and self._stream:
            raise self._blame("something follows the last word of a stream of cells")

    def _content(self, cell: bytes) -> bytes:
        if len(cell) != self._cell_bytes:
            raise self._blame(
                f"a cell has {len(cell)} bytes, must have {self._cell_bytes}",
                hint="ask the hub to describe itself again",
            )
        (size,) = _CELL.unpack_from(cell)
        end = CELL_OVERHEAD_BYTES + size
        if end > len(cell) or any(cell[end:]):
            raise self._blame(f"a cell says that it holds {size} bytes, and does not")
        return cell[CELL_OVERHEAD_BYTES:end]

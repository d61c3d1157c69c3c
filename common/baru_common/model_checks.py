"""What is checked of a model's files before anything reads them: no code, and no size that a loader would believe.

A model may come from anybody. Lengths are compared with what the files hold before memory is taken for them.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from .errors import ModelFileError

MAX_JSON_BYTES = 64 << 20
"""Most bytes of one JSON file; the largest tokenizer in use has 34 MB."""
_MAX_NUMBER = 1 << 24
_MAX_PARTS = 4096
_PARTS = re.compile(r"^(num|n)_.*layers?$|^(num_|n_routed_|num_local_)experts$")
"""Keys of a configuration that say how many modules a loader makes; each has a tensor at least."""
_COPY = "copy the whole model folder again"


def read_json(path: Path) -> Any:
    """Return what a JSON file holds; ModelFileError when it is none, or too large."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ModelFileError(f"{path} is larger than {MAX_JSON_BYTES >> 20} MB", hint=_COPY)
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFileError(f"{path} cannot be read: {error!r}", hint=_COPY) from error


def require_inside(path: Path, root: Path) -> None:
    """Raise ModelFileError for a file that a link leads out of its model's folder."""
    if not path.resolve().is_relative_to(root.resolve()):
        raise ModelFileError(f"{path} leads out of {root}", hint="copy the file itself into the folder")


def refuse_code(path: Path) -> None:
    """Raise ModelFileError for a configuration that asks for code of its own, at any depth."""
    for value in _mappings(read_json(path)):
        for key in ("auto_map", "trust_remote_code"):
            if value.get(key):
                raise ModelFileError(
                    f"{path} asks for code from the model's folder ({key}), which is never run",
                    hint="use a model that transformers supports by itself",
                )


def check_sizes(config: Path, weights: Sequence[Path]) -> None:
    """Raise ModelFileError for a configuration that describes more than its safetensors files can hold."""
    raw = read_json(config)
    if not isinstance(raw, dict):
        raise ModelFileError(f"{config} is no configuration", hint=_COPY)
    num_bytes = sum(path.stat().st_size for path in weights)
    num_tensors = sum(len(_header(path)) for path in weights)
    for value in _mappings(raw):
        for key, number in value.items():
            most = min(_MAX_PARTS, num_tensors) if _PARTS.search(key) else _MAX_NUMBER
            if isinstance(number, int) and abs(number) > most:
                raise _absurd(config, f"{key} is {number}")
        hidden = value.get("hidden_size")
        for key in ("vocab_size", "intermediate_size"):
            other = value.get(key)
            # A weight takes at least a quarter of a byte.
            if isinstance(hidden, int) and isinstance(other, int) and hidden * other > 4 * num_bytes:
                raise _absurd(config, f"hidden_size is {hidden} and {key} {other}")


def _absurd(path: Path, what: str) -> ModelFileError:
    return ModelFileError(f"{path} describes another model than its weights: {what}", hint=_COPY)


def _mappings(value: Any) -> Iterator[Mapping[str, Any]]:
    todo = [value]
    while todo:
        value = todo.pop()
        if isinstance(value, dict):
            yield value
            todo.extend(value.values())
        elif isinstance(value, list):
            todo.extend(value)


def num_weights(path: Path) -> int:
    """Return how many weights a safetensors or GGUF file says it holds; ModelFileError when its header is unsound."""
    if path.suffix == ".gguf":
        return check_gguf(path)
    tensors = (tensor for name, tensor in _header(path).items() if name != "__metadata__")
    try:
        return sum(math.prod(tensor["shape"]) for tensor in tensors)
    except (TypeError, KeyError) as error:
        raise ModelFileError(f"{path} is no safetensors file: {error!r}", hint=_COPY) from error


def _header(path: Path) -> dict[str, Any]:
    """Return what a safetensors file says of its tensors. The library checks the rest: offsets that overlap, are out of
    range, or leave gaps."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if not 2 <= size <= min(MAX_JSON_BYTES, path.stat().st_size - 8):
            raise ModelFileError(f"{path} is no safetensors file: its header would have {size} bytes", hint=_COPY)
        try:
            header: dict[str, Any] = json.loads(file.read(size))
        except (ValueError, RecursionError) as error:
            raise ModelFileError(f"{path} is no safetensors file: {error}", hint=_COPY) from error
    return header


# -- GGUF

_GGUF_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of each plain type of a value."""
_GGUF_STRING, _GGUF_ARRAY = 8, 9
_MAX_KEYS, _MAX_TENSORS, _MAX_STRINGS, _MAX_DIMS = 4096, 1 << 16, 1 << 20, 4


def check_gguf(path: Path) -> int:
    """Return how many weights a GGUF file holds; ModelFileError when its header promises more than the file has."""
    try:
        with path.open("rb") as file:
            return _Gguf(file, path.stat().st_size).check()
    except (OSError, ValueError, struct.error) as error:
        raise ModelFileError(f"{path} is no sound GGUF file: {error}", hint="copy the file again") from error


class _Gguf:
    """Walks through a header, as the GGUF specification lays it out; ValueError where it cannot be true."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._size = file, size

    def check(self) -> int:
        """Return how many weights there are."""
        magic, version, num_tensors, num_keys = self._read("<4sIQQ")
        if magic != b"GGUF" or version not in (2, 3):
            raise ValueError(f"it begins with {magic!r}, version {version}")
        self._at_most("tensors", num_tensors, _MAX_TENSORS)
        self._at_most("keys", num_keys, _MAX_KEYS)
        for _ in range(num_keys):
            key = self._string()
            number = self._value(*self._read("<I"))
            if number is not None and key.endswith(b".block_count"):
                self._at_most("layers", number, num_tensors)
            elif number is not None and key.endswith((b"_length", b".head_count", b"_count")):
                self._at_most(key.decode(errors="replace"), number, _MAX_NUMBER)
        return sum(self._tensor() for _ in range(num_tensors))

    def _tensor(self) -> int:
        self._string()
        (num_dims,) = self._read("<I")
        self._at_most("dimensions", num_dims, _MAX_DIMS)
        num_weights: int = math.prod(self._read(f"<{num_dims}Q"))
        _, offset = self._read("<IQ")
        self._at_most("weights", num_weights, 8 * self._size)
        self._at_most("bytes before a tensor", offset, self._size)
        return num_weights

    def _value(self, kind: int) -> int | None:
        """Pass a value; return it if it is a plain 32-bit number."""
        if kind == _GGUF_STRING:
            self._string()
        elif kind == _GGUF_ARRAY:
            self._array()
        elif kind == 4:
            return int(self._read("<I")[0])
        else:
            self._skip(self._bytes_of(kind))
        return None

    def _array(self) -> None:
        kind, num = self._read("<IQ")
        if kind == _GGUF_STRING:
            self._at_most("strings", num, _MAX_STRINGS)
            for _ in range(num):
                self._skip(*self._read("<Q"))
        else:
            self._skip(num * self._bytes_of(kind))

    def _bytes_of(self, kind: int) -> int:
        if kind not in _GGUF_BYTES:
            raise ValueError(f"a value has type {kind}")
        return _GGUF_BYTES[kind]

    def _string(self) -> bytes:
        (size,) = self._read("<Q")
        self._at_most("bytes of text", size, self._size - self._file.tell())
        return self._file.read(size)

    def _skip(self, num_bytes: int) -> None:
        self._at_most("bytes", num_bytes, self._size - self._file.tell())
        self._file.seek(num_bytes, 1)

    def _read(self, layout: str) -> tuple[Any, ...]:
        return struct.unpack(layout, self._file.read(struct.calcsize(layout)))

    def _at_most(self, what: str, number: int, most: int) -> None:
        if number > most:
            raise ValueError(f"it claims {number} {what}, at most {most} can be true")

"""A receipt as a file: it holds all that is needed to check it offline, but for the authority's certificate."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from pathlib import Path
from typing import Any

from baru_common.errors import ConfigError, ReceiptInvalid
from baru_common.signatures import SignedStatement, wrong
from baru_common.whole_files import write_atomically

from .proof import Content

FORMAT, VERSION = "baru-receipt", 1
MAX_BYTES = 64 << 20


def write(path: Path, receipt: SignedStatement, content: Content | None = None) -> None:
    """Keep a receipt, and what its digests are of if that is given; ConfigError when it cannot be written."""
    values = values_of(receipt, content)
    try:
        write_atomically(path, json.dumps(values, ensure_ascii=False).encode() + b"\n")
    except OSError as error:
        raise ConfigError(f"the receipt cannot be written to {path}: {error.strerror}") from error


def values_of(receipt: SignedStatement, content: Content | None = None) -> dict[str, Any]:
    """Return what a file of it holds."""
    values: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "statement": receipt.statement.decode(),
        "signature": b64encode(receipt.signature).decode(),
        "certificate": b64encode(receipt.certificate).decode(),
    }
    if content:
        values["content"] = {
            "prompt_ids": list(content.prompt_ids),
            "output_ids": list(content.output_ids),
            "params": content.params,
        }
    return values


def read(path: Path) -> tuple[SignedStatement, Content | None]:
    """Return what a file holds, nothing checked yet; ReceiptInvalid when it is none."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    try:
        if len(data) > MAX_BYTES:
            raise ValueError(f"it has more than {MAX_BYTES} bytes")
        values = json.loads(data)
        if (values["format"], values["version"]) != (FORMAT, VERSION):
            raise ValueError(f"it is of another format or version than {FORMAT} {VERSION}")
        signature, certificate = (b64decode(values[name], validate=True) for name in ("signature", "certificate"))
        signed = SignedStatement(values["statement"].encode(), signature, certificate)
        return signed, _content(values["content"]) if "content" in values else None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise wrong(ReceiptInvalid, "file", f"{path} holds no receipt: {error}") from error


def _content(values: Any) -> Content:
    prompt, output = values["prompt_ids"], values["output_ids"]
    if not all(type(token) is int and 0 <= token < 1 << 32 for token in [*prompt, *output]):
        raise ValueError("its ids are none")
    if not isinstance(values["params"], str):
        raise TypeError("its parameters are no text")
    return Content(prompt, output, values["params"])

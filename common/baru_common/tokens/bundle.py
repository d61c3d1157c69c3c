"""Everything a node needs to turn text into the target's ids, as one digestible piece of bytes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from baru_common.errors import TokenizerMismatch

_FORMAT = 1


@dataclass(frozen=True)
class TokenizerBundle:
    """A tokenizer (the `tokenizer.json` format of Hugging Face tokenizers) and its chat template."""

    tokenizer_json: str
    """The whole `tokenizer.json`."""
    chat_template: str | None = None
    """Jinja template of a chat prompt; None for a model without one."""
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    """Variables of the template: `bos_token`, `eos_token`, ..."""

    @cached_property
    def data(self) -> bytes:
        """Canonical bytes: the same bundle gives the same bytes everywhere."""
        body = {
            "format": _FORMAT,
            "tokenizer": json.loads(self.tokenizer_json),
            "chat_template": self.chat_template,
            "special_tokens": dict(self.special_tokens),
        }
        return json.dumps(body, sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode()

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of `data`, 32 bytes."""
        return hashlib.sha256(self.data).digest()

    @classmethod
    def from_bytes(cls, data: bytes, digest: bytes) -> TokenizerBundle:
        """Parse `data`; TokenizerMismatch when its SHA-256 is not `digest` or it is not a bundle."""
        if hashlib.sha256(data).digest() != digest:
            raise TokenizerMismatch("the tokenizer bundle does not match its digest", hint="fetch it again")
        try:
            body: dict[str, Any] = json.loads(data)
            if body["format"] != _FORMAT:
                raise TokenizerMismatch(
                    f"the tokenizer bundle has format {body['format']}, this version reads {_FORMAT}",
                    hint="use the same release on hub and node",
                )
            bundle = cls(
                tokenizer_json=json.dumps(body["tokenizer"], ensure_ascii=False),
                chat_template=body["chat_template"],
                special_tokens=body["special_tokens"],
            )
            special: Any = bundle.special_tokens
            for text in (bundle.tokenizer_json, bundle.chat_template or "", *special.keys(), *special.values()):
                text.encode()  # text, and no lone surrogate in it
            bundle.__dict__["data"] = data
            return bundle
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise TokenizerMismatch(f"the tokenizer bundle cannot be read: {error!r}") from error

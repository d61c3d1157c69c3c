"""What an output must look like: a grammar as the request brings it, not yet compiled."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from baru_common.errors import InvalidRequest

MAX_GRAMMAR_BYTES = 1 << 16


class GrammarKind(Enum):
    """Language that a grammar is written in."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"


@dataclass(frozen=True)
class Grammar:
    """A grammar. Make one with `json_schema`, `regex`, `lark` or `choices`; InvalidRequest for an impossible one."""

    kind: GrammarKind
    text: str

    def __post_init__(self) -> None:
        try:
            size = len(self.text.encode())
        except (AttributeError, UnicodeEncodeError):
            raise wrong_grammar("is no valid text") from None
        if not 1 <= size <= MAX_GRAMMAR_BYTES:
            raise wrong_grammar(f"has {size} bytes, must have 1 to {MAX_GRAMMAR_BYTES}")

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str) -> Grammar:
        """JSON that satisfies a JSON schema, given as an object or as its text."""
        try:
            text = schema if isinstance(schema, str) else json.dumps(schema)
            parsed = json.loads(text)
        except (ValueError, TypeError, RecursionError) as error:
            raise wrong_grammar(f"is no JSON: {error}") from None
        if not isinstance(parsed, dict):
            raise wrong_grammar("is no JSON object, so it is no schema")
        return cls(GrammarKind.JSON_SCHEMA, text)

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Text that matches a regular expression as a whole (syntax of Rust's `regex`)."""
        return cls(GrammarKind.REGEX, pattern)

    @classmethod
    def lark(cls, grammar: str) -> Grammar:
        """Text that a context-free grammar produces from `start` (Lark syntax as llguidance reads it)."""
        return cls(GrammarKind.LARK, grammar)

    @classmethod
    def choices(cls, texts: Sequence[str]) -> Grammar:
        """One of these texts."""
        if not isinstance(texts, (list, tuple)) or not texts or not all(isinstance(t, str) and t for t in texts):
            raise wrong_grammar("needs a list of choices, each a text of one character or more")
        # A JSON string is a Lark string, but for DEL, which JSON leaves alone. One terminal for all of them:
        # as rules, more than 2000 would be past llguidance's limit of items.
        choices = " | ".join(json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f") for text in texts)
        return cls(GrammarKind.LARK, f"start: CHOICE\nCHOICE: {choices}")


def wrong_grammar(what: str) -> InvalidRequest:
    """Return the error that says what is wrong with a grammar."""
    return InvalidRequest(f"grammar {what}", details={"param": "grammar"})

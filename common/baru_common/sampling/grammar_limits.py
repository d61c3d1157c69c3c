"""What a grammar may ask of its compiler, where the compiler's own limits do not see it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from .grammar import Grammar, GrammarKind, wrong_grammar

MAX_MULTIPLE = 10_000
"""Most that `multipleOf` may come to in a grammar, all of them multiplied."""


MAX_MERGED = 12
"""Most schemas of a grammar that hold at the same time as another one."""
_MERGING = {"allOf", "anyOf", "oneOf", "$ref"}
_MERGED = {"pattern", "format", "properties", "patternProperties", "additionalProperties", "items", "prefixItems"}


def require_bounded(grammar: Grammar) -> None:
    """Refuse what the library's own limits do not see, though it takes minutes and gigabytes for a short schema."""
    objects = [value for schema in _schemas(grammar) for value in _objects(schema)]
    _require_small_multiples(objects)
    num_merged = sum(map(_num_merged, objects))
    if num_merged > MAX_MERGED:
        raise wrong_grammar(f"has {num_merged} schemas that hold along with others (allOf, $ref); at most {MAX_MERGED}")


def _num_merged(schema: dict[str, Any]) -> int:
    """Return how many schemas this one is merged with: patterns that hold together cost 2^(number of them)."""
    merging = _MERGING & schema.keys()
    together = schema["allOf"] if isinstance(schema.get("allOf"), list) else []
    return max(len(together) - 1, 0) + max(len(merging) - 1, 0) + bool(merging and _MERGED & schema.keys())


def _require_small_multiples(objects: list[dict[str, Any]]) -> None:
    """The library builds a state for every remainder, and for every remainder of the product of several."""
    values = [value.get("multipleOf") for value in objects]
    product = 1
    for divisor in {value for value in values if isinstance(value, (int, float))}:  # infinity has no digits
        digits = "".join(map(str, Decimal(str(divisor)).as_tuple().digits)).rstrip("0")
        product *= int(digits or 1)
    if product > MAX_MULTIPLE:
        raise wrong_grammar(
            f"has multipleOf {product}, all multiplied and without zeros at the end; at most {MAX_MULTIPLE}"
        )


def _schemas(grammar: Grammar) -> Iterator[Any]:
    """Yield the JSON of a schema, and what a Lark grammar embeds."""
    pieces: list[str] = []
    if grammar.kind is GrammarKind.JSON_SCHEMA:
        pieces = [grammar.text]
    elif grammar.kind is GrammarKind.LARK:
        if grammar.text.lstrip().startswith("{"):
            raise wrong_grammar("is no Lark: what begins with a brace is llguidance's own format")
        pieces = grammar.text.split("%json")[1:]
    for piece in pieces:
        with contextlib.suppress(ValueError, RecursionError):  # the library reads no JSON that Python does not
            yield json.JSONDecoder().raw_decode(piece.lstrip())[0]


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    pending = [value]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            yield value
        if isinstance(value, (dict, list)):
            pending.extend(value.values() if isinstance(value, dict) else value)

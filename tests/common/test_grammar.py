from __future__ import annotations

import json
import math
from typing import Any

import pytest

from baru_common.errors import InvalidRequest
from baru_common.sampling import Grammar, GrammarKind


def refused(make: Any, *arguments: Any) -> str:
    with pytest.raises(InvalidRequest, match=r"^grammar ") as caught:
        make(*arguments)
    assert caught.value.details == {"param": "grammar"}
    return str(caught.value)


def test_each_way_to_make_one_says_its_language() -> None:
    assert Grammar.regex("a+") == Grammar(GrammarKind.REGEX, "a+")
    assert Grammar.lark('start: "a"') == Grammar(GrammarKind.LARK, 'start: "a"')
    assert Grammar.json_schema('{"type": "null"}') == Grammar(GrammarKind.JSON_SCHEMA, '{"type": "null"}')
    assert Grammar.json_schema({"type": "null"}) == Grammar.json_schema('{"type": "null"}')
    assert Grammar.choices(["a"]).kind is GrammarKind.LARK
    assert len({Grammar.regex("a"), Grammar.regex("a"), Grammar.lark("a")}) == 2


def test_a_schema_of_objects_means_what_it_says() -> None:
    schema = {"type": "string", "enum": ["é", "🦉", 'q"'], "$defs": {"x": {"minimum": 0.5}}}
    assert json.loads(Grammar.json_schema(schema).text) == schema


@pytest.mark.parametrize("schema", ["", "{", "5", "[]", '"a"', "null", "true", "{'a': 1}", "{} {}"])
def test_what_is_no_json_object_is_no_schema(schema: str) -> None:
    assert "JSON" in refused(Grammar.json_schema, schema)


@pytest.mark.parametrize("schema", [{"const": {1}}, {"const": b"a"}, None, 5, ["a"]])
def test_what_cannot_be_json_is_no_schema(schema: Any) -> None:
    assert "JSON" in refused(Grammar.json_schema, schema)


@pytest.mark.parametrize("text", ["[" * 50_000, '{"a":' * 50_000])
def test_a_schema_that_is_too_deep_to_read_is_refused(text: str) -> None:
    refused(Grammar.json_schema, text)


def test_a_schema_that_holds_itself_is_refused() -> None:
    schema: dict[str, Any] = {}
    schema["items"] = schema
    refused(Grammar.json_schema, schema)


@pytest.mark.parametrize("make", [Grammar.regex, Grammar.lark])
def test_a_grammar_has_some_bytes_and_not_too_many(make: Any) -> None:
    """Bytes, not characters."""
    assert len(make("é" * 32768).text) == 32768
    for text in ("", "é" * 32768 + "a"):
        assert "1 to 65536" in refused(make, text)


@pytest.mark.parametrize("make", [Grammar.regex, Grammar.lark])
@pytest.mark.parametrize("text", ["\ud800", None, 5, b"a", ["a"]])
def test_what_is_no_text_is_no_grammar(make: Any, text: Any) -> None:
    refused(make, text)


@pytest.mark.parametrize("texts", [[], (), "abc", ["a", ""], ["a", None], [1], [["a"]], [b"a"], None, 5, ["\ud800"]])
def test_choices_are_texts_and_not_empty(texts: Any) -> None:
    """A list among them would be a piece of grammar."""
    refused(Grammar.choices, texts)


def test_a_number_that_json_lacks_stays_what_it_is() -> None:
    """It is refused where the grammar is compiled."""
    assert "NaN" in Grammar.json_schema({"const": math.nan}).text

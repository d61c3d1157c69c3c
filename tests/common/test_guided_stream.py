from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import pytest

from baru_common.drafters import GuidedStream, NgramDrafter, Proposal
from baru_common.sampling import Grammar
from baru_common.sampling.guide import Guide
from baru_common.tokens import Tokenizer
from support.tiny import tiny_bundle

PROMPT = [5, 6, 7]
EOS = (1, 2)


@cache
def tiny() -> Tokenizer:
    return Tokenizer(tiny_bundle())


@cache
def guide(grammar: Grammar) -> Guide:
    return Guide.compile(grammar, tiny().bundle, EOS)


def ids_of(text: str) -> list[int]:
    return tiny().encode_text(text) if text else []


@dataclass
class Repeater:
    """Proposes the same ids whatever came before, and keeps what it was asked."""

    ids: list[int]
    calls: list[tuple[list[int], int, int]] = field(default_factory=list)

    def propose(self, ids: Sequence[int], num_committed: int, max_tokens: int) -> Proposal:
        self.calls.append((list(ids), num_committed, max_tokens))
        return Proposal(self.ids[:max_tokens])


def guided(grammar: Grammar, proposed: str | list[int] = "") -> tuple[GuidedStream, Repeater]:
    repeater = Repeater(proposed if isinstance(proposed, list) else ids_of(proposed))
    return GuidedStream(repeater, guide(grammar), len(PROMPT)), repeater


def proposed_after(stream: GuidedStream, text: str, max_tokens: int = 64) -> list[int]:
    return list(stream.propose([*PROMPT, *ids_of(text)], len(PROMPT), max_tokens).ids)


DIGITS = Grammar.regex("[0-9]{2,5}")


def test_what_the_grammar_forbids_is_cut_off() -> None:
    """From the first id on that may not come where it would; what is allowed stays as it was proposed."""
    stream, repeater = guided(DIGITS, "12a45")
    assert proposed_after(stream, "") == ids_of("12")
    assert proposed_after(stream, "9") == ids_of("12")
    assert proposed_after(stream, "9999") == ids_of("1")
    assert repeater.calls == [([*PROMPT, *ids_of(text)], 3, 64) for text in ("", "9", "9999")]
    assert proposed_after(guided(DIGITS, "a")[0], "") == []


def test_ids_outside_of_the_text_are_forbidden() -> None:
    """Control ids that are no end."""
    assert proposed_after(guided(DIGITS, [0])[0], "12") == []
    assert proposed_after(guided(DIGITS, [*ids_of("3"), 1])[0], "12") == [*ids_of("3"), 1]
    assert proposed_after(guided(DIGITS, [*ids_of("3"), 1, *ids_of("4")])[0], "12") == [*ids_of("3"), 1]
    assert proposed_after(guided(DIGITS, [1])[0], "1") == []


def test_ids_without_an_alternative_come_first() -> None:
    """At no cost: the drafter is not even asked. In the tokenizer's own cut, which the masks allow."""
    stream, repeater = guided(Grammar.choices(["she said", "he said"]), "xx")
    assert proposed_after(stream, "s") == ids_of("she said")[len(ids_of("s")) :]
    assert repeater.calls == []
    for text in ("s", "he ", "she sa"):
        following = proposed_after(stream, text)
        assert tiny().decode([*ids_of(text), *following]) in ("she said", "he said")
    assert proposed_after(stream, "") == []
    assert len(repeater.calls) == 1


@pytest.mark.parametrize("max_tokens", [1, 3, 5])
def test_no_more_is_proposed_than_is_asked_for(max_tokens: int) -> None:
    forced = ids_of("and so on")
    assert proposed_after(guided(Grammar.choices(["and so on"]))[0], "", max_tokens) == forced[:max_tokens]
    stream, repeater = guided(DIGITS, "12345")
    assert proposed_after(stream, "", max_tokens) == ids_of("12345")[:max_tokens]
    assert repeater.calls[0][2] == max_tokens


def test_the_prompt_is_no_part_of_the_text() -> None:
    """It need not follow the grammar, and what it looks like is no matter."""
    stream = GuidedStream(Repeater(ids_of("34")), guide(DIGITS), 4)
    assert list(stream.propose(ids_of("abcd12"), 6, 64).ids) == ids_of("34")
    assert list(stream.propose(ids_of("123412345"), 9, 64).ids) == []


def test_a_draft_that_is_forbidden_gets_no_continuation() -> None:
    """Nothing that is drafted after it could be accepted; with another draft it goes on."""
    stream, repeater = guided(DIGITS, "12")
    assert proposed_after(stream, "1x") == []
    assert proposed_after(stream, "x") == []
    assert repeater.calls == []
    assert proposed_after(stream, "1") == ids_of("12")
    assert proposed_after(stream, "99999") == []
    assert proposed_after(stream, "") == ids_of("12")


def test_after_the_end_there_is_nothing_to_say() -> None:
    stream, _ = guided(DIGITS, "12")
    for end in EOS:
        assert list(stream.propose([*PROMPT, *ids_of("123"), end], len(PROMPT), 64).ids) == []
        assert list(stream.propose([*PROMPT, *ids_of("12345"), end], len(PROMPT), 64).ids) == []
    assert proposed_after(stream, "123") == ids_of("12")


def test_calls_leave_no_trace() -> None:
    """Committed and drafted ids come and go as verdicts have it; each call equals that of a fresh stream."""
    grammar = Grammar.json_schema({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]})
    texts = ["", '{"n": 1', '{"n"', '{"n": 12}', "x", '{"n": -', "{", '{"n": 1x', '{"n": 1', ""]
    stream, _ = guided(grammar, "234")
    for text in texts:
        for max_tokens in (1, 9):
            fresh, _ = guided(grammar, "234")
            assert proposed_after(stream, text, max_tokens) == proposed_after(fresh, text, max_tokens), text


def test_an_ngram_drafter_is_kept_to_the_grammar() -> None:
    """What it repeats from the prompt is used as far as it fits."""
    prompt = ids_of("note 123x 123x ")
    stream = GuidedStream(NgramDrafter().start(), guide(DIGITS), len(prompt))
    ids = [*prompt, *ids_of("12")]
    assert list(NgramDrafter().start().propose(ids, len(ids), 8).ids)[:2] == ids_of("3x")
    assert list(stream.propose(ids, len(ids), 8).ids) == ids_of("3")


_LIGHT = """
import json, sys
import baru_common.sampling
from baru_common.drafters import GuidedStream, NgramDrafter
from baru_common.sampling import Grammar, SamplingContext, SamplingParams
from baru_common.sampling.guide import Guide
from baru_common.tokens import TextStream, Tokenizer, TokenizerBundle

imported = sorted(sys.modules)
tokenizer = Tokenizer(TokenizerBundle(sys.stdin.read()))
grammar = Grammar.json_schema({"enum": ["on", "off"]})
guide = Guide.compile(grammar, tokenizer.bundle, (2,))
sampling = SamplingContext(SamplingParams(grammar=grammar), 1, tokenizer.vocabulary, (2,), guide)
proposal = GuidedStream(NgramDrafter().start(sampling), guide, 1).propose([9], 1, 4)
text = TextStream(tokenizer.vocabulary, ("x",))
print(json.dumps([imported, sorted(sys.modules), "".join(map(text.push, proposal.ids))]))
"""


def test_a_node_that_follows_grammars_needs_no_torch() -> None:
    """Neither what says what may be asked for, nor drafting by grammar, nor text with stop strings."""
    run = subprocess.run(
        [sys.executable, "-c", _LIGHT], input=tiny().bundle.tokenizer_json, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    at_first, at_last, text = json.loads(run.stdout)
    assert text == '"o'
    assert {name.partition(".")[0] for name in at_last}.isdisjoint({"torch", "transformers", "numpy", "safetensors"})
    assert "llguidance" not in at_first, "loaded for a request that has a grammar only"
    assert "llguidance" in at_last

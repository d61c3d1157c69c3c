"""The posture document: who may draft what, why, and what another document would change."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baru_common.errors import ConfigError
from baru_hub.posture import Decision, Document, decide, parse
from baru_hub.posture_diff import diff, model_classes
from baru_hub.posture_store import shipped, shipped_text
from baru_hub.published import SOURCE, published_rows
from support.documents import FLOORS, document


def asked(tier: str, model: str, batch: int = 1) -> Decision:
    return decide(shipped(), tier, model, batch, published_rows())


# -- the shipped document


@pytest.mark.parametrize("model", ["Qwen3.5-0.8B", "Qwen3-1.7B", "smollm2-135m-instruct"])
def test_the_micro_tier_never_speculates_by_itself_and_drafts_upward(model: str) -> None:
    """Whatever it gains; the published rows of its board are what that rests on, and are marked as others'."""
    for batch in (1, 8):
        decision = asked("micro", model, batch)
        assert (decision.local.on, decision.upward.on, decision.rule) == (False, True, "nano")
        assert decision.published
        assert {(row.device, row.source) for row in decision.published} == {("Jetson Orin Nano (8GB)", SOURCE)}
        assert not decision.measured


def test_the_rows_are_those_of_the_model_that_is_asked_for() -> None:
    """0.81x, as it was published."""
    (row,) = asked("micro", "Qwen3.5-0.8B").published
    assert (row.model, row.drafter, row.batch, row.speedup) == ("Qwen3.5-0.8B", "MTP", 1, 0.81)


_TIERS = {"Jetson AGX Thor": "hub", "Jetson AGX Orin (64GB)": "heavy", "Jetson Orin NX (16GB)": "standard"}
_FAMILIES = {"EAGLE3": "eagle3", "MTP": "mtp", "DFlash": "dflash"}


@pytest.mark.parametrize(
    "row",
    [row for row in published_rows() if row.device in _TIERS and row.speedup is not None and row.speedup < 1],
    ids=lambda row: f"{row.device} {row.model_class} {row.drafter} {row.batch}",
)
def test_what_was_published_as_slower_than_no_drafter_is_off(row: Any) -> None:
    """Every such row; and the decision shows it."""
    decision = asked(_TIERS[row.device], row.model_class, row.batch)
    assert not decision.local.allows(_FAMILIES[row.drafter])
    assert row in decision.published


def test_a_tier_that_the_document_does_not_have_gets_its_default() -> None:
    """And is told that it is unknown."""
    decision = asked("desk", "anything")
    assert (decision.tier, decision.rule, decision.upward.on) == ("unknown", "default", True)


def test_the_digest_is_of_the_content() -> None:
    """Not of comments and spacing; any value counts."""
    text = shipped_text()
    assert parse(f"# mine\n\n{text}").digest == shipped().digest
    assert parse(text.replace("\nversion = 1\n", "\nversion = 2\n")).digest != shipped().digest
    assert parse(text.replace("window = 128", "window = 129")).digest != shipped().digest


# -- what is wrong is named, with its line


@pytest.mark.parametrize(
    ("line", "instead", "words"),
    [
        ("window = 128", "windows = 128", ("canary.windows", "check its spelling")),
        ("window = 128", 'window = "128"', ("canary.window", "integer", "'128'")),
        ("window = 128", "window = 1", ("canary.window", "greater than or equal to 8", "1")),
        ("min_batch = 2", "min_batch = 2\nmax_batch = 1", ("rules.4", "max_batch is 1", "min_batch (2)")),
        ('tiers = ["heavy"]', 'tiers = ["havy"]', ("rules.4.tiers", "orin-batch-2-up", "'havy'", "heavy")),
        ('name = "nano"', 'name = "orin"', ("rules.10.name", "'orin'", "a second time")),
        ('"eagle3", "mtp", "early_exit"', '"eagle-3"', ("rules.6.local", "'eagle-3'", "eagle3")),
        ('fallback = "local"', 'fallback = "guess"', ("rules.10.fallback", "'guess'", "'wait'")),
        ("expected = 0.51", "expected = 51", ("canary.floors.1.expected", "less than or equal to 1", "51")),
        ('role = "micro node"', "", ("tiers.micro.role", "missing", "add it")),
        ("[default]", "[default]]", ("no TOML",)),
    ],
)
def test_every_error_names_its_key_its_line_and_what_to_do(line: str, instead: str, words: tuple[str, ...]) -> None:
    """The line is where somebody has to look."""
    text = shipped_text()
    start = text.index(line)
    with pytest.raises(ConfigError) as refused:
        parse(text[:start] + instead + text[start + len(line) :])
    assert refused.value.hint
    for word in words:
        assert word in refused.value.message
    number = text[:start].count("\n") + 1
    near = {f"line {n}" for n in range(number - 5, number + 3)}
    assert any(f"{said}:" in refused.value.message or f"{said}," in refused.value.message for said in near)


def test_an_empty_document_lacks_every_section() -> None:
    """All at once, not one after the other."""
    with pytest.raises(ConfigError, match=r"schema_version is missing.*version is missing.*tiers.*default"):
        parse("")


# -- the first rule that matches decides

_TIER_NAMES, _MODELS = ("micro", "hub"), ("*", "*8b*", "qwen?", "qwen3-8b")
effects = st.fixed_dictionaries(
    {
        "local": st.fixed_dictionaries({"on": st.booleans()}),
        "upward": st.fixed_dictionaries({"on": st.booleans(), "max_depth": st.none() | st.integers(0, 2)}),
        "because": st.just("why not"),
    }
)


@st.composite
def documents(draw: st.DrawFn) -> Document:
    rules = []
    for index in range(draw(st.integers(0, 4))):
        first = draw(st.integers(1, 6))
        bounds = {"min_batch": first, "max_batch": draw(st.none() | st.integers(first, 8))}
        tiers = draw(st.lists(st.sampled_from([*_TIER_NAMES, "unknown", "*"]), min_size=1, max_size=2))
        models = draw(st.lists(st.sampled_from(_MODELS), min_size=1, max_size=2))
        rules.append({"name": f"r{index}", "tiers": tiers, "models": models} | bounds | draw(effects))
    tier = {"device": "board", "role": "some"}
    return Document.model_validate(
        {
            "schema_version": 1,
            "version": 1,
            "tiers": dict.fromkeys(_TIER_NAMES, tier),
            "rules": rules,
            "default": draw(effects),
        }
    )


@settings(deadline=None)
@given(
    documents(), st.sampled_from([*_TIER_NAMES, "desk"]), st.sampled_from(["Qwen3-8B", "QwenX", "x"]), st.integers(1, 9)
)
def test_the_first_rule_that_matches_decides(found: Document, tier: str, model: str, batch: int) -> None:
    """As a plain search through the rules says."""
    known = tier if tier in _TIER_NAMES else "unknown"
    expected = "default"
    for rule in reversed(found.rules):
        fits_batch = rule.min_batch <= batch and (rule.max_batch is None or batch <= rule.max_batch)
        fits_model = any(fnmatchcase(model.lower(), pattern) for pattern in rule.models)
        if fits_batch and fits_model and ({known, "*"} & set(rule.tiers)):
            expected = rule.name
    decision = decide(found, tier, model, batch)
    assert decision.rule == expected
    source = next((rule for rule in found.rules if rule.name == expected), found.default)
    assert decision.effect == (source.local, source.upward, source.fallback)


@settings(max_examples=40, deadline=None)
@given(documents(), documents())
def test_a_preview_says_exactly_what_changes(old: Document, new: Document) -> None:
    """For every tier, named model and batch: it is in the preview once if its decision differs, else not at all."""
    changes = diff(old, new).decisions
    for tier in [*_TIER_NAMES, "unknown"]:
        for model in ["qwen3-8b", "any other model", *model_classes(old, new)[:3]]:
            of_both = [c for c in changes if (c.tier, c.model) == (tier, model)]
            for batch in range(1, 11):
                told = [c for c in of_both if c.first_batch <= batch <= (c.last_batch or batch)]
                before, after = decide(old, tier, model, batch).effect, decide(new, tier, model, batch).effect
                looked_at = model in model_classes(old, new)
                assert len(told) == (before != after and looked_at)
                assert all((c.before.effect, c.after.effect) == (before, after) for c in told)
    assert not diff(old, old)


def test_a_preview_says_what_changes_beside_the_rules() -> None:
    """A floor is no decision of a rule, and counts."""
    old, new = parse(document(canary=FLOORS)), parse(document(2, canary=FLOORS.replace("0.63", "0.7")))
    assert diff(old, new).settings == ("canary.floors.0.expected: 0.63 -> 0.7",)

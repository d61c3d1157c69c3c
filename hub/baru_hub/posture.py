"""The posture document: what a tier may do for a model class at a batch size. Pure: text in, decisions out.

The first rule that matches decides, or else the default; the rule is part of the decision. A posture is a ceiling: the
goodput scheduler goes as far as it pays, and no further than the posture allows.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal

import tomli
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from baru_common.board import UNKNOWN_TIER
from baru_common.errors import ConfigError

from .posture_errors import described
from .published import PublishedRow

SCHEMA_VERSION = 1
MAX_BYTES = 1 << 20
MODEL_FAMILIES = ("causal_lm", "foreign_lm", "early_exit", "eagle3", "mtp", "dflash")
"""Drafters with weights: what an engine can run wrong."""
FAMILIES = ("ngram", "suffix", "simulated", *MODEL_FAMILIES)
DEFAULT_RULE = "default"

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]
TierName = Annotated[str, StringConstraints(pattern=r"^(\*|[a-z][a-z0-9_-]{0,31})$")]
Pattern = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_. +*?/-]{1,128}$")]
Text = Annotated[str, StringConstraints(max_length=500)]


class _Part(BaseModel):
    """A table of the document: every key is known, no value is converted."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Tier(_Part):
    """Machines of one kind."""

    device: Text
    """For people."""
    role: Text


class Allowance(_Part):
    """What drafting may be done, on one of the two ways."""

    on: bool
    drafters: tuple[Pattern, ...] = ("*",)
    """Families that may be used, the preferred one first. Of a cascade each part must be among them."""
    max_depth: int | None = Field(default=None, ge=0, le=256)
    """Most draft ids checked per session and step."""
    max_ahead: int | None = Field(default=None, ge=1, le=4096)
    """Most drafted ids past the committed length."""

    @model_validator(mode="after")
    def _known_families(self) -> Allowance:
        for pattern in self.drafters:
            if not any(fnmatchcase(family, pattern) for family in FAMILIES):
                raise ValueError(f"drafters names {pattern!r}, which is no family; use one of {', '.join(FAMILIES)}")
        return self

    def allows(self, family: str) -> bool:
        """True when a drafter of this family, or each part of a cascade, may be used."""
        return self.on and all(any(fnmatchcase(part, p) for p in self.drafters) for part in family.split("+"))


class Evidence(_Part):
    """Which published rows a rule rests on."""

    device: Pattern
    model: Pattern = "*"
    precision: Pattern = "*"
    drafter: Pattern = "*"
    batch: int | None = Field(default=None, ge=1)

    def rows(self, published: Sequence[PublishedRow]) -> list[PublishedRow]:
        """Return them."""
        return [row for row in published if self._selects(row)]

    def _selects(self, row: PublishedRow) -> bool:
        names = ("device", "model", "precision", "drafter")
        return self.batch in (None, row.batch) and all(
            _matches(getattr(row, name), getattr(self, name)) for name in names
        )


class Effect(_Part):
    """What is decided."""

    local: Allowance
    """Speculation on this tier itself: its own target with a drafter beside it."""
    upward: Allowance
    """Drafting for a hub."""
    fallback: Literal["local", "wait", "fail"] | None = None
    """What a node does while no hub answers, unless it was told; None: its own choice."""
    because: Text
    published: tuple[Evidence, ...] = ()


class Rule(Effect):
    """One rule."""

    name: Name
    tiers: tuple[TierName, ...] = Field(min_length=1)
    models: tuple[Pattern, ...] = Field(default=("*",), min_length=1)
    """Patterns of target names, in any case; * and ? as in file names."""
    min_batch: int = Field(default=1, ge=1)
    max_batch: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _in_order(self) -> Rule:
        if self.max_batch is not None and self.max_batch < self.min_batch:
            raise ValueError(f"max_batch is {self.max_batch}, must be at least min_batch ({self.min_batch})")
        if self.name == DEFAULT_RULE:
            raise ValueError(f"name is {DEFAULT_RULE!r}, which is the name of the section [default]")
        return self

    def matches(self, tier: str, model: str, batch: int) -> bool:
        """True when this rule decides, unless an earlier one does."""
        return (
            any(one in ("*", tier) for one in self.tiers)
            and self.min_batch <= batch <= (self.max_batch or batch)
            and any(_matches(model, pattern) for pattern in self.models)
        )


class Floor(_Part):
    """The least acceptance that a canary must measure for drafters of some family."""

    family: Pattern
    models: tuple[Pattern, ...] = Field(default=("*",), min_length=1)
    expected: float = Field(gt=0, le=1)
    """Share of the drafted ids that are accepted, each where those before it were."""
    fraction: float = Field(gt=0, le=1)
    """The floor is so much of what is expected."""
    source: Text
    """Where the expected figure is from."""

    @property
    def least(self) -> float:
        """The floor itself."""
        return self.expected * self.fraction

    def is_for(self, family: str, model: str) -> bool:
        """True for a drafter of this family, or a cascade with one, beside this target."""
        return any(fnmatchcase(part, self.family) for part in family.split("+")) and any(
            _matches(model, pattern) for pattern in self.models
        )


class CanaryRules(_Part):
    """How drafters with weights are admitted."""

    depth: int = Field(default=4, ge=1, le=16)
    """Draft ids checked per step while a drafter is measured."""
    window: int = Field(default=128, ge=8, le=65536)
    """Draft ids of a node's drafter that are checked before it is judged."""
    floors: tuple[Floor, ...] = ()
    """The first that fits counts; a drafter that none fits is measured and never refused."""


class Document(_Part):
    """A posture document."""

    schema_version: Literal[1]
    version: int = Field(ge=1, le=0xFFFFFFFF)
    """Of this document; grows with each change."""
    note: Text = ""
    tiers: Mapping[Name, Tier]
    rules: tuple[Rule, ...] = Field(default=(), max_length=1000)
    default: Effect
    canary: CanaryRules = CanaryRules()

    @model_validator(mode="after")
    def _consistent(self) -> Document:
        names = [rule.name for rule in self.rules]
        for index, rule in enumerate(self.rules):
            if rule.name in names[:index]:
                raise ValueError(f"rules.{index}.name is {rule.name!r} a second time; give each rule a name of its own")
            for tier in rule.tiers:
                if tier not in ("*", UNKNOWN_TIER, *self.tiers):
                    raise ValueError(
                        f"rules.{index}.tiers of rule {rule.name!r} names {tier!r}, which is not in [tiers]; add it "
                        f"there, or use one of {', '.join((*self.tiers, UNKNOWN_TIER, '*'))}"
                    )
        return self

    @property
    def canonical(self) -> str:
        """The content without comments, spacing and order of keys."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, ensure_ascii=False, separators=(",", ":"))

    @property
    def digest(self) -> bytes:
        """SHA-256 of the content, 32 bytes."""
        return hashlib.sha256(self.canonical.encode()).digest()

    def tier(self, name: str) -> str:
        """Return the tier's name as rules have it: "unknown" for one that the document does not have."""
        return name if name in self.tiers else UNKNOWN_TIER

    def floor(self, family: str, model: str) -> Floor | None:
        """Return the floor for a drafter beside this target; None: there is none."""
        return next((floor for floor in self.canary.floors if floor.is_for(family, model)), None)


@dataclass(frozen=True)
class MeasuredRow:
    """What a canary measured: a figure of ours."""

    drafter: str
    engine: str
    acceptance: float
    num_tried: int
    method: str
    machine: str
    measured_at: str
    """Date and time, UTC."""


@dataclass(frozen=True)
class Decision:
    """What a document says for one tier, model class and batch, and what that rests on."""

    tier: str
    model: str
    batch: int
    rule: str
    local: Allowance
    upward: Allowance
    fallback: str | None
    because: str
    published: tuple[PublishedRow, ...] = ()
    """Figures of others."""
    measured: tuple[MeasuredRow, ...] = ()
    """Figures of ours."""

    @property
    def effect(self) -> tuple[Allowance, Allowance, str | None]:
        """What it changes for anybody."""
        return self.local, self.upward, self.fallback


def parse(text: str) -> Document:
    """Read a document; ConfigError names every key that is wrong, its line, and what to do."""
    if len(text.encode()) > MAX_BYTES:
        raise ConfigError(f"the posture document has more than {MAX_BYTES} bytes", hint="make it shorter")
    try:
        raw = tomli.loads(text)
    except tomli.TOMLDecodeError as error:
        raise ConfigError(f"the posture document is no TOML: {error}", hint="correct that line") from error
    try:
        # As JSON, so that nothing is converted: a number in quotes is no number.
        return Document.model_validate_json(json.dumps(raw, default=str), strict=True)
    except ValidationError as error:
        raise described(error, text) from error


def decide(
    document: Document, tier: str, model: str, batch: int = 1, published: Sequence[PublishedRow] = ()
) -> Decision:
    """Return what holds for `tier`, for targets of the class `model`, while `batch` sessions are decoded."""
    known = document.tier(tier)
    rule = next((rule for rule in document.rules if rule.matches(known, model, batch)), None)
    effect = rule or document.default
    return Decision(
        tier=known,
        model=model,
        batch=batch,
        rule=rule.name if rule else DEFAULT_RULE,
        local=effect.local,
        upward=effect.upward,
        fallback=effect.fallback,
        because=effect.because,
        published=tuple(_rows(effect.published, model, published)),
    )


def with_measured(decision: Decision, measured: Sequence[MeasuredRow]) -> Decision:
    """Return the decision with figures of ours beside the published ones."""
    return replace(decision, measured=tuple(measured))


def _rows(evidence: Sequence[Evidence], model: str, published: Sequence[PublishedRow]) -> Iterator[PublishedRow]:
    """Those of the model that is asked for; all that the rule rests on when there are none of it."""
    rows = list(dict.fromkeys(row for one in evidence for row in one.rows(published)))
    exact = [row for row in rows if model.lower() in (row.model.lower(), row.model_class.lower())]
    closest = max((row.model for row in rows if row.model.lower() in model.lower()), key=len, default=None)
    yield from exact or [row for row in rows if row.model == closest] or rows


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name.lower(), pattern.lower())


def leaves(part: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value of a dumped document with its key."""
    if isinstance(part, Mapping):
        for key, value in part.items():
            yield from leaves(value, f"{path}.{key}" if path else str(key))
    elif isinstance(part, list) and part and isinstance(part[0], Mapping):
        for index, value in enumerate(part):
            yield from leaves(value, f"{path}.{index}")
    else:
        yield path, part

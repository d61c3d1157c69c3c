"""What another posture document would change, before it is applied: for whom which decision, not which line. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from baru_common.board import UNKNOWN_TIER

from .posture import Decision, Document, decide, leaves
from .published import published_rows

OTHER_MODEL = "any other model"


@dataclass(frozen=True)
class Change:
    """A decision that another document would make differently."""

    tier: str
    model: str
    first_batch: int
    last_batch: int | None
    """None: and all larger ones."""
    before: Decision
    after: Decision

    @property
    def batches(self) -> str:
        """E.g. "1", "2-7", "8+"."""
        if self.last_batch is None:
            return f"{self.first_batch}+"
        return str(self.first_batch) if self.first_batch == self.last_batch else f"{self.first_batch}-{self.last_batch}"


@dataclass(frozen=True)
class Difference:
    """All that another document would change."""

    decisions: tuple[Change, ...]
    settings: tuple[str, ...]
    """Changes outside the rules: tiers and the canary's floors."""
    models: tuple[str, ...]
    """Model classes that were looked at."""

    def __bool__(self) -> bool:
        return bool(self.decisions or self.settings)


def diff(old: Document, new: Document) -> Difference:
    """Return what changes from `old` to `new`, for every tier, every batch, and every model class that either document
    or the published figures name."""
    return Difference(tuple(_merged(_changes(old, new))), tuple(_settings(old, new)), tuple(model_classes(old, new)))


def model_classes(*documents: Document) -> list[str]:
    """Return names of targets to look at: one for each pattern, the published ones, and one that no pattern names."""
    patterns = {pattern for document in documents for rule in document.rules for pattern in rule.models}
    named = {pattern.replace("*", "").replace("?", "4") for pattern in patterns} - {""}
    published = {name for row in published_rows() for name in (row.model, row.model_class)}
    return [*sorted(named | published), OTHER_MODEL]


def _batches(*documents: Document) -> list[tuple[int, int | None]]:
    """Ranges within which no decision changes."""
    rules = [rule for document in documents for rule in document.rules]
    starts = {1, *(rule.min_batch for rule in rules), *(rule.max_batch + 1 for rule in rules if rule.max_batch)}
    ordered = sorted(starts)
    return [(first, following - 1) for first, following in pairwise(ordered)] + [(ordered[-1], None)]


def _changes(old: Document, new: Document) -> Iterator[Change]:
    for tier in [*dict.fromkeys([*old.tiers, *new.tiers]), UNKNOWN_TIER]:
        for model in model_classes(old, new):
            for first, last in _batches(old, new):
                before, after = decide(old, tier, model, first), decide(new, tier, model, first)
                if before.effect != after.effect:
                    yield Change(tier, model, first, last, before, after)


def _merged(changes: Iterator[Change]) -> Iterator[Change]:
    """Join neighbouring ranges in which the same becomes the same."""
    last: Change | None = None
    for change in changes:
        if last and _goes_on(last, change):
            last = replace(last, last_batch=change.last_batch)
            continue
        if last:
            yield last
        last = change
    if last:
        yield last


def _goes_on(last: Change, change: Change) -> bool:
    return (
        (last.tier, last.model, last.before.effect, last.after.effect)
        == (change.tier, change.model, change.before.effect, change.after.effect)
        and last.last_batch is not None
        and last.last_batch + 1 == change.first_batch
    )


def _settings(old: Document, new: Document) -> Iterator[str]:
    before, after = ({key: _leaves(d, key) for key in ("tiers", "canary")} for d in (old, new))
    for key in before:
        for name in sorted(before[key].keys() | after[key].keys()):
            was, becomes = before[key].get(name), after[key].get(name)
            if was != becomes:
                yield f"{name}: {_shown(was)} -> {_shown(becomes)}"


def _leaves(document: Document, key: str) -> dict[str, Any]:
    return dict(leaves(document.model_dump(mode="json")[key], key))


def _shown(value: Any) -> str:
    return "none" if value is None else str(value)

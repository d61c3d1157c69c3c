"""`baru-hub posture` and `baru-hub canary` as somebody types them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from baru_common.errors import BaruError, ConfigError
from baru_hub.canary import FIXED_PROMPTS, Figure, Record, Triple
from baru_hub.canary_store import CanaryLedger
from baru_hub.cli import app
from support.documents import document


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BARU_STATE_DIR", str(tmp_path / "state"))
    return tmp_path / "state"


def said(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    if isinstance(result.exception, BaruError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def told(*arguments: str) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(said(*arguments, "--json"))
    return answer


def test_explain_says_the_decision_its_rule_and_the_rows_it_rests_on(state: Path) -> None:
    """Published figures are marked as others'; those of a canary as ours, with machine and date."""
    triple = Triple("ab" * 32, "transformers (5.24)", "mtp", "cd" * 32, "")
    ledger = CanaryLedger(state / "canary")
    ledger.put(Record(triple, Figure(200, 90), "Qwen3.5-0.8B-bf16", "mtp", FIXED_PROMPTS, "a desk", "2026-12-01"))
    ledger.save()
    question = ("posture", "explain", "--tier", "micro", "--model", "Qwen3.5-0.8B")
    answer = told(*question)
    assert (answer["rule"], answer["local"]["on"], answer["upward"]["on"]) == ("nano", False, True)
    assert [(row["speedup"], "not measured by us" in row["source"]) for row in answer["published"]] == [(0.81, True)]
    assert [(row["acceptance"], row["machine"]) for row in answer["measured"]] == [(0.45, "a desk")]
    text = said(*question)
    published, ours = text.index("not measured by us"), text.index("measured by us:\n    mtp")
    assert published < text.index("0.81x") < ours < text.index("45%") < text.index("a desk, 2026-12-01")


def test_a_document_is_checked_previewed_applied_and_taken_back(tmp_path: Path, state: Path) -> None:
    """Each says what it did; a dry run and a bad document do nothing."""
    old, new, bad = (tmp_path / f"{name}.toml" for name in ("old", "new", "bad"))
    old.write_text(document(2))
    new.write_text(document(3, micro="{ on = false }"))
    bad.write_text(document(4, micro='{ on = "no" }'))
    assert told("posture", "check", str(old))["valid"]
    with pytest.raises(ConfigError, match=r"line \d+: rules.0.upward.on"):
        said("posture", "check", str(bad))
    said("posture", "apply", str(old))
    assert "micro, batch 1+" in said("posture", "diff", str(old), str(new))
    assert "upward: on; drafters * -> off" in said("posture", "apply", str(new), "--dry-run")
    assert told("posture", "show")["version"] == 2
    assert told("posture", "apply", str(new))["applied"]
    with pytest.raises(ConfigError, match=r"rules.0.upward.on"):
        said("posture", "apply", str(bad))
    assert told("posture", "show")["version"] == 3
    assert told("posture", "rollback")["version"] == 2
    assert [entry["action"] for entry in told("posture", "history")["history"]] == ["apply", "apply", "rollback"]
    assert (state / "posture.toml").read_text() == said("posture", "show") == document(2)


def test_what_was_measured_is_listed_judged_and_forgotten(state: Path) -> None:
    triple = Triple("ab" * 32, "transformers (5.24)", "mtp", "cd" * 32, "")
    ledger = CanaryLedger(state / "canary")
    ledger.put(Record(triple, Figure(200, 2), "Qwen3.5-4B", "mtp", FIXED_PROMPTS, "a desk", "2026-12-01"))
    ledger.save()
    (row,) = told("canary", "show")["records"]
    assert row["standing"] == "refused"
    assert "1% measured" in row["reason"]
    assert "51% expected" in row["reason"]
    assert "1 records removed" in said("canary", "forget", row["key"][:8])
    assert told("canary", "show")["records"] == []

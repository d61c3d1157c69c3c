"""`baru-hub posture`: look at a posture document, change it, and go back."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from baru_common.cli_support import harmless, print_json
from baru_common.folders import state_folder

from .canary_store import CanaryLedger
from .following import canary_folder
from .posture import Allowance, Decision, Document, decide, with_measured
from .posture_diff import Difference, diff
from .posture_store import PostureStore, read_document
from .published import SOURCE, PublishedRow, published_rows

posture_app = typer.Typer(no_args_is_help=True, help="What each tier may do: the posture document.")
State = Annotated[
    Path | None, typer.Option("--state", help="Folder of the posture document; default: this user's state folder.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
_File = Annotated[Path, typer.Argument(help="A posture document (TOML).")]


def _store(state: Path | None) -> PostureStore:
    return PostureStore(state or state_folder())


@posture_app.command()
def explain(
    tier: Annotated[str, typer.Option(help="Tier, e.g. micro.")],
    model: Annotated[str, typer.Option(help="Name of the target, e.g. Qwen3.5-0.8B.")],
    batch: Annotated[int, typer.Option(min=1, help="Sessions at a time.")] = 1,
    document: Annotated[Path | None, typer.Option(help="Ask this document; default: the present one.")] = None,
    state: State = None,
    json_output: Json = False,
) -> None:
    """Say what holds for a tier, a model and a batch size, which rule decided, and what it rests on."""
    asked = read_document(document)[1] if document else _store(state).current()
    decision = decide(asked, tier, model, batch, published_rows())
    records = CanaryLedger(canary_folder(state)).records()
    ours = [record.row for record in records if model.lower() in record.target_name.lower()]
    decision = with_measured(decision, ours)
    if json_output:
        print_json(_as_json(asked, decision))
    else:
        _explain(asked, decision)


@posture_app.command()
def check(file: _File, json_output: Json = False) -> None:
    """Say whether a document is valid; every key that is wrong is named."""
    document = read_document(file)[1]
    if json_output:
        print_json({"valid": True} | _identity(document))
    else:
        typer.echo(f"valid: {_titled(document)}, {len(document.rules)} rules, {len(document.tiers)} tiers")


@posture_app.command("diff")
def diff_command(old: _File, new: _File, json_output: Json = False) -> None:
    """Show which decisions differ between two documents: for whom, not in which line."""
    _show_difference(diff(read_document(old)[1], read_document(new)[1]), json_output=json_output)


@posture_app.command()
def apply(
    file: _File,
    state: State = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would change, and change nothing.")] = False,
    json_output: Json = False,
) -> None:
    """Make a document the present one. Hubs that follow it take it over while they run."""
    store = _store(state)
    text, document = read_document(file)
    difference = diff(store.current(), document)
    if not dry_run:
        store.apply(text)
    if json_output:
        print_json({"applied": not dry_run} | _identity(document) | _difference(difference))
        return
    _show_difference(difference, json_output=False)
    typer.echo(f"{'would be applied' if dry_run else 'applied'}: {_titled(document)}")


@posture_app.command()
def rollback(
    version: Annotated[int | None, typer.Argument(help="Version to go back to; default: undo the last change.")] = None,
    state: State = None,
    json_output: Json = False,
) -> None:
    """Go back to a document that was there before."""
    store = _store(state)
    before = store.current()
    document = store.rollback(version)
    difference = diff(before, document)
    if json_output:
        print_json(_identity(document) | _difference(difference))
        return
    _show_difference(difference, json_output=False)
    typer.echo(f"back to: {_titled(document)}")


@posture_app.command()
def show(state: State = None, json_output: Json = False) -> None:
    """Print the present document; before anything was applied, the shipped one."""
    store = _store(state)
    if json_output:
        print_json(_identity(store.current()) | {"document": store.current().model_dump(mode="json")})
    else:
        typer.echo(store.current_text(), nl=False)


@posture_app.command()
def history(state: State = None, json_output: Json = False) -> None:
    """List all changes, the oldest first."""
    entries = _store(state).history()
    if json_output:
        print_json({"history": [asdict(entry) for entry in entries]})
    for entry in entries if not json_output else ():
        change = f"{entry.action:8}  {entry.before} -> {entry.version}  {entry.digest[:12]}"
        typer.echo(f"{entry.at}  {change}  {harmless(entry.by)}")


def _titled(document: Document) -> str:
    return f"version {document.version}, digest {document.digest.hex()[:12]}"


def _identity(document: Document) -> dict[str, Any]:
    return {"version": document.version, "digest": document.digest.hex()}


def _as_json(document: Document, decision: Decision) -> dict[str, Any]:
    allowances = {"local": decision.local.model_dump(), "upward": decision.upward.model_dump()}
    return {"document": _identity(document)} | asdict(decision) | allowances


def _said(allowance: Allowance) -> str:
    if not allowance.on:
        return "off"
    limits = [f"{name} {value}" for name in ("max_depth", "max_ahead") if (value := getattr(allowance, name))]
    return "; ".join(["on", f"drafters {', '.join(allowance.drafters)}", *limits])


def _explain(document: Document, decision: Decision) -> None:
    rows = {
        "for": f"{decision.tier}, {decision.model}, batch {decision.batch}",
        "local speculation": _said(decision.local),
        "drafting for a hub": _said(decision.upward),
        "fallback": decision.fallback or "the node's own choice",
        "decided by": f"rule {decision.rule} of the document, {_titled(document)}",
        "because": decision.because,
    }
    for name, value in rows.items():
        typer.echo(harmless(f"{name:20}{value}"))
    typer.echo(f"rests on these rows, {SOURCE}:" if decision.published else "rests on no published row")
    for row in decision.published:
        typer.echo(f"    {_published(row)}")
    typer.echo("measured by us:" if decision.measured else "nothing of it was measured by us")
    for ours in decision.measured:
        figure = f"acceptance {ours.acceptance:.0%} of {ours.num_tried} ids ({ours.method})"
        typer.echo(harmless(f"    {ours.drafter} on {ours.engine}: {figure}; {ours.machine}, {ours.measured_at}"))


def _published(row: PublishedRow) -> str:
    speedup = "no speed-up published" if row.speedup is None else f"{row.speedup:.2f}x"
    what = f"{row.device}, {row.model}, {row.precision}, {row.drafter}, batch {row.batch}"
    return f"{what}: {speedup}, mean accepted length {row.mean_accepted_length:.2f}"


def _difference(difference: Difference) -> dict[str, Any]:
    decisions = [
        {
            "tier": change.tier,
            "model": change.model,
            "batch": change.batches,
            "before": {"rule": change.before.rule} | _effect(change.before),
            "after": {"rule": change.after.rule} | _effect(change.after),
        }
        for change in difference.decisions
    ]
    return {"decisions": decisions, "settings": list(difference.settings)}


def _effect(decision: Decision) -> dict[str, str]:
    return {
        "local": _said(decision.local),
        "upward": _said(decision.upward),
        "fallback": decision.fallback or "the node's own choice",
    }


def _show_difference(difference: Difference, *, json_output: bool) -> None:
    if json_output:
        print_json(_difference(difference))
        return
    if not difference:
        typer.echo("no decision changes")
    models: dict[str, list[str]] = {}
    for change in difference.decisions:
        before, after = _effect(change.before), _effect(change.after)
        changed = [f"{key}: {before[key]} -> {after[key]}" for key in before if before[key] != after[key]]
        said = f"{change.tier}, batch {change.batches}: {' | '.join(changed)}"
        models.setdefault(said, []).append(change.model)
    for said, names in models.items():
        everyone = len(names) == len(difference.models)
        typer.echo(f"{said}\n    for {'every model' if everyone else ', '.join(names)}")
    for setting in difference.settings:
        typer.echo(setting)

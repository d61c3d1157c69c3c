"""`baru-hub canary`: measure the hub's own drafter, and see what has been measured."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from baru_common.cli_support import EXIT_ERROR, configure_logs, harmless, print_json
from baru_common.errors import NotFound
from baru_common.folders import state_folder
from baru_common.model_files import DEFAULT_TARGET, locate

from .canary import Record, Standing, judge
from .canary_store import CanaryLedger
from .engines import Engine
from .following import canary_folder
from .posture import Document
from .posture_cli import Json, State
from .posture_store import PostureStore

canary_app = typer.Typer(no_args_is_help=True, help="What drafters have been seen to earn here, and who is admitted.")


@canary_app.command("run")
def run_command(
    drafter: Annotated[str, typer.Option(help="The hub's own drafter, as for serve.")],
    target: Annotated[str, typer.Option(help="Target model, as for serve.")] = DEFAULT_TARGET,
    dtype: Annotated[str, typer.Option(help="Numeric type, as for serve.")] = "bfloat16",
    device: Annotated[str, typer.Option(help="Device, as for serve.")] = "cpu",
    model_class: Annotated[str, typer.Option(help="Name of the target for the document's floors.")] = "",
    state: State = None,
    json_output: Json = False,
) -> None:
    """Measure a hub drafter on the fixed prompts now, whatever is known of it; exit code 1 below its floor."""
    configure_logs(verbose=False)
    locate(target)
    from . import load_engine

    engine = load_engine(target, dtype=dtype, device=device, drafter=drafter)
    document = PostureStore(state or state_folder()).current()
    record = asyncio.run(_measured(engine, CanaryLedger(canary_folder(state)), document))
    standing = _show([record], document, model_class or record.target_name, json_output=json_output)
    if standing is Standing.REFUSED:
        raise typer.Exit(EXIT_ERROR)


async def _measured(engine: Engine, ledger: CanaryLedger, document: Document) -> Record:
    from .canary_run import measured

    try:
        return await measured(engine, ledger, document.canary.depth, again=True)
    finally:
        await engine.close()


@canary_app.command()
def show(state: State = None, json_output: Json = False) -> None:
    """List what was measured: figures of ours, each with machine and date."""
    document = PostureStore(state or state_folder()).current()
    records = CanaryLedger(canary_folder(state)).records()
    if not records and not json_output:
        typer.echo("nothing was measured yet")
    _show(records, document, "", json_output=json_output)


@canary_app.command()
def forget(
    key: Annotated[str, typer.Argument(help="Key of a record, or its first characters.")] = "",
    everything: Annotated[bool, typer.Option("--all", help="All of them.")] = False,
    state: State = None,
) -> None:
    """Remove what was measured, so that it is measured again; a hub that runs notices."""
    if not key and not everything:
        raise NotFound("no record is named", hint="give a key as `canary show` prints it, or --all")
    number = CanaryLedger(canary_folder(state)).forget(key)
    if not number:
        raise NotFound(f"there is no record {key!r}", hint="`baru-hub canary show` lists them")
    typer.echo(f"{number} records removed")


def _show(records: list[Record], document: Document, model: str, *, json_output: bool) -> Standing | None:
    judged = [
        (record, judge(record, document.floor(record.triple.family, model or record.target_name))) for record in records
    ]
    if json_output:
        rows = [
            {"key": r.triple.key, "target": r.target_name, "standing": a.standing.value, "reason": a.reason}
            | vars(r.row)
            for r, a in judged
        ]
        print_json({"records": rows})
    for record, admission in judged if not json_output else ():
        row = record.row
        typer.echo(
            harmless(f"{record.triple.key[:12]}  {admission.standing.value}  {row.drafter} for {record.target_name}")
        )
        typer.echo(harmless(f"    {admission.reason}"))
        typer.echo(harmless(f"    on {row.engine}; {row.machine}, {row.measured_at}"))
    return judged[-1][1].standing if judged else None

"""`baru-hub audit`: whether an audit log is what the hub has written."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from baru_common.cli_support import EXIT_ERROR, EXIT_UNTRUSTED, print_json
from baru_common.errors import AuditBroken
from baru_common.trust import trust_of

from .audit import Report, check_log
from .signing import default_folder

app = typer.Typer(no_args_is_help=True, help="The audit log of a hub.")


@app.callback()
def _app() -> None:
    """The audit log of a hub."""


@app.command()
def verify(
    folder: Annotated[
        Path | None, typer.Argument(help="The log's folder; default: where a hub of this user has it.")
    ] = None,
    authority: Annotated[
        Path | None, typer.Option(help="The kit's ca.pem: the hub's key must be vouched for by it.")
    ] = None,
    revoked: Annotated[Path | None, typer.Option(help="The kit's crl.pem.")] = None,
    key: Annotated[str | None, typer.Option(help="The hub's public key, 64 hexadecimal digits.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check every record, the chain through all files, and the signed head.

    Exit code 0: whole, by the key that was asked for. 1: broken; it says where. 3: whole, but nothing was given by
    which to tell whose key has signed the head.
    """
    trust = trust_of(authority, revoked, key)
    try:
        report = check_log(folder or default_folder(), trust)
    except AuditBroken as error:
        if json_output:
            print_json({"ok": False, "error": error.message, **error.details})
            raise typer.Exit(EXIT_ERROR) from None
        raise
    vouched = report.signer.trusted or trust.key is not None
    facts = _facts(report)
    if json_output:
        print_json({"ok": True, "vouched": vouched, **facts})
    else:
        _print(facts, vouched=vouched)
    if not vouched:
        raise typer.Exit(EXIT_UNTRUSTED)


def _facts(report: Report) -> dict[str, object]:
    return {
        "num_records": report.num_records,
        "first": report.head.first,
        "last": report.tail.end.next - 1,
        "num_files": report.num_files,
        "sealed_at": report.head.at,
        "num_unsealed": report.tail.num_unsealed,
        "num_torn_bytes": report.tail.num_torn_bytes,
        "hub": report.signer.identity,
        "key": report.signer.public_key.hex(),
    }


def _print(facts: dict[str, object], *, vouched: bool) -> None:
    typer.echo(
        "{num_records} records ({first} to {last}) in {num_files} files, none changed or missing".format(**facts)
    )
    typer.echo("sealed at {sealed_at} by {hub}, key {key}".format(**facts))
    if facts["num_unsealed"] or facts["num_torn_bytes"]:
        typer.echo(
            "{num_unsealed} records and {num_torn_bytes} bytes of a torn one came after the seal: the hub runs, or it "
            "crashed; they are in the chain, but anybody could have put them there".format(**facts)
        )
    if not vouched:
        typer.echo("nobody vouches for this key: give --authority, or --key as the hub showed it", err=True)

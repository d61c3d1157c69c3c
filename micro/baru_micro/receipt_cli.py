"""`baru-micro verify-receipt`: what a receipt proves, and what it does not."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from baru_common.cli_support import EXIT_ERROR, EXIT_UNTRUSTED, harmless, print_json
from baru_common.errors import ReceiptInvalid
from baru_common.receipts import Statement, verify
from baru_common.signatures import Signer
from baru_common.trust import trust_of

from . import receipt_file
from .proof import Content


@dataclass(frozen=True)
class Finding:
    """One thing that the receipt might prove."""

    proven: bool
    what: str
    found: str


def verify_receipt(
    file: Annotated[Path, typer.Argument(help="What `generate --receipt` has written.")],
    authority: Annotated[
        Path | None, typer.Option(help="The kit's ca.pem: the hub's key must be vouched for by it.")
    ] = None,
    revoked: Annotated[Path | None, typer.Option(help="The kit's crl.pem.")] = None,
    key: Annotated[str | None, typer.Option(help="The hub's public key, 64 hexadecimal digits.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check a receipt, offline, and say what it proves.

    Exit code 0: good, by the key that was asked for. 1: not good; it says which field. 3: whole, but nothing was given
    by which to tell whose key has signed it.
    """
    trust = trust_of(authority, revoked, key)
    try:
        receipt, content = receipt_file.read(file)
        statement, signer = verify(receipt, trust)
        if content:
            content.require_same(statement)
    except ReceiptInvalid as error:
        if json_output:
            print_json({"ok": False, "error": error.message, **error.details})
            raise typer.Exit(EXIT_ERROR) from None
        raise
    vouched = signer.trusted or trust.key is not None
    findings = _findings(statement, signer, content, by_key=trust.key is not None)
    if json_output:
        facts = {"ok": True, "vouched": vouched, "trusted": signer.trusted, "key": signer.public_key.hex()}
        print_json(facts | {"findings": [asdict(f) for f in findings], "statement": asdict(statement)})
    else:
        Console().print(_table(findings))
    if not vouched:
        raise typer.Exit(EXIT_UNTRUSTED)


def _findings(statement: Statement, signer: Signer, content: Content | None, *, by_key: bool) -> list[Finding]:
    said = statement
    who = said.hub if signer.trusted else f"key {signer.public_key.hex()}"
    whose = "the kit's authority" if signer.trusted else "the key that was given" if by_key else ""
    given = f"; the first {said.num_given} were there before, and are not this hub's" if said.num_given else ""
    return [
        Finding(True, "signed by", who),
        Finding(bool(whose), "vouched for by", whose or "nobody: give --authority, or --key as the hub showed it"),
        Finding(True, "transcript", said.transcript_digest),
        Finding(
            content is not None, "ids in this file", "as signed" if content else "none: compare digests by yourself"
        ),
        Finding(True, "target", said.target_fingerprint),
        Finding(not said.num_given, "decided by the target", f"{said.num_decided} of {said.num_output} ids{given}"),
        Finding(True, "session", f"{said.session_id} of {said.node}"),
        Finding(False, "time", f"{said.started_at} to {said.finished_at}, by the hub's own clock"),
    ]


def _table(findings: list[Finding]) -> Table:
    table = Table(box=None, show_header=False)
    for finding in findings:
        mark = "[green]proven[/]" if finding.proven else "[yellow]not proven[/]"
        table.add_row(mark, finding.what, Text(harmless(finding.found), overflow="fold"))
    return table

"""`baru-hub certs`: the certificates of a kit, made without a network."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from baru_common.cli_support import print_json
from baru_common.folders import config_folder
from baru_common.identity import Role

from .ca import LIFETIME, Authority, Issued

_SOON = timedelta(days=30)
_Dir = Annotated[
    Path,
    typer.Option("--dir", envvar="BARU_CA", help="Folder of the authority. It belongs on no hub and no node."),
]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
DEFAULT_FOLDER = config_folder() / "ca"

certs_app = typer.Typer(no_args_is_help=True, help="Certificates of a kit: who may connect to its hubs.")


@certs_app.command("init")
def certs_init(
    kit: Annotated[str, typer.Option(help="Name of the kit.")],
    folder: _Dir = DEFAULT_FOLDER,
) -> None:
    """Make the authority of a kit. Guard its folder: who has ca.key can be anybody."""
    authority = Authority.create(folder, kit)
    typer.echo(f"the authority of kit {authority.kit} is in {folder}")


@certs_app.command("issue")
def certs_issue(
    name: Annotated[str, typer.Argument(help="Name of the machine.")],
    role: Annotated[Role, typer.Option(help="What it is there for.")] = Role.NODE,
    days: Annotated[int, typer.Option(min=1, help="Time that the certificate is valid.")] = LIFETIME.days,
    address: Annotated[
        list[str] | None, typer.Option(help="A hub's DNS name or IP address, for other programs; may be given again.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the machine; default: ./NAME.")] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Put it in the place of one that is there.")] = False,
    folder: _Dir = DEFAULT_FOLDER,
) -> None:
    """Make the folder that a machine needs. Copy it there, whole, and start with --tls FOLDER.

    Given again with --replace, it renews: what runs takes the new files without a restart.
    """
    to = out or Path(name)
    made = Authority(folder).issue(
        name, role, to, lifetime=timedelta(days=days), addresses=address or (), replace=replace
    )
    typer.echo(f"{made.identity}, until {made.ends:%Y-%m-%d}: {to}")


@certs_app.command("revoke")
def certs_revoke(
    name: Annotated[str, typer.Argument(help="A name: all of its certificates; or the serial number of one.")],
    out: Annotated[
        list[Path] | None, typer.Option(help="A hub's folder to put the new list into; may be given again.")
    ] = None,
    folder: _Dir = DEFAULT_FOLDER,
) -> None:
    """Revoke. A hub ends the sessions of whom it concerns as soon as it has the new crl.pem."""
    authority = Authority(folder)
    for certificate in authority.revoke(name):
        typer.echo(f"revoked {certificate.identity}, serial {certificate.serial:x}")
    for to in out or ():
        authority.publish(to)
    if not out:
        typer.echo(f"now copy {folder / 'crl.pem'} to every hub", err=True)


@certs_app.command("show")
def certs_show(folder: _Dir = DEFAULT_FOLDER, json_output: _Json = False) -> None:
    """Show every certificate of the kit, and which of them end soon."""
    authority = Authority(folder)
    rows = [row(one, datetime.now(timezone.utc)) for one in authority.issued()]
    if json_output:
        print_json({"kit": authority.kit, "certificates": rows})
        return
    table = Table(box=None)
    headings = ("name", "role", "for", "serial", "valid from", "valid to", "days left", "state")
    for heading in headings:
        table.add_column(heading, no_wrap=True)
    for one in rows:
        table.add_row(*(str(one[heading.replace(" ", "_")]).partition("T")[0] for heading in headings))
    Console().print(table)
    for one in rows:
        if one["state"] == "ends soon":
            typer.echo(f"the certificate of {one['name']} ends in {one['days_left']} days: renew it", err=True)


def row(one: Issued, now: datetime) -> dict[str, Any]:
    """Return what is shown of a certificate."""
    certificate = one.certificate
    left = certificate.ends - now
    state = "valid" if left > _SOON else "ends soon"
    if left <= timedelta(0):
        state = "expired"
    return {
        "name": certificate.identity.name,
        "role": certificate.identity.role.value,
        "for": "receipts" if one.signs_receipts else "TLS",
        "serial": f"{certificate.serial:x}",
        "valid_from": f"{certificate.starts:%Y-%m-%dT%H:%M:%SZ}",
        "valid_to": f"{certificate.ends:%Y-%m-%dT%H:%M:%SZ}",
        "days_left": max(left.days, 0),
        "state": "revoked" if one.revoked else state,
    }

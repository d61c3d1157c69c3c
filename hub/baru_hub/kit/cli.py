"""`baru-hub kit`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from baru_common.cli_support import EXIT_ERROR, EXIT_UNTRUSTED, harmless, print_json
from baru_common.errors import ConfigError
from baru_hub.ca import Authority
from baru_hub.certs_cli import DEFAULT_FOLDER

from . import install as installing
from . import places
from .check import DEFAULT_SSH, Found, as_json, check_all, check_this, recorded_name
from .install import Part
from .manifest import Manifest
from .seal import SEALED_APART, Sealed, check_seal, digest_of

kit_app = typer.Typer(
    no_args_is_help=True, help="Field kits: built where there is a network, installed where there is none."
)
_Bundle = Annotated[Path, typer.Argument(help="The folder that `kit build` made.")]
_Fingerprint = Annotated[
    str | None, typer.Option("--fingerprint", help="Of the kit's authority, as `kit build` printed it.")
]
_DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@kit_app.command("build")
def kit_build(
    manifest: Annotated[Path, typer.Argument(help="kit.toml.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to make, or to bring up to date.")],
    ca: Annotated[
        Path, typer.Option("--ca", envvar="BARU_CA", help="Folder of the kit's authority; made when there is none.")
    ] = DEFAULT_FOLDER,
    wheel: Annotated[
        Path | None, typer.Option(help="Wheel of this project; default: made from its source tree.")
    ] = None,
    renew: Annotated[
        list[str] | None, typer.Option(help="Machine that gets a new certificate; may be given again.")
    ] = None,
) -> None:
    """Make the folder that sets up every machine of a kit without a network. It holds keys: guard it."""
    from .build import Bundle

    read = Manifest.read(manifest)
    authority = Authority(ca) if (ca / "ca.key").exists() else Authority.create(ca, read.kit.name)
    found = Bundle(read, authority, out, _say).build(wheel, tuple(renew or ()))
    typer.echo(f"kit {read.kit.name} is in {out}\nfingerprint {found}")


@kit_app.command("verify")
def kit_verify(
    bundle: _Bundle = Path(),
    fingerprint: _Fingerprint = None,
    json_output: _Json = False,
) -> None:
    """Check every file of a bundle. Exit code 0: whole, and of this authority; 3: whole, but nobody said whose it is to
    be; 1: something is wrong."""
    trusted = fingerprint or installing.known_fingerprint()
    folders = [bundle, *sorted((bundle / SEALED_APART).glob("*/"))]
    seals = [check_seal(folder) for folder in folders]
    problems = [f"{seal.what}: {problem}" for seal in seals for problem in _problems(seal, trusted, seals[0])]
    if json_output:
        print_json(
            {"ok": not problems, "trusted": bool(trusted), "fingerprint": seals[0].fingerprint, "problems": problems}
        )
    else:
        for line in problems or [f"{seal.what}: whole" for seal in seals]:
            typer.echo(line)
        typer.echo(f"fingerprint {seals[0].fingerprint}")
    if problems:
        raise typer.Exit(EXIT_ERROR)
    if not trusted:
        typer.echo("compare it with what `baru-hub kit build` has printed, or give it: --fingerprint", err=True)
        raise typer.Exit(EXIT_UNTRUSTED)


def _problems(seal: Sealed, trusted: str | None, first: Sealed) -> list[str]:
    wanted = (trusted or first.fingerprint).upper()
    other = [] if seal.fingerprint == wanted else [f"signed by {seal.fingerprint}, not by {wanted}"]
    return [*seal.problems, *other]


@kit_app.command("install")
def kit_install(
    machine: Annotated[str, typer.Argument(help="Name of this machine in the kit; or its role, where that is plain.")],
    bundle: Annotated[Path, typer.Option("--from", help="The folder that `kit build` made.")] = Path(),
    fingerprint: _Fingerprint = None,
    start: Annotated[bool, typer.Option(help="Start the service.")] = True,
    dry_run: _DryRun = False,
) -> None:
    """Put a machine's part of a kit on it. A second run does nothing; one from a later bundle is an upgrade."""
    part = Part.find(bundle, machine)
    trusted = fingerprint or installing.known_fingerprint()
    found = part.check(trusted)
    if not trusted and not dry_run:
        _confirm(found)
    installing.install(part, _say, dry_run=dry_run, start=start)


def _confirm(fingerprint: str) -> None:
    if not sys.stdin.isatty():
        raise ConfigError(
            "nobody said which authority to trust",
            hint="give --fingerprint with what `baru-hub kit build` has printed",
        )
    typer.confirm(f"signed by {fingerprint}\nIs that what `baru-hub kit build` has printed?", abort=True)


@kit_app.command("uninstall")
def kit_uninstall(
    purge: Annotated[bool, typer.Option("--purge", help="Remove the state, too: audit log, caches.")] = False,
    dry_run: _DryRun = False,
) -> None:
    """Take this machine's part of a kit away again."""
    installing.uninstall(_say, purge=purge, dry_run=dry_run)


@kit_app.command("check")
def kit_check(
    every: Annotated[bool, typer.Option("--all", help="Every machine of the kit, not only this one.")] = False,
    manifest: Annotated[Path, typer.Option(help="kit.toml, for --all.")] = places.MANIFEST,
    ssh: Annotated[str, typer.Option(help="How to reach a machine, with {name} and {address}.")] = DEFAULT_SSH,
    json_output: _Json = False,
) -> None:
    """The field test: a hub is ready; a node reaches its hub, drafts, loses the link, falls back, comes back."""
    found = dict[str, list[Found]]()
    for name, checks in check_all(Manifest.read(manifest), ssh) if every else [(recorded_name() or "", check_this())]:
        found[name] = checks
        if not json_output:
            Console().print(_table(name, checks))
    told = as_json(found)
    if json_output:
        print_json(told)
    if not told["ok"]:
        raise typer.Exit(EXIT_ERROR)


def _table(name: str, checks: list[Found]) -> Table:
    table = Table(box=None, title=name, title_justify="left")
    for heading in ("", "check", "found", "what to do"):
        table.add_column(heading, overflow="fold")
    for check in checks:
        mark = "[green]ok[/]" if check.ok else "[bold red]FAILED[/]"
        table.add_row(mark, check.name, Text(harmless(check.found)), Text(harmless(check.advice)))
    return table


@kit_app.command("digest")
def kit_digest(path: Annotated[Path, typer.Argument(help="A model: a file, or a folder.")]) -> None:
    """Print the digest of a model for kit.toml."""
    if not path.exists():
        raise ConfigError(f"there is no {path}")
    typer.echo(digest_of(path))


def _say(line: str) -> None:
    typer.echo(line, err=True)

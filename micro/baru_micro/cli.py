"""`baru-micro`: generate through a hub, and find out what is wrong when it does not work."""

from __future__ import annotations

import sys
from collections.abc import Coroutine, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
import uvloop
from rich.console import Console
from rich.table import Table
from rich.text import Text

from baru_common import __version__
from baru_common.cli_support import (
    EXIT_ERROR,
    NO_TLS,
    ConfigOption,
    LogFormatOption,
    MetricsOption,
    MetricsTlsOption,
    OtlpOption,
    configure_logs,
    given,
    harmless,
    print_json,
    print_settings,
    run,
)
from baru_common.corpus import DEFAULT_CORPUS, Corpus, corpora
from baru_common.errors import ConfigError, ReceiptInvalid
from baru_common.logs import LogFormat
from baru_common.sampling import SamplingParams
from baru_common.telemetry import TelemetryConfig
from baru_common.workloads import DEFAULT_WORKLOAD

from . import receipt_file
from .canary import CanaryReport, run_canary
from .chat.command import chat
from .cli_options import (
    DEFAULT_HUBS,
    DrafterOption,
    FallbackOption,
    HubsOption,
    ShapingOption,
    TierOption,
    TlsOption,
    WorkloadOption,
)
from .client import Prompt
from .config import NodeConfig
from .decoding import Fallback, Reconcile
from .doctor import Check, Doctor
from .endpoint.command import serve
from .events import Finish
from .field_test import field_test
from .fit import Shaping
from .observing import NodeObserver
from .preflight_cli import preflight
from .reader import Reader, summary
from .receipt_cli import verify_receipt
from .request_options import grammar_of, with_settings
from .telemetry import observing

_T = TypeVar("_T")
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
_Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Log more.")]

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)


@app.callback()
def _app() -> None:
    """The node: drafts, and has the hub's target verify."""


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


@app.command()
def generate(
    context: typer.Context,
    prompt: Annotated[str, typer.Argument(help="What to ask; - reads it from standard input.")],
    config: ConfigOption = None,
    hub: HubsOption = DEFAULT_HUBS,
    tls: TlsOption = None,
    drafter: DrafterOption = NodeConfig.drafter,
    max_tokens: Annotated[
        int | None, typer.Option(help="Most tokens to generate; default: all the context takes.")
    ] = 512,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after an end-of-sequence token.")] = False,
    temperature: Annotated[float, typer.Option("--temperature", "-t", help="0 is greedy.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Seed of the noise; default: drawn, and printed.")] = None,
    top_k: Annotated[int, typer.Option(help="Only the k likeliest tokens; 0: all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Only the likeliest tokens with this probability together.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Only tokens with this share of the likeliest's probability.")] = 0.0,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the answer; may be given again.")] = None,
    json_schema: Annotated[
        str | None, typer.Option(help="Answer in JSON of this schema; a file or the schema.")
    ] = None,
    regex: Annotated[str | None, typer.Option(help="Answer what matches this regular expression.")] = None,
    lark: Annotated[
        str | None, typer.Option(help="Answer what this Lark grammar allows; a file or the grammar.")
    ] = None,
    choice: Annotated[list[str] | None, typer.Option(help="Answer one of these; may be given again.")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Any other sampling parameter, NAME=JSON: repetition_penalty=1.2, logprobs=3; may be given again.",
        ),
    ] = None,
    fallback: FallbackOption = None,
    reconcile: Annotated[
        Reconcile, typer.Option(help="What becomes of provisional tokens when a hub is back.")
    ] = Reconcile.REWRITE,
    receipt: Annotated[Path | None, typer.Option(help="File to write the hub's receipt to.")] = None,
    receipt_ids: Annotated[
        bool, typer.Option("--receipt-ids", help="Write prompt, parameters and answer with it, as ids.")
    ] = False,
    traffic_shape: ShapingOption = Shaping.AUTO,
    tier: TierOption = None,
    workload: WorkloadOption = DEFAULT_WORKLOAD,
    metrics: MetricsOption = "",
    metrics_tls: MetricsTlsOption = NO_TLS,
    otlp: OtlpOption = "",
    log_format: LogFormatOption = LogFormat.TEXT,
    json_output: _Json = False,
    verbose: _Verbose = False,
) -> None:
    """Ask the hub's target, drafting on this node, and stream the answer.

    Accepted tokens are green, those that the hub guessed itself blue, corrections yellow, bonus tokens cyan, tokens of
    steps without a draft plain; provisional ones, decoded here while no hub answered, dim. Into a pipe goes only what
    stands.
    """
    node_config = NodeConfig.read(config, given(context))
    configure_logs(verbose=verbose, log_format=node_config.log_format)
    telemetry = TelemetryConfig(metrics, node_config.otlp, metrics_tls)
    text = sys.stdin.read() if prompt == "-" else prompt
    params = with_settings(
        SamplingParams(
            max_tokens=max_tokens,
            ignore_eos=ignore_eos,
            temperature=temperature,
            seed=seed,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            stop_strings=tuple(stop or ()),
            grammar=grammar_of(json_schema=json_schema, regex=regex, lark=lark, choices=choice),
        ),
        settings or (),
    )
    asked = _as_prompt(text, system, raw=raw)
    with observing(telemetry, log=verbose or node_config.log_format is LogFormat.JSON) as observed:
        if observed.metrics:
            typer.echo(f"metrics at {observed.metrics}", err=True)
        finish = _run(_generate(asked, params, node_config, reconcile, observed.observers, show=not json_output))
    if json_output:
        print_json(summary(finish) | {"text": finish.text, "ids": finish.ids} | _logprobs(finish))
    if receipt:
        _keep_receipt(receipt, finish, with_ids=receipt_ids)


def _keep_receipt(path: Path, finish: Finish, *, with_ids: bool) -> None:
    if not finish.proof.receipt:
        raise ReceiptInvalid(f"nothing was written to {path}: {finish.proof.reason}", details={"field": "receipt"})
    receipt_file.write(path, finish.proof.receipt, finish.proof.content if with_ids else None)


def _logprobs(finish: Finish) -> dict[str, Any]:
    return {"logprobs": [entry and asdict(entry) for entry in finish.logprobs]} if finish.logprobs else {}


def _as_prompt(text: str, system: str | None, *, raw: bool) -> Prompt:
    if raw:
        if system is not None:
            raise ConfigError("--raw and --system contradict each other", hint="leave one of them out")
        return text
    if not text.strip():
        return ""  # refused as an empty prompt, not dressed up as a chat turn
    messages = [{"role": "user", "content": text}]
    return messages if system is None else [{"role": "system", "content": system}, *messages]


async def _generate(
    prompt: Prompt,
    params: SamplingParams,
    config: NodeConfig,
    reconcile: Reconcile,
    observers: Sequence[NodeObserver],
    *,
    show: bool,
) -> Finish:
    reader = Reader(keeps=reconcile is Reconcile.KEEP) if show else None
    async with config.connect(reconcile=reconcile, observers=observers) as node:
        async for event in node.generate(prompt, params):
            if reader:
                reader.take(event)
            if isinstance(event, Finish):
                return event
    raise AssertionError("a generation ends with Finish")


app.command()(serve)
app.command()(chat)
app.command()(preflight)


@app.command()
def settings(config: ConfigOption = None, json_output: _Json = False) -> None:
    """Show the settings in force: what a settings file says, and the defaults. What is wrong in it is named."""
    print_settings({"node": NodeConfig.read(config, {})}, json_output=json_output)


@app.command()
def doctor(
    context: typer.Context,
    config: ConfigOption = None,
    hub: HubsOption = DEFAULT_HUBS,
    tls: TlsOption = None,
    drafter: DrafterOption = NodeConfig.drafter,
    cut: Annotated[
        bool, typer.Option("--cut", help="Also cut the way to the hub on purpose: does the node fall back, and return?")
    ] = False,
    json_output: _Json = False,
    verbose: _Verbose = False,
) -> None:
    """Check the way to the hub: certificate, reach, health, versions, tokenizer, drafter, round trip."""
    configure_logs(verbose=verbose)
    node_config = NodeConfig.read(config, given(context))
    doctors = [Doctor(address, node_config.drafter, tls=node_config.tls) for address in node_config.hub]
    found = {doctor.address: _run(doctor.examine()) for doctor in doctors}
    ok = all(checks[-1].ok for checks in found.values())
    if cut and found[node_config.hub[0]][-1].ok:
        found[node_config.hub[0]] += _run(field_test(node_config))
        ok = all(check.ok for checks in found.values() for check in checks)
    if json_output:
        hubs = [
            {"hub": address, "ok": checks[-1].ok, "checks": [asdict(check) for check in checks]}
            for address, checks in found.items()
        ]
        print_json({"ok": ok, "hubs": hubs} if len(hubs) > 1 else hubs[0])
    else:
        for address, checks in found.items():
            typer.echo(f"hub {harmless(address)}")
            Console().print(_check_table(checks))
    if len({doctor.document for doctor in doctors if doctor.document}) > 1:
        typer.echo("warning: the hubs follow different posture documents", err=True)
    if not ok:
        raise typer.Exit(EXIT_ERROR)


def _check_table(checks: list[Check]) -> Table:
    table = Table(box=None)
    for heading in ("", "check", "found", "what to do"):
        table.add_column(heading, overflow="fold")
    for check in checks:
        table.add_row(
            "[green]ok[/]" if check.ok else "[bold red]FAILED[/]",
            check.name,
            Text(harmless(check.found)),
            Text(harmless(check.advice)),
        )
    return table


app.command("verify-receipt")(verify_receipt)


canary_app = typer.Typer(no_args_is_help=True, help="What the hub makes of this node's drafter.")
app.add_typer(canary_app, name="canary")


@canary_app.command("run")
def canary_run(
    context: typer.Context,
    config: ConfigOption = None,
    hub: HubsOption = DEFAULT_HUBS,
    tls: TlsOption = None,
    drafter: DrafterOption = NodeConfig.drafter,
    tier: TierOption = None,
    json_output: _Json = False,
    verbose: _Verbose = False,
) -> None:
    """Decode the fixed prompts, so that the hub can measure this node's drafter and admit it, or not."""
    configure_logs(verbose=verbose)
    node_config = replace(NodeConfig.read(config, given(context)), fallback=Fallback.FAIL)
    report = _run(_canary(node_config))
    reason = report.posture.reason if report.posture else "the hub follows no posture document"
    counts = {"num_verified": report.num_verified, "num_accepted": report.num_accepted}
    if json_output:
        print_json({"standing": report.standing, "reason": reason} | counts)
    else:
        typer.echo(f"{node_config.drafter}: {report.standing}; {harmless(reason)}")
        typer.echo(f"{report.num_accepted} of {report.num_verified} draft ids accepted")
    if report.standing == "refused":
        raise typer.Exit(EXIT_ERROR)


async def _canary(config: NodeConfig) -> CanaryReport:
    async with config.connect() as node:
        return await run_canary(node)


corpus_app = typer.Typer(no_args_is_help=True, help="Texts of this node to draft from: they never leave it.")
app.add_typer(corpus_app, name="corpus")
_Name = Annotated[str, typer.Option("--name", help="Which corpus; draft from it with --drafter suffix:NAME.")]


@corpus_app.command("add")
def corpus_add(
    source: Annotated[Path, typer.Argument(help="A text file, or a folder: all texts below it.")],
    name: _Name = DEFAULT_CORPUS,
    json_output: _Json = False,
) -> None:
    """Copy texts into a corpus. Sessions that begin from now on draft from them."""
    added = Corpus(name).add(source)
    if json_output:
        print_json(asdict(added) | {"skipped": [[str(path), why] for path, why in added.skipped]})
        return
    for path, why in added.skipped:
        typer.echo(f"left out {harmless(str(path))}: {why}", err=True)
    typer.echo(f"{added.num_texts} texts added to corpus {name}, {added.num_known} were there already")


@corpus_app.command("list")
def corpus_list(json_output: _Json = False) -> None:
    """Show every corpus of this node."""
    rows = [{"name": c.name, "num_texts": len(c.version), "num_bytes": c.num_bytes} for c in corpora()]
    if json_output:
        print_json({"corpora": rows})
        return
    for row in rows:
        typer.echo(f"{row['name']}: {row['num_texts']} texts, {row['num_bytes']} bytes")


@corpus_app.command("remove")
def corpus_remove(name: Annotated[str, typer.Argument(help="The corpus.")]) -> None:
    """Delete a corpus and its copies of texts."""
    Corpus(name).remove()
    typer.echo(f"corpus {name} removed")


def _run(work: Coroutine[Any, Any, _T]) -> _T:
    return uvloop.run(work)


def main() -> None:
    """Entry point of the console script."""
    run(app, "baru-micro")


if __name__ == "__main__":
    main()

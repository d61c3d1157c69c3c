"""`baru-hub`: run the hub service."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
import uvloop

from baru_common import __version__
from baru_common.cli_support import (
    ConfigOption,
    LogFormatOption,
    MetricsOption,
    MetricsTlsOption,
    OtlpOption,
    Say,
    configure_logs,
    given,
    print_json,
    print_settings,
    run,
    stop_signal,
)
from baru_common.config_file import ConfigFile
from baru_common.discovery import announced
from baru_common.errors import ConfigError
from baru_common.health_page import READY, HealthPage
from baru_common.identity import Role
from baru_common.model_files import DEFAULT_TARGET, load, locate
from baru_common.preflight import look, usable_device
from baru_common.service_manager import notify, watched
from baru_common.tls import TlsFiles

from . import audit_cli, load_engine
from .canary_cli import canary_app
from .certs_cli import certs_app
from .config import HubConfig, Shaping, TargetConfig, split_address
from .engines import Engine
from .following import CanaryMode, Follow
from .kit.cli import kit_app
from .memory_budget import Budget, available_mb
from .posture_cli import posture_app
from .top_cli import top

if TYPE_CHECKING:
    from .verifier import Verifier  # needs numpy

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)
app.add_typer(certs_app, name="certs")
app.add_typer(audit_cli.app, name="audit")
app.add_typer(posture_app, name="posture")
app.add_typer(canary_app, name="canary")
app.add_typer(kit_app, name="kit")
app.command()(top)


@app.callback()
def _app() -> None:
    """The hub: one target model that verifies what many nodes draft."""


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


@app.command()
def serve(
    context: typer.Context,
    config: ConfigOption = None,
    model: Annotated[
        str, typer.Option("--target", help="Target model: a name, a Hugging Face folder, or a .gguf file.")
    ] = TargetConfig.model,
    engine: Annotated[str, typer.Option(help="What runs the target: transformers or simulated.")] = TargetConfig.engine,
    profile: Annotated[
        str | None, typer.Option(help="Device that a simulated target takes its time from, e.g. thor-qwen3-8b-int4.")
    ] = TargetConfig.profile,
    drafter: Annotated[
        str | None,
        typer.Option(help="Draft at the hub, too: early_exit:LAYERS, eagle3, eagle3:PATH, mtp or dflash:PATH."),
    ] = TargetConfig.drafter,
    kv_cache_mb: Annotated[
        int, typer.Option(help="Memory for keys and values, MB; it bounds all sessions.")
    ] = TargetConfig.kv_cache_mb,
    listen: Annotated[str, typer.Option(help="HOST:PORT to serve on; port 0 takes a free one.")] = HubConfig.listen,
    tls: Annotated[
        Path | None,
        typer.Option(envvar="BARU_TLS", help="Folder with the hub's certificate (`certs issue`); needed off loopback."),
    ] = HubConfig.tls,
    allow: Annotated[
        list[str], typer.Option(help="Name that may connect; may be given again. Default: all of the kit.")
    ] = list(HubConfig.allow),  # noqa: B006
    allow_file: Annotated[
        Path | None, typer.Option(help="File of such names, one a line; read again when it changes.")
    ] = HubConfig.allow_file,
    dtype: Annotated[
        str, typer.Option(help="Numeric type of the target: bfloat16, float32 or float16.")
    ] = TargetConfig.dtype,
    device: Annotated[str, typer.Option(help="Device of the target, as torch names it.")] = TargetConfig.device,
    allow_cpu: Annotated[
        bool, typer.Option("--allow-cpu", help="Use the CPU when the GPU of --device cannot be used.")
    ] = TargetConfig.allow_cpu,
    threads: Annotated[
        int, typer.Option(min=0, help="CPU threads of the target; 0 leaves the choice to torch.")
    ] = TargetConfig.threads,
    max_sessions: Annotated[int, typer.Option(help="Most sessions at a time.")] = HubConfig.max_sessions,
    max_depth: Annotated[
        int, typer.Option(help="Most draft ids checked per session and step; 0: no drafting.")
    ] = HubConfig.max_depth,
    max_patience_ms: Annotated[
        float, typer.Option(help="Longest wait for a draft, whatever it promises; 0 never waits.")
    ] = HubConfig.max_patience_ms,
    drain_grace_s: Annotated[float, typer.Option(help="Time to finish after SIGTERM.")] = HubConfig.drain_grace_s,
    orphan_grace_s: Annotated[
        float, typer.Option(help="Time that a session is kept when the link to its node breaks; 0: none.")
    ] = HubConfig.orphan_grace_s,
    orphan_tokens: Annotated[int, typer.Option(help="Most ids that it decodes meanwhile.")] = HubConfig.orphan_tokens,
    announce: Annotated[
        str, typer.Option(help="Identity to announce on the local network (mDNS), for nodes that look for it.")
    ] = HubConfig.announce,
    audit: Annotated[
        Path | None,
        typer.Option(help="Folder of the audit log. Default: with --tls this hub's state folder; else none."),
    ] = HubConfig.audit,
    traffic_shape: Annotated[
        Shaping, typer.Option(help="Streams of constant size and pace, so that traffic says nothing of what is said.")
    ] = HubConfig.traffic_shape,
    shape_tick_ms: Annotated[int, typer.Option(help="Time between two of their cells.")] = HubConfig.shape_tick_ms,
    document: Annotated[
        Path | None,
        typer.Option("--posture", help="Posture document: a folder as `posture apply` keeps it, or a .toml file."),
    ] = Follow.document,
    tier: Annotated[
        str | None, typer.Option(help="Tier of this hub in the posture document; default: by the board's name.")
    ] = Follow.tier,
    model_class: Annotated[
        str, typer.Option(help="Name of the target that the document's rules are asked for; default: its own.")
    ] = Follow.model_class,
    health: Annotated[
        str, typer.Option(help="HOST:PORT of /livez and /readyz, plain HTTP, from the start on, e.g. 127.0.0.1:7444.")
    ] = HubConfig.health,
    canary: Annotated[
        CanaryMode, typer.Option(help="Drafters that were not measured, or fail: auto leaves them out, off admits all.")
    ] = Follow.canary,
    console: Annotated[
        str, typer.Option(help="HOST:PORT of a page that shows nodes, links and sessions live, e.g. 127.0.0.1:8080.")
    ] = HubConfig.console,
    reflection: Annotated[bool, typer.Option("--reflection", help="Serve gRPC reflection.")] = False,
    metrics: MetricsOption = HubConfig.metrics,
    metrics_tls: MetricsTlsOption = HubConfig.metrics_tls,
    otlp: OtlpOption = HubConfig.otlp,
    log_format: LogFormatOption = HubConfig.log_format,
    log_sessions: Annotated[
        bool, typer.Option("--log-sessions", help="Log a line for each session that begins and ends.")
    ] = HubConfig.log_sessions,
    json_output: Annotated[bool, typer.Option("--json", help="Say what happens as JSON lines.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log more.")] = False,
) -> None:
    """Load the target and serve it until SIGTERM or Ctrl-C, which let running sessions finish."""
    file, said = ConfigFile.read(config), given(context)
    target = file.settings("target", TargetConfig, said)
    hub = file.settings("hub", HubConfig, said)
    configure_logs(verbose=verbose, log_format=hub.log_format)
    follow = file.settings("posture", Follow, said)
    follow.check()
    if hub.tls:
        TlsFiles.of(hub.tls, Role.HUB).load(Role.HUB)  # what is wrong is said before the target loads
    from .vestibule import vestibule

    say = Say(json_output=json_output)
    target = _on_usable_device(target, say)
    with HealthPage(hub.health, "loading") as page:
        page.device = target.device if target.engine == TargetConfig.engine else ""
        with vestibule(hub), say.loading(target.name):
            runs = _simulated_engine(target.profile) if target.profile else _transformers_engine(target)
        uvloop.run(_serve(runs, hub, say, follow, page))


@app.command()
def preflight(
    config: ConfigOption = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Does this machine's system go with this program, and can the target's device be used? Exit code 1: no."""
    target = ConfigFile.read(config).settings("target", TargetConfig, {})
    system = look()
    device = usable_device(target.device, allow_cpu=target.allow_cpu, system=system)
    if json_output:
        print_json({"device": device, "found": str(system)})
    else:
        typer.echo(f"the target can run on {device} ({system})")


@app.command()
def settings(
    config: ConfigOption = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show the settings in force: what a settings file says, and the defaults. What is wrong in it is named."""
    file = ConfigFile.read(config)
    tables: dict[str, type] = {"hub": HubConfig, "target": TargetConfig, "posture": Follow}
    print_settings({table: file.settings(table, kind, {}) for table, kind in tables.items()}, json_output=json_output)


@app.command()
def prepare(
    target: Annotated[str, typer.Option(help="Target model, as for serve.")] = DEFAULT_TARGET,
    dtype: Annotated[str, typer.Option(help="Numeric type, as for serve.")] = "bfloat16",
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log more.")] = False,
) -> None:
    """Load a target once, so that what is wrong shows now and later starts find its converted copy."""
    configure_logs(verbose=verbose)
    with Say(json_output=False).loading(target):
        loaded = load(target, dtype=dtype)
    typer.echo(f"{loaded.files.name}: {loaded.vocabulary.size} ids, fingerprint {loaded.fingerprint.hex()[:16]}")


@app.command()
def distill(
    text: Annotated[list[Path], typer.Argument(help="Files of text that the target wrote (.npz).")],
    out: Annotated[Path, typer.Option(help="Folder of the head; a run that was interrupted goes on from there.")],
    target: Annotated[str, typer.Option(help="Target model, as for serve.")] = DEFAULT_TARGET,
    minutes: Annotated[float, typer.Option(min=0.1, help="Time to train.")] = 60.0,
    draft_vocab_size: Annotated[int, typer.Option(min=2, help="Ids that the head can draft.")] = 8192,
    quoting: Annotated[float, typer.Option(min=0, max=2, help="Texts that quote, added for each text given.")] = 0.5,
    device: Annotated[str, typer.Option(help="Device, as torch names it.")] = "cpu",
    threads: Annotated[int, typer.Option(min=0, help="CPU threads; 0 leaves the choice to torch.")] = 0,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log more.")] = False,
) -> None:
    """Train an EAGLE-3 head for a target. Serve it with --drafter eagle3:FOLDER."""
    configure_logs(verbose=verbose)
    locate(target)
    import torch

    from .distill.quoting import quoting as texts_that_quote
    from .distill.texts import read_texts
    from .distill.train import Recipe, Training

    if threads:
        torch.set_num_threads(threads)
    texts = read_texts(text)
    with Say(json_output=False).loading(target):
        loaded = load(target, device=device)
    recipe = Recipe(draft_vocab_size=draft_vocab_size)
    texts += texts_that_quote(texts, round(quoting * len(texts)), recipe.longest)
    training = Training(loaded, texts, out, recipe)
    training.run(minutes * 60, lambda line: typer.echo(line))
    typer.echo(f"the head is in {out}")


def _on_usable_device(target: TargetConfig, say: Say) -> TargetConfig:
    """What cannot run here is said before the target loads."""
    device = usable_device(target.device, allow_cpu=target.allow_cpu)
    if device != target.device:
        say.event("preflight", asked=target.device, device=device, found=str(look()))
    return replace(target, device=device)


def _simulated_engine(profile: str) -> Engine:
    from .engines.simulated import DeviceProfile, SimulatedEngine

    return SimulatedEngine(DeviceProfile.load(profile))


def _transformers_engine(config: TargetConfig) -> Engine:
    files = locate(config.model)  # what is missing is said before the slow imports
    if not config.device.startswith("cuda") or look().host:  # a Jetson's GPU has the machine's memory
        Budget.of(files, config.dtype, config.kv_cache_mb).check(available_mb())
    import torch

    if config.threads:
        torch.set_num_threads(config.threads)
    return load_engine(
        config.model,
        dtype=config.dtype,
        device=config.device,
        kv_cache_mb=config.kv_cache_mb,
        drafter=config.drafter,
    )


async def _serve(engine: Engine, config: HubConfig, say: Say, follow: Follow, page: HealthPage) -> None:
    from .server import running_hub

    if config.console:
        try:
            from .console.server import running_console
            from .console.state import ConsoleState
        except ImportError as error:
            raise ConfigError(f"{error.name} is not installed", hint="pip install 'baru-drafting[serve]'") from error
    stop = stop_signal()
    keeper = await follow.keeper(engine, say.event)
    facts: dict[str, str] = {}
    async with AsyncExitStack() as stack:
        watchers = [ConsoleState()] if config.console else []
        hub = await stack.enter_async_context(
            running_hub(
                engine, config, observers=watchers, posture=keeper, on_change=[state.changed for state in watchers]
            )
        )
        for state in watchers:
            facts["console"] = await stack.enter_async_context(running_console(config, hub, state, keeper))
        if config.announce:
            host, port = split_address(hub.address)
            await stack.enter_async_context(announced(host, port, config.announce))
        spec = engine.spec
        facts |= {"metrics": hub.metrics} if hub.metrics else {}
        facts["posture"] = keeper.name
        facts |= {"health": page.address} if page.address else {}
        facts |= {"device": page.device} if page.device else {}
        await stack.enter_async_context(watched(hub.verifier.goes_on))
        page.says = lambda: _state(hub.verifier)
        say.event("ready", address=hub.address, target=spec.target_name, engine=spec.engine, **facts)
        notify(READY="1", STATUS=f"serving {spec.target_name} at {hub.address}")
        await stop.wait()
        notify(STOPPING="1", STATUS="draining")
        say.event("draining", sessions=str(hub.verifier.num_sessions))
        await hub.drain(config.drain_grace_s)
    say.event("stopped")


def _state(verifier: Verifier) -> str:
    if not verifier.goes_on():
        return "the target does not answer"
    return "draining" if verifier.draining else READY


def main() -> None:
    """Entry point of the console script."""
    run(app, "baru-hub")


if __name__ == "__main__":
    main()

"""Settings of the hub service: parsed once, checked once, passed in."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from baru_common.addresses import is_loopback
from baru_common.addresses import split_address as split_address
from baru_common.channel_options import MAX_MESSAGE_BYTES
from baru_common.errors import ConfigError
from baru_common.frames import TrafficShape
from baru_common.logs import LogFormat
from baru_common.model_files import DEFAULT_TARGET
from baru_common.shaping import check_shape
from baru_common.telemetry import TelemetryConfig

from .access import EVERYBODY, allow_list
from .orphans import LinkPolicy
from .quotas import Quotas

DEFAULT_LISTEN = "127.0.0.1:7443"
_DRAFT_AHEAD = 64
_LEAST = {
    "max_depth": 0,
    "max_prefill": 1,
    "max_patience_ms": 0,
    "node_silence_s": 0.5,  # nodes send a heartbeat every 0.2 s
    "slow_reader_s": 0.5,
    "orphan_grace_s": 0,
    "orphan_tokens": 0,
    "orphan_mb": 0,
}


class Shaping(Enum):
    """Whether sizes and times of what is sent are to say nothing of what is said (docs/security.md)."""

    OFF = "off"
    ALLOWED = "allowed"
    """For nodes that ask for it."""
    REQUIRED = "required"


@dataclass(frozen=True)
class TargetConfig:
    """What `baru-hub serve` runs: the table [target] of a settings file."""

    model: str = DEFAULT_TARGET
    """A name, a Hugging Face folder, or a .gguf file."""
    engine: str = "transformers"
    """What runs it: transformers or simulated."""
    profile: str | None = None
    """Device that a simulated target takes its time from."""
    drafter: str | None = None
    """The hub's own drafter: early_exit:LAYERS, eagle3, eagle3:PATH, mtp or dflash:PATH; none: do not draft here."""
    kv_cache_mb: int = 1024
    """Memory for keys and values, MB; it bounds all sessions."""
    dtype: str = "bfloat16"
    """Numeric type: bfloat16, float32 or float16."""
    device: str = "cpu"
    """As torch names it."""
    allow_cpu: bool = False
    """Run on the CPU when `device` is a GPU that cannot be used; else that is an error."""
    threads: int = 0
    """CPU threads; 0 leaves the choice to torch."""

    def __post_init__(self) -> None:
        if self.engine not in ("transformers", "simulated") or (self.engine == "simulated") != (
            self.profile is not None
        ):
            raise ConfigError(
                f"engine {self.engine} with profile {self.profile} is no engine",
                hint="use --engine transformers, or --engine simulated --profile NAME",
            )
        if self.engine == "simulated" and self.drafter:
            raise ConfigError("a simulated target has no drafter of its own", hint="leave --drafter out")
        if self.threads < 0:
            raise ConfigError(f"threads is {self.threads}, must be at least 0")

    @property
    def name(self) -> str:
        """For people."""
        return self.profile or self.model


@dataclass(frozen=True)
class HubConfig(Quotas):
    """How `baru-hub serve` serves, and what it lets others take: the table [hub] of a settings file.

    ConfigError names the setting that is wrong.
    """

    listen: str = DEFAULT_LISTEN
    """Address to serve on, HOST:PORT; port 0 takes a free one. Without `tls` it must be loopback."""
    tls: Path | None = None
    """Folder with this hub's certificate, as `baru-hub certs issue` makes it; none: plain, and open to this machine."""
    allow: tuple[str, ...] = (EVERYBODY,)
    """Who may connect: names, ROLE/NAME, or `*` for everybody with a certificate of the kit."""
    allow_file: Path | None = None
    """A file of such names, one a line, in the place of `allow`; read again when it changes."""
    max_depth: int = 16
    """Most draft ids checked per session and step; 0 turns drafting off."""
    max_draft_ahead: int = 0
    """Most drafted ids past the committed length that the hub keeps per session; 0: 64, or `max_depth` if more."""
    max_patience_ms: float = 250.0
    """Longest wait for a draft, whatever it promises; 0 never waits."""
    max_prefill: int = 512
    """Most prompt ids fed in one step."""
    drain_grace_s: float = 10.0
    """Time that running sessions get to finish after SIGTERM."""
    node_silence_s: float = LinkPolicy.node_silence_s
    """A node that has sent heartbeats, and then nothing for so long, is gone."""
    slow_reader_s: float = LinkPolicy.slow_reader_s
    """A node that leaves its frames unread for so long is gone."""
    orphan_grace_s: float = LinkPolicy.orphan_grace_s
    """Time that a session is kept when its node is gone; 0: none."""
    orphan_tokens: int = LinkPolicy.orphan_tokens
    """Most ids that it decodes meanwhile."""
    orphan_mb: int = LinkPolicy.orphan_bytes >> 20
    """Most memory for keys and values that all such sessions hold, MB."""
    announce: str = ""
    """Identity to announce on the local network by mDNS; none: do not."""
    health: str = ""
    """HOST:PORT of /livez and /readyz, plain HTTP that says nothing else, from the start on; empty: none."""
    console: str = ""
    """HOST:PORT of a page that shows the kit live; empty: none. Past loopback it is for observers and operators."""
    audit: Path | None = None
    """Folder of the audit log; none: with `tls` in this user's state folder, else none is kept."""
    reflection: bool = False
    """Serve gRPC reflection, for debugging."""
    traffic_shape: Shaping = Shaping.OFF
    """Whether streams may, or must, be of constant size and pace."""
    shape_cell_bytes: int = TrafficShape.cell_bytes
    """Size of what a shaped stream sends at a time."""
    shape_tick_ms: int = TrafficShape.tick_ms
    """Time between two of these."""
    shape_round_s: float = TrafficShape.round_ms / 1000
    """A shaped stream lasts this long, or 2, 4, 8, ... times as long."""
    metrics: str = TelemetryConfig.metrics
    """HOST:PORT to be scraped at by Prometheus; empty: nowhere. See `TelemetryConfig`."""
    metrics_tls: tuple[str, str, str] = TelemetryConfig.tls
    """Files for scraping past loopback: certificate, key, client CA."""
    otlp: str = TelemetryConfig.otlp
    """URL that metrics and traces are pushed to; empty: the environment's, if any."""
    follow_changes: bool = False
    """When a session's acceptance has changed, let drafting forget what it was; else that is only reported."""
    log_format: LogFormat = LogFormat.TEXT
    """How log lines look."""
    log_sessions: bool = False
    """Log a line for each session that begins and ends."""

    def __post_init__(self) -> None:
        if not self.max_draft_ahead:
            object.__setattr__(self, "max_draft_ahead", max(_DRAFT_AHEAD, self.max_depth))
        super().__post_init__()
        host, _ = split_address(self.listen)
        if not self.tls and not is_loopback(host):
            raise ConfigError(
                f"listen is {self.listen}: {host} is not a loopback address, and without tls anybody could connect",
                hint="give --tls with a folder made by `baru-hub certs issue NAME --role hub`, or listen on 127.0.0.1",
            )
        if self.console and not is_loopback(split_address(self.console)[0]) and not self.tls:
            raise ConfigError(
                f"console is {self.console}, and without tls anybody could look",
                hint="give --tls, or serve it on 127.0.0.1",
            )
        self._check_allow()
        if self.health:
            split_address(self.health)
        _ = self.telemetry  # says what is wrong with it
        for name, least in _LEAST.items():
            if not least <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} is {getattr(self, name)}, must be at least {least}")
        if self.max_draft_ahead < self.max_depth:
            raise ConfigError(
                f"max_draft_ahead is {self.max_draft_ahead}, must be at least max_depth ({self.max_depth})"
            )
        if self.shape:
            check_shape(self.shape, ConfigError)

    def _check_allow(self) -> None:
        allow_list(self.allow)
        listed = tuple(self.allow) != (EVERYBODY,)
        if (listed or self.allow_file) and not self.tls:
            raise ConfigError(
                "a list of who may connect needs tls: without, nobody says who they are", hint="give --tls"
            )
        if listed and self.allow_file:
            raise ConfigError("allow and allow_file contradict each other", hint="leave one of them out")

    @property
    def max_message_bytes(self) -> int:
        return MAX_MESSAGE_BYTES

    @property
    def shape(self) -> TrafficShape | None:
        """How shaped streams look, if there are any."""
        if self.traffic_shape is Shaping.OFF:
            return None
        required = self.traffic_shape is Shaping.REQUIRED
        return TrafficShape(self.shape_cell_bytes, self.shape_tick_ms, round(self.shape_round_s * 1000), required)

    @property
    def telemetry(self) -> TelemetryConfig:
        """Where metrics and traces go."""
        return TelemetryConfig(self.metrics, self.otlp, self.metrics_tls)

    @property
    def link(self) -> LinkPolicy:
        """What is made of links that break."""
        return LinkPolicy(
            node_silence_s=self.node_silence_s,
            slow_reader_s=self.slow_reader_s,
            orphan_grace_s=self.orphan_grace_s,
            orphan_tokens=self.orphan_tokens,
            orphan_bytes=self.orphan_mb << 20,
        )

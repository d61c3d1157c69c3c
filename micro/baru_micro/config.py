"""Settings of a node: the table [node] of a kit's settings file, or options."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baru_common.config_file import ConfigFile
from baru_common.errors import ConfigError
from baru_common.logs import LogFormat
from baru_common.workloads import DEFAULT_WORKLOAD, check_workload

from .client import LinkOptions, MicroNode
from .decoding import Fallback, Reconcile
from .fit import Shaping
from .observing import NodeObserver


@dataclass(frozen=True)
class NodeConfig:
    """How a node reaches its hubs, drafts, and serves. ConfigError names the setting that is wrong."""

    hub: tuple[str, ...] = ("127.0.0.1:7443",)
    """Hubs, HOST:PORT, the first choice first."""
    tls: Path | None = None
    """Folder with this machine's certificate, as `baru-hub certs issue` makes it; none: only hubs of this machine."""
    drafter: str = "ngram"
    """What drafts here; or several, as suffix+causal_lm."""
    fallback: Fallback | None = None
    """While no hub answers; none: local if the drafter has a model, else wait."""
    traffic_shape: Shaping = Shaping.AUTO
    """Constant size and pace, so that traffic says nothing; auto: if the hub requires it."""
    tier: str | None = None
    """Tier in the hub's posture; none: by the board's name."""
    workload: str = DEFAULT_WORKLOAD
    """Kind of work that answers are."""
    listen: str = "127.0.0.1:8000"
    """HOST:PORT that `baru-micro serve` serves HTTP on; port 0 takes a free one."""
    api_key_file: Path | None = None
    """File of API keys, one a line; past loopback there must be one."""
    certificate: Path | None = None
    """Certificate (PEM) to serve HTTPS with."""
    key: Path | None = None
    """Its key (PEM)."""
    max_running: int = 16
    """Most generations at a time."""
    max_waiting: int = 256
    """Most generations that wait for their turn."""
    otlp: str = ""
    """URL that metrics and traces are pushed to; empty: the environment's, if any."""
    log_format: LogFormat = LogFormat.TEXT
    """How log lines look."""

    def __post_init__(self) -> None:
        if not self.hub:
            raise ConfigError("hub is empty", hint="name at least one hub, HOST:PORT")
        check_workload(self.workload)
        for name, least in (("max_running", 1), ("max_waiting", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} is {getattr(self, name)}, must be at least {least}")

    @classmethod
    def read(cls, path: Path | None, given: Mapping[str, Any]) -> NodeConfig:
        """Return what the file says, and before it what was given as options; ConfigError for what is wrong in it."""
        return ConfigFile.read(path).settings("node", cls, given)

    def connect(
        self, *, reconcile: Reconcile = Reconcile.REWRITE, observers: Iterable[NodeObserver] = ()
    ) -> AbstractAsyncContextManager[MicroNode]:
        """Connect as `MicroNode.connect` does, for the length of the block."""
        options = LinkOptions(
            fallback=self.fallback,
            reconcile=reconcile,
            shaping=self.traffic_shape,
            tier=self.tier,
            workload=self.workload,
        )
        return MicroNode.connect(self.hub, drafter=self.drafter, options=options, tls=self.tls, observers=observers)

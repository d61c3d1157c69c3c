"""How a hub that starts comes to its posture, and has its own drafter measured before anybody relies on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from baru_common.board import detected_tier
from baru_common.errors import ConfigError
from baru_common.folders import state_folder

from .canary import Standing, judge
from .canary_run import measured
from .canary_store import CanaryLedger
from .engines import Engine
from .posture_keeper import PostureKeeper, PostureSource


class CanaryMode(Enum):
    """What becomes of drafters whose acceptance was not measured, or is below its floor."""

    AUTO = "auto"
    """The hub's own is measured now, and left out if it fails; nodes' are measured as they draft."""
    STRICT = "strict"
    """The same, but the hub does not start with a drafter that fails."""
    OFF = "off"
    """All are admitted unseen."""


@dataclass(frozen=True)
class Follow:
    """What a hub is to follow: the table [posture] of a settings file."""

    document: Path | None = None
    """Folder as `PostureStore` keeps it, or a .toml file; None: the folder in the user's state."""
    tier: str | None = None
    """Of the hub itself; None: by the board's name."""
    model_class: str = ""
    """Name of the target that the document's rules are asked for; empty: its own."""
    canary: CanaryMode = CanaryMode.AUTO
    """What becomes of drafters that were not measured, or fail."""

    @property
    def source(self) -> PostureSource:
        """Where the document is."""
        return PostureSource(self.document or state_folder())

    def check(self) -> None:
        """Raise the ConfigError that says what is wrong with the document, if anything is."""
        self.source.read()

    async def keeper(self, engine: Engine, say: Callable[..., None]) -> PostureKeeper:
        """Return what keeps the hub to its posture. ConfigError when the document is not valid, or when a drafter fails
        that must not."""
        source = self.source
        ledger = None if self.canary is CanaryMode.OFF else CanaryLedger(canary_folder(source.folder))
        keeper = PostureKeeper(
            engine.spec,
            source=source,
            tier=detected_tier() if self.tier is None else self.tier,
            model=self.model_class,
            ledger=ledger,
        )
        if ledger is not None and engine.spec.drafter:
            await self._measure(engine, keeper, ledger, say)
        return keeper

    async def _measure(
        self, engine: Engine, keeper: PostureKeeper, ledger: CanaryLedger, say: Callable[..., None]
    ) -> None:
        record = await measured(engine, ledger, keeper.document.canary.depth)
        admission = judge(record, keeper.document.floor(record.triple.family, keeper.model))
        say("canary", drafter=record.row.drafter, standing=admission.standing.value, reason=admission.reason)
        if self.canary is CanaryMode.STRICT and admission.standing is Standing.REFUSED:
            raise ConfigError(admission.reason, hint="serve without --drafter, or with --canary auto")


def canary_folder(folder: Path | None = None) -> Path:
    """Where canary records are kept: beside the posture document."""
    return (folder or state_folder()) / "canary"

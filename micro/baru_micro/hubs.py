"""The hubs of a node, in order of preference: which to try next, and who looks after the idle ones."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum

from baru_common.errors import BaruError, ConfigError, HubUnavailable
from baru_common.frames import HubDescription, Posture

from .known_hubs import recall, remember
from .link import LinkEvent, LinkState
from .transport import HubChannel

_LAST = (LinkState.DOWN, LinkState.DRAINING)
_CHECK_S = 1.0
"""Time between two health checks of a hub that nothing else is heard from."""
_log = logging.getLogger(__name__)


class FailBack(Enum):
    """When to return to a hub that is preferred, once it is back."""

    NEXT = "next"
    """With the next generation; those that run stay where they are."""
    NEVER = "never"
    """When the present hub fails."""


@dataclass
class Hubs:
    """Channels to the hubs of one node. All serve the same target."""

    channels: Sequence[HubChannel]
    fail_back: FailBack = FailBack.NEXT
    posture: Posture | None = None
    """What a hub let this node do, last."""
    _current: HubChannel | None = None
    _documents: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    """Version and digest of the posture document that each hub follows, by address."""
    _differing: frozenset[bytes] = frozenset()
    _watchers: list[asyncio.Task[None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.channels:
            raise ConfigError("no hub is named", hint="give HOST:PORT")

    @property
    def current(self) -> HubChannel:
        """The hub that answered last; the first one while none has."""
        return self._current or self.channels[0]

    def in_order(self, stay_with: HubChannel | None = None) -> list[HubChannel]:
        """Return the hubs in the order they are to be tried: `stay_with` first, those that are down last."""
        first = stay_with or (self._current if self.fail_back is FailBack.NEVER else None)
        if first and first.link.state is LinkState.DRAINING:
            first = None
        others = sorted((c for c in self.channels if c is not first), key=lambda c: c.link.state in _LAST)
        return [first, *others] if first else others

    def has_other(self, channel: HubChannel) -> bool:
        """True when another hub is not known to be down."""
        return any(other.link.state not in _LAST for other in self.channels if other is not channel)

    def answered(self, channel: HubChannel) -> None:
        """Note which hub serves."""
        self._current = channel

    async def describe(self) -> HubDescription:
        """Return what the first hub that answers says of itself; the last one's error when none does."""
        error: BaruError | None = None
        for channel in self.in_order():
            try:
                description = await channel.describe()
            except BaruError as caught:
                error = caught
            else:
                self.answered(channel)
                self.note_document(channel.address, description.posture_version, description.posture_digest)
                remember(channel.address, description)
                return description
        raise error or HubUnavailable("no hub is named")

    def note_document(self, address: str, version: int, digest: bytes) -> None:
        """Note which posture document a hub follows; a warning where the hubs of one node follow different ones."""
        self._documents[address] = version, digest
        digests = frozenset(digest for _, digest in self._documents.values())
        if len(digests) > 1 and digests != self._differing:
            each = ", ".join(f"{a} version {v} ({d.hex()[:12] or 'none'})" for a, (v, d) in self._documents.items())
            _log.warning("the hubs follow different posture documents: %s", each)
        self._differing = digests

    def recall(self) -> HubDescription | None:
        """Return what the first hub of which that is known said of itself when it was last heard."""
        return next(filter(None, (recall(channel.address) for channel in self.channels)), None)

    def watch(self) -> None:
        """Begin to check, now and again, on hubs that no session hears from."""
        self._watchers = [asyncio.create_task(self._watch(channel)) for channel in self.channels]

    async def _watch(self, channel: HubChannel) -> None:
        while True:
            await asyncio.sleep(_CHECK_S)
            if channel.streams:
                continue  # its streams hear of it sooner
            with suppress(BaruError):
                if channel.link.state is LinkState.DOWN:
                    channel.link.happen(LinkEvent.ATTEMPT)
                if await channel.health() != "SERVING":
                    channel.link.happen(LinkEvent.DRAIN)
                elif len(self.channels) > 1:
                    hub = await channel.describe()
                    self.note_document(channel.address, hub.posture_version, hub.posture_digest)

    async def close(self) -> None:
        """Close every channel."""
        for task in self._watchers:
            task.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        for channel in self.channels:
            await channel.close()

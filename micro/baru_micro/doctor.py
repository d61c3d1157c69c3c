"""What can be wrong between a node and its hub, checked one by one, with what to do about each."""

from __future__ import annotations

import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from baru_common import __version__, board_state
from baru_common.drafters import load_drafter
from baru_common.errors import BaruError, HubUnavailable
from baru_common.frames import PROTOCOL_REVISION, HubDescription
from baru_common.tls import MEMBERS, TlsFiles
from baru_common.tokens import Tokenizer

from .fit import fitted, require_protocol
from .tokenizer_cache import cached_bundle
from .transport import HubChannel

_NUM_SAMPLES = 20


@dataclass(frozen=True)
class Check:
    """One thing that was looked at."""

    name: str
    ok: bool
    found: str
    advice: str = ""


@dataclass
class Doctor:
    """Examines the way from this node to one hub. Stops at the first failure the rest depends on."""

    address: str
    drafter: str
    timeout_s: float = 5.0
    tls: Path | None = None
    document: str = ""
    """The posture document that the hub follows, once that was asked."""

    async def examine(self) -> list[Check]:
        """Return the checks that were made, in order; the last one may have failed."""
        checks: list[Check] = []
        files = None
        if self.tls:
            checks.append(_check_certificate(self.tls))
            if not checks[-1].ok:
                return checks
            files = TlsFiles.of(self.tls, *MEMBERS)
        channel = HubChannel(self.address, timeout_s=self.timeout_s, tls=files)
        steps = (
            ("reachable", self._reachable),
            ("healthy", self._healthy),
            ("versions", self._versions),
            ("tokenizer", self._tokenizer),
            ("drafter", self._drafter),
            ("posture", self._posture),
            ("round trip", self._round_trip),
            ("board", self._board),
        )
        try:
            for name, step in steps:
                checks.append(await _check(name, step, channel))
                if not checks[-1].ok:
                    break
        finally:
            await channel.close()
        return checks

    async def _reachable(self, channel: HubChannel) -> str:
        self._hub: HubDescription = await channel.describe()
        return f"{self._hub.target_name} on {self._hub.engine}"

    async def _healthy(self, channel: HubChannel) -> str:
        status = await channel.health()
        if status != "SERVING":
            raise HubUnavailable(
                f"the hub answers but is {status}", hint="wait until it has loaded, or is not draining"
            )
        return status

    async def _versions(self, channel: HubChannel) -> str:  # noqa: ARG002
        require_protocol(self._hub)
        return f"hub {self._hub.hub_version}, node {__version__}, protocol {PROTOCOL_REVISION}"

    async def _tokenizer(self, channel: HubChannel) -> str:
        self._loaded = Tokenizer(await cached_bundle(self._hub.tokenizer_digest, channel.fetch_tokenizer))
        return f"{self._loaded.vocabulary.size} ids, digest {self._hub.tokenizer_digest.hex()[:12]}"

    async def _drafter(self, channel: HubChannel) -> str:  # noqa: ARG002
        await fitted(load_drafter(self.drafter), self._loaded)
        return self.drafter

    async def _posture(self, channel: HubChannel) -> str:  # noqa: ARG002
        version, digest = self._hub.posture_version, self._hub.posture_digest
        self.document = f"version {version}, digest {digest.hex()[:12]}" if digest else "none"
        return self.document

    async def _board(self, channel: HubChannel) -> str:  # noqa: ARG002
        return str(board_state.look())

    async def _round_trip(self, channel: HubChannel) -> str:
        samples_ms = []
        for _ in range(_NUM_SAMPLES):
            start = time.perf_counter()
            await channel.describe()
            samples_ms.append((time.perf_counter() - start) * 1e3)
        return f"median {statistics.median(samples_ms):.2f} ms, worst {max(samples_ms):.2f} ms of {_NUM_SAMPLES}"


def _check_certificate(folder: Path) -> Check:
    try:
        found = TlsFiles.of(folder, *MEMBERS).load(*MEMBERS)
        if problem := found.time_problem():
            raise problem
    except BaruError as error:
        return Check("certificate", ok=False, found=error.message, advice=error.hint)
    left = found.own.ends - datetime.now(timezone.utc)
    return Check("certificate", ok=True, found=f"{found.own.identity}, for {left.days} more days")


async def _check(name: str, step: Callable[[HubChannel], Awaitable[str]], channel: HubChannel) -> Check:
    try:
        return Check(name, ok=True, found=await step(channel))
    except BaruError as error:
        return Check(name, ok=False, found=error.message, advice=error.hint)

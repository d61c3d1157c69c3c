"""How fast a node may talk: token buckets. Pure; the clock is told."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from baru_common.errors import CapacityExhausted, InvalidRequest

from .quotas import Quotas

_CUT_OFF_S = 5.0
"""A stream that is throttled for so long, without a rest, is ended."""
_CALL_BURST_S = 5.0
_LONGEST_WAIT_S = 2.0
"""A call that would have to wait longer is refused."""
_MAX_IDENTITIES = 256


@dataclass
class Bucket:
    """Fills by `rate` a second up to `burst`; what is taken beyond its content has to be waited for."""

    rate: float
    burst: float
    level: float = field(init=False)
    _at_s: float | None = None

    def __post_init__(self) -> None:
        self.level = self.burst

    def take(self, amount: float, now_s: float) -> float:
        """Take `amount`; return how long to wait until it is covered."""
        self.fill(now_s)
        self.level -= amount
        return max(-self.level / self.rate, 0.0)

    def fill(self, now_s: float) -> None:
        """Let in what has come since the last time."""
        since_s = 0.0 if self._at_s is None else max(now_s - self._at_s, 0.0)
        self.level, self._at_s = min(self.level + self.rate * since_s, self.burst), now_s


class FrameRate:
    """The frames of one stream, after Open."""

    def __init__(self, quotas: Quotas) -> None:
        self._quotas = quotas
        self._bucket = Bucket(quotas.max_frames_per_s, quotas.max_frames_per_s)
        self._over_since_s: float | None = None

    def admit(self, num_bytes: int, now_s: float) -> float:
        """Return how long to wait before reading on. InvalidRequest for too large a frame; CapacityExhausted for a
        node that has been throttled for long without a rest."""
        quotas = self._quotas
        if num_bytes > quotas.max_frame_bytes:
            raise InvalidRequest(
                f"a frame has {num_bytes} bytes, at most {quotas.max_frame_bytes} are allowed",
                hint="draft less at a time, or raise max_frame_bytes at the hub",
                details={"limit": "max_frame_bytes"},
            )
        wait_s = self._bucket.take(1 + num_bytes // 1024, now_s)
        if self._bucket.level > self._bucket.burst / 2:
            self._over_since_s = None
        elif wait_s and self._over_since_s is None:
            self._over_since_s = now_s
        if self._over_since_s is not None and now_s - self._over_since_s > _CUT_OFF_S:
            raise CapacityExhausted(
                f"more than {quotas.max_frames_per_s:.0f} frames a second came for {_CUT_OFF_S:.0f} s",
                hint="draft more ids in a frame, or raise max_frames_per_s at the hub",
                details={"limit": "max_frames_per_s"},
            )
        return wait_s


class CallGate:
    """The calls of each identity: how many at a time, and how many a second."""

    def __init__(self, quotas: Quotas) -> None:
        self._quotas = quotas
        self._running: Counter[str] = Counter()
        self._buckets: dict[str, Bucket] = {}

    def enter(self, identity: str) -> None:
        """Count a call until it leaves; CapacityExhausted when there are too many."""
        most = self._quotas.identity_calls(identity)
        if self._running[identity] >= most:
            raise CapacityExhausted(
                f"{identity} has {most} calls under way, as many as one node may have",
                hint="end some first, or raise max_identity_calls at the hub",
                details={"limit": "max_identity_calls"},
            )
        self._running[identity] += 1

    def leave(self, identity: str) -> None:
        """It is over."""
        self._running[identity] -= 1
        if not self._running[identity]:
            del self._running[identity]

    def wait_s(self, identity: str, amount: float, now_s: float) -> float:
        """Return how long the call has to wait, counting as `amount`; CapacityExhausted if that is too long."""
        rate = self._quotas.max_calls_per_s
        bucket = self._buckets.setdefault(identity, Bucket(rate, rate * _CALL_BURST_S))
        wait_s = bucket.take(amount, now_s)
        self._forget(now_s)
        if wait_s > _LONGEST_WAIT_S:
            bucket.level += amount
            raise CapacityExhausted(
                f"{identity} begins more than {rate:g} calls a second",
                retry_after_s=wait_s,
                hint="call less often, or raise max_calls_per_s at the hub",
                details={"limit": "max_calls_per_s"},
            )
        return wait_s

    def _forget(self, now_s: float) -> None:
        """Those who have not called for a while need no bucket."""
        if len(self._buckets) > _MAX_IDENTITIES:
            for bucket in self._buckets.values():
                bucket.fill(now_s)
            self._buckets = {name: b for name, b in self._buckets.items() if b.level < b.burst}

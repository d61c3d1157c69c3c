"""Admission by canary: what a drafter with weights has been seen to earn beside a target, on what runs the two. Pure.

One checkpoint has shown 0 % acceptance under one engine and 63 % under another. So what was measured holds for exactly
one (target, drafter, engine, engine version); when any digest or version differs, nothing has been measured yet.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import Enum

from baru_common.fingerprint import fingerprint
from baru_common.frames import DrafterInfo

from .engines.base import EngineSpec
from .posture import Floor, MeasuredRow

FIXED_PROMPTS, LIVE_SESSIONS = "fixed prompts", "live sessions"


@dataclass(frozen=True)
class Triple:
    """What a figure holds for. Digests in hex."""

    target: str
    engine: str
    """Of the hub, with versions, numeric type and device."""
    family: str
    drafter: str
    drafter_engine: str
    """Of the node; empty for a drafter of the hub's own."""
    prompts: str = ""
    """Digest of the fixed prompts; empty for a figure of live sessions."""

    @classmethod
    def of_hub(cls, spec: EngineSpec, prompts: str) -> Triple:
        """The hub's own drafter."""
        return cls(spec.fingerprint.hex(), _engine(spec), spec.drafter or "", spec.drafter_digest.hex(), "", prompts)

    @classmethod
    def of_node(cls, spec: EngineSpec, drafter: DrafterInfo) -> Triple:
        """A node's drafter."""
        return cls(spec.fingerprint.hex(), _engine(spec), drafter.family, drafter.digest.hex(), drafter.engine)

    @property
    def key(self) -> str:
        """Names the triple: another digest or version gives another name."""
        return fingerprint(asdict(self)).hex()[:32]


def _engine(spec: EngineSpec) -> str:
    return f"{spec.engine} ({spec.runtime})" if spec.runtime else spec.engine


@dataclass(frozen=True)
class Figure:
    """Draft ids that were checked after others that stood, and how many of them did, too: the chance that the next
    drafted id is right, at whatever depth it was measured."""

    num_tried: int = 0
    num_accepted: int = 0

    def __add__(self, other: Figure) -> Figure:
        return Figure(self.num_tried + other.num_tried, self.num_accepted + other.num_accepted)

    @property
    def acceptance(self) -> float:
        """Share; 0 before anything was tried."""
        return self.num_accepted / self.num_tried if self.num_tried else 0.0


def figure_of(num_verified: int, num_accepted: int) -> Figure:
    """Return what one step says: the ids after the first refused one were not tried."""
    return Figure(min(num_accepted + 1, num_verified), num_accepted)


@dataclass(frozen=True)
class Record:
    """What a canary measured."""

    triple: Triple
    figure: Figure
    target_name: str
    drafter_model: str
    method: str
    """FIXED_PROMPTS or LIVE_SESSIONS."""
    machine: str
    measured_at: str
    """Date and time, UTC."""

    @property
    def row(self) -> MeasuredRow:
        """The figure as evidence."""
        drafter = f"{self.triple.family} {self.drafter_model}".strip()
        engine = " / ".join(filter(None, (self.triple.engine, self.triple.drafter_engine)))
        return MeasuredRow(
            drafter,
            engine,
            self.figure.acceptance,
            self.figure.num_tried,
            self.method,
            self.machine,
            self.measured_at,
        )


class Standing(Enum):
    """What a drafter may do."""

    ADMITTED = "admitted"
    PROBATION = "on probation"
    REFUSED = "refused"


@dataclass(frozen=True)
class Admission:
    """A drafter's standing, and why."""

    standing: Standing
    reason: str = ""


def judge(record: Record | None, floor: Floor | None) -> Admission:
    """Return the standing of a drafter of which `record` is known, under a document that asks for `floor`."""
    if record is None:
        return Admission(Standing.PROBATION, "its acceptance beside this target and engine is being measured")
    if floor is None:
        return Admission(Standing.ADMITTED, f"acceptance {_measured(record)}; no floor is set")
    told = f"acceptance {_measured(record)}, {floor.expected:.0%} expected ({floor.source}), floor {floor.least:.0%}"
    if record.figure.acceptance >= floor.least:
        return Admission(Standing.ADMITTED, told)
    return Admission(
        Standing.REFUSED,
        f"the canary refuses {record.row.drafter} on {record.row.engine}: {told}; check that engine and weights fit, "
        "then have it measured again",
    )


def _measured(record: Record) -> str:
    return f"{record.figure.acceptance:.0%} measured on {record.figure.num_tried} ids ({record.method})"

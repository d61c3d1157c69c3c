"""What a request may ask for. Checked once, where it enters; the same object on hub and node."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import InvalidRequest

MAX_STOP_IDS = 64


@dataclass(frozen=True)
class SamplingParams:
    """How the target's ids are chosen, and when to stop. InvalidRequest names a value that is wrong."""

    max_tokens: int | None = None
    """Most ids to emit, 1 or more; None: as many as the context takes."""
    temperature: float = 0.0
    """0 is greedy, the only value served so far."""
    seed: int | None = None
    """Seed of the sampling noise; greedy decoding does not use it."""
    ignore_eos: bool = False
    """End-of-sequence ids do not stop the generation."""
    stop_ids: tuple[int, ...] = ()
    """Further ids that stop the generation, at most 64."""

    def __post_init__(self) -> None:
        if self.max_tokens is not None and not 1 <= self.max_tokens < 1 << 32:
            raise InvalidRequest(
                f"max_tokens is {self.max_tokens}, must be in 1 .. 2^32 - 1", details={"param": "max_tokens"}
            )
        if self.temperature != 0.0:
            raise InvalidRequest(
                f"temperature is {self.temperature}, only 0 (greedy) is served so far",
                details={"param": "temperature"},
            )
        if self.seed is not None and not 0 <= self.seed < 1 << 64:
            raise InvalidRequest(f"seed is {self.seed}, must be in 0 .. 2^64 - 1", details={"param": "seed"})
        if len(self.stop_ids) > MAX_STOP_IDS:
            raise InvalidRequest(
                f"{len(self.stop_ids)} stop_ids, at most {MAX_STOP_IDS} are allowed",
                details={"param": "stop_ids"},
            )
        if any(not 0 <= i < 1 << 32 for i in self.stop_ids):
            raise InvalidRequest("stop_ids holds an id outside 0 .. 2^32 - 1", details={"param": "stop_ids"})

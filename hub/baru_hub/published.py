"""The published envelope of speculative decoding on Jetson boards: figures of others, never presented as ours."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from importlib import resources

SOURCE = "published by TensorRT Edge-LLM v0.9.0, not measured by us"


@dataclass(frozen=True)
class PublishedRow:
    """One row of data/edge_llm_v0_9_0_speculative.csv."""

    device: str
    model: str
    precision: str
    drafter: str
    batch: int
    vanilla_tok_s: float | None
    spec_tok_s: float
    speedup: float | None
    """spec / vanilla; None where the vanilla figure was not published."""
    mean_accepted_length: float
    source: str = SOURCE

    @property
    def model_class(self) -> str:
        """The model and the precision of its weights as one name, e.g. "Qwen3-8B-INT4"."""
        return f"{self.model}-{self.precision.split()[0]}"


@cache
def published_rows() -> tuple[PublishedRow, ...]:
    """Return all of them, in the order they were published."""
    text = (resources.files("baru_hub") / "data" / "edge_llm_v0_9_0_speculative.csv").read_text()
    return tuple(
        PublishedRow(
            device=row["device"],
            model=row["model"],
            precision=row["precision"],
            drafter=row["drafter"],
            batch=int(row["batch"]),
            vanilla_tok_s=float(row["vanilla_tok_s"]) if row["vanilla_tok_s"] else None,
            spec_tok_s=float(row["spec_tok_s"]),
            speedup=float(row["speedup"]) if row["speedup"] else None,
            mean_accepted_length=float(row["mean_accepted_length"]),
        )
        for row in csv.DictReader(text.splitlines())
    )

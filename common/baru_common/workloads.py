"""What kind of work an output is. Only what is generated id by id has a next id to propose."""

from __future__ import annotations

from .errors import WorkloadRefused

DEFAULT_WORKLOAD = "text"
AUTOREGRESSIVE = ("text", "transcription", "forecasting", "actions")
"""Text, speech transcription, forecasts, action tokens."""
DETERMINISTIC = ("fft", "filter_bank", "beamformer", "matched_filter", "resampling", "cfar")
"""Kinds of signal processing, refused by name."""


def check_workload(kind: str) -> None:
    """Raise WorkloadRefused unless drafts are of use for this kind; an empty one is text."""
    if kind in ("", *AUTOREGRESSIVE):
        return
    known = ", ".join(AUTOREGRESSIVE)
    if kind in DETERMINISTIC:
        raise WorkloadRefused(
            f"workload {kind} is deterministic: its output is a function of its input, so there is no next token to "
            "propose",
            hint=f"run it without a hub; what can be drafted is {known}",
            details={"param": "workload"},
        )
    raise WorkloadRefused(f"workload {kind!r} is not known", hint=f"use one of {known}", details={"param": "workload"})

"""What users import. A change here is a change of the public interface: make it on purpose."""

from __future__ import annotations

import inspect

import baru_micro

_NAMES = [
    "BaruError",
    "Confirmed",
    "Event",
    "FailBack",
    "Fallback",
    "Finish",
    "FinishReason",
    "Grammar",
    "HubDescription",
    "Kind",
    "LinkChanged",
    "LinkOptions",
    "LinkState",
    "MicroNode",
    "Piece",
    "Posture",
    "PostureChanged",
    "Proof",
    "Provenance",
    "Reconcile",
    "Retracted",
    "SamplingMode",
    "SamplingParams",
    "Shaping",
    "Span",
    "Started",
    "Step",
    "StepStats",
    "SyncMicroNode",
    "Timers",
    "TokenLogprobs",
    "Usage",
    "load_drafter",
]


def test_the_public_names_are_these() -> None:
    """In order, each of them there."""
    assert baru_micro.__all__ == _NAMES
    assert all(hasattr(baru_micro, name) for name in _NAMES)


def test_both_nodes_have_the_same_calls() -> None:
    """The facade without `async` takes what the other takes."""
    for name in ("connect", "generate"):
        calls = [getattr(node, name) for node in (baru_micro.MicroNode, baru_micro.SyncMicroNode)]
        ours, theirs = (list(inspect.signature(call).parameters.values()) for call in calls)
        assert ours == theirs


def test_the_values_on_paper_stay() -> None:
    """They stand in JSON output and in logs."""
    assert [kind.value for kind in baru_micro.Kind] == ["accepted", "guessed", "correction", "bonus", "plain", "local"]
    assert [provenance.value for provenance in baru_micro.Provenance] == ["verified", "provisional"]
    assert [state.value for state in baru_micro.LinkState] == ["connecting", "up", "suspect", "down", "draining"]
    assert [fallback.value for fallback in baru_micro.Fallback] == ["local", "wait", "fail"]
    assert [reconcile.value for reconcile in baru_micro.Reconcile] == ["rewrite", "keep"]
    assert [reason.value for reason in baru_micro.FinishReason] == ["stop", "length", "cancelled"]

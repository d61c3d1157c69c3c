"""A generation for a person at a terminal, or for a pipe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from enum import Enum
from typing import Any

from rich.console import Console
from rich.text import Text

from baru_common.cli_support import harmless

from .events import Event, Finish, Kind, LinkChanged, Piece, PostureChanged, Provenance, Retracted
from .link import LinkState
from .standing import Standing

_STYLES = {
    Kind.ACCEPTED: "green",
    Kind.GUESSED: "blue",
    Kind.CORRECTION: "bold yellow",
    Kind.BONUS: "cyan",
    Kind.PLAIN: "default",
    Kind.LOCAL: "dim italic",
}

_LINK = {
    LinkState.UP: "the hub is back",
    LinkState.DOWN: "no hub answers",
    LinkState.DRAINING: "the hub goes down",
}


class Reader:
    """Shows events as they come. Into a pipe goes only what stands: nothing can be taken back from there."""

    def __init__(self, *, keeps: bool, out: Console | None = None, err: Console | None = None) -> None:
        """`keeps`: provisional ids stand whatever comes."""
        self._out = out or Console(highlight=False, soft_wrap=True)
        self._err = err or Console(stderr=True, highlight=False, soft_wrap=True)
        self._standing = Standing(keeps or self._out.is_terminal)  # a terminal is told later what is withdrawn

    def take(self, event: Event) -> None:
        """Show one event."""
        if pieces := self._standing.take(event):
            self._write(pieces)
        if isinstance(event, Retracted):
            if self._out.is_terminal:
                self._out.print(Text(f" [withdrawn: {harmless(event.text)}] ", "strike dim"), end="")
        elif isinstance(event, LinkChanged):
            self._err.print(Text(f"[{_LINK[event.state]}: {harmless(event.reason or event.hub)}]", "dim"))
        elif isinstance(event, PostureChanged):
            said = "drafting is on" if event.posture.drafting else "the hub wants no drafts"
            self._err.print(Text(f"[{said}: {harmless(event.posture.reason)}]", "dim"))
        elif isinstance(event, Finish):
            self._out.print(Text(harmless(event.tail)))
            self._err.print(_summary_line(event), style="dim")

    def _write(self, pieces: Sequence[Piece]) -> None:
        if self._out.is_terminal:
            self._out.print(Text.assemble(*((harmless(p.text), _STYLES[p.kind]) for p in pieces)), end="")
        else:
            self._out.file.write("".join(piece.text for piece in pieces))
            self._out.file.flush()


def summary(finish: Finish) -> dict[str, Any]:
    """Return the figures of a generation, units in the names, ready for JSON."""
    usage = finish.usage
    return {
        "finish_reason": finish.reason.value,
        "stopped_by": finish.stopped_by,
        "tokens_per_s": round(finish.tokens_per_s, 2),
        "mean_accepted_length": round(usage.mean_accepted_length, 3),
        "acceptance_rate": round(usage.acceptance_rate, 3),
        "round_trip_ms": None if finish.round_trip_s is None else round(finish.round_trip_s * 1e3, 3),
        "time_to_first_token_s": round(finish.time_to_first_token_s, 3),
        "elapsed_s": round(finish.elapsed_s, 3),
        "usage": asdict(usage),
        "verified": finish.verified,
        "proof": _proof(finish),
        "provenance": [{k: v.value if isinstance(v, Enum) else v for k, v in asdict(s).items()} for s in finish.spans],
    }


def _summary_line(finish: Finish) -> str:
    figures = summary(finish)
    round_trip = "-" if figures["round_trip_ms"] is None else f"{figures['round_trip_ms']:.2f} ms"
    return (
        f"{len(finish.ids)} tokens ({figures['finish_reason']}), {figures['tokens_per_s']:.1f} tokens/s, "
        f"mean accepted length {figures['mean_accepted_length']:.2f}, "
        f"acceptance rate {figures['acceptance_rate']:.0%}, round trip {round_trip}, {_verified(finish)}"
        + ("" if finish.usage.seed is None else f", seed {finish.usage.seed}")
    )


def _verified(finish: Finish) -> str:
    num_own = sum(span.end - span.start for span in finish.spans if span.provenance is Provenance.PROVISIONAL)
    if num_own:
        return f"{num_own} provisional, not verified"
    return "all verified by the target" + ("" if finish.verified else f" (no proof: {finish.proof.reason})")


def _proof(finish: Finish) -> dict[str, Any]:
    proof = finish.proof
    if not (statement := proof.statement):
        return {"reason": proof.reason}
    return {
        "reason": proof.reason,
        "hub": statement.hub,
        "trusted": proof.trusted,
        "transcript_digest": statement.transcript_digest,
        "num_decided": statement.num_decided,
        "num_given": statement.num_given,
    }

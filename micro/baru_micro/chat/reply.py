"""A reply as it grows: what stands, what is provisional, and how the link is. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from baru_micro.events import Confirmed, Event, Finish, LinkChanged, Piece, Provenance, Retracted, Step
from baru_micro.link import LinkState

_LINKS = {LinkState.UP: "hub", LinkState.DOWN: "no hub", LinkState.DRAINING: "hub goes down"}


@dataclass
class Reply:
    """Takes in events. With `keeps` provisional text stands whatever comes."""

    keeps: bool = False
    settled: str = ""
    """What stands and was not yet taken by `take_lines`."""
    whole: str = ""
    """All that stands."""
    link: str = "hub"
    num_verified: int = 0
    num_accepted: int = 0
    num_tokens: int = 0
    num_retracted: int = 0
    finish: Finish | None = None
    _held: list[Piece] = field(default_factory=list)

    def take(self, event: Event) -> None:
        """Take in one event."""
        if isinstance(event, Step):
            self._take_step(event)
        elif isinstance(event, Confirmed):
            self._settle(self._held[: event.end - event.start])
            del self._held[: event.end - event.start]
        elif isinstance(event, Retracted):
            self.num_retracted += len(self._held)
            self._held.clear()
        elif isinstance(event, LinkChanged):
            self.link = _LINKS.get(event.state, event.state.value)
        elif isinstance(event, Finish):
            self._settle(self._held)
            self._held.clear()
            self._add(event.tail)
            self.finish = event

    def _take_step(self, step: Step) -> None:
        self.num_verified += step.stats.num_verified
        self.num_accepted += step.stats.num_accepted
        self.num_tokens += len(step.pieces)
        if step.provenance is Provenance.PROVISIONAL and not self.keeps:
            self._held += step.pieces
        else:
            self._settle(list(step.pieces))

    def _settle(self, pieces: list[Piece]) -> None:
        self._add("".join(piece.text for piece in pieces))

    def _add(self, text: str) -> None:
        self.settled += text
        self.whole += text

    @property
    def provisional(self) -> str:
        """Text that may yet be withdrawn."""
        return "".join(piece.text for piece in self._held)

    def take_lines(self) -> list[str]:
        """Return the whole lines that stand, each once; the rest is still being written."""
        *lines, self.settled = self.settled.split("\n")
        return lines

    @property
    def status(self) -> str:
        """One line: link, tokens, acceptance."""
        accepted = (
            f"{self.num_accepted / self.num_verified:.0%} of drafts accepted" if self.num_verified else "no drafts"
        )
        withdrawn = f", {self.num_retracted} withdrawn" if self.num_retracted else ""
        own = ", this node alone, provisional" if self._held else ""
        return f"{self.link}{own} | {self.num_tokens} tokens{withdrawn} | {accepted}"

"""A reply as it grows: what stands, what is provisional, and how the link is. Pure."""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field

from baru_micro.events import Event, Finish, LinkChanged, Retracted, Step
from baru_micro.link import LinkState
from baru_micro.standing import Standing

_LINKS = {LinkState.UP: "hub", LinkState.DOWN: "no hub", LinkState.DRAINING: "hub goes down"}


@dataclass
class Reply:
    """Takes in events. With `keeps` provisional text stands whatever comes."""

    keeps: InitVar[bool] = False
    settled: str = ""
    """What stands and was not yet taken by `take_lines`."""
    whole: str = ""
    """All that stands; at the end also what no hub has confirmed, if none came back."""
    link: str = "hub"
    num_verified: int = 0
    num_accepted: int = 0
    num_tokens: int = 0
    num_retracted: int = 0
    finish: Finish | None = None
    _standing: Standing = field(init=False)
    _unconfirmed: str = ""

    def __post_init__(self, keeps: bool) -> None:
        self._standing = Standing(keeps)

    def take(self, event: Event) -> None:
        """Take in one event."""
        if isinstance(event, Step):
            self.num_verified += event.stats.num_verified
            self.num_accepted += event.stats.num_accepted
            self.num_tokens += len(event.pieces)
        elif isinstance(event, Retracted):
            self.num_retracted += len(self._standing.held)
        elif isinstance(event, LinkChanged):
            self.link = _LINKS.get(event.state, event.state.value)
        stands = "".join(piece.text for piece in self._standing.take(event))
        if isinstance(event, Finish):
            self._end(event, stands)
        else:
            self._add(stands)

    def _end(self, finish: Finish, unconfirmed: str) -> None:
        """What is provisional now stays so: no hub came back to confirm it."""
        self.finish = finish
        if unconfirmed:
            self._unconfirmed = unconfirmed + finish.tail
            self.whole += self._unconfirmed
        else:
            self._add(finish.tail)

    def _add(self, text: str) -> None:
        self.settled += text
        self.whole += text

    @property
    def provisional(self) -> str:
        """Text that no hub has confirmed; it may yet be withdrawn, unless the reply has ended."""
        return "".join(piece.text for piece in self._standing.held) + self._unconfirmed

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
        own = ", this node alone, provisional" if self.provisional else ""
        return f"{self.link}{own} | {self.num_tokens} tokens{withdrawn} | {accepted}"

"""What the caller was shown: ids with who stands behind each, their text, and what becomes of what was provisional.

    ids     [0, num_settled)  [num_settled, end)      settled; provisional, shown but still to be checked or kept

Pure state: decoding tells it what happened and passes on the events it returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

from baru_common.frames import TokenLogprobs
from baru_common.prefixes import common_prefix
from baru_common.sampling import SamplingContext
from baru_common.tokens import TextStream

from .events import Confirmed, Event, Kind, Piece, Provenance, Retracted, Span, Step, StepStats


@dataclass
class Transcript:
    """The output of one generation."""

    sampling: SamplingContext
    ids: list[int] = field(default_factory=list)
    num_settled: int = 0
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    text: str = ""
    """All that was shown and stands."""
    _who: list[Provenance] = field(default_factory=list)
    _stream: TextStream = field(init=False)

    def __post_init__(self) -> None:
        self._stream = self._new_stream()

    @property
    def settled(self) -> list[int]:
        """Ids that stand."""
        return self.ids[: self.num_settled]

    @property
    def provisional(self) -> list[int]:
        """Ids that are shown and may be withdrawn."""
        return self.ids[self.num_settled :]

    @property
    def num_provisional(self) -> int:
        """Ids that the node's own model decoded, whether they stand or not."""
        return self._who.count(Provenance.PROVISIONAL)

    @property
    def stopped_by(self) -> int | str | None:
        """What ended the output by itself: a stop string, or the stop or end-of-sequence id that it ends with."""
        if self._stream.stopped_by is not None:
            return self._stream.stopped_by
        return self.ids[-1] if self.ids and self.ids[-1] in self.sampling.stop_ids else None

    def decided(
        self,
        token_ids: Sequence[int],
        kinds: Sequence[Kind],
        logprobs: Sequence[TokenLogprobs | None],
        stats: StepStats,
    ) -> list[Event]:
        """Settle what the target decided: provisional ids that equal it are confirmed, the rest is withdrawn."""
        start = self.num_settled
        agreed = common_prefix(self.provisional, token_ids)
        events: list[Event] = []
        if agreed:
            self.num_settled += agreed
            self._who[start : self.num_settled] = [Provenance.VERIFIED] * agreed
            self.logprobs[start : self.num_settled] = logprobs[:agreed]
            asked = self.sampling.params.logprobs is not None
            events.append(Confirmed(start, self.num_settled, tuple(logprobs[:agreed]) if asked else ()))
        if agreed == len(token_ids):
            return events
        events += self.withdraw()
        base = self.sampling.num_prompt + len(self.ids)
        pieces = tuple(
            self._piece(*each, Provenance.VERIFIED)
            for each in zip(token_ids[agreed:], kinds[agreed:], logprobs[agreed:], strict=True)
        )
        self.num_settled = len(self.ids)
        return [*events, Step(base, pieces, Provenance.VERIFIED, stats)]

    def decoded(self, token_id: int) -> Step:
        """Show an id that the node decoded by itself."""
        base = self.sampling.num_prompt + len(self.ids)
        piece = self._piece(token_id, Kind.LOCAL, None, Provenance.PROVISIONAL)
        return Step(base, (piece,), Provenance.PROVISIONAL, StepStats(0, 0, None))

    def keep(self) -> None:
        """Let what is provisional stand as it is."""
        self.num_settled = len(self.ids)

    def withdraw(self) -> list[Event]:
        """Take back what is provisional; return the event that says so, if there is any."""
        if self.num_settled == len(self.ids):
            return []
        shown, withdrawn = self.text, tuple(self.provisional)
        del self.ids[self.num_settled :], self._who[self.num_settled :], self.logprobs[self.num_settled :]
        # Text that was held back depends on what came before only, so it is built again.
        self._stream = self._new_stream()
        self.text = "".join(map(self._stream.push, self.ids))
        return [Retracted(self.num_settled, withdrawn, shown[len(self.text) :])]

    def finish(self) -> str:
        """Return the text held back to the end."""
        tail = self._stream.finish()
        self.text += tail
        return tail

    def spans(self) -> tuple[Span, ...]:
        """Who stands behind what, in order."""
        spans, start = [], 0
        for who, run in groupby(self._who):
            end = start + len(list(run))
            spans.append(Span(start, end, who))
            start = end
        return tuple(spans)

    def _piece(self, token_id: int, kind: Kind, logprobs: TokenLogprobs | None, who: Provenance) -> Piece:
        text = self._stream.push(token_id)
        self.ids.append(token_id)
        self._who.append(who)
        self.logprobs.append(logprobs)
        self.text += text
        return Piece(token_id, text, kind, logprobs)

    def _new_stream(self) -> TextStream:
        params = self.sampling.params
        return TextStream(self.sampling.vocabulary, params.stop_strings, params.min_tokens)

"""What was said so far, and how much of it still fits. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from baru_common.errors import InvalidRequest

Message = dict[str, str]
HELP = {
    "/help": "this list",
    "/system TEXT": "set the system message; without TEXT take it away",
    "/clear": "forget what was said",
    "/save FILE": "write the conversation as JSON",
    "/stats": "figures of the last reply",
    "/quit": "leave; so does Ctrl-D",
}
KEYS = "Enter sends, Alt-Enter begins a new line, Ctrl-C stops a reply, arrows bring back what you wrote."
STOPPED = " [stopped]"


@dataclass
class Conversation:
    """Turns in order; the system message is kept apart."""

    system: str | None = None
    turns: list[Message] = field(default_factory=list)

    def ask(self, text: str) -> None:
        """The person says something."""
        self.turns.append({"role": "user", "content": text})

    def answer(self, text: str, *, stopped: bool = False) -> None:
        """The model has answered; a reply that was stopped stays, marked, so that it is not taken for a whole one."""
        self.turns.append({"role": "assistant", "content": text + STOPPED if stopped else text})

    def take_back(self) -> None:
        """The last question came to nothing."""
        if self.turns and self.turns[-1]["role"] == "user":
            self.turns.pop()

    def clear(self) -> None:
        """Forget all turns."""
        self.turns.clear()

    @property
    def messages(self) -> list[Message]:
        """For the chat template."""
        return [*self._instructions, *self.turns]

    @property
    def _instructions(self) -> list[Message]:
        return [{"role": "system", "content": self.system}] if self.system else []

    def fit(self, count: Callable[[Sequence[Mapping[str, Any]]], int], room: int) -> int:
        """Drop the oldest turns, question and answer together, until the rest has `room` tokens at most; return how
        many were dropped. InvalidRequest when the last question alone is too long; only that is taken back then."""
        num_dropped = 0
        while count([*self._instructions, *self.turns[num_dropped:]]) > room:
            num_dropped += 2
            if num_dropped >= len(self.turns):
                self.take_back()
                raise InvalidRequest(
                    f"that is too long: at most {room} tokens fit", hint="ask in parts, or lower --max-tokens"
                )
        del self.turns[:num_dropped]
        return num_dropped

    def to_json(self) -> str:
        """Return all of it."""
        return json.dumps({"messages": self.messages}, ensure_ascii=False, indent=1) + "\n"


def command(line: str) -> tuple[str, str] | None:
    """Return the command and what follows it; None if the line is for the model. Two slashes begin a line with one."""
    if not line.startswith("/") or line.startswith("//"):
        return None
    name, _, rest = line.strip().partition(" ")
    return name, rest.strip()

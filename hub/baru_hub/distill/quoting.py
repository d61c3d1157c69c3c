"""Texts that quote and repeat, put together from a target's own answers.

A target copies what stands in its context far better than a head of one layer does, and short answers give that head
little to learn it from. What the target thinks of each id is asked again in the new context, as for any text.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from .texts import Text

_PIECE = (12, 72)
"""Ids of a piece, at least and at most."""
_QUOTED = 0.5
"""How often a piece is one that stands in the text already."""


def quoting(texts: Sequence[Text], num_texts: int, longest: int, seed: int = 0) -> list[Text]:
    """Return `num_texts` texts of `longest` ids: one's prompt, then pieces of several answers and, about half of the
    time, a part of what stands there already."""
    chance = random.Random(seed)  # noqa: S311
    answers = [text.ids[text.num_prompt :] for text in texts if len(text.ids) - text.num_prompt > _PIECE[0]]
    made: list[Text] = []
    while answers and len(made) < num_texts:
        prompt = _prompt(chance.choice(texts), longest)
        ids = list(prompt)
        begin = len(ids)
        while len(ids) < longest:
            written = ids[begin:]
            quoted = len(written) > _PIECE[0] and chance.random() < _QUOTED
            ids += _piece(written if quoted else chance.choice(answers), chance)
        made.append(Text(tuple(ids[:longest]), len(prompt)))
    return made


def _prompt(text: Text, longest: int) -> tuple[int, ...]:
    return text.ids[: min(text.num_prompt, longest // 2)]


def _piece(ids: Sequence[int], chance: random.Random) -> Sequence[int]:
    length = min(chance.randint(*_PIECE), len(ids))
    at = chance.randint(0, len(ids) - length)
    return ids[at : at + length]

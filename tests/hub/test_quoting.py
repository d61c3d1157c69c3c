"""Texts that quote: what a head learns to copy from."""

from __future__ import annotations

from baru_hub.distill.quoting import quoting
from baru_hub.distill.texts import Text

ANSWERS = [Text((1, 2, *range(100 * n, 100 * n + 90)), 2) for n in range(1, 6)]
LONGEST = 300


def runs(text: Text) -> list[tuple[int, ...]]:
    """The 12-grams of the written part."""
    written = text.ids[text.num_prompt :]
    return [written[i : i + 12] for i in range(len(written) - 11)]


def test_they_are_made_of_the_answers_and_quote_themselves() -> None:
    known = {text.ids[i : i + 12] for text in ANSWERS for i in range(2, len(text.ids) - 11)}
    for text in quoting(ANSWERS, 20, LONGEST):
        assert len(text.ids) == LONGEST
        assert text.ids[: text.num_prompt] == (1, 2)
        grams = runs(text)
        assert sum(gram in known for gram in grams) > len(grams) // 2
        assert len(grams) - len(set(grams)) > 10


def test_a_seed_makes_the_same_texts() -> None:
    assert quoting(ANSWERS, 3, LONGEST, seed=4) == quoting(ANSWERS, 3, LONGEST, seed=4)
    assert quoting(ANSWERS, 3, LONGEST, seed=4) != quoting(ANSWERS, 3, LONGEST, seed=5)


def test_answers_too_short_to_quote_make_none() -> None:
    assert quoting([Text((1, 2, 3), 1)], 5, LONGEST) == []

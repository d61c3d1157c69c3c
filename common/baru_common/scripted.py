"""A script that a simulated target follows and a simulated drafter knows, imperfectly.

Both sides compute the same ids from the position alone, so that acceptance is exactly what was asked
for and nothing but the schedule is under test.
"""

from __future__ import annotations

from .splitmix64 import GAMMA, mix

NUM_SPECIALS = 2
EOS_ID = 1
LETTERS = b"abcdefghijklmnopqrstuvwxyz "


def scripted_id(position: int) -> int:
    """Return the id that the simulated target decides at `position`: a letter or a space."""
    return NUM_SPECIALS + LETTERS[mix(position) % len(LETTERS)]


def is_hard(position: int, acceptance: float, seed: int = 0) -> bool:
    """True where a drafter of this per-id acceptance is wrong: independently at each position."""
    return mix(position * GAMMA + seed + 1) >= acceptance * 2.0**64

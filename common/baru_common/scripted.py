"""A script that a simulated target follows and a simulated drafter knows, imperfectly.

Both sides compute the same ids from the position alone, so that acceptance is exactly what was asked
for and nothing but the schedule is under test.
"""

from __future__ import annotations

NUM_SPECIALS = 2
EOS_ID = 1
LETTERS = b"abcdefghijklmnopqrstuvwxyz "


def scripted_id(position: int) -> int:
    """Return the id that the simulated target decides at `position`: a letter or a space."""
    return NUM_SPECIALS + LETTERS[_mix(position) % len(LETTERS)]


def is_hard(position: int, acceptance: float, seed: int = 0) -> bool:
    """True where a drafter of this per-id acceptance is wrong: independently at each position."""
    return _mix(position * 0x9E3779B97F4A7C15 + seed + 1) >= acceptance * 2.0**64


def _mix(value: int) -> int:
    """SplitMix64 (Steele, Lea & Flood, 2014): 64 well mixed bits."""
    value = (value + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return value ^ (value >> 31)

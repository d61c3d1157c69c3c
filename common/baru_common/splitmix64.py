"""SplitMix64 (Steele, Lea & Flood, 2014): 64 well mixed bits, the same on every machine."""

from __future__ import annotations

GAMMA = 0x9E3779B97F4A7C15
"""Step between successive states."""
MASK = 0xFFFFFFFFFFFFFFFF


def mix(value: int) -> int:
    """Return the output that follows state `value`, modulo 2^64."""
    value = (value + GAMMA) & MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)

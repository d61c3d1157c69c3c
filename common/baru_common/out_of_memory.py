"""Is an error one of memory? Whoever ran out of it goes on with less, instead of failing for good."""

from __future__ import annotations

OUT_OF_MEMORY = "memory"
"""`details["cause"]` of a CapacityExhausted that has it."""
_TYPES = {"OutOfMemoryError"}
_WORDS = ("can't allocate memory", "cannot allocate memory", "out of memory", "not enough memory", "alloc_failed")
"""What torch says on a CPU, and drivers on a board."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory could not be allocated; torch need not be there to tell."""
    if isinstance(error, MemoryError) or type(error).__name__ in _TYPES:
        return True
    said = str(error).lower()
    return isinstance(error, (RuntimeError, OSError)) and any(words in said for words in _WORDS)

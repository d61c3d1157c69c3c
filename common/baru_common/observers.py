"""Telling observers what happened: they look, and whatever goes wrong with them stays with them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class Told(Generic[_T]):
    """Some observers. What they raise is logged, the first time that each of them does, and goes no further."""

    def __init__(self, observers: Iterable[_T] = ()) -> None:
        self._observers = list(observers)
        self._failed: set[int] = set()

    def __call__(self, tell: Callable[[_T], object]) -> None:
        """Call `tell` with each of them."""
        for number, observer in enumerate(self._observers):
            try:
                tell(observer)
            except Exception:
                if number not in self._failed:
                    self._failed.add(number)
                    _log.exception("%s failed; what it says from now on may be wrong", type(observer).__name__)

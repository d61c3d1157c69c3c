from __future__ import annotations

import re

import grpc
import pytest

from baru_common import errors
from baru_common.errors import BaruError, CapacityExhausted, InvalidRequest, error_class, error_tree

TREE = list(error_tree())


def test_every_reason_is_unique_and_upper_snake_case() -> None:
    """A reason names one class on the wire."""
    reasons = [cls.reason for cls in TREE]
    assert len(set(reasons)) == len(reasons)
    assert all(re.fullmatch(r"[A-Z]+(_[A-Z]+)*", reason) for reason in reasons)


@pytest.mark.parametrize("cls", TREE)
def test_every_status_is_a_grpc_status(cls: type[BaruError]) -> None:
    """A status is the name of a code, and never OK."""
    assert cls.status in {code.name for code in grpc.StatusCode} - {"OK"}


@pytest.mark.parametrize("cls", TREE)
def test_a_reason_leads_back_to_its_class(cls: type[BaruError]) -> None:
    assert error_class(cls.reason) is cls


def test_an_unknown_reason_is_a_plain_baru_error() -> None:
    """A newer peer may name an error that this version does not have."""
    assert error_class("SOMETHING_NEW") is BaruError


def test_the_drawn_tree_is_the_real_one() -> None:
    """The drawing at the top of the module shows every class at its depth, with the status where it is set."""
    drawn = []
    for line in (errors.__doc__ or "").splitlines():
        if match := re.fullmatch(r"([│├└─ ]*)([A-Z][A-Za-z]+)(?: +([A-Z_]+)\b.*)?", line):
            drawn.append((len(match[1]) // 4, match[2], match[3]))
    real = [(len(cls.__mro__) - len(BaruError.__mro__), cls.__name__, cls.__dict__.get("status")) for cls in TREE[1:]]
    assert drawn == [(0, "BaruError", None), *real]


def test_parents_come_first() -> None:
    """So that the first match of a list of handlers is not a parent's child by accident."""
    for index, cls in enumerate(TREE[1:], 1):
        assert cls.__bases__[0] in TREE[:index]


def test_the_text_holds_message_and_hint() -> None:
    assert str(InvalidRequest("it is wrong")) == "it is wrong"
    assert str(InvalidRequest("it is wrong", hint="mend it")) == "it is wrong (mend it)"


def test_details_are_a_copy() -> None:
    """What a caller does to its own mapping later does not change the error."""
    details = {"param": "seed"}
    error = CapacityExhausted("full", details=details, retry_after_s=2.5)
    details.clear()
    assert error.details == {"param": "seed"}
    assert error.retry_after_s == 2.5

from __future__ import annotations

import pytest

from baru_common.errors import ConfigError, PermissionDenied, Unauthenticated
from baru_common.identity import Identity, Role
from baru_hub.access import Policy, allow_list, check_method

ALPHA = Identity("kit", Role.NODE, "alpha")
DECODE = "/baru.drafting.v1.DraftingService/Decode"


@pytest.mark.parametrize(
    ("policy", "left_s", "error"),
    [
        (Policy("kit"), 1.0, None),
        (Policy("kit"), 0.0, Unauthenticated),
        (Policy("tik"), 1.0, Unauthenticated),
        (Policy("kit", revoked=frozenset({7})), 1.0, Unauthenticated),
        (Policy("kit", revoked=frozenset({8})), 1.0, None),
        (Policy("kit", frozenset()), 1.0, PermissionDenied),
        (Policy("kit", frozenset({"beta", "hub/alpha"})), 1.0, PermissionDenied),
        (Policy("kit", frozenset({"alpha"})), 1.0, None),
        (Policy("kit", frozenset({"node/alpha"})), 1.0, None),
    ],
)
def test_who_is_let_in(policy: Policy, left_s: float, error: type[Exception] | None) -> None:
    """Who somebody is comes first, then whether they may."""
    found = policy.refusal(ALPHA, 7, left_s)
    assert found is None if error is None else type(found) is error


@pytest.mark.parametrize(
    ("role", "may"), [(Role.NODE, True), *((role, False) for role in Role if role is not Role.NODE)]
)
def test_only_nodes_have_sessions(role: Role, may: bool) -> None:
    """And nobody may call what does not exist."""
    identity = Identity("kit", role, "alpha")
    assert (check_method(identity, DECODE) is None) is may
    assert isinstance(check_method(identity, DECODE.lower()), PermissionDenied)
    assert isinstance(check_method(identity, ""), PermissionDenied)


def test_a_list_is_checked() -> None:
    """A slip of the hand must not shut out, or let in, somebody else."""
    assert allow_list(["alpha", " node/beta # why", "", "# gone"]) == {"alpha", "node/beta"}
    assert allow_list(["*"]) == {"*"}
    for wrong in ("Alpha", "king/alpha", "node/", "a b", "**", "spiffe://kit/node/alpha"):
        with pytest.raises(ConfigError, match="names nobody"):
            allow_list([wrong])

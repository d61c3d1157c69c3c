from __future__ import annotations

import pytest

from baru_common.errors import ConfigError
from baru_common.identity import Identity, Role


@pytest.mark.parametrize("role", Role)
def test_an_identity_and_its_spelling_are_one(role: Role) -> None:
    """There and back."""
    identity = Identity("kit-7", role, "alpha")
    assert str(identity) == f"spiffe://kit-7/{role.value}/alpha"
    assert Identity.parse(str(identity)) == identity


@pytest.mark.parametrize(
    "uri",
    [
        "",
        "kit/node/alpha",
        "https://kit/node/alpha",
        "SPIFFE://kit/node/alpha",
        "spiffe://kit/node",
        "spiffe://kit/node/alpha/beta",
        "spiffe://kit/node/alpha/",
        "spiffe:///node/alpha",
        "spiffe://kit/king/alpha",
        "spiffe://kit/node/Alpha",
        "spiffe://kit/node/..",
        "spiffe://kit/node/a%62",
        "spiffe://kit/node/alpha?x",
        "spiffe://kit:1/node/alpha",
        "spiffe://kit/node/alpha\n",
        "spiffe://kit/node/-a",
        f"spiffe://kit/node/{'a' * 64}",
    ],
)
def test_any_other_spelling_is_refused(uri: str) -> None:
    """One form only, so that two texts are never one identity."""
    with pytest.raises(ConfigError) as refused:
        Identity.parse(uri)
    assert refused.value.hint

"""Hubs found by name: real multicast, on the loopback interface."""

from __future__ import annotations

import sys

import pytest

from baru_common import discovery
from baru_common.discovery import announced, find, resolved
from baru_common.errors import ConfigError, HubUnavailable

_HERE = ["127.0.0.1"]
_ONE, _OTHER, _STRANGER = (f"spiffe://kit/hub/{name}" for name in ("one", "other", "stranger"))


@pytest.fixture(autouse=True)
def _on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "_interfaces", lambda _library: _HERE)


async def test_hubs_are_found_by_who_they_say_they_are() -> None:
    """In the order asked for; a stranger is passed over."""
    async with (
        announced("127.0.0.1", 7001, _ONE),
        announced("127.0.0.1", 7002, _OTHER),
        announced("127.0.0.1", 7003, _STRANGER),
    ):
        assert await find([_OTHER, _ONE]) == ["127.0.0.1:7002", "127.0.0.1:7001"]
        assert await resolved([f"mdns:{_ONE}", "10.0.0.9:7443"]) == [("127.0.0.1:7001", _ONE), ("10.0.0.9:7443", "")]


async def test_who_is_not_there_is_not_waited_for_long() -> None:
    async with announced("127.0.0.1", 7001, _STRANGER):
        with pytest.raises(HubUnavailable, match="hub/one"):
            await find([_ONE], timeout_s=0.5)


async def test_an_address_is_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is looked for when nothing is to be found, nor when there is another way."""

    async def nobody(*_: object) -> list[str]:
        raise HubUnavailable("nobody")

    assert await resolved(["a:1", "b:2"]) == [("a:1", ""), ("b:2", "")]
    monkeypatch.setattr(discovery, "find", nobody)
    assert await resolved(["a:1", f"mdns:{_ONE}"]) == [("a:1", "")]
    with pytest.raises(HubUnavailable):
        await resolved([f"mdns:{_ONE}"])


async def test_without_the_library_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zeroconf", None)
    with pytest.raises(ConfigError, match="zeroconf"):
        await find([_ONE])

"""Settings are checked once, and a bad one is named."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest

from baru_common.errors import ConfigError
from baru_hub.config import HubConfig, split_address
from baru_hub.orphans import LinkPolicy


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("127.0.0.1:7443", ("127.0.0.1", 7443)),
        ("localhost:0", ("localhost", 0)),
        ("[::1]:7443", ("::1", 7443)),
        ("hub.local:65535", ("hub.local", 65535)),
    ],
)
def test_addresses_are_split(address: str, parts: tuple[str, int]) -> None:
    """Host and port, brackets of an IPv6 address taken off."""
    assert split_address(address) == parts


@pytest.mark.parametrize(
    "address", ["", "127.0.0.1", ":7443", "127.0.0.1:", "127.0.0.1:http", "127.0.0.1:-1", "127.0.0.1: 1", "h:1.5"]
)
def test_what_is_no_address_is_refused(address: str) -> None:
    """With the text as it came, and the form that is wanted."""
    with pytest.raises(ConfigError, match="is not an address") as refused:
        split_address(address)
    assert repr(address) in refused.value.message
    assert "HOST:PORT" in refused.value.hint


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "127.8.9.1:7443", "[::1]:7443", "localhost:65535"])
def test_loopback_is_served(listen: str) -> None:
    """In all its spellings."""
    assert HubConfig(listen=listen).listen == listen


@pytest.mark.parametrize("listen", ["0.0.0.0:7443", "[::]:7443", "192.168.1.2:7443", "hub.local:7443", "[fe80::1]:1"])
def test_anything_but_loopback_is_refused(listen: str) -> None:
    """Without certificates nothing leaves this machine; a name may mean anything."""
    with pytest.raises(ConfigError, match=r"listen is .*not a loopback address"):
        HubConfig(listen=listen)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"allow": ("alpha",)}, "needs tls"),
        ({"allow_file": Path("list")}, "needs tls"),
        ({"allow": ("Alpha",), "tls": Path()}, "'Alpha' on the list names nobody"),
        ({"allow": ("alpha",), "allow_file": Path("list"), "tls": Path()}, "contradict each other"),
    ],
)
def test_a_list_of_who_may_connect_is_checked(settings: dict[str, Any], words: str) -> None:
    """One that could not be enforced would be worse than none."""
    with pytest.raises(ConfigError, match=words):
        HubConfig(**settings)


def test_a_port_too_large_is_refused() -> None:
    """It is named, not wrapped around."""
    with pytest.raises(ConfigError, match="65536 is not a port"):
        HubConfig(listen="127.0.0.1:65536")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_sessions", 0),
        ("max_sessions", -1),
        ("max_depth", -1),
        ("max_prefill", 0),
        ("max_patience_ms", -0.1),
        ("max_patience_ms", math.nan),
        ("max_patience_ms", math.inf),
        ("max_draft_ahead", 7),
        ("node_silence_s", 0.4),
        ("node_silence_s", math.inf),
        ("slow_reader_s", 0.4),
        ("orphan_grace_s", -1.0),
        ("orphan_grace_s", math.nan),
        ("orphan_tokens", -1),
        ("orphan_mb", -1),
    ],
)
def test_a_value_out_of_range_is_named(name: str, value: float) -> None:
    """The message starts with the setting and holds the value."""
    with pytest.raises(ConfigError, match=rf"^{name} is {value}"):
        HubConfig(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "values",
    [
        {"max_sessions": 1, "max_depth": 0, "max_draft_ahead": 1, "max_prefill": 1, "max_patience_ms": 0.0},
        {"max_depth": 16, "max_draft_ahead": 16},
        {"drain_grace_s": 0.0},
        {"node_silence_s": 0.5, "slow_reader_s": 0.5},
        {"orphan_grace_s": 0.0, "orphan_tokens": 0, "orphan_mb": 0},
    ],
)
def test_the_ends_of_each_range_are_fine(values: dict[str, float]) -> None:
    """Drafting off, no patience, one session: all of them are of use."""
    config = HubConfig(**values)  # type: ignore[arg-type]
    assert {name: getattr(config, name) for name in values} == values


def test_what_is_made_of_broken_links_is_told_in_one() -> None:
    """Each setting arrives where it belongs; megabytes are of 2^20 bytes."""
    config = HubConfig(node_silence_s=1.0, slow_reader_s=2.0, orphan_grace_s=3.0, orphan_tokens=4, orphan_mb=5)
    assert config.link == LinkPolicy(1.0, 2.0, 3.0, 4, 5 << 20)
    assert HubConfig().link == LinkPolicy()


def test_settings_do_not_change_once_checked() -> None:
    """Otherwise the check would be worth nothing."""
    with pytest.raises(FrozenInstanceError):
        HubConfig().max_depth = -1  # type: ignore[misc]

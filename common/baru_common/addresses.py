"""Addresses as people write them."""

from __future__ import annotations

import ipaddress

from .errors import ConfigError


def split_address(address: str) -> tuple[str, int]:
    """Split HOST:PORT, [IPV6]:PORT; ConfigError for anything else."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal():
        raise ConfigError(f"{address!r} is not an address", hint="use HOST:PORT, e.g. 127.0.0.1:7443")
    if int(port) >= 1 << 16:
        raise ConfigError(f"{address} is not an address: {port} is not a port", hint="use 0 to 65535")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """True when nobody but this machine reaches it."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"

"""Whose signatures count, from files as a kit has them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from .certificates import read_authorities, revoked_serials
from .errors import ConfigError
from .signatures import KEY_BYTES, Trust
from .tls import Credentials

_T = TypeVar("_T")


def trust_of(authority: Path | None, revoked: Path | None = None, key: str | None = None) -> Trust:
    """Read the files and the key that are given; ConfigError says which of them is no good."""
    pem = _read(authority) if authority else None
    if authority and pem is not None:
        _named(authority, lambda: read_authorities(pem))
    serials: frozenset[int] = frozenset()
    if revoked:
        if pem is None:
            raise ConfigError("a revocation list counts only with its authority", hint="give --authority, too")
        serials = _named(revoked, lambda: revoked_serials(_read(revoked), pem))
    return Trust(pem, _key(key) if key else None, serials)


def trust_in_kit(credentials: Credentials) -> Trust:
    """Take the hubs of a machine's own kit, but for those that its revocation list names, if it has one."""
    authority, revoked = credentials.authority_pem, credentials.files.revoked
    if revoked is None or not revoked.exists():
        return Trust(authority)
    return Trust(authority, None, _named(revoked, lambda: revoked_serials(_read(revoked), authority)))


def _key(text: str) -> bytes:
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise ConfigError("the key is none", hint=f"give {2 * KEY_BYTES} hexadecimal digits")
    return key


def _named(path: Path, read: Callable[[], _T]) -> _T:
    try:
        return read()
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message}") from error


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error

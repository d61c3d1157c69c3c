"""Signed statements: bytes, an Ed25519 signature over them, and whose key that is.

What is signed is a purpose, a zero byte, and the statement: one key signs for several purposes, and a signature for one
is none for another.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from .certificates import Certificate
from .errors import BaruError, ConfigError
from .identity import Role

KEY_BYTES = 32
MAX_STATEMENT_BYTES, MAX_CERTIFICATE_BYTES = 4096, 8192
ANYBODY = "loopback"
"""Identity of everybody where connections carry none."""


@dataclass(frozen=True)
class SignedStatement:
    """A statement as it travels and is kept."""

    statement: bytes
    signature: bytes
    certificate: bytes
    """X.509 in DER, signed by the kit's authority; of a signer without a kit its bare public key, 32 bytes."""


@dataclass(frozen=True)
class Trust:
    """Whose signatures count. With nothing set, anybody's, and `Signer.trusted` is False."""

    authority: bytes | None = None
    """Certificate of the kit's authority (PEM): the signer's must be signed by it, be a hub's, and not be bare."""
    key: bytes | None = None
    """Public key that must have signed."""
    revoked: Collection[int] = ()
    """Serial numbers of certificates that do not count any more."""


@dataclass(frozen=True)
class Signer:
    """Who has signed."""

    identity: str
    public_key: bytes
    trusted: bool
    """The kit's authority vouches for it."""


def canonical(value: Mapping[str, Any]) -> bytes:
    """Return JSON in the one form that is signed and hashed: UTF-8, keys sorted by code point, no white space."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def utc_now() -> datetime:
    """The wall clock."""
    return datetime.now(timezone.utc)


def spelled(at: datetime) -> str:
    """Return a time as RFC 3339 in UTC, with microseconds."""
    return at.astimezone(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def read_time(text: str) -> datetime:
    """Return the time that `spelled` wrote; ValueError for another spelling."""
    at = datetime.strptime(text, "%Y-%m-%dT%H:%M:%S.%fZ").replace(tzinfo=timezone.utc)
    if spelled(at) != text:
        raise ValueError(f"{text!r} is not spelled as times are")
    return at


def sign(key: Ed25519PrivateKey, certificate: bytes, purpose: str, statement: bytes) -> SignedStatement:
    """Sign a statement."""
    return SignedStatement(statement, key.sign(_signed(purpose, statement)), certificate)


def check_signature(
    signed: SignedStatement, purpose: str, at: datetime, trust: Trust, error: type[BaruError]
) -> Signer:
    """Return who has signed; raise `error`, whose `details["field"]` says what is wrong, if it does not count.

    `at`: when it was signed, as it says itself; the certificate must have been valid then.
    """
    signer = _signer(signed.certificate, at, trust, error)
    try:
        Ed25519PublicKey.from_public_bytes(signer.public_key).verify(
            signed.signature, _signed(purpose, signed.statement)
        )
    except InvalidSignature:
        raise wrong(error, "signature", "the signature does not fit the statement: one of them was changed") from None
    return signer


def wrong(error: type[BaruError], field: str, what: str) -> BaruError:
    """Return the error that names the field."""
    return error(what, details={"field": field})


def _signed(purpose: str, statement: bytes) -> bytes:
    return purpose.encode() + b"\0" + statement


def _signer(certificate: bytes, at: datetime, trust: Trust, error: type[BaruError]) -> Signer:
    if len(certificate) == KEY_BYTES:
        if trust.authority is not None:
            raise wrong(error, "certificate", "a bare key has signed it, for which no authority vouches")
        signer = Signer(ANYBODY, certificate, trusted=False)
    else:
        signer = _certified(certificate, at, trust, error)
    if trust.key not in (None, signer.public_key):
        raise wrong(error, "certificate", f"another key has signed it: {signer.public_key.hex()}")
    return signer


def _certified(der: bytes, at: datetime, trust: Trust, error: type[BaruError]) -> Signer:
    try:
        document = _read_der(der)
        certificate, key = Certificate.of(document), document.public_key()
    except (ValueError, ConfigError, UnsupportedAlgorithm, x509.InvalidVersion) as found:
        raise wrong(error, "certificate", f"the signer's certificate cannot be read: {found}") from found
    who = certificate.identity
    problem = None
    if not isinstance(key, Ed25519PublicKey):
        problem = "is not for an Ed25519 key"
    elif who.role is not Role.HUB:
        problem = f"is of a {who.role.value}, and hubs sign"
    elif not certificate.starts <= at <= certificate.ends:
        problem = f"is valid from {certificate.starts} to {certificate.ends}, and it was signed at {at}"
    elif certificate.serial in trust.revoked:
        problem = "is revoked"
    elif trust.authority is not None and not certificate.is_signed_by(trust.authority):
        problem = "is not signed by this authority"
    if problem or not isinstance(key, Ed25519PublicKey):
        raise wrong(error, "certificate", f"the signer's certificate ({who}) {problem}")
    return Signer(str(who), key.public_bytes_raw(), trusted=trust.authority is not None)


def _read_der(der: bytes) -> x509.Certificate:
    if len(der) > MAX_CERTIFICATE_BYTES:
        raise ValueError(f"it has {len(der)} bytes")
    document = x509.load_der_x509_certificate(der)
    if not der.endswith(b"\0" + document.signature):
        # Zero bits at a signature's end can be declared unused: by the one byte that nothing signs.
        raise ValueError("its signature is not whole bytes")
    return document

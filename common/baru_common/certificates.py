"""What a certificate, a key and a revocation list of a kit say: read and checked, with `cryptography`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization

from .errors import ConfigError
from .identity import Identity

HUB_HOST = "hub.baru.internal"
"""DNS name that every hub's certificate carries, and no other one: a hub is known by it wherever it is, and nobody who
is no hub can pose as one."""


@dataclass(frozen=True)
class Certificate:
    """Whose it is, and when it is valid."""

    identity: Identity
    serial: int
    starts: datetime
    ends: datetime
    hosts: tuple[str, ...]
    """DNS names and addresses that it is good for."""
    document: x509.Certificate

    @classmethod
    def read(cls, pem: bytes) -> Certificate:
        """Read the first one of a PEM text; ConfigError when it is none of a kit."""
        try:
            return cls.of(x509.load_pem_x509_certificate(pem))
        except ValueError as error:
            raise ConfigError("it is no certificate in PEM") from error

    @classmethod
    def of(cls, found: x509.Certificate) -> Certificate:
        """Take one apart; ConfigError when it names nobody, or several."""
        try:
            names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        except (x509.ExtensionNotFound, x509.DuplicateExtension, ValueError) as error:
            raise ConfigError("the certificate names nobody", hint="use one that baru-hub certs has made") from error
        uris = names.get_values_for_type(x509.UniformResourceIdentifier)
        if len(uris) != 1:
            raise ConfigError(f"the certificate holds {len(uris)} identities, must be 1")
        addresses = [str(address) for address in names.get_values_for_type(x509.IPAddress)]
        return cls(
            identity=Identity.parse(uris[0]),
            serial=found.serial_number,
            starts=found.not_valid_before_utc,
            ends=found.not_valid_after_utc,
            hosts=(*names.get_values_for_type(x509.DNSName), *addresses),
            document=found,
        )

    def has_key(self, pem: bytes) -> bool:
        """Whether the private key belongs to it; ConfigError when the text holds none, or an encrypted one."""
        try:
            key = serialization.load_pem_private_key(pem, password=None)
        except (ValueError, TypeError) as error:
            raise ConfigError("it is no private key in PEM without a password") from error
        return public_bytes(key.public_key()) == public_bytes(self.document.public_key())

    def is_signed_by(self, authority_pem: bytes) -> bool:
        """Whether one of these authorities has signed it; ConfigError when the text holds none."""
        return any(_has_signed(authority, self.document) for authority in read_authorities(authority_pem))


def read_authorities(pem: bytes) -> Sequence[x509.Certificate]:
    """Return the authorities of a PEM text; ConfigError when there is none."""
    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError as error:
        raise ConfigError("it is no certificate in PEM") from error


def revoked_serials(pem: bytes, authority_pem: bytes) -> frozenset[int]:
    """Return what a revocation list revokes; ConfigError when it is none, or not signed by the authority."""
    try:
        revoked = x509.load_pem_x509_crl(pem)
    except ValueError as error:
        raise ConfigError("it is no revocation list in PEM") from error
    if not any(_issued(authority, revoked) for authority in read_authorities(authority_pem)):
        raise ConfigError("the revocation list is not signed by the authority")
    return frozenset(entry.serial_number for entry in revoked)


def public_bytes(key: object) -> bytes:
    """Return a public key in one form (DER), to compare."""
    encoded: bytes = key.public_bytes(  # type: ignore[attr-defined]
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return encoded


def _has_signed(authority: x509.Certificate, certificate: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
        return False
    return True


def _issued(authority: x509.Certificate, revoked: x509.CertificateRevocationList) -> bool:
    return revoked.issuer == authority.subject and revoked.is_signature_valid(authority.public_key())  # type: ignore[arg-type]

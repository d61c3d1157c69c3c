"""Keys and certificates for tests of what is signed, made in memory; and a receipt to try things on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from functools import cache
from ipaddress import IPv4Address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.x509.oid import NameOID

from baru_common.receipts import PURPOSE, Statement, digests
from baru_common.sampling import SamplingParams
from baru_common.signatures import ANYBODY, SignedStatement, sign, spelled

NOW = datetime(2026, 11, 30, 12, 0, tzinfo=timezone.utc)
HUB = "spiffe://kit/hub/one"
PROMPT, OUTPUT, PARAMS, FINGERPRINT = (5, 6, 7), (10, 11), SamplingParams(max_tokens=2), b"f" * 32


@dataclass(frozen=True)
class Kit:
    """An authority."""

    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate

    @classmethod
    @cache
    def of(cls, name: str) -> Kit:
        key, subject = ec.generate_private_key(ec.SECP256R1()), _named(name)
        builder = _builder(subject, subject, key.public_key(), NOW + timedelta(days=1000))
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        return cls(key, builder.sign(key, hashes.SHA256()))

    @property
    def pem(self) -> bytes:
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    def certify(
        self,
        key: Ed25519PrivateKey | ec.EllipticCurvePrivateKey,
        uri: str = HUB,
        ends: datetime = NOW + timedelta(days=30),
    ) -> x509.Certificate:
        builder = _builder(self.certificate.subject, _named("hub"), key.public_key(), ends)
        names = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri)])
        return builder.add_extension(names, critical=False).sign(self.key, hashes.SHA256())


def self_signed(folder: Path) -> tuple[str, str, str]:
    """Files of a certificate for 127.0.0.1, its key, and who signed it: itself."""
    key, subject = ec.generate_private_key(ec.SECP256R1()), _named("kit")
    now = datetime.now(timezone.utc)
    builder = _builder(subject, subject, key.public_key(), now + timedelta(days=1), now)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    here = x509.SubjectAlternativeName([x509.IPAddress(IPv4Address("127.0.0.1"))])
    certificate = builder.add_extension(here, critical=False).sign(key, hashes.SHA256())
    plain = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "cert.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    (folder / "key.pem").write_bytes(key.private_bytes(*plain))
    return str(folder / "cert.pem"), str(folder / "key.pem"), str(folder / "cert.pem")


def der(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.DER)


@cache
def hub_key() -> Ed25519PrivateKey:
    return Ed25519PrivateKey.generate()


def statement(hub: str = ANYBODY, **changes: object) -> Statement:
    """A session of three prompt ids and two of output."""
    plain = Statement(
        hub=hub,
        node=ANYBODY,
        session_id="s" * 16,
        **digests(FINGERPRINT, PROMPT, PARAMS, OUTPUT),
        num_prompt=3,
        num_output=2,
        num_given=0,
        num_decided=2,
        num_steps=1,
        num_drafted=3,
        num_verified=2,
        num_accepted=1,
        num_guessed=0,
        finish_reason="length",
        started_at=spelled(NOW),
        finished_at=spelled(NOW),
        elapsed_ns=5,
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


def bare(said: Statement | None = None) -> SignedStatement:
    """Signed by a key without a certificate."""
    return sign(hub_key(), hub_key().public_key().public_bytes_raw(), PURPOSE, (said or statement()).to_bytes())


def certified(kit: Kit, said: Statement | None = None, certificate: x509.Certificate | None = None) -> SignedStatement:
    """Signed by a hub of a kit."""
    shown = certificate or kit.certify(hub_key())
    return sign(hub_key(), der(shown), PURPOSE, (said or statement(HUB)).to_bytes())


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _builder(
    issuer: x509.Name, subject: x509.Name, key: object, ends: datetime, made: datetime = NOW
) -> x509.CertificateBuilder:
    start = made - timedelta(days=1)
    return x509.CertificateBuilder(issuer, subject, key, x509.random_serial_number(), start, ends)  # type: ignore[arg-type]

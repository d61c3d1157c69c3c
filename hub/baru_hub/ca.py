"""A small certificate authority for one kit. It needs no network: a folder that is kept away from the machines.

    ca.pem ca.key     the authority                     crl.pem        what was revoked
    issued/           every certificate it has signed   hubs, nodes    what a machine gets: see `Authority.issue`

Keys: EC P-256, in files that only their owner may read. Certificates start a day back, because clocks differ.
"""

from __future__ import annotations

import ipaddress
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID, ObjectIdentifier

from baru_common.certificates import HUB_HOST, Certificate, revoked_serials
from baru_common.errors import ConfigError, NotFound
from baru_common.identity import Identity, Role
from baru_common.whole_files import write_atomically

BACKDATED = timedelta(days=1)
"""How far back a certificate starts."""
LIFETIME = timedelta(days=365)
AUTHORITY_LIFETIME = timedelta(days=3650)
_SIGNS_DOCUMENTS = ObjectIdentifier("1.3.6.1.5.5.7.3.36")  # RFC 9336: it opens no connection
_Key = ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey


@dataclass(frozen=True)
class Issued:
    """A certificate that this authority has signed."""

    certificate: Certificate
    revoked: bool

    @property
    def signs_receipts(self) -> bool:
        """It is a hub's second one, with which it signs and does not connect."""
        return not isinstance(self.certificate.document.public_key(), ec.EllipticCurvePublicKey)


class Authority:
    """The authority in a folder."""

    def __init__(self, folder: Path) -> None:
        """Open it; ConfigError when there is none, or it is damaged."""
        self.folder = folder
        try:
            self.certificate_pem = (folder / "ca.pem").read_bytes()
            self._certificate = x509.load_pem_x509_certificate(self.certificate_pem)
            key = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), password=None)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"there is no authority in {folder}: {error}", hint="make one with `baru-hub certs init --kit NAME`"
            ) from error
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise ConfigError(f"{folder / 'ca.key'} is no EC key")
        self._key = key

    @classmethod
    def create(cls, folder: Path, kit: str) -> Authority:
        """Make a kit's authority; ConfigError when the folder has one already."""
        Identity(kit, Role.HUB, "any")  # refuses what is no name of a kit
        if (folder / "ca.key").exists():
            raise ConfigError(f"{folder} has an authority already", hint="choose another --dir, or use the one there")
        _make_private(folder)
        _make_private(folder / "issued")
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, kit)])
        now = _now()
        certificate = (
            x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
            .not_valid_before(now - BACKDATED)
            .not_valid_after(now + AUTHORITY_LIFETIME)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs_certificates=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(x509.SubjectAlternativeName([x509.UniformResourceIdentifier(f"spiffe://{kit}")]), False)
            .sign(key, hashes.SHA256())
        )
        write_atomically(folder / "ca.pem", _pem(certificate))
        write_atomically(folder / "ca.key", _key_pem(key))
        authority = cls(folder)
        authority._write_revoked([])
        return authority

    @property
    def kit(self) -> str:
        """Name of the kit."""
        return str(self._certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value)

    def sign(self, text: bytes) -> bytes:
        """Sign what belongs to the kit and is no certificate (ECDSA, SHA-256, DER)."""
        return self._key.sign(text, ec.ECDSA(hashes.SHA256()))

    # -- certificates

    def issue(
        self,
        name: str,
        role: Role,
        out: Path,
        *,
        lifetime: timedelta = LIFETIME,
        addresses: Sequence[str] = (),
        replace: bool = False,
        now: datetime | None = None,
    ) -> Certificate:
        """Make the folder that a machine needs:

            ca.pem  crl.pem  <role>.pem  <role>.key      a hub also gets receipts.pem  receipts.key (Ed25519)

        `addresses`: more DNS names and IP addresses for a hub's certificate. ConfigError when the folder has a
        certificate, unless it is to be replaced: then a running hub or node takes the new one by itself.
        """
        identity = Identity(self.kit, role, name)
        _check_lifetime(lifetime)
        if addresses and role is not Role.HUB:
            raise ConfigError(f"a {role.value} has no address in its certificate", hint="leave --address out")
        if (out / f"{role.value}.pem").exists() and not replace:
            raise ConfigError(
                f"{out / role.value}.pem is there already",
                hint="choose another --out, or say --replace to put a new one in its place",
            )
        _make_private(out)
        write_atomically(out / "ca.pem", self.certificate_pem)
        self.publish(out)
        starts = (now or _now()) - BACKDATED
        ends = (now or _now()) + lifetime
        if role is Role.HUB:
            self._sign(identity, ed25519.Ed25519PrivateKey.generate(), (starts, ends), out / "receipts", ())
        hosts = (HUB_HOST, f"{name}.{HUB_HOST}", *addresses) if role is Role.HUB else ()
        return self._sign(identity, ec.generate_private_key(ec.SECP256R1()), (starts, ends), out / role.value, hosts)

    def _sign(
        self, identity: Identity, key: _Key, period: tuple[datetime, datetime], to: Path, hosts: Sequence[str]
    ) -> Certificate:
        builder = x509.CertificateBuilder(
            self._certificate.subject,
            x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, identity.name)]),
            key.public_key(),
            secrets.randbits(63) + 1,  # short enough to be typed
        )
        purpose = ExtendedKeyUsageOID.SERVER_AUTH if hosts else ExtendedKeyUsageOID.CLIENT_AUTH
        if isinstance(key, ed25519.Ed25519PrivateKey):
            purpose = _SIGNS_DOCUMENTS
        names = [x509.UniformResourceIdentifier(str(identity)), *map(_host, hosts)]
        certificate = (
            builder.not_valid_before(period[0])
            .not_valid_after(min(period[1], self._certificate.not_valid_after_utc))
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        pem = _pem(certificate)
        write_atomically(self.folder / "issued" / f"{certificate.serial_number:x}.pem", pem)
        write_atomically(to.with_suffix(".key"), _key_pem(key))
        write_atomically(to.with_suffix(".pem"), pem)
        return Certificate.of(certificate)

    def issued(self) -> list[Issued]:
        """Return every certificate it has signed, the latest to end last."""
        revoked = self._revoked()
        found = [
            Issued(certificate, certificate.serial in revoked)
            for certificate in (Certificate.read(path.read_bytes()) for path in self._issued_files())
        ]
        return sorted(found, key=lambda one: (one.certificate.ends, one.certificate.serial))

    def _issued_files(self) -> Iterator[Path]:
        return (self.folder / "issued").glob("*.pem")

    # -- revocation

    def revoke(self, name: str) -> list[Certificate]:
        """Revoke every certificate of a name, or one by its serial (hexadecimal); NotFound when there is none."""
        valid = [one.certificate for one in self.issued() if not one.revoked]
        serial = int(name, 16) if all(c in "0123456789abcdef" for c in name) else None
        chosen = [one for one in valid if one.identity.name == name] or [one for one in valid if one.serial == serial]
        if not chosen:
            raise NotFound(
                f"no certificate of {name!r} is left to revoke", hint="`baru-hub certs show` lists names and serials"
            )
        self._write_revoked([*self._revoked(), *(one.serial for one in chosen)])
        return chosen

    def publish(self, out: Path) -> None:
        """Copy the revocation list to a machine's folder: a running hub takes it at once."""
        write_atomically(out / "crl.pem", (self.folder / "crl.pem").read_bytes())

    def _revoked(self) -> frozenset[int]:
        return revoked_serials((self.folder / "crl.pem").read_bytes(), self.certificate_pem)

    def _write_revoked(self, serials: Sequence[int]) -> None:
        """The list is good for as long as the authority: a kit that is offline gets no fresh one."""
        now = _now()
        builder = x509.CertificateRevocationListBuilder(
            self._certificate.subject, now - BACKDATED, self._certificate.not_valid_after_utc
        ).add_extension(x509.CRLNumber(int(now.timestamp())), critical=False)
        for serial in sorted(serials):
            builder = builder.add_revoked_certificate(x509.RevokedCertificateBuilder(serial, now - BACKDATED).build())
        signed = builder.sign(self._key, hashes.SHA256())
        write_atomically(self.folder / "crl.pem", signed.public_bytes(serialization.Encoding.PEM))


def _now() -> datetime:
    return datetime.now(timezone.utc)


def _check_lifetime(lifetime: timedelta) -> None:
    if not timedelta(0) < lifetime <= AUTHORITY_LIFETIME:
        raise ConfigError(f"a certificate of {lifetime.days} days is none", hint="use 1 to 3650 days")


def _make_private(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _host(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name.strip("[]")))
    except ValueError:
        pass
    try:
        return x509.DNSName(name)
    except ValueError as error:
        raise ConfigError(f"{name!r} is no host", hint="give a DNS name or an IP address") from error


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: _Key) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )

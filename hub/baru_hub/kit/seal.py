"""A sealed folder: the digest of every file in it, signed by the kit's authority.

SHA256SUMS       as `sha256sum` writes and checks it; its first line says what the folder is
SHA256SUMS.sig   the authority's signature of that file (ECDSA, SHA-256), as `openssl dgst -verify` checks it
ca.pem           the authority's certificate: its fingerprint is what a person compares
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from baru_common.errors import ConfigError
from baru_common.whole_files import write_atomically
from baru_hub.ca import Authority

SUMS, SIGNATURE, AUTHORITY = "SHA256SUMS", "SHA256SUMS.sig", "ca.pem"
SEALED_APART = "machines"
"""Folder whose folders have seals of their own: a machine is given only its own."""
_CHUNK = 1 << 20
_MAX_SUMS_BYTES = 16 << 20


@dataclass(frozen=True)
class Sealed:
    """What a check of a folder found."""

    what: str
    """First line: which kit, release and part it is."""
    fingerprint: str
    """Of the authority that signed, as `openssl x509 -fingerprint -sha256` writes it."""
    problems: tuple[str, ...]
    """What is wrong, a line each; none: the folder is as it was sealed."""


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file, or of a folder: of the lines `DIGEST  NAME` of its files, by name."""
    if path.is_file():
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
        return digest.hexdigest()
    lines = "".join(f"{digest_of(path / name)}  {name}\n" for name in sorted(_files(path)))
    if not lines:
        raise ConfigError(f"{path} holds no file", hint="name a file, or a folder of files")
    return hashlib.sha256(lines.encode()).hexdigest()


def fingerprint(pem: bytes) -> str:
    """Return the SHA-256 fingerprint of a certificate: pairs of upper-case digits with colons between them."""
    return x509.load_pem_x509_certificate(pem).fingerprint(hashes.SHA256()).hex(":").upper()


def seal(folder: Path, what: str, authority: Authority) -> None:
    """Seal all that is in the folder now."""
    write_atomically(folder / AUTHORITY, authority.certificate_pem)
    names = sorted(_files(folder) - {SUMS, SIGNATURE})
    text = f"# {what}\n" + "".join(f"{digest_of(folder / name)}  {name}\n" for name in names)
    write_atomically(folder / SUMS, text.encode())
    write_atomically(folder / SIGNATURE, authority.sign(text.encode()))


def check_seal(folder: Path) -> Sealed:
    """Check every file of a sealed folder; ConfigError when it is none."""
    try:
        with (folder / SUMS).open("rb") as file:
            sums = file.read(_MAX_SUMS_BYTES)
        signature, pem = (folder / SIGNATURE).read_bytes(), (folder / AUTHORITY).read_bytes()
        signer = x509.load_pem_x509_certificate(pem)
        lines = sums.decode().splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{folder} is no folder of a kit: {error}", hint="it is made by `baru-hub kit build`"
        ) from error
    what = lines[0].removeprefix("# ") if lines else ""
    if not _signed(signer, signature, sums):
        return Sealed(what, fingerprint(pem), (f"{SUMS} is not what the authority signed",))
    wanted = {name: digest for digest, _, name in (line.partition("  ") for line in lines[1:])}
    return Sealed(what, fingerprint(pem), tuple(_differences(folder, wanted)))


def _signed(signer: x509.Certificate, signature: bytes, text: bytes) -> bool:
    key = signer.public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey):
        return False
    try:
        key.verify(signature, text, ec.ECDSA(hashes.SHA256()))
    except InvalidSignature:
        return False
    return True


def _differences(folder: Path, wanted: dict[str, str]) -> Iterator[str]:
    there = _files(folder) - {SUMS, SIGNATURE}
    yield from (f"{name} is missing" for name in sorted(wanted.keys() - there))
    yield from (f"{name} is not of this kit" for name in sorted(there - wanted.keys()))
    for name in sorted(there & wanted.keys()):
        if digest_of(folder / name) != wanted[name]:
            yield f"{name} was changed"


def _files(folder: Path) -> set[str]:
    """Names of all files below, but for those of folders with seals of their own. A link counts as what it is: a file
    that nobody put there."""
    found = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    names = {path.relative_to(folder).as_posix() for path in found}
    return {name for name in names if not name.startswith(f"{SEALED_APART}/")}

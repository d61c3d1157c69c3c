"""The key with which a hub signs its receipts and its audit log."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from baru_common.certificates import Certificate
from baru_common.errors import ConfigError
from baru_common.folders import state_folder
from baru_common.reread import Reread
from baru_common.signatures import ANYBODY, SignedStatement, sign, utc_now
from baru_common.tls import readable_by_others

KEY_FILE, CERTIFICATE_FILE = "receipts.key", "receipts.pem"


def default_folder() -> Path:
    """Where a hub keeps its audit log unless told otherwise."""
    return state_folder() / "audit"


class Notary:
    """Signs, with one key at a time."""

    def __init__(self, folder: Path, *, certified: bool, clock: Callable[[], datetime] = utc_now) -> None:
        """Use receipts.key of a folder. `certified`: with receipts.pem, as `baru-hub certs issue` makes them; else the
        key is bare, and made if there is none. ConfigError when a file is missing, damaged or open to others."""
        self._folder, self._certified, self._clock = folder, certified, clock
        if not certified:
            _make_key(folder / KEY_FILE)
        self._files = Reread([folder / KEY_FILE, folder / CERTIFICATE_FILE], self._read)

    def _read(self) -> tuple[Ed25519PrivateKey, x509.Certificate | None]:
        key = _read_key(self._folder / KEY_FILE)
        return key, _read_certificate(self._folder / CERTIFICATE_FILE, key) if self._certified else None

    def refresh(self) -> bool:
        """Take a new key and certificate if they have come; say whether they have."""
        return self._files.refresh()

    @property
    def identity(self) -> str:
        """Who signs."""
        _, found = self._files.value
        return str(Certificate.of(found).identity) if found else ANYBODY

    @property
    def public_key(self) -> bytes:
        """32 bytes."""
        return self._files.value[0].public_key().public_bytes_raw()

    def _has_expired(self) -> bool:
        _, found = self._files.value
        return found is not None and self._clock() > found.not_valid_after_utc

    def sign(self, purpose: str, statement: bytes) -> SignedStatement:
        """Sign for a purpose; ConfigError when the certificate has expired."""
        if self._has_expired():
            self.refresh()
        if self._has_expired():
            raise ConfigError(
                f"the certificate in {self._folder / CERTIFICATE_FILE} has expired, so nothing can be signed",
                hint="issue a new one, or set this machine's clock if it is wrong",
            )
        key, found = self._files.value
        der = found.public_bytes(serialization.Encoding.DER) if found else self.public_key
        return sign(key, der, purpose, statement)


def _make_key(path: Path) -> None:
    """Make a key unless there is one: whoever comes second uses the first one's."""
    if path.exists():
        return
    pem = Ed25519PrivateKey.generate().private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")  # 0600
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(pem)
                file.flush()
                os.fsync(file.fileno())
            with contextlib.suppress(FileExistsError):
                os.link(name, path)
        finally:
            Path(name).unlink()
    except OSError as error:
        raise ConfigError(
            f"the hub's key cannot be kept in {path.parent}: {error.strerror}",
            hint="set BARU_STATE_DIR to a folder that the hub may write",
        ) from error


def _read_key(path: Path) -> Ed25519PrivateKey:
    try:
        if readable_by_others(path):
            raise ConfigError(f"{path} can be read by others", hint=f"chmod 600 {path}")
        key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"the hub's key cannot be read: {path}: {error}") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError(
            f"{path} holds no Ed25519 key", hint="receipts are signed with the key that `certs issue` made"
        )
    return key


def _read_certificate(path: Path, key: Ed25519PrivateKey) -> x509.Certificate:
    try:
        found = x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"the certificate for receipts cannot be read: {path}: {error}") from error
    if found.public_key() != key.public_key():
        raise ConfigError(f"{path} is not the certificate of {KEY_FILE}", hint="issue both together")
    return found

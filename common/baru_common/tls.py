"""Certificates on disk, and the connections that are made with them: mutual TLS, both sides of one kit.

Both sides take new files without a restart: a hub with the next connection, a node when it next looks.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TypeVar

import grpc

from .certificates import HUB_HOST, Certificate, read_authorities
from .errors import BaruError, ClockError, ConfigError, Unauthenticated
from .identity import Role
from .reread import Reread

MEMBERS = (Role.NODE, Role.OBSERVER, Role.OPERATOR)
"""Who connects to hubs."""
RELEASED = datetime(2026, 11, 1, tzinfo=timezone.utc)
"""This release was made later than that, so a clock that shows an earlier time is wrong."""
_MAKE = "make it with `baru-hub certs issue`"
_T = TypeVar("_T")

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TlsFiles:
    """Where somebody's certificate is, with its key and the kit's authority."""

    certificate: Path
    key: Path
    authority: Path
    revoked: Path | None = None
    """The kit's revocation list; a hub needs one."""
    hub: str | None = None
    """For who connects: name of the one hub to trust; None: any of the kit."""

    @classmethod
    def of(cls, where: TlsFiles | Path | str, *roles: Role) -> TlsFiles:
        """Take the files of a machine's folder, as `baru-hub certs issue` makes it, for the first of these roles that
        is there; ConfigError when none is."""
        if isinstance(where, TlsFiles):
            return where
        folder = Path(where)
        found = [role.value for role in roles if (folder / f"{role.value}.pem").exists()]
        if not found:
            names = " or ".join(f"{role.value}.pem" for role in roles)
            raise ConfigError(f"there is no {names} in {folder}", hint=_MAKE)
        return cls(
            folder / f"{found[0]}.pem", folder / f"{found[0]}.key", folder / "ca.pem", revoked=folder / "crl.pem"
        )

    def load(self, *roles: Role) -> Credentials:
        """Read and check them; ConfigError names the file and says what to do.

        Dates are another matter: see `Credentials.time_problem`.
        """
        certificate_pem = _read(self.certificate, _MAKE)
        key_pem = _read(self.key, _MAKE)
        authority_pem = _read(self.authority, "copy the ca.pem of the kit there")
        own = _parsed(self.certificate, lambda: Certificate.read(certificate_pem))
        _parsed(self.authority, lambda: read_authorities(authority_pem))
        _check_private(self.key)
        if not _parsed(self.key, lambda: own.has_key(key_pem)):
            raise ConfigError(f"{self.key} is not the key of {self.certificate}", hint="copy both of one folder")
        if not own.is_signed_by(authority_pem):
            raise ConfigError(
                f"{self.certificate} is not signed by {self.authority}",
                hint="use files of one kit, and of one authority",
            )
        if own.identity.role not in roles:
            wanted = " or ".join(role.value for role in roles)
            raise ConfigError(
                f"{self.certificate} is of a {own.identity.role.value}, must be of a {wanted}", hint=_MAKE
            )
        return Credentials(self, own, certificate_pem, key_pem, authority_pem)

    def watched(self, *roles: Role) -> Reread[Credentials]:
        """The same, read again when a file changes."""
        return Reread((self.certificate, self.key, self.authority), lambda: self.load(*roles))


@dataclass(frozen=True)
class Credentials:
    """What was read, and found in order but for its dates."""

    files: TlsFiles
    own: Certificate
    certificate_pem: bytes
    key_pem: bytes
    authority_pem: bytes

    @property
    def hub_host(self) -> str:
        """The name that a hub's certificate has to carry."""
        return f"{self.files.hub}.{HUB_HOST}" if self.files.hub else HUB_HOST

    def time_problem(self, now: datetime | None = None) -> BaruError | None:
        """Return what is wrong about the date: ClockError, or Unauthenticated when the certificate has expired."""
        now = now or datetime.now(timezone.utc)
        if now < max(RELEASED, self.own.starts):
            return clock_error(now, f"{self.files.certificate} begins on {_date(self.own.starts)}")
        if now >= self.own.ends:
            return Unauthenticated(
                f"{self.files.certificate} expired on {_date(self.own.ends)}; the clock here says {_date(now)}",
                hint="renew it with `baru-hub certs issue --replace`, or set the clock",
            )
        return None


def clock_error(now: datetime, why: str) -> ClockError:
    """The error of a machine whose clock is behind."""
    why = f"this release was made after {RELEASED:%Y-%m-%d}" if now < RELEASED else why
    return ClockError(
        f"the clock of this machine is wrong: it says {_date(now)}, and {why}",
        hint="set the clock; what waits for it goes on by itself",
    )


def server_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """Return what a hub serves with: a certificate of the kit is demanded, and new files are taken as they come.

    The BaruError of files that are wrong, or of a wrong clock.
    """
    watched = files.watched(Role.HUB)
    if problem := watched.value.time_problem():
        raise problem

    def configuration() -> grpc.ServerCertificateConfiguration:
        now = watched.value
        return grpc.ssl_server_certificate_configuration([(now.key_pem, now.certificate_pem)], now.authority_pem)

    def changed() -> grpc.ServerCertificateConfiguration | None:
        if not watched.refresh():
            return None  # gRPC stays with what it has
        _log.info("a new certificate is served, until %s", _date(watched.value.own.ends))
        return configuration()

    return grpc.dynamic_ssl_server_credentials(configuration(), changed, require_client_authentication=True)  # type: ignore[arg-type]


def channel_credentials(credentials: Credentials) -> grpc.ChannelCredentials:
    """Return what a channel connects with. It keeps them for life."""
    return grpc.ssl_channel_credentials(credentials.authority_pem, credentials.key_pem, credentials.certificate_pem)


def _read(path: Path, hint: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", hint=hint) from error


def _parsed(path: Path, parse: Callable[[], _T]) -> _T:
    try:
        return parse()
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message}", hint=error.hint or _MAKE) from error


def readable_by_others(key: Path) -> bool:
    """Whether a key's file lets others than its reader read it. Somebody else's file that this process reads by its
    group is private enough: that is how a cluster lends a secret to a pod."""
    if os.name != "posix":
        return False
    found = key.stat()
    lent = found.st_uid != os.geteuid() and found.st_gid in (os.getegid(), *os.getgroups())
    return bool(stat.S_IMODE(found.st_mode) & (0o037 if lent else 0o077))


def _check_private(key: Path) -> None:
    if readable_by_others(key):
        raise ConfigError(f"{key} can be read by others", hint=f"chmod 600 {key}")


def _date(moment: datetime) -> str:
    return f"{moment:%Y-%m-%d %H:%M} UTC"

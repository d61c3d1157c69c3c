"""Why a connection does not come about. gRPC only says that it is unavailable; one plain handshake finds the reason."""

from __future__ import annotations

import asyncio
import socket
import ssl
from datetime import datetime, timezone

from .errors import BaruError, Unauthenticated
from .tls import Credentials, clock_error

_TIMEOUT_S = 0.5
# Numbers of OpenSSL's X509_V_ERR_*
_NOT_YET_VALID, _EXPIRED = 9, 10
_NO_HUB = (26, 62)  # another purpose, another name


async def explain_handshake(
    address: str, credentials: Credentials | None, *, timeout_s: float = _TIMEOUT_S
) -> BaruError | None:
    """Return what is wrong between this machine (None: one that speaks plainly) and the hub at HOST:PORT: ClockError or
    Unauthenticated; None when it is not that, for instance because nobody answers."""
    return await asyncio.to_thread(_explain, address, credentials, timeout_s)


def _explain(address: str, credentials: Credentials | None, timeout_s: float) -> BaruError | None:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout_s) as connection:
            connection.settimeout(timeout_s)
            return _greet(connection, address, credentials) if credentials else _greet_plainly(connection, address)
    except (OSError, ValueError, OverflowError):  # nobody there, or no such place
        return None


def _greet(connection: socket.socket, address: str, credentials: Credentials) -> BaruError | None:
    if problem := credentials.time_problem():
        return problem
    context = _context()
    context.load_verify_locations(cadata=credentials.authority_pem.decode())
    context.load_cert_chain(credentials.files.certificate, credentials.files.key)
    try:
        with context.wrap_socket(connection, server_hostname=credentials.hub_host) as secured:
            # In TLS 1.3 the hub judges our certificate after our side is done: it greets, or says why not.
            return None if secured.recv(1) else _refused(address, credentials)
    except ssl.SSLCertVerificationError as error:
        return _distrusted(address, credentials, error)
    except ssl.SSLError as error:
        if "ALERT" in (error.reason or ""):
            return _refused(address, credentials)
        return Unauthenticated(
            f"what answers at {address} does not speak TLS", hint="start the hub with --tls, or leave --tls out here"
        )


def _greet_plainly(connection: socket.socket, address: str) -> BaruError | None:
    context = _context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # it is only asked whether it is TLS
    try:
        context.wrap_socket(connection, server_hostname=address).close()
    except ssl.SSLError:
        return None
    return Unauthenticated(
        f"the hub at {address} wants a certificate",
        hint="give --tls with a folder that `baru-hub certs issue` has made for this machine",
    )


def _context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["h2"])
    return context


def _distrusted(address: str, credentials: Credentials, error: ssl.SSLCertVerificationError) -> BaruError:
    now = datetime.now(timezone.utc)
    if error.verify_code == _NOT_YET_VALID:
        return clock_error(now, f"the certificate of the hub at {address} begins later")
    if error.verify_code == _EXPIRED:
        return Unauthenticated(
            f"the certificate of the hub at {address} has expired, as the clock here says {now:%Y-%m-%d %H:%M} UTC",
            hint="renew the hub's with `baru-hub certs issue --replace`, or set the clock",
        )
    if error.verify_code in _NO_HUB:
        wanted = f"the hub {credentials.files.hub}" if credentials.files.hub else "a hub of this kit"
        return Unauthenticated(f"what answers at {address} is not {wanted}", hint="check the address")
    return Unauthenticated(
        f"the certificate of the hub at {address} is not signed by {credentials.files.authority}",
        hint="use files of the hub's kit",
    )


def _refused(address: str, credentials: Credentials) -> Unauthenticated:
    # gRPC's hub closes the connection without the alert that would say why.
    return Unauthenticated(
        f"the hub at {address} does not take {credentials.files.certificate}",
        hint="it is of another kit, or the hub's clock is wrong; the hub's log says which",
    )

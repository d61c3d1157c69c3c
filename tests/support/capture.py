"""What somebody on the way sees of a connection: who sent a record, of what size, when."""

from __future__ import annotations

import datetime as dt
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

UP, DOWN = 1, -1
_RECORD_HEADER_BYTES = 5


@dataclass(frozen=True)
class Record:
    """A TLS record."""

    way: int
    num_bytes: int
    at_s: float


@dataclass
class Capture:
    """A relay before a hub, with threads of its own: what it sees does not wait for an event loop."""

    target: tuple[str, int]
    records: list[Record] = field(default_factory=list)
    """Of what is TLS."""
    chunks: list[Record] = field(default_factory=list)
    """Of anything, as it was read."""
    _open: list[socket.socket] = field(default_factory=list)

    @classmethod
    @contextmanager
    def of(cls, address: str) -> Iterator[tuple[Capture, str]]:
        """Listen; yield the capture, and where."""
        host, port = address.rsplit(":", 1)
        capture = cls((host, int(port)))
        listener = socket.create_server(("127.0.0.1", 0))
        capture._open.append(listener)
        accepting = threading.Thread(target=capture._accept, args=(listener,), daemon=True)
        accepting.start()
        try:
            yield capture, f"localhost:{listener.getsockname()[1]}"
        finally:
            for end in capture._open:
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
                end.close()
            accepting.join()

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                near, _ = listener.accept()
                far = socket.create_connection(self.target)
                for end in (near, far):
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._open += [near, far]
                for source, sink, way in ((near, far, UP), (far, near, DOWN)):
                    threading.Thread(target=self._relay, args=(source, sink, way), daemon=True).start()

    def _relay(self, source: socket.socket, sink: socket.socket, way: int) -> None:
        unread = b""
        with suppress(OSError):
            while data := source.recv(1 << 16):
                at_s = time.monotonic()
                sink.sendall(data)
                self.chunks.append(Record(way, len(data), at_s))
                unread += data
                while len(unread) >= _RECORD_HEADER_BYTES:
                    size = _RECORD_HEADER_BYTES + int.from_bytes(unread[3:5], "big")
                    if len(unread) < size:
                        break
                    self.records.append(Record(way, size, at_s))
                    unread = unread[size:]
            sink.shutdown(socket.SHUT_WR)


def encrypt(patch: pytest.MonkeyPatch) -> None:
    """Have hubs and nodes of this process speak TLS: sizes on the wire are then those of records."""
    key, certificate = _certificate()
    credentials = grpc.ssl_server_credentials([(key, certificate)])
    make_server: Callable[..., Any] = grpc.aio.server

    def server(*arguments: Any, **options: Any) -> Any:
        made = make_server(*arguments, **options)
        made.add_insecure_port = lambda address: made.add_secure_port(address, credentials)
        return made

    def channel(address: str, options: Any) -> Any:
        return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(certificate), options)

    patch.setattr(grpc.aio, "server", server)
    patch.setattr(grpc.aio, "insecure_channel", channel)


def _certificate() -> tuple[bytes, bytes]:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now, day = dt.datetime.now(dt.timezone.utc), dt.timedelta(days=1)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), 1, now - day, now + day)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    plain = (serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return key.private_bytes(pem, *plain), made.public_bytes(pem)

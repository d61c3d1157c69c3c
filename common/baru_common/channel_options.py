"""Transport settings of both ends, chosen together: a client that pings more often than the server
allows is cut off with GOAWAY too_many_pings.

The timers are the slow, certain way to notice a dead link; heartbeats on the stream are the fast one.
Below 500 ms they gave false alarms at 2-5 % packet loss.
"""

from __future__ import annotations

MAX_MESSAGE_BYTES = 4 << 20
"""Most bytes of one message, both ways, on both ends."""

KEEPALIVE_TIME_MS = 1000
KEEPALIVE_TIMEOUT_MS = 1000
PING_TIMEOUT_MS = 1000  # without it a peer whose kernel still acknowledges is never found dead

_BOTH: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.bdp_probe", 0),  # its pings come and go with the amount of data, for anybody on the way to see
)

CLIENT_OPTIONS: tuple[tuple[str, int], ...] = (
    *_BOTH,
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.use_local_subchannel_pool", 1),  # a new channel is a new connection
    ("grpc.enable_http_proxy", 0),  # the hub is a neighbour, whatever the environment says
)

_MAX_METADATA_BYTES = 8 << 10
_HANDSHAKE_MS = 10_000

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    *_BOTH,
    ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_TIME_MS // 2),
    ("grpc.so_reuseport", 0),  # a second hub on the same port is a mistake, not a helper
    ("grpc.max_metadata_size", _MAX_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", 2 * _MAX_METADATA_BYTES),
    ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
)


def server_options(
    *, max_streams: int, max_connections: int, max_connection_age_s: float
) -> tuple[tuple[str, int], ...]:
    """Return the options of a hub: calls at a time on one connection, connections at a time, and the age at which a
    connection takes no more calls; as much later those that it still has are cut."""
    age_ms = min(round(max_connection_age_s * 1000), (1 << 31) - 1)
    return (
        *SERVER_OPTIONS,
        ("grpc.max_concurrent_streams", max_streams),
        ("grpc.max_allowed_incoming_connections", max_connections),
        ("grpc.max_connection_age_ms", age_ms),
        ("grpc.max_connection_age_grace_ms", age_ms),
    )

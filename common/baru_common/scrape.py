"""Reading what a hub or a node shows to be scraped, and what happened between two readings."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from ssl import SSLContext, SSLError

from .addresses import split_address
from .errors import ConfigError, HubUnavailable

MAX_BYTES = 8 << 20
_HINT = "give the address that a hub or a node has after --metrics"
Labels = Mapping[str, str]


@dataclass(frozen=True)
class Scrape:
    """All series of one program at one moment."""

    address: str
    at_s: float
    """By a clock that nobody sets."""
    series: Mapping[str, list[tuple[Labels, float]]]

    def values(self, name: str, *labels: str) -> dict[tuple[str, ...], float]:
        """Return a metric, summed over all labels but these."""
        sums: defaultdict[tuple[str, ...], float] = defaultdict(float)
        for found, value in self.series.get(name, []):
            sums[tuple(found.get(label, "") for label in labels)] += value
        return dict(sums)

    def value(self, name: str) -> float:
        """Return a metric, summed over all labels; 0 where there is none."""
        return sum(value for _, value in self.series.get(name, []))


def scrape(address: str, timeout_s: float = 3.0, tls: SSLContext | None = None) -> Scrape:
    """Read the metrics at HOST:PORT, whatever proxies the environment names.

    Raises:
        HubUnavailable: Nobody answers.
        ConfigError: What answers is neither a hub nor a node.
    """
    host, port = split_address(address)
    try:
        how = HTTPSConnection(host, port, timeout=timeout_s, context=tls) if tls else None
        with closing(how or HTTPConnection(host, port, timeout=timeout_s)) as connection:
            connection.request("GET", "/metrics")
            answer = connection.getresponse()
            data = answer.read(MAX_BYTES + 1)
    except (SSLError, HTTPException, ValueError) as error:
        raise ConfigError(f"{address} shows no metrics: {error}", hint=_HINT) from error
    except OSError as error:
        raise HubUnavailable(
            f"nobody shows metrics at {address}: {error}",
            hint="start it with --metrics HOST:PORT, and give that address",
        ) from error
    if answer.status != 200:
        raise ConfigError(f"{address} shows no metrics: {answer.status} {answer.reason}", hint=_HINT)
    return read(data, address)


def read(data: bytes, address: str = "") -> Scrape:
    """Read a hub's or a node's Prometheus text; ConfigError when it is something else.

    A value that is no number is left out: it tells nothing.
    """
    from prometheus_client.parser import text_string_to_metric_families

    at_s = time.monotonic()
    series: defaultdict[str, list[tuple[Labels, float]]] = defaultdict(list)
    try:
        if len(data) > MAX_BYTES:
            raise ValueError(f"it has more than {MAX_BYTES} bytes")
        for family in text_string_to_metric_families(data.decode()):
            for sample in family.samples:
                if math.isfinite(sample.value):
                    series[sample.name].append((sample.labels, sample.value))
    except (ValueError, IndexError, KeyError) as error:
        raise ConfigError(f"{address} shows no metrics: {error}", hint=_HINT) from error
    if not any(name.startswith("baru_") for name in series):
        raise ConfigError(f"{address} shows metrics, but not those of a hub or a node", hint=_HINT)
    return Scrape(address, at_s, dict(series))

"""Reading what a hub or a node shows to be scraped, and what happened between two readings."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPException
from ssl import SSLContext, SSLError

from .errors import ConfigError, HubUnavailable

MAX_BYTES = 8 << 20
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
    """Read the metrics at HOST:PORT. HubUnavailable when nobody answers, ConfigError when what answers shows none."""
    url = f"{'https' if tls else 'http'}://{address}/metrics"
    try:
        with urllib.request.urlopen(url, timeout=timeout_s, context=tls) as answer:  # noqa: S310
            data = answer.read(MAX_BYTES + 1)
    except (SSLError, urllib.error.HTTPError, HTTPException, ValueError) as error:
        raise ConfigError(f"{address} shows no metrics: {error}", hint="give the address of --metrics") from error
    except OSError as error:
        raise HubUnavailable(
            f"nobody shows metrics at {address}: {getattr(error, 'reason', error)}",
            hint="start it with --metrics HOST:PORT, and give that address",
        ) from error
    return read(data, address)


def read(data: bytes, address: str = "") -> Scrape:
    """Read Prometheus' text format; ConfigError when it is something else."""
    from prometheus_client.parser import text_string_to_metric_families

    at_s = time.monotonic()
    series: defaultdict[str, list[tuple[Labels, float]]] = defaultdict(list)
    try:
        if len(data) > MAX_BYTES:
            raise ValueError(f"it has more than {MAX_BYTES} bytes")
        for family in text_string_to_metric_families(data.decode()):
            for sample in family.samples:
                series[sample.name].append((sample.labels, sample.value))
    except (ValueError, IndexError, KeyError) as error:
        raise ConfigError(f"{address} shows no metrics: {error}") from error
    return Scrape(address, at_s, dict(series))

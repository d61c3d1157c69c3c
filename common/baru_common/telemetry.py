"""OpenTelemetry, set up once: metrics to be scraped by Prometheus, metrics and traces pushed over OTLP.

Nothing here is loaded, and nothing runs, unless one of the two is asked for. Exporters have threads of their own; what
fails in them is logged there and reaches nobody else.
"""

from __future__ import annotations

import os
import ssl
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from socket import AF_INET, AF_INET6, socket
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from . import __version__
from .addresses import is_loopback, split_address
from .errors import ConfigError
from .instruments import Instrument, Kind, Ledger, Series
from .trace_context import TraceContext

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, Histogram, Meter, Observation
    from opentelemetry.sdk.metrics.export import MetricReader
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.trace import Tracer
    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric
    from prometheus_client.samples import Sample

OTLP_ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
_SCRAPER_S = 10.0
"""A scraper that stalls for so long is hung up on."""
_FLUSH_S = 1.0
"""Time for a last push when the program ends."""

Gauges = Mapping[str, Callable[[], Series]]
"""Name of the instrument -> its values now; called in an exporter's thread."""


@dataclass(frozen=True)
class TelemetryConfig:
    """Where telemetry goes. ConfigError names the setting that is wrong."""

    metrics: str = ""
    """HOST:PORT to be scraped at by Prometheus; port 0 takes a free one; empty: nowhere."""
    otlp: str = ""
    """URL that metrics and traces are pushed to (OTLP over gRPC); empty: the one in OTEL_EXPORTER_OTLP_ENDPOINT, if
    any."""
    tls: tuple[str, str, str] = ("", "", "")
    """Files in PEM for scraping past loopback: the server's certificate, its key, and who signs those of scrapers."""
    page: bool = False
    """`Telemetry.page` is wanted, for a server that the program has anyway."""

    def __post_init__(self) -> None:
        if self.metrics and not is_loopback(split_address(self.metrics)[0]) and not all(self.tls):
            raise ConfigError(
                f"metrics would be served at {self.metrics}, which is not a loopback address, to anybody",
                hint="serve them on 127.0.0.1, or give certificate, key and client CA (--metrics-tls)",
            )

    @property
    def pushes(self) -> bool:
        """Something is pushed."""
        return bool(self.otlp or os.environ.get(OTLP_ENDPOINT))

    @property
    def is_on(self) -> bool:
        """Somebody gets something."""
        return bool(self.metrics) or self.page or self.pushes


NO_TELEMETRY = TelemetryConfig()


@dataclass(frozen=True)
class Span:
    """A part of a request that has ended; times are Unix, nanoseconds."""

    name: str
    start_ns: int
    end_ns: int
    attributes: Mapping[str, str | int | float] = field(default_factory=dict)
    error: str = ""
    """What went wrong, by name."""


class Telemetry:
    """Exporters at work. Made by `exporting`."""

    def __init__(
        self,
        address: str,
        registry: CollectorRegistry | None,
        tracer: Tracer | None,
        ids: Any,
        histograms: Mapping[str, Histogram],
    ) -> None:
        self.address = address
        """Where metrics are scraped; empty: nowhere."""
        self._registry = registry
        self._tracer = tracer
        self._ids = ids
        self._histograms = histograms

    @property
    def traces(self) -> bool:
        """Spans go somewhere."""
        return self._tracer is not None

    def page(self) -> bytes:
        """Return what a scrape shows (Prometheus' text format)."""
        from prometheus_client import generate_latest

        return bytes(generate_latest(self._registry)) if self._registry else b""

    def record(self, name: str, value: float, attributes: Mapping[str, str]) -> None:
        """Add a value to a histogram."""
        self._histograms[name].record(value, attributes)

    def trace(self, whole: Span, parts: Iterable[Span], own: TraceContext, parent: TraceContext | None = None) -> None:
        """Export a span with the ids of `own`, a child of `parent` if there is one, and its parts as its children."""
        if not (self._tracer and own.sampled):
            return
        from opentelemetry import trace

        context = trace.set_span_in_context(trace.NonRecordingSpan(_span_context(parent))) if parent else None
        self._ids.given = own
        span = _begun(self._tracer, whole, context)
        inside = trace.set_span_in_context(span)
        for part in parts:
            _begun(self._tracer, part, inside).end(part.end_ns)
        span.end(whole.end_ns)


@contextmanager
def exporting(
    config: TelemetryConfig,
    service: str,
    instruments: Sequence[Instrument],
    ledger: Ledger,
    gauges: Gauges,
    constant: Mapping[str, str],
) -> Iterator[Telemetry]:
    """Export while the block runs. `constant` labels go on every series.

    ConfigError when the address cannot be taken or the packages are missing.
    """
    try:
        from opentelemetry.sdk.metrics import AlwaysOffExemplarFilter, MeterProvider
        from opentelemetry.sdk.resources import Resource
    except ImportError as error:
        raise ConfigError(
            f"telemetry needs a package that is missing: {error.name}",
            hint="pip install 'baru-drafting[telemetry]'",
        ) from error
    resource = Resource.create({"service.name": service, "service.version": __version__})
    with ExitStack() as stack:
        address, registry, readers = "", None, list[Any]()
        if config.metrics or config.page:
            registry, reader = _registry(instruments)
            readers.append(reader)
            address = stack.enter_context(_scraped(config, registry)) if config.metrics else ""
        if config.pushes:
            readers.append(_metric_pusher(config))
        provider = MeterProvider(readers, resource, exemplar_filter=AlwaysOffExemplarFilter(), shutdown_on_exit=False)
        stack.callback(_push_last, provider.shutdown)
        meter = provider.get_meter("baru", __version__)
        _observe(meter, instruments, ledger, gauges, constant)
        histograms = {i.name: _histogram(meter, i) for i in instruments if i.kind is Kind.HISTOGRAM}
        tracer, ids = stack.enter_context(_span_pusher(config, resource)) if config.pushes else (None, None)
        yield Telemetry(address, registry, tracer, ids, histograms)


def _push_last(shutdown: Callable[[], object]) -> None:
    """End an exporter, with what it still has. A collector that does not answer holds nobody up: its thread goes with
    the program."""
    thread = threading.Thread(target=shutdown, name="baru-last-push", daemon=True)
    thread.start()
    thread.join(_FLUSH_S)


# -- metrics


def _observe(
    meter: Meter, instruments: Sequence[Instrument], ledger: Ledger, gauges: Gauges, constant: Mapping[str, str]
) -> None:
    """Let counters and gauges be read when somebody exports.

    A collection calls the callbacks one after the other, in the order of creation, and no two collections overlap. So
    the first one takes the snapshot that all counters of the collection show.
    """
    from opentelemetry.metrics import Observation

    seen: dict[str, Series] = {}

    def observed(instrument: Instrument, series: Series) -> list[Observation]:
        return [
            Observation(value, {**constant, **dict(zip(instrument.labels, labels, strict=True))})
            for labels, value in list(series.items())
        ]

    def counter(instrument: Instrument, *, first: bool) -> Callable[[CallbackOptions], list[Observation]]:
        def read(_: CallbackOptions) -> list[Observation]:
            if first:
                seen.update(ledger.snapshot())
            return observed(instrument, seen[instrument.name])

        return read

    def gauge(instrument: Instrument) -> Callable[[CallbackOptions], list[Observation]]:
        return lambda _: observed(instrument, gauges[instrument.name]())

    for number, each in enumerate(ledger.instruments):
        read = counter(each, first=number == 0)
        meter.create_observable_counter(each.name, [read], each.unit, each.description)
    for each in (i for i in instruments if i.kind is Kind.GAUGE):
        meter.create_observable_gauge(each.name, [gauge(each)], each.unit, each.description)


def _histogram(meter: Meter, instrument: Instrument) -> Histogram:
    return meter.create_histogram(
        instrument.name, instrument.unit, instrument.description, explicit_bucket_boundaries_advisory=instrument.buckets
    )


def _metric_pusher(config: TelemetryConfig) -> MetricReader:
    from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

    return PeriodicExportingMetricReader(OTLPMetricExporter(config.otlp or None))


# -- scraping


def _registry(instruments: Sequence[Instrument]) -> tuple[CollectorRegistry, MetricReader]:
    """What is scraped: the instruments, the same under vLLM's names, and the process."""
    from opentelemetry.exporter.prometheus import PrometheusMetricReader
    from prometheus_client import CollectorRegistry, ProcessCollector

    mirrors = {i.exported_name.removesuffix("_total"): i.mirrors for i in instruments if i.mirrors}

    class Mirrored(CollectorRegistry):
        def collect(self) -> Iterator[Metric]:
            for metric in super().collect():
                yield metric
                if name := mirrors.get(metric.name):
                    yield _mirrored(metric, name)

    registry = Mirrored()
    ProcessCollector(registry=registry)
    return registry, PrometheusMetricReader(scope_info_enabled=False, registry=registry)


_MIRRORED_LABELS = {"model": "model_name", "position": "position", "le": "le"}


def _mirrored(metric: Metric, name: str) -> Metric:
    """The same under vLLM's name: its labels, and summed over all others."""
    from prometheus_client.metrics_core import Metric

    sums: defaultdict[tuple[str, tuple[tuple[str, str], ...]], float] = defaultdict(float)
    for sample in metric.samples:
        sums[name + sample.name.removeprefix(metric.name), _mirrored_labels(sample)] += sample.value
    mirrored = Metric(name, metric.documentation, metric.type)
    for (full_name, labels), value in sums.items():
        mirrored.add_sample(full_name, dict(labels), value)
    return mirrored


def _mirrored_labels(sample: Sample) -> tuple[tuple[str, str], ...]:
    kept = ((_MIRRORED_LABELS[key], value) for key, value in sample.labels.items() if key in _MIRRORED_LABELS)
    return (("engine", "0"), *kept)


class _Handler(WSGIRequestHandler):
    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Say nothing of each scrape."""


class _Server(ThreadingMixIn, WSGIServer):
    """Each scraper has a thread and a deadline, its TLS handshake included."""

    daemon_threads = True
    tls: ssl.SSLContext | None = None

    def get_request(self) -> tuple[socket, Any]:
        connection, peer = super().get_request()
        connection.settimeout(_SCRAPER_S)
        if self.tls:  # the first read shakes hands
            connection = self.tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        return connection, peer

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A scraper that fails is its own affair."""


@contextmanager
def _scraped(config: TelemetryConfig, registry: CollectorRegistry) -> Iterator[str]:
    """Serve while the block runs; yield the address."""
    from prometheus_client import make_wsgi_app

    host, port = split_address(config.metrics)
    tls = _server_tls(*config.tls) if all(config.tls) else None

    class Server(_Server):
        address_family = AF_INET6 if ":" in host else AF_INET

    try:
        server = make_server(host, port, make_wsgi_app(registry), Server, _Handler)
    except OSError as error:
        raise ConfigError(
            f"metrics cannot be served at {config.metrics}: {error.strerror}", hint="another program may use the port"
        ) from error
    server.tls = tls
    thread = threading.Thread(target=server.serve_forever, name="baru-metrics", daemon=True)
    thread.start()
    try:
        yield f"[{host}]:{server.server_port}" if ":" in host else f"{host}:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _server_tls(cert: str, key: str, client_ca: str) -> ssl.SSLContext:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        tls.load_cert_chain(cert, key)
        tls.load_verify_locations(client_ca)
    except OSError as error:
        raise ConfigError(f"the metrics' certificate files cannot be used: {error}") from error
    tls.verify_mode = ssl.CERT_REQUIRED
    return tls


# -- traces


@contextmanager
def _span_pusher(config: TelemetryConfig, resource: Resource) -> Iterator[tuple[Tracer, Any]]:
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

    class GivenIds(RandomIdGenerator):
        """Ids of a span are those that its peers were told before it was made."""

        given: TraceContext | None = None

        def generate_trace_id(self) -> int:
            return int(self.given.trace_id, 16) if self.given else super().generate_trace_id()

        def generate_span_id(self) -> int:
            given, self.given = self.given, None
            return int(given.span_id, 16) if given else super().generate_span_id()

    ids = GivenIds()
    provider = TracerProvider(resource=resource, id_generator=ids, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(config.otlp or None)))
    try:
        yield provider.get_tracer("baru", __version__), ids
    finally:
        _push_last(provider.shutdown)


def _begun(tracer: Tracer, made: Span, context: Any) -> Any:
    from opentelemetry.trace import Status, StatusCode

    span = tracer.start_span(made.name, context, attributes=made.attributes, start_time=made.start_ns)
    if made.error:
        span.set_status(Status(StatusCode.ERROR, made.error))
    return span


def _span_context(of: TraceContext) -> Any:
    from opentelemetry.trace import SpanContext, TraceFlags

    return SpanContext(int(of.trace_id, 16), int(of.span_id, 16), is_remote=True, trace_flags=TraceFlags(of.sampled))

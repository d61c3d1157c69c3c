"""Metrics and traces pushed to a collector: one trace across node and hub."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from baru_common.telemetry import OTLP_ENDPOINT, TelemetryConfig
from baru_common.trace_context import TraceContext
from baru_hub.config import Shaping
from baru_hub.observing import Begin, HubObserver, Who
from baru_micro import Finish, MicroNode
from baru_micro.telemetry import observing
from support.fault_proxy import FaultProxy
from support.hubs import hub_of
from support.link import PROMPT, Local, asked, scripted_engine
from support.lockstep import free_running


@dataclass
class Collector:
    """Takes what is pushed."""

    spans: list[tuple[str, Any]] = field(default_factory=list)
    """With the service that each is of."""
    metrics: set[str] = field(default_factory=set)


class Traces(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self, collector: Collector) -> None:
        self._collector = collector

    def Export(self, request: Any, context: object) -> Any:  # noqa: N802
        for of in request.resource_spans:
            service = next(a.value.string_value for a in of.resource.attributes if a.key == "service.name")
            self._collector.spans += [(service, span) for scope in of.scope_spans for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()


class Metrics(metrics_service_pb2_grpc.MetricsServiceServicer):
    def __init__(self, collector: Collector) -> None:
        self._collector = collector

    def Export(self, request: Any, context: object) -> Any:  # noqa: N802
        for of in request.resource_metrics:
            self._collector.metrics |= {metric.name for scope in of.scope_metrics for metric in scope.metrics}
        return metrics_service_pb2.ExportMetricsServiceResponse()


@contextmanager
def collecting() -> Iterator[tuple[str, Collector]]:
    """A collector on loopback; its URL."""
    server, collector = grpc.server(ThreadPoolExecutor(2)), Collector()
    add_traces: Any = trace_service_pb2_grpc.add_TraceServiceServicer_to_server
    add_metrics: Any = metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server
    add_traces(Traces(collector), server)
    add_metrics(Metrics(collector), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"http://127.0.0.1:{port}", collector
    finally:
        server.stop(0).wait()


async def test_one_trace_across_node_and_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    caller = TraceContext.new()
    with collecting() as (url, collector):
        monkeypatch.setenv(OTLP_ENDPOINT, url)  # as a deployment says it, for both
        with observing(TelemetryConfig()) as observed:
            async with (
                hub_of(scripted_engine(0.005), scheduler=free_running()) as hub,
                FaultProxy.open(hub.address) as proxy,
                MicroNode.connect(proxy.address, drafter=Local(0.5), observers=observed.observers) as node,
            ):
                events = []
                async for event in node.generate(PROMPT, asked(120), trace=caller):
                    events.append(event)
                    if len(events) == 8:
                        await proxy.reset()
    assert isinstance(events[-1], Finish)
    assert {span.trace_id.hex() for _, span in collector.spans} == {caller.trace_id}
    by_id = {span.span_id: (service, span.name) for service, span in collector.spans}
    parents = sorted((service, span.name, by_id.get(span.parent_span_id)) for service, span in collector.spans)
    generate, session = ("baru-micro", "generate"), ("baru-hub", "session")
    assert parents.count((*generate, None)) == 1
    assert parents.count((*session, generate)) == 1
    assert parents.count(("baru-micro", "attempt", generate)) >= 2
    assert parents.count(("baru-micro", "away", generate)) == 1
    assert parents.count(("baru-hub", "decode", session)) == parents.count(("baru-hub", "prefill", session)) == 1
    (root,) = (span for service, span in collector.spans if (service, span.name) == generate)
    assert root.parent_span_id.hex() == caller.span_id
    (decode,) = (span for _, span in collector.spans if span.name == "decode")
    counts = {attribute.key: attribute.value.int_value for attribute in decode.attributes}
    assert counts["num_emitted"] == 120
    assert counts["num_drafted"] == counts["num_accepted"] + counts["num_rejected"] + counts["num_discarded"]
    assert {"baru_hub_emitted_tokens", "baru_node_tokens"} <= collector.metrics


async def test_nobody_listens_and_nobody_waits() -> None:
    """A collector that is not there costs the request nothing, and the end little."""
    with observing(TelemetryConfig(otlp="http://127.0.0.1:9")) as observed:
        async with (
            hub_of(scripted_engine(0.005), scheduler=free_running()) as hub,
            MicroNode.connect(hub.address, drafter=None, observers=observed.observers) as node,
        ):
            events = [event async for event in node.generate(PROMPT, asked(20))]
        finished_s = time.monotonic()
    assert isinstance(events[-1], Finish)
    assert time.monotonic() - finished_s < 5


class Opened(HubObserver):
    """Notes which requests the hub's sessions serve."""

    def __init__(self) -> None:
        self.traces: list[str] = []

    def opened(self, who: Who, begin: Begin, num_known: int, num_cached: int) -> None:
        self.traces.append(who.trace.trace_id)


@pytest.mark.parametrize("shaping", [Shaping.OFF, Shaping.REQUIRED])
async def test_a_stream_of_any_shape_says_which_request_it_serves(shaping: Shaping) -> None:
    opened, caller = Opened(), TraceContext.new()
    settings: dict[str, Any] = {"traffic_shape": shaping, "shape_tick_ms": 5, "shape_round_s": 0.2}
    async with (
        hub_of(scripted_engine(0.001), scheduler=free_running(), observers=[opened], **settings) as hub,
        MicroNode.connect(hub.address, drafter=None) as node,
    ):
        _ = [event async for event in node.generate(PROMPT, asked(4), trace=caller)]
    assert opened.traces == [caller.trace_id]

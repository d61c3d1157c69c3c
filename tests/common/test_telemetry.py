"""What telemetry is set up with, and what it shows of itself, the documentation included."""

from __future__ import annotations

import json
import logging
import re
import socket
import ssl
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Generator
from pathlib import Path

import pytest
import yaml
from tools.make_metrics_table import PAGE, filled

from baru_common.errors import ConfigError
from baru_common.instruments import OTHER, Bounded, Instrument, Kind, Ledger
from baru_common.logs import JsonFormatter
from baru_common.observers import Told
from baru_common.telemetry import TelemetryConfig, exporting
from baru_common.trace_context import TraceContext
from support.signers import self_signed

HEADER = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
NUM = Instrument("baru_num", Kind.COUNTER, "Some.", ("who",))
SHIPPED = PAGE.parent.parent / "deploy" / "observability"


def test_the_documentation_lists_every_instrument_and_every_alert() -> None:
    page = PAGE.read_text()
    assert page == filled(page), "run `python -m tools.make_metrics_table`"
    groups = yaml.safe_load((SHIPPED / "rules" / "alerts.yml").read_text())["groups"]
    alerts = [rule for group in groups for rule in group["rules"]]
    assert re.findall(r"^\| (Baru\w+) \|", page, re.MULTILINE) == [rule["alert"] for rule in alerts]
    assert all(rule["annotations"].keys() == {"summary", "runbook"} for rule in alerts)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"metrics": "0.0.0.0:9464"}, "not a loopback address"),
        ({"metrics": "9464"}, "not an address"),
        ({"metrics": "127.0.0.1:99999"}, "not a port"),
        ({"metrics": "[::]:9464", "tls": ("cert", "", "")}, "not a loopback address"),
    ],
)
def test_a_config_that_is_wrong_says_so(config: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        TelemetryConfig(**config)  # type: ignore[arg-type]


def exported(ledger: Ledger, config: TelemetryConfig) -> Generator[str, None, None]:
    with exporting(config, "test", [NUM], ledger, {}, {}) as telemetry:
        yield telemetry.address


def test_a_port_that_is_taken_and_files_that_are_missing_are_config_errors(tmp_path: Path) -> None:
    running = exported(Ledger([NUM]), TelemetryConfig("127.0.0.1:0"))
    with pytest.raises(ConfigError, match="cannot be served"):
        next(exported(Ledger([NUM]), TelemetryConfig(next(running))))
    files = (str(tmp_path / "cert"), str(tmp_path / "key"), str(tmp_path / "ca"))
    with pytest.raises(ConfigError, match="certificate files"):
        next(exported(Ledger([NUM]), TelemetryConfig("127.0.0.1:0", tls=files)))
    running.close()


def test_past_loopback_only_those_with_a_certificate_scrape(tmp_path: Path) -> None:
    cert, key, _ = self_signed(tmp_path)
    running = exported(Ledger([NUM]), TelemetryConfig("0.0.0.0:0", tls=(cert, key, cert)))
    url = f"https://127.0.0.1:{next(running).rpartition(':')[2]}/metrics"
    anybody = ssl.create_default_context(cafile=cert)
    with pytest.raises((urllib.error.URLError, ConnectionError, ssl.SSLError)):
        urllib.request.urlopen(url, context=anybody, timeout=10)
    with socket.create_connection(("127.0.0.1", int(url.split(":")[2].split("/")[0]))):  # stalls, and holds up nobody
        known = ssl.create_default_context(cafile=cert)
        known.load_cert_chain(cert, key)
        with urllib.request.urlopen(url, context=known, timeout=10) as answer:
            assert b"process_" in answer.read()
    running.close()


def test_what_is_done_together_is_seen_together() -> None:
    ledger, done = Ledger([NUM]), threading.Event()

    def count() -> None:
        for _ in range(20_000):
            with ledger:
                ledger.add(NUM.name, 1, ("a",))
                ledger.add(NUM.name, 1, ("b",))
        done.set()

    seen, usual_s = [], sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        counting = threading.Thread(target=count)
        counting.start()
        while not done.is_set():
            seen.append(ledger.snapshot()[NUM.name])
        counting.join()
    finally:
        sys.setswitchinterval(usual_s)
    assert all(series.get(("a",), 0) == series.get(("b",), 0) for series in seen)


def test_labels_are_bounded() -> None:
    label = Bounded(3)
    assert [label(name) for name in ("a", "b\n", "x" * 100, "d", "a")] == ["a", OTHER, OTHER, OTHER, "a"]


def test_an_observer_that_fails_stops_nobody(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[int] = []

    def tell(observer: str) -> None:
        if observer == "bad":
            raise ValueError
        heard.append(1)

    told = Told(["bad", "good"])
    told(tell)
    told(tell)
    assert len(heard) == 2
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    "header",
    [
        "",
        HEADER[:-3],
        HEADER.upper(),
        "ff" + HEADER[2:],
        HEADER + "-more",
        re.sub("-4bf9.{28}-", f"-{'0' * 32}-", HEADER),
        re.sub("-00f0.{12}-", f"-{'0' * 16}-", HEADER),
    ],
)
def test_a_trace_header_that_is_none_is_ignored(header: str) -> None:
    assert TraceContext.parse(header) is None


def test_a_trace_header_is_read_and_written() -> None:
    trace = TraceContext.parse(HEADER)
    assert trace == TraceContext("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7", sampled=True)
    assert trace is not None
    assert trace.header == HEADER
    assert TraceContext.parse("cc" + HEADER[2:] + "-what-comes-later")
    assert TraceContext.parse(TraceContext.new().header)


def test_a_log_line_is_one_json_object() -> None:
    record = logging.makeLogRecord({"msg": "two\nlines %d", "args": (1,), "levelname": "INFO", "trace_id": "t"})
    line = JsonFormatter().format(record)
    assert "\n" not in line
    assert json.loads(line)["message"] == "two\nlines 1"
    assert json.loads(line)["trace_id"] == "t"

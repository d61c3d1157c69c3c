"""The console's state, what it warns of, and whom it lets look."""

from __future__ import annotations

import asyncio
import itertools
import re
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest

from baru_common.certificates import HUB_HOST
from baru_common.errors import ConfigError
from baru_common.frames import Usage
from baru_common.identity import Role
from baru_common.tls import TlsFiles
from baru_common.trace_context import TraceContext
from baru_common.waiting import within
from baru_hub.config import HubConfig
from baru_hub.console import app, server
from baru_hub.console.alerts import alerts
from baru_hub.console.server import running_console
from baru_hub.console.state import MAX_CELLS, MAX_EVENTS, MAX_NODES, ConsoleState
from baru_hub.observing import Begin, Ended, Part, Stepped, Who
from baru_hub.scene import SceneChange, Scope
from baru_hub.stability import Change
from support.hubs import LOOPBACK, hub_of
from support.kits import kit
from support.link import scripted_engine

CONSOLE = replace(LOOPBACK, console="127.0.0.1:0")


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def _who(node: str, session: str = "s") -> Who:
    return Who(session, f"spiffe://kit/node/{node}", "ngram", TraceContext.new())


def _part(who: Who, verified: int, accepted: int, emitted: int, guessed: int = 0) -> Part:
    return Part(who, 0, 4, verified, accepted, guessed, emitted, 1, 0, 0, 0.02)


def step(*parts: Part) -> Stepped:
    return Stepped(parts, 0.02, 0.0, 0.0)


def test_cells_say_how_each_id_came_about() -> None:
    state, who = ConsoleState(Clock()), _who("one")
    state.opened(who, Begin.NEW, 3, 0)
    for part in (
        _part(who, 4, 2, 3),
        _part(who, 2, 2, 3),
        _part(who, 0, 0, 1),
        _part(who, 3, 1, 4, guessed=2),
        _part(who, 0, 0, 0),
    ):
        state.stepped(step(part))
    (session,) = state.told()["sessions"]
    assert session["cells"] == "aaxxc" + "aab" + "p" + "axxggc"
    assert (session["tokens"], session["length"], session["depth"]) == (11, 2.75, 4)


def test_figures_are_of_the_last_whole_seconds() -> None:
    clock = Clock()
    state, who = ConsoleState(clock), _who("one")
    state.opened(who, Begin.NEW, 3, 0)
    for _ in range(50):  # ten a second
        state.stepped(step(_part(who, 4, 3, 4)))
        clock.now_s += 0.1
    (node,) = state.told()["nodes"]
    assert (node["tokens_per_s"], node["acceptance"], node["length"]) == (40.0, 0.75, 4.0)
    clock.now_s += 20
    (node,) = state.told()["nodes"]
    assert (node["tokens_per_s"], node["acceptance"], node["idle_s"]) == (0.0, None, 20.1)


def test_links_sessions_and_what_happened() -> None:
    clock = Clock()
    state, who = ConsoleState(clock), _who("one")
    state.opened(who, Begin.NEW, 3, 0)
    assert state.told()["nodes"][0]["link"] == "up"
    state.orphaned(who)
    assert (state.told()["nodes"][0]["link"], state.told()["sessions"][0]["state"]) == ("cut", "cut")
    state.opened(who, Begin.RESUMED, 3, 0)
    assert state.told()["nodes"][0]["link"] == "up"
    state.changed(SceneChange(Scope.NODE, who, Change(1, 2, 0.8, 0.4, 0.99)))
    state.ended(Ended(who, "ENGINE_FAILURE", failed=True, usage=Usage(*[0] * 9)))
    told = state.told()
    assert (told["nodes"][0]["link"], told["sessions"], told["ended"][0]["state"]) == ("idle", [], "ENGINE_FAILURE")
    assert [event["what"] for event in told["events"]] == [
        "a session of one failed: ENGINE_FAILURE",
        "acceptance of one went from 80% to 40%",
        "one is back, and goes on",
        "the link to one is cut",
    ]


def test_it_is_bounded_whatever_nodes_do() -> None:
    state = ConsoleState(Clock())
    for number in range(1000):
        who = _who(f"n{number}", f"s{number}")
        state.opened(who, Begin.NEW, 3, 0)
        state.orphaned(who)
        state.refused("CAPACITY_EXHAUSTED")
    for _ in range(1000):
        state.stepped(step(_part(_who("n999", "s0"), 4, 2, 3)))
    told = state.told()
    assert len(told["nodes"]) == MAX_NODES
    assert len(told["events"]) == MAX_EVENTS
    assert len(told["sessions"]) == 32 < told["num_sessions"] <= 128
    assert max(len(session["cells"]) for session in told["sessions"]) == MAX_CELLS


def _told(**changes: Any) -> dict[str, Any]:
    hub = {"draining": False, "kv_cache_usage": 0.2, "sessions": {}} | changes.pop("hub", {})
    posture = {"problem": "", "canary": []} | changes.pop("posture", {})
    nodes = [{"name": "two", "link": "up", "drafter": "ngram", "acceptance_5min": 0.4, "cuts_15min": 5}]
    nodes = [nodes[0] | changed for changed in changes.pop("nodes", [{}])]
    return {"hub": hub, "posture": posture, "nodes": nodes, "refused": {}, "failed": {}, "slow_step_s": 0.1} | changes


@pytest.mark.parametrize(
    ("changes", "level", "what"),
    [
        ({"nodes": [{"name": "one", "link": "cut"}, {}]}, "warning", "no link to one"),
        ({"nodes": [{"cuts_15min": 6}]}, "warning", "the link to two broke 6 times"),
        ({"nodes": [{"acceptance_5min": 0.09}]}, "warning", "of what two drafts with ngram, 9% is right"),
        ({"slow_step_s": 1.2}, "warning", "steps take 1.2 s"),
        ({"failed": {"ENGINE_FAILURE": 2}}, "critical", "2 sessions ended with ENGINE_FAILURE"),
        ({"hub": {"draining": True}}, "warning", "about to stop"),
        ({"hub": {"kv_cache_usage": 0.97}}, "warning", "97% of the pages"),
        ({"hub": {"sessions": {"unread": 1}}}, "warning", "does not read"),
        ({"refused": {"CAPACITY_EXHAUSTED": 3}}, "warning", "3 sessions were refused for lack of room"),
        ({"refused": {"PERMISSION_DENIED": 1}}, "warning", "somebody asked for what is not theirs"),
        ({"posture": {"problem": "no such tier"}}, "critical", "no such tier"),
        ({"posture": {"canary": [{"standing": "refused", "reason": "0% measured"}]}}, "critical", "0% measured"),
    ],
)
def test_what_asks_for_a_person(changes: dict[str, Any], level: str, what: str) -> None:
    assert alerts(_told()) == []
    (alert,) = alerts(_told(**changes))
    assert alert["level"] == level
    assert what in alert["what"]
    assert alert["todo"]


def test_the_worst_comes_first() -> None:
    found = alerts(_told(refused={"CAPACITY_EXHAUSTED": 1}, posture={"problem": "x"}))
    assert [alert["level"] for alert in found] == ["critical", "warning"]


def test_what_alerts_are_judged_by_is_kept_for_as_long_as_they_need() -> None:
    clock = Clock()
    state, who = ConsoleState(clock), _who("one")
    state.opened(who, Begin.NEW, 3, 0)
    for _ in range(7):
        state.orphaned(who)
    state.refused("PERMISSION_DENIED")
    state.ended(Ended(who, "ENGINE_FAILURE", failed=True, usage=Usage(*[0] * 9)))
    state.ended(Ended(who, "CANCELLED", failed=True, usage=Usage(*[0] * 9)))  # not the target's fault
    for second in range(300):
        told = state.told()
        assert (told["nodes"][0]["acceptance_5min"] is None) == (second <= 240)  # too early to say
        assert (told["refused"], told["failed"]) == ({"PERMISSION_DENIED": 1}, {"ENGINE_FAILURE": 1})
        state.stepped(step(_part(who, 100, 9, 10)))
        clock.now_s += 1
    state.stepped(Stepped((), 3.0, 0.0, 0.0))
    told = state.told()
    assert (told["nodes"][0]["acceptance_5min"], told["nodes"][0]["cuts_15min"]) == (pytest.approx(0.09), 7)
    assert told["slow_step_s"] == 0.02  # one of two hundred is no sign
    clock.now_s += 601
    told = state.told()
    assert (told["refused"], told["failed"], told["nodes"][0]["cuts_15min"]) == ({}, {}, 0)
    assert told["nodes"][0]["acceptance_5min"] is None


# -- who may look


async def test_only_pages_of_its_own_may_call_it() -> None:
    """A foreign name (DNS rebinding) is refused; nothing but GET; nothing may be loaded."""
    async with (
        hub_of(scripted_engine(0.01)) as hub,
        running_console(CONSOLE, hub, ConsoleState(), None) as url,
        httpx2.AsyncClient(base_url=url) as http,
    ):
        page = await http.get("/")
        assert "default-src 'none'" in page.headers["content-security-policy"]
        assert "unsafe" not in page.headers["content-security-policy"]
        assert (await http.get("/", headers={"Host": "evil.example"})).status_code == 400
        assert (await http.post("/state")).status_code == 405
        state = (await http.get("/state")).json()
        assert state["hub"]["target"].startswith("simulated")


async def test_viewers_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many come in the same moment; a place that is left is free again."""
    monkeypatch.setattr(app, "MAX_VIEWERS", 1)
    monkeypatch.setattr(app, "TICK_S", 0.02)
    async with (
        hub_of(scripted_engine(0.01)) as hub,
        running_console(CONSOLE, hub, ConsoleState(), None) as url,
        httpx2.AsyncClient(base_url=url) as http,
    ):

        async def look() -> int:
            async with http.stream("GET", "/events") as answer:
                if answer.status_code == 200:
                    assert (await anext(answer.aiter_lines())).startswith("retry: ")
                    await asyncio.sleep(0.2)
                return int(answer.status_code)

        assert sorted(await asyncio.gather(*[look() for _ in range(5)])) == [200, 503, 503, 503, 503]
        while await look() != 200:  # noqa: ASYNC110 - it notices that nobody is there when it sends next
            await asyncio.sleep(0.02)


async def test_a_viewer_that_does_not_read_gets_the_latest_and_loses_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it left unread is little, whatever time it stood still; one that is gone is not waited for."""
    monkeypatch.setattr(app, "MAX_VIEWERS", 1)
    monkeypatch.setattr(app, "TICK_S", 0.01)
    made = itertools.count()
    monkeypatch.setattr(server, "told", lambda *_: {"n": next(made), "padding": "." * 4_000})
    loop = asyncio.get_running_loop()
    async with hub_of(scripted_engine(0.01)) as hub:
        async with running_console(CONSOLE, hub, ConsoleState(), None) as url:
            with closing(await _viewer(url)) as slow:
                await asyncio.sleep(1)
                latest, seen = next(made), b""
                while not (numbers := [int(n) for n in re.findall(rb'"n":(\d+),', seen)]) or numbers[-1] < latest:
                    seen += await loop.sock_recv(slow, 65536)
            assert len([number for number in numbers if number < latest]) < 24  # of a hundred
        monkeypatch.setattr(server, "_GIVE_UP_S", 0.3)
        async with (
            running_console(CONSOLE, hub, ConsoleState(), None) as url,
            httpx2.AsyncClient(base_url=url) as http,
        ):
            with closing(await _viewer(url)):
                while await _look(http) != 200:  # noqa: ASYNC110
                    await asyncio.sleep(0.1)


async def _look(http: httpx2.AsyncClient) -> int:
    async with http.stream("GET", "/events") as answer:
        return int(answer.status_code)


async def _end(lines: AsyncIterator[str]) -> None:
    async for _ in lines:
        pass


async def _viewer(url: str) -> socket.socket:
    """One that asks for the events and reads none."""
    address = urlsplit(url)
    viewer = socket.socket()
    viewer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    viewer.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(viewer, (address.hostname, address.port))
    await loop.sock_sendall(viewer, b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
    return viewer


async def test_past_loopback_observers_and_operators_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a certificate of the kit that is not revoked, at a name of the hub's; nobody else gets past the handshake,
    or further. Who is revoked while looking sees no more."""
    monkeypatch.setattr(app, "TICK_S", 0.02)
    made, others = kit(tmp_path), kit(tmp_path, "other")
    config = replace(CONSOLE, console="0.0.0.0:0", tls=made.hub)

    def caller(folder: Path | None) -> httpx2.AsyncClient:
        trust = ssl.create_default_context(cafile=str(made.hub / "ca.pem"))
        trust.check_hostname = False
        if folder:
            files = TlsFiles.of(folder, Role.OBSERVER, Role.OPERATOR, Role.NODE)
            trust.load_cert_chain(files.certificate, files.key)
        return httpx2.AsyncClient(verify=trust, base_url=url)

    async def look(folder: Path | None, host: str = f"one.{HUB_HOST}") -> int:
        async with caller(folder) as http:
            return int((await http.get("/", headers={"Host": host})).status_code)

    async with (
        hub_of(scripted_engine(0.01), tls=made.hub) as hub,
        running_console(config, hub, ConsoleState(), None) as url,
    ):
        assert url.startswith("https://")
        assert await look(made.issue("eve", Role.OBSERVER)) == 200
        assert await look(made.folder / "eve", "evil.example") == 400
        assert await look(made.issue("olga", Role.OPERATOR)) == 200
        assert await look(made.issue("alpha")) == 403
        for stranger in (None, others.issue("eve", Role.OBSERVER)):
            with pytest.raises(httpx2.TransportError):
                await look(stranger)
        headers = {"Host": f"one.{HUB_HOST}"}
        async with caller(made.folder / "eve") as http, http.stream("GET", "/events", headers=headers) as events:
            lines = events.aiter_lines()
            assert (await anext(lines)).startswith("retry: ")
            made.revoke("eve")
            await within(_end(lines), 5)
        assert await look(made.folder / "eve") == 403


def test_an_address_that_cannot_be_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="anybody could look"):
        HubConfig(console="0.0.0.0:8080")
    with pytest.raises(ConfigError, match="is not an address"):
        HubConfig(console="8080", tls=kit(tmp_path).hub)

"""Group G of the public bug reports, the link: it breaks, stalls, falls silent, and the output is as it always was."""

from __future__ import annotations

import asyncio
import gc
import random
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle, islice, pairwise
from typing import Any

import grpc
import psutil
import pytest

from baru_common.channel_options import CLIENT_OPTIONS, SERVER_OPTIONS, server_options
from baru_common.errors import BaruError, EngineFailure, Superseded
from baru_common.frames import DrafterInfo, HubFrame, Open, Opened, Resume, Verdict
from baru_hub import server
from baru_hub.engines import Feed
from baru_hub.engines.simulated import DeviceProfile, SimulatedEngine
from baru_hub.engines.transformers import TransformersEngine
from baru_hub.live import LiveSession, Resident
from baru_hub.servicer import DraftingServicer
from baru_micro import LinkState, MicroNode, Step
from baru_micro.transport import HubChannel, HubStream
from support.fault_proxy import FaultProxy
from support.faults import Fault, Lab, LabKind
from support.hubs import hub_of
from support.link import PROMPT, WAIT_S, Local, Shown, Told, asked, script, scripted_engine, until
from support.lockstep import Lockstep, free_running
from support.netlab import OPEN
from support.processes import LEAP_S, CannotApply, End
from support.tiny import tiny_target, twin

HOLES = (Fault.BLACK_HOLE, Fault.BLACK_HOLE_UP, Fault.BLACK_HOLE_DOWN)
CUTS = (Fault.RST, Fault.FIN, Fault.BLACK_HOLE)
GRACE_S = 0.5
WITHOUT_NODE = ("down", "connecting")


def ci_and_full(name: str, ci: object, full: object, timeout_s: int = 600) -> pytest.MarkDecorator:
    """Both forms of a test: the short one, and the long one for `make test-full`."""
    long = pytest.param(full, id="full", marks=(pytest.mark.full, pytest.mark.timeout(timeout_s)))
    return pytest.mark.parametrize(name, [pytest.param(ci, id="ci"), long])


@asynccontextmanager
async def behind_a_proxy(engine: SimulatedEngine, **settings: Any) -> AsyncIterator[tuple[server.Hub, FaultProxy]]:
    """A hub in this process, on the real schedule, and a proxy before it."""
    settings = {"scheduler": free_running(), **settings}
    async with hub_of(engine, **settings) as hub, FaultProxy.open(hub.address) as proxy:
        yield hub, proxy


async def opening(channel: HubChannel, num_tokens: int, drafter: DrafterInfo | None = None) -> Open:
    """What the first frame of a stream says."""
    told = await channel.describe()
    return Open(PROMPT, asked(num_tokens), told.target_fingerprint, told.tokenizer_digest, drafter)


# -- G01: keepalive


def test_g01_the_ends_settings_belong_together() -> None:
    """What the client sends, the server allows: as often, and with no call open."""
    client, hub = dict(CLIENT_OPTIONS), dict(SERVER_OPTIONS)
    assert hub["grpc.http2.min_ping_interval_without_data_ms"] <= client["grpc.keepalive_time_ms"]
    for name in ("grpc.keepalive_permit_without_calls", "grpc.http2.max_pings_without_data"):
        assert client[name] == hub[name]
    for options in (client, hub):  # a peer whose kernel still answers is found dead, too
        assert options["grpc.http2.ping_timeout_ms"] <= 1000


@ci_and_full("silence_s", 6.0, 30.0)
async def test_g01_silence_ends_no_connection(silence_s: float) -> None:
    """With a stream that says nothing either way, and with no stream: no GOAWAY, and later the same connection."""
    patient = Lockstep(patience_s=1e6)
    async with AsyncExitStack() as stack:
        hub, proxy = await stack.enter_async_context(behind_a_proxy(scripted_engine(0.01), scheduler=patient))
        channels = [HubChannel(proxy.address, timeout_s=5.0) for _ in range(2)]
        for channel in channels:
            stack.push_async_callback(channel.close)
        silent, idle = channels
        stream = silent.open_stream()
        stream.send(await opening(silent, 5, DrafterInfo("silent")))
        frames = stream.frames()
        assert isinstance(await anext(frames), Opened)
        await idle.describe()

        await asyncio.gather(*(stays_ready(channel._channel, silence_s) for channel in channels))

        await idle.describe()
        patient.patience_s = 0.0
        hub.verifier._awake.set()
        assert [i async for frame in frames if isinstance(frame, Verdict) for i in frame.token_ids] == script(5)
        assert len((await proxy.report()).attempts_s) == len(channels)


async def stays_ready(channel: grpc.aio.Channel, for_s: float) -> None:
    """GOAWAY would make it idle."""
    await channel.channel_ready()
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(channel.wait_for_state_change(grpc.ChannelConnectivity.READY), for_s)


# -- G02: the cable is pulled


class SlowEngine(TransformersEngine):
    """A real target that takes its time over a step."""

    async def verify(self, feeds: Sequence[Feed]) -> Any:
        await asyncio.sleep(0.03)
        return await super().verify(feeds)


Held = Callable[[], int]
"""How much a hub holds for sessions: themselves, and pages where it has any."""


@asynccontextmanager
async def hub_at(lab: Lab) -> AsyncIterator[Held]:
    """A hub at the lab's end. Behind the proxy it is in this process and has a real target; else it is a program."""
    if lab.kind is LabKind.PROXY:
        engine = SlowEngine(twin(tiny_target()), kv_cache_mb=16)
        settings: dict[str, Any] = {"listen": lab.hub_listen, "orphan_grace_s": GRACE_S}
        async with hub_of(engine, scheduler=free_running(), **settings) as hub:
            yield lambda: hub.verifier.num_sessions + engine.pool.num_held
    else:
        options: dict[str, Any] = {"listen": lab.hub_listen, "step_s": 0.03, "orphan_grace_s": GRACE_S}
        async with Told.by(lab, End.HUB, "serve", **options) as hub_told:
            await hub_told.first(lambda line: line["event"] == "ready")
            yield lambda: hub_told.some(lambda line: line["event"] == "sessions")[-1]["num"]


@asynccontextmanager
async def generating(lab: Lab, held: Held, num_tokens: int = 480) -> AsyncIterator[Told]:
    """A node process in the middle of a generation."""
    async with Told.by(lab, End.NODE, "generate", hub=lab.address, num_tokens=num_tokens) as node:
        await until(lambda: len(node.some(lambda line: line.get("verified"))) >= 3)
        assert held() > 0
        yield node


async def pull_the_cable(lab: Lab, held: Held, hole: Fault) -> None:
    """The node goes on by itself within 3 s and says so, the hub gives the memory back within 10 s."""
    async with generating(lab, held) as node:
        await lab.apply(hole)
        cut_s = asyncio.get_running_loop().time()
        freed = asyncio.create_task(until(lambda: held() == 0, 10.0))
        own = await node.first(lambda line: line.get("verified") is False, 10.0)
        tokens_s = [cut_s, *(line["at_s"] for line in node.some(lambda line: "verified" in line)), own["at_s"]]
        after_s = sorted(at_s for at_s in tokens_s if cut_s <= at_s <= own["at_s"])
        assert max(later - earlier for earlier, later in pairwise(after_s)) <= 3.0, hole
        assert own["state"] in WITHOUT_NODE, hole
        await freed
    await lab.heal()


@pytest.mark.timeout(120)
async def test_g02_a_black_hole_is_noticed_at_both_ends() -> None:
    """Both ways, up and down, behind a proxy: its kernel goes on to acknowledge. The hub's target is real."""

    async def one(hole: Fault) -> None:
        async with FaultProxy.open() as lab, hub_at(lab) as held:
            await pull_the_cable(lab, held, hole)

    await asyncio.gather(*map(one, HOLES))


@pytest.mark.timeout(120)
async def test_g02_lost_frames_and_a_killed_node_are_noticed_at_both_ends() -> None:
    """The same where nothing acknowledges."""
    async with OPEN[LabKind.FRAMES]() as lab, hub_at(lab) as held:
        for hole in HOLES:
            await pull_the_cable(lab, held, hole)
        await kill_the_node(lab, held)


async def test_g02_a_killed_node_is_noticed() -> None:
    async with FaultProxy.open() as lab, hub_at(lab) as held:
        await kill_the_node(lab, held)


async def kill_the_node(lab: Lab, held: Held) -> None:
    """kill -9: 2 s and the grace later the hub holds nothing of it."""
    async with generating(lab, held):
        await lab.apply(Fault.NODE_KILL)
        await until(lambda: held() == 0, 2.0 + GRACE_S)


# -- G03: cut at any moment


@dataclass
class Streams:
    """What the hub's sessions say, and through which of their streams."""

    live: defaultdict[str, list[LiveSession]] = field(default_factory=lambda: defaultdict(list))
    """By session: those that were neither ended nor lost."""
    ended: Counter[str] = field(default_factory=Counter)
    """How many streams ended with each error."""
    most_at_once: int = 0
    """Of one session."""
    num_strays: int = 0
    """Verdicts through a stream that is not the session's latest."""

    def watch(self, patch: pytest.MonkeyPatch) -> None:
        attach, send = Resident.attach, LiveSession.send
        end, lose = LiveSession.end, LiveSession.lose

        def attached(resident: Resident) -> LiveSession:
            stream = attach(resident)
            of_session = self.live[resident.state.session_id]
            of_session.append(stream)
            self.most_at_once = max(self.most_at_once, len(of_session))
            return stream

        def sent(stream: LiveSession, frame: HubFrame) -> None:
            if isinstance(frame, Verdict) and stream is not self.live[stream.state.session_id][-1]:
                self.num_strays += 1
            send(stream, frame)

        def ended(stream: LiveSession, error: BaruError) -> None:
            self.ended[type(error).__name__] += 1
            self._over(stream)
            end(stream, error)

        def lost(stream: LiveSession) -> None:
            self._over(stream)
            lose(stream)

        patch.setattr(Resident, "attach", attached)
        patch.setattr(LiveSession, "send", sent)
        patch.setattr(LiveSession, "end", ended)
        patch.setattr(LiveSession, "lose", lost)

    def _over(self, stream: LiveSession) -> None:
        of_session = self.live[stream.state.session_id]
        if stream in of_session:
            of_session.remove(stream)


@dataclass(frozen=True)
class Load:
    num_generations: int
    num_cuts: int
    """In each."""
    step_s: float


async def cut(proxy: FaultProxy, shown: Shown, num_cuts: int, chance: random.Random) -> None:
    """Again and again, each time when the hub has been heard again."""
    for fault in islice(cycle(CUTS), num_cuts):
        num_steps = shown.num_steps
        await until(lambda num_steps=num_steps: shown.num_steps > num_steps)  # type: ignore[misc]
        await asyncio.sleep(chance.uniform(0.0, 0.15))
        assert shown.finish is None
        await proxy.apply(fault)
        await asyncio.sleep(chance.uniform(0.3, 1.4) if fault is Fault.BLACK_HOLE else 0.0)
        await proxy.heal()


@pytest.mark.timeout(120)
@ci_and_full("load", Load(3, 4, 0.04), Load(10, 10, 0.1))
async def test_g03_cuts_lose_and_double_nothing(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """RST, FIN and black holes at random moments of generations of 500 tokens, each over a connection of its own."""
    streams = Streams()
    streams.watch(monkeypatch)

    async def one(hub: server.Hub, seed: int) -> Shown:
        shown = Shown()
        async with (
            FaultProxy.open(hub.address, seed=seed) as proxy,
            MicroNode.connect(proxy.address, drafter=Local(0.8, token_ms=5, seed=seed)) as node,
        ):
            cutting = asyncio.create_task(cut(proxy, shown, load.num_cuts, random.Random(seed)))
            await shown.follow(node, 500)
            await cutting
        return shown

    async with hub_of(scripted_engine(load.step_s), scheduler=free_running()) as hub:
        outcomes = await asyncio.gather(*(one(hub, seed) for seed in range(load.num_generations)))
        await until(lambda: hub.verifier.num_sessions == 0, 10.0)
    for shown in outcomes:
        assert shown.ids == script(500)
    changes = Counter(change.state for shown in outcomes for change in shown.changes)
    assert changes[LinkState.DOWN] == changes[LinkState.UP] >= load.num_generations * load.num_cuts * 2 // 3
    assert (streams.most_at_once, streams.num_strays) == (1, 0)


async def test_g03_the_older_of_two_streams_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that comes back over another connection while the hub has not noticed: the new stream has the session."""
    streams = Streams()
    streams.watch(monkeypatch)
    async with behind_a_proxy(scripted_engine(0.02)) as (_, proxy):
        older, newer = HubChannel(proxy.address, timeout_s=5.0), HubChannel(proxy.address, timeout_s=5.0)
        try:
            start = await opening(older, 60)
            frames = sent_first(older.open_stream(), start)
            opened = await anext(frames)
            assert isinstance(opened, Opened)
            ids = await some_ids(frames, 5)
            ticket = Resume(opened.session_id, opened.session_key, opened.epoch, tuple(ids))
            rest = [f async for f in sent_first(newer.open_stream(), replace(start, resume=ticket))]
            assert isinstance(rest[0], Opened)
            assert (rest[0].continued, rest[0].session_id) == (True, opened.session_id)
            assert ids + [i for f in rest if isinstance(f, Verdict) for i in f.token_ids] == script(60)
            with pytest.raises(Superseded):
                await asyncio.wait_for(some_ids(frames, 60), WAIT_S)
        finally:
            await older.close()
            await newer.close()
    assert streams.ended == {"Superseded": 1}
    assert (streams.most_at_once, streams.num_strays) == (1, 0)


def sent_first(stream: HubStream, frame: Open) -> AsyncIterator[HubFrame]:
    stream.send(frame)
    return stream.frames()


async def some_ids(frames: AsyncIterator[HubFrame], num: int) -> list[int]:
    ids: list[int] = []
    while len(ids) < num:
        frame = await anext(frames)
        ids += frame.token_ids if isinstance(frame, Verdict) else ()
    return ids


# -- G05: who goes without a word


class Handlers:
    """How many calls of `Decode` the hub has open."""

    num_open = 0

    def watch(self, patch: pytest.MonkeyPatch) -> None:
        decode = DraftingServicer.Decode

        async def counted(servicer: DraftingServicer, requests: Any, context: Any) -> None:
            self.num_open += 1
            try:
                await decode(servicer, requests, context)
            finally:
                self.num_open -= 1

        patch.setattr(DraftingServicer, "Decode", counted)


@ci_and_full("num_drops", 50, 1000)
async def test_g05_a_dropped_iterator_ends_its_session(num_drops: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One token is read and the iterator forgotten: within 2 s nothing of it is left, though orphans are kept."""
    handlers = Handlers()
    handlers.watch(monkeypatch)
    async with behind_a_proxy(scripted_engine(0.005)) as (hub, proxy), MicroNode.connect(proxy.address) as node:
        for _ in range(num_drops):
            await read_one(node)
            gc.collect(1)
            await until(lambda: hub.verifier.num_sessions == handlers.num_open == 0, 2.0)


async def read_one(node: MicroNode) -> None:
    events = node.generate(PROMPT, asked(10_000))
    while not isinstance(await anext(events), Step):
        pass


@ci_and_full("num_streams", 300, 10_000, timeout_s=1200)
async def test_g05_streams_cancelled_in_mid_read_leak_nothing(num_streams: int) -> None:
    """Less than 30 MB, both ends together."""
    async with hub_of(scripted_engine(0.002), scheduler=free_running(), orphan_grace_s=0) as hub:
        channel = HubChannel(hub.address, timeout_s=5.0)
        start = await opening(channel, 10_000)

        async def cancel_some(num: int) -> None:
            for _ in range(num):
                stream = channel.open_stream()
                await some_ids(sent_first(stream, start), 1)
                stream.close()
            await until(lambda: hub.verifier.num_sessions == 0)
            gc.collect()

        await cancel_some(100)  # what is allocated once
        before = psutil.Process().memory_info().rss
        await cancel_some(num_streams)
        assert psutil.Process().memory_info().rss - before < 30 << 20
        await channel.close()


class Failing(SimulatedEngine):
    """One step fails: in its own way, or because what it waits for was cancelled."""

    error: BaseException | None = None

    async def verify(self, feeds: Sequence[Feed]) -> Any:
        if error := self.error:
            self.error = None
            raise error
        return await super().verify(feeds)


def fail_a_step(hub: server.Hub, error: BaseException) -> None:
    hub.verifier._engine.error = error  # type: ignore[attr-defined]


def cancel_the_loop(hub: server.Hub) -> None:
    assert hub.verifier._loop_task
    hub.verifier._loop_task.cancel()


@pytest.mark.parametrize(
    ("fail", "goes_on"),
    [
        pytest.param(partial(fail_a_step, error=RuntimeError("broken")), True, id="a-step-raises"),
        pytest.param(partial(fail_a_step, error=asyncio.CancelledError()), True, id="a-step-is-cancelled"),
        pytest.param(cancel_the_loop, False, id="the-loop-is-cancelled"),
    ],
)
async def test_g05_a_verification_that_fails_is_told(fail: Callable[[server.Hub], None], goes_on: bool) -> None:
    """The client has a status within 1 s, not none for ever; a step that fails does not end the hub."""
    async with (
        behind_a_proxy(Failing(DeviceProfile("failing", (0.02, 0.02), 0.0))) as (hub, proxy),
        MicroNode.connect(proxy.address, drafter=None) as node,
    ):
        shown = Shown()
        following = asyncio.create_task(shown.follow(node, 500))
        await until(lambda: shown.num_steps >= 3)
        fail(hub)
        with pytest.raises(EngineFailure):
            await asyncio.wait_for(following, 1.0)
        assert shown.ids == script(len(shown.ids))
        if goes_on:
            assert (await Shown().follow(node, 5)).ids == script(5)


# -- G09: time limits at the right level


class Hiccup:
    """Lets a step's time pass; one of them takes longer."""

    def __init__(self, at: int, for_s: float) -> None:
        self.at, self.for_s, self.num_steps = at, for_s, 0

    async def __call__(self, step_s: float) -> None:
        self.num_steps += 1
        await asyncio.sleep(self.for_s if self.num_steps == self.at else step_s)


async def undisturbed(engine: SimulatedEngine, num_tokens: int) -> Shown:
    """A generation through a good link, on a node that could decode by itself."""
    async with (
        behind_a_proxy(engine) as (_, proxy),
        MicroNode.connect(proxy.address, drafter=Local(0.0, token_ms=20)) as node,
    ):
        return await Shown().follow(node, num_tokens)


@ci_and_full("num_steps", 32, 240)
async def test_g09_what_takes_long_is_no_outage(num_steps: int) -> None:
    """A stream of steady tokens for 8 s (60 s); one step of 3 s, and heartbeats are answered meanwhile."""
    steady, delayed = await asyncio.gather(
        undisturbed(scripted_engine(0.25), num_steps),
        undisturbed(scripted_engine(0.05, Hiccup(20, 3.0)), 40),
    )
    for shown, num_tokens in ((steady, num_steps), (delayed, 40)):
        assert shown.ids == script(num_tokens)
        assert (shown.changes, shown.provisional) == ([], 0)
    assert steady.finish
    assert steady.finish.elapsed_s >= 0.25 * num_steps * 0.9
    assert delayed.finish
    assert delayed.finish.elapsed_s >= 3.0


async def test_g09_a_link_that_stalls_costs_that_part_only() -> None:
    """2 s in which nothing passes: ids of the node's own while it lasts, then the hub's again, to the right end."""
    async with (
        behind_a_proxy(scripted_engine(0.04)) as (_, proxy),
        MicroNode.connect(proxy.address, drafter=Local(0.8, token_ms=20)) as node,
    ):
        shown = Shown()
        following = asyncio.create_task(shown.follow(node, 150))
        await until(lambda: shown.num_steps >= 5)
        assert shown.provisional == 0
        await proxy.apply(Fault.BLACK_HOLE)
        await asyncio.sleep(2.0)
        await proxy.heal()
        assert shown.provisional > 0
        num_steps = shown.num_steps
        await until(lambda: shown.num_steps > num_steps + 3)
        provisional = shown.provisional
        await following
    assert [change.state for change in shown.changes] == [LinkState.DOWN, LinkState.UP]
    assert shown.provisional == provisional
    assert shown.ids == script(150)


@pytest.mark.parametrize("fault", [Fault.FIN, Fault.RST], ids=lambda fault: fault.name)
async def test_g09_a_connection_that_was_cut_while_idle_is_no_error(fault: Fault) -> None:
    """The user thinks, a proxy ends the idle connection: the next generation works, whether that was noticed or not."""
    async with (
        behind_a_proxy(scripted_engine(0.002)) as (_, proxy),
        MicroNode.connect(proxy.address, drafter="ngram") as node,
    ):
        for idle_s in (1.5, 0.3, 0.05, 0.01, 0.0, 0.0, 0.0):
            shown = await Shown().follow(node, 20)
            assert shown.ids == script(20)
            await proxy.apply(fault)
            await asyncio.sleep(idle_s)
        shown = await Shown().follow(node, 20)
        assert (shown.ids, shown.changes) == (script(20), [])


@asynccontextmanager
async def two_hubs(**settings: Any) -> AsyncIterator[tuple[list[server.Hub], MicroNode]]:
    """Two hubs of one target, and a node that knows both."""
    async with AsyncExitStack() as stack:
        opened = [behind_a_proxy(scripted_engine(0.03), **settings) for _ in range(2)]
        pairs = [await stack.enter_async_context(one) for one in opened]
        node = MicroNode.connect([proxy.address for _, proxy in pairs], drafter=Local(0.5, token_ms=10))
        yield [hub for hub, _ in pairs], await stack.enter_async_context(node)


async def test_g09_a_hub_that_drains_hands_over() -> None:
    """In mid-stream: the other hub goes on, well before the grace is over."""
    async with two_hubs() as ((first, second), node):
        shown = Shown()
        following = asyncio.create_task(shown.follow(node, 120))
        await until(lambda: shown.num_steps >= 5)
        assert (first.verifier.num_sessions, second.verifier.num_sessions) == (1, 0)
        await asyncio.wait_for(first.drain(20.0), 5.0)
        await until(lambda: second.verifier.num_sessions == 1, 5.0)
        await following
        assert shown.ids == script(120)
        assert shown.changes[0].state is LinkState.DRAINING
        assert shown.changes[-1].state is LinkState.UP


_AGED = {"max_connection_age_s": 1.0}


async def test_g09_a_stream_of_a_certain_age_is_opened_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hubs that let no connection live for longer than 1 s: the output takes several, and is as it should be."""
    monkeypatch.setattr(server, "server_options", lambda **limits: server_options(**limits | _AGED))
    async with two_hubs() as (_, node):
        shown = await Shown().follow(node, 120)
    assert shown.ids == script(120)
    assert sum(change.state is LinkState.UP for change in shown.changes) >= 1


# -- G11: clocks


@pytest.mark.parametrize(
    "offsets_s",
    [
        pytest.param((-LEAP_S, LEAP_S, 0), id="from-1970-into-the-future"),
        pytest.param((-600, 600, 0), id="ten-minutes-wrong"),
    ],
)
async def test_g11_the_wall_clock_of_a_node_means_nothing(offsets_s: Sequence[int]) -> None:
    """It starts wrong and leaps in mid-stream, forwards and back: nothing times out, and the ids are right."""
    async with FaultProxy.open() as lab:
        try:
            lab.processes.step_clock(End.NODE, offsets_s[0])
        except CannotApply as why:
            pytest.skip(str(why))
        async with (
            hub_of(scripted_engine(0.05), scheduler=free_running(), listen=lab.hub_listen) as hub,
            Told.by(lab, End.NODE, "generate", hub=lab.address, num_tokens=80) as node,
        ):
            for offset_s in offsets_s[1:]:
                num_lines = len(node.lines)
                await until(lambda num=num_lines: len(node.lines) > num + 3)  # type: ignore[misc]
                lab.processes.step_clock(End.NODE, offset_s)
            finish = await node.first(lambda line: line["event"] == "Finish")
            assert hub.verifier.num_sessions == 0
    assert finish["ids"] == script(80)
    assert 0.0 < finish["elapsed_s"] < WAIT_S
    assert {line["event"] for line in node.lines} == {"Started", "Step", "Finish"}
    assert {line["state"] for line in node.lines} <= {"up", "suspect"}
    clocks_s = [line["clock_s"] for line in node.lines]
    assert max(clocks_s) - min(clocks_s) > (max(offsets_s) - min(offsets_s)) - 60.0


# -- many nodes at once


@pytest.mark.timeout(120)
@ci_and_full("num_nodes", 100, 200)
async def test_reconnections_are_spread_over_time(num_nodes: int) -> None:
    """All lose their hub at once, and 2 s later one is back that knows nothing: no 100 ms see more than a tenth of the
    attempts. Of 100 nodes that is few attempts, so their short form leaves something to chance."""
    num_tokens = 12
    settings: dict[str, Any] = {"max_sessions": num_nodes, "node_silence_s": 20.0, "max_calls_per_s": 1000.0}

    def hub() -> AbstractAsyncContextManager[server.Hub]:
        return hub_of(scripted_engine(0.4), scheduler=free_running(), **settings)

    async with hub() as first, hub() as second, FaultProxy.open(first.address) as lab, FaultProxy.open() as nowhere:
        options: dict[str, Any] = {"hub": lab.address, "num_tokens": num_tokens, "num_nodes": num_nodes}
        async with Told.by(lab, End.NODE, "fleet", **options) as nodes:
            await until(lambda: len(nodes.some(lambda line: line["event"] == "begun")) == num_nodes)
            num_before = len((await lab.report()).attempts_s)
            lab.target = nowhere.hub_listen
            await lab.reset()
            await asyncio.sleep(2.0)
            lab.target = second.address
            await until(lambda: len(nodes.some(lambda line: line["event"] == "Finish")) == num_nodes)
            assert second.verifier.num_sessions == 0
        attempts_s = (await lab.report()).attempts_s[num_before:]
    ends = nodes.some(lambda line: line["event"] == "Finish")
    assert all(line["ids"] == script(num_tokens) for line in ends)
    assert all(line["changes"] == ["down", "up"] for line in ends)
    assert len(attempts_s) >= num_nodes
    tenth = len(attempts_s) / 10
    assert most_within(attempts_s, 0.1) <= tenth + (5 * tenth**0.5 if num_nodes < 200 else 0)


def most_within(times_s: Sequence[float], window_s: float) -> int:
    """The most of them that any window of this length holds."""
    times = sorted(times_s)
    return max(sum(start <= at < start + window_s for at in times[i:]) for i, start in enumerate(times))

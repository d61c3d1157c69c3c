"""The labs do to a link what they say: seen by plain TCP through them, and by their own counters."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from support.fault_proxy import RETRANSMIT_S, FaultProxy
from support.faults import REORDER_S, Conditions, Fault, Lab, LabKind, Place
from support.netlab import OPEN, NetLab, missing
from support.processes import LEAP_S, CannotApply, End

WAIT_S = 10.0
"""What must come, comes within this."""
QUIET_S = 0.15
"""What must not come, has not come after this."""
RATED_S = 0.6
DATA = random.Random(7).randbytes(100_000)

both = pytest.mark.parametrize("kind", list(LabKind), ids=lambda kind: kind.value)


class Peer:
    """One end of a TCP connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    def send(self, data: bytes) -> None:
        self._writer.write(data)

    async def receive(self, num_bytes: int) -> bytes:
        return await asyncio.wait_for(self._reader.readexactly(num_bytes), WAIT_S)

    async def end(self) -> bytes:
        """What comes until the connection ends; raises if it is reset."""
        return await asyncio.wait_for(self._reader.read(), WAIT_S)

    async def hears_nothing(self) -> bool:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(self._reader.readexactly(1), QUIET_S)
        return True

    async def close(self) -> None:
        """At once, whatever is still to be sent."""
        self._writer.transport.abort()
        with suppress(ConnectionError):
            await self._writer.wait_closed()


async def connect(lab: Lab) -> Peer:
    host, port = lab.address.split(":")
    socket = lab.tcp_socket(End.NODE)
    try:
        await asyncio.wait_for(asyncio.get_running_loop().sock_connect(socket, (host, int(port))), WAIT_S)
    except OSError:
        socket.close()
        raise
    return Peer(*await asyncio.open_connection(sock=socket))


class Hub:
    """Listens at the hub's end and hands out who connects."""

    def __init__(self) -> None:
        self.accepted: asyncio.Queue[Peer] = asyncio.Queue()

    @classmethod
    @asynccontextmanager
    async def at(cls, lab: Lab) -> AsyncIterator[Hub]:
        hub, peers = cls(), list[Peer]()
        host, port = lab.hub_listen.split(":")
        socket = lab.tcp_socket(End.HUB)
        socket.bind((host, int(port)))

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            peers.append(Peer(reader, writer))
            hub.accepted.put_nowait(peers[-1])

        server = await asyncio.start_server(accept, sock=socket)
        try:
            yield hub
        finally:
            server.close()
            for peer in peers:
                await peer.close()

    async def peer(self) -> Peer:
        return await asyncio.wait_for(self.accepted.get(), WAIT_S)


@asynccontextmanager
async def linked(kind: LabKind) -> AsyncIterator[tuple[Lab, Peer, Peer]]:
    """A lab, and both ends of a connection through it that has carried a byte each way."""
    async with OPEN[kind]() as lab, Hub.at(lab) as listening:
        node = await connect(lab)
        hub = await listening.peer()
        node.send(b"?")
        assert await hub.receive(1) == b"?"
        hub.send(b"!")
        assert await node.receive(1) == b"!"
        yield lab, node, hub
        await node.close()


async def round_trip_s(node: Peer, hub: Peer) -> float:
    started_s = time.monotonic()
    node.send(b"a")
    await hub.receive(1)
    hub.send(b"b")
    await node.receive(1)
    return time.monotonic() - started_s


def test_every_fault_says_where_it_can_be_had() -> None:
    """None is left out by both labs, no two are one, and process faults are had anywhere."""
    assert len(Fault) == len(Fault.__members__) == 18
    assert all(fault.labs for fault in Fault)
    assert all(fault.labs == frozenset(LabKind) for fault in Fault if fault.place is Place.PROCESS)


@both
async def test_what_a_lab_cannot_do_it_refuses(kind: LabKind) -> None:
    async with OPEN[kind]() as lab:
        for fault in Fault:
            if kind not in fault.labs:
                with pytest.raises(CannotApply):
                    await lab.apply(fault)


@both
async def test_a_reset_is_a_reset_at_both_ends(kind: LabKind) -> None:
    async with linked(kind) as (lab, node, hub):
        await lab.apply(Fault.RST)
        for peer in (node, hub):
            with pytest.raises(ConnectionResetError):
                await peer.end()


async def test_an_end_is_an_end_at_both_ends() -> None:
    """And not a reset, though bytes were under way."""
    async with linked(LabKind.PROXY) as (lab, node, hub):
        node.send(b"unread")
        await lab.apply(Fault.FIN)
        assert await node.end() == b""
        assert await hub.end() in (b"", b"unread")


@both
@pytest.mark.parametrize("fault", [Fault.BLACK_HOLE_UP, Fault.BLACK_HOLE_DOWN, Fault.BLACK_HOLE])
async def test_a_black_hole_lets_nothing_through_and_then_the_stream_goes_on(kind: LabKind, fault: Fault) -> None:
    async with linked(kind) as (lab, node, hub):
        await lab.apply(fault)
        before = await lab.report()
        node.send(b"up")
        hub.send(b"down")
        if fault.value.up.cut:
            assert await hub.hears_nothing()
            assert (await lab.report()).up.num_delivered == before.up.num_delivered
        else:
            assert await hub.receive(2) == b"up"
        if fault.value.down.cut:
            assert await node.hears_nothing()
            assert (await lab.report()).down.num_delivered == before.down.num_delivered
        else:
            assert await node.receive(4) == b"down"
        await lab.heal()
        node.send(b".")
        hub.send(b".")
        assert (await hub.receive(3 if fault.value.up.cut else 1)).endswith(b".")
        assert (await node.receive(5 if fault.value.down.cut else 1)).endswith(b".")


@both
async def test_a_connection_into_a_black_hole_reaches_the_hub_once_the_link_is_back(kind: LabKind) -> None:
    async with OPEN[kind]() as lab, Hub.at(lab) as listening:
        await lab.apply(Fault.BLACK_HOLE)
        connecting = asyncio.create_task(connect(lab))
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(listening.accepted.get(), QUIET_S)
        await lab.heal()
        node = await connecting
        node.send(b"late")
        assert await (await listening.peer()).receive(4) == b"late"
        await node.close()


@both
async def test_delay_comes_on_top_of_the_round_trip(kind: LabKind) -> None:
    async with linked(kind) as (lab, node, hub):
        at_rest_s = await round_trip_s(node, hub)
        await lab.apply(Fault.DELAY)
        delayed_s = await round_trip_s(node, hub)
        assert 0.1 <= delayed_s < 0.3 + at_rest_s
        await lab.heal()
        assert await round_trip_s(node, hub) < delayed_s


@both
@pytest.mark.parametrize(
    "conditions",
    [
        pytest.param(Fault.JITTER.value.up, id="jitter"),
        pytest.param(Fault.LOSS_5.value.up, id="loss"),
        pytest.param(Fault.REORDER.value.up, id="reorder"),
        pytest.param(Conditions(duplicate=0.2), id="duplicate"),
        pytest.param(Conditions(0.002, 0.005, loss=0.01, reorder=0.05, duplicate=0.05), id="all"),
    ],
)
async def test_streams_stay_whole_and_in_order(kind: LabKind, conditions: Conditions) -> None:
    """Both directions at once, whatever happens to the frames."""
    async with linked(kind) as (lab, node, hub):
        await lab.shape(conditions, conditions)
        node.send(DATA)
        hub.send(DATA[::-1])
        up, down = await asyncio.gather(hub.receive(len(DATA)), node.receive(len(DATA)))
        assert up == DATA
        assert down == DATA[::-1]


@both
async def test_what_passes_is_counted(kind: LabKind) -> None:
    async with linked(kind) as (lab, node, hub):
        node.send(DATA)
        await hub.receive(len(DATA))
        report = await lab.report()
        assert report.up.num_bytes >= len(DATA) > report.down.num_bytes > 0
        assert report.up.num_frames == report.up.num_delivered
        assert (report.up.num_lost, report.up.num_duplicated, report.up.num_late) == (0, 0, 0)


async def test_loss_makes_frames_vanish() -> None:
    """The share that was told, of the frames offered; the other direction loses none."""
    async with linked(LabKind.FRAMES) as (lab, node, hub):
        await lab.shape(up=Fault.LOSS_20.value.up)
        for _ in range(3):
            node.send(DATA[:50_000])
            await hub.receive(50_000)
        report = await lab.report()
        assert report.up.num_delivered == report.up.num_frames - report.up.num_lost
        assert 0.2 / 3 < report.up.num_lost / report.up.num_frames < 0.2 * 3
        assert report.down.num_lost == 0


async def test_loss_through_the_proxy_is_the_wait_for_a_retransmission() -> None:
    async with linked(LabKind.PROXY) as (lab, node, hub):
        await lab.shape(up=Conditions(loss=0.5))
        started_s = time.monotonic()
        for _ in range(6):
            node.send(b"x")
            await hub.receive(1)
        num_lost = (await lab.report()).up.num_lost
        assert num_lost > 0
        assert time.monotonic() - started_s >= RETRANSMIT_S * num_lost


async def test_duplicates_and_late_frames_are_seen_on_the_wire() -> None:
    async with linked(LabKind.FRAMES) as (lab, node, hub):
        await lab.apply(Fault.DUPLICATE)
        node.send(2 * DATA)
        await hub.receive(2 * len(DATA))
        twice = (await lab.report()).up
        assert twice.num_duplicated > 0
        assert twice.num_late == 0
        await lab.apply(Fault.REORDER)
        node.send(2 * DATA)
        await hub.receive(2 * len(DATA))  # what came late was sent again meanwhile
        await asyncio.sleep(10 * REORDER_S)
        late = (await lab.report()).up
        assert late.num_late > 0
        assert late.num_duplicated == twice.num_duplicated


@both
async def test_a_rate_bounds_what_passes(kind: LabKind) -> None:
    """16 kB/s and two frames at once; the rest follows when the limit is gone."""
    async with linked(kind) as (lab, node, hub):
        await lab.apply(Fault.RATE)
        before, started_s = (await lab.report()).up.num_bytes, time.monotonic()
        node.send(DATA[:60_000])
        await asyncio.sleep(RATED_S)
        passed = (await lab.report()).up.num_bytes - before
        assert 16_000 * RATED_S / 3 < passed <= 2 * 1514 + 16_000 * (time.monotonic() - started_s)
        await lab.heal()
        healed_s = time.monotonic()
        assert await hub.receive(60_000) == DATA[:60_000]
        assert time.monotonic() - healed_s < 1.0  # it would take 3 s


async def test_frames_that_waited_are_delivered_when_the_link_heals() -> None:
    """None waits on for a time that no longer counts."""
    async with linked(LabKind.FRAMES) as (lab, node, hub):
        await lab.shape(up=Conditions(delay_s=600))
        node.send(b"x")
        assert await hub.hears_nothing()
        await lab.heal()
        assert await hub.receive(1) == b"x"
        report = await lab.report()
        assert report.up.num_delivered == report.up.num_frames


async def test_the_proxy_holds_little() -> None:
    """A sender into a black hole is stopped by its window."""
    async with linked(LabKind.PROXY) as (lab, node, _):
        await lab.apply(Fault.BLACK_HOLE_UP)
        node.send(bytes(8 << 20))
        await asyncio.sleep(QUIET_S)
        # One has passed; 32 are queued, one is on its way into the queue, one out of it.
        assert 1 < (await lab.report()).up.num_frames <= 1 + 32 + 2


@both
async def test_attempts_are_noted_when_they_come(kind: LabKind) -> None:
    async with OPEN[kind]() as lab, Hub.at(lab):
        started_s = time.monotonic()
        peers = [await connect(lab) for _ in range(5)]
        attempts_s = (await lab.report()).attempts_s
        assert len(attempts_s) == 5
        assert started_s <= min(attempts_s) <= max(attempts_s) <= time.monotonic()
        for peer in peers:
            await peer.close()


async def test_the_proxy_refuses_and_listens_again_at_the_same_address() -> None:
    async with FaultProxy.open() as proxy, Hub.at(proxy) as listening:
        address = proxy.address
        await proxy.refuse()
        with pytest.raises(ConnectionRefusedError):
            await connect(proxy)
        await proxy.heal()
        assert proxy.address == address
        node = await connect(proxy)
        await listening.peer()
        await node.close()


async def test_the_target_of_the_proxy_may_be_away_and_move() -> None:
    """With nobody there a connection is reset; then it reaches whoever is the target."""
    async with FaultProxy.open() as proxy:
        node = await connect(proxy)
        with pytest.raises(ConnectionResetError):
            await node.end()
        await node.close()
        async with FaultProxy.open() as other, Hub.at(other) as listening:
            proxy.target = other.hub_listen
            node = await connect(proxy)
            (await listening.peer()).send(b"here")
            assert await node.receive(4) == b"here"
            await node.close()


HUB = """
import socket, sys
host, port = sys.argv[1].split(":")
server = socket.create_server((host, int(port)))
print("ready", flush=True)
served = 0
while True:
    client, _ = server.accept()
    while client.recv(1):
        served += 1
        client.sendall(bytes([served]))
"""
"""Answers each byte with how many it has served: what it remembers is gone with it."""

NODE = """
import datetime, sys, time
print("ready", flush=True)
for line in sys.stdin:
    print(time.time(), datetime.datetime.now().timestamp(), time.monotonic(), flush=True)
"""


async def ready(process: asyncio.subprocess.Process) -> None:
    assert process.stdout
    assert await asyncio.wait_for(process.stdout.readline(), WAIT_S) == b"ready\n"


@asynccontextmanager
async def served(kind: LabKind) -> AsyncIterator[tuple[Lab, Peer]]:
    """A hub process behind a lab and a connection to it that it has answered once."""
    async with OPEN[kind]() as lab:
        await ready(await lab.processes.start(End.HUB, sys.executable, "-c", HUB, lab.hub_listen))
        node = await connect(lab)
        node.send(b"?")
        assert await node.receive(1) == b"\x01"
        yield lab, node
        await node.close()


@both
async def test_a_stalled_hub_answers_nothing_and_then_goes_on(kind: LabKind) -> None:
    async with served(kind) as (lab, node):
        await lab.apply(Fault.STALL)
        node.send(b"?")
        assert await node.hears_nothing()
        await lab.heal()
        assert await node.receive(1) == b"\x02"


@both
async def test_a_killed_hub_ends_its_connections_and_comes_back_by_healing(kind: LabKind) -> None:
    async with served(kind) as (lab, node):
        hub = lab.processes.process(End.HUB)
        await lab.apply(Fault.HUB_KILL)
        assert hub.returncode == -signal.SIGKILL
        assert await node.end() == b""
        await lab.heal()
        await ready(lab.processes.process(End.HUB))
        again = await connect(lab)
        again.send(b"?")
        assert await again.receive(1) == b"\x01"
        await again.close()


@both
async def test_a_hub_restarts_with_nothing(kind: LabKind) -> None:
    async with served(kind) as (lab, node):
        await lab.apply(Fault.HUB_RESTART)
        assert await node.end() == b""
        await ready(lab.processes.process(End.HUB))
        again = await connect(lab)
        again.send(b"?")
        assert await again.receive(1) == b"\x01"
        await again.close()


async def clocks(node: asyncio.subprocess.Process) -> tuple[float, ...]:
    """What the node reads now: two ways of asking the wall clock, and the monotonic clock."""
    assert node.stdin
    assert node.stdout
    node.stdin.write(b"\n")
    return tuple(map(float, (await asyncio.wait_for(node.stdout.readline(), WAIT_S)).split()))


@both
@pytest.mark.skipif(shutil.which("cc") is None, reason="a clock step needs a C compiler")
async def test_a_clock_step_moves_the_wall_clock_of_the_node_only(kind: LabKind) -> None:
    async with OPEN[kind]() as lab:
        node = await lab.processes.start(End.NODE, sys.executable, "-c", NODE, stdin=asyncio.subprocess.PIPE)
        await ready(node)
        before = await clocks(node)
        await lab.apply(Fault.CLOCK_STEP)
        stepped = await clocks(node)
        assert stepped[0] - before[0] == pytest.approx(LEAP_S, abs=WAIT_S)
        assert stepped[1] - before[1] == pytest.approx(LEAP_S, abs=WAIT_S)
        assert 0 <= stepped[2] - before[2] < WAIT_S
        assert abs(time.time() - before[0]) < WAIT_S
        await lab.heal()
        assert abs((await clocks(node))[0] - before[0]) < WAIT_S


@both
async def test_a_killed_node_stays_dead(kind: LabKind) -> None:
    async with OPEN[kind]() as lab:
        node = await lab.processes.start(End.NODE, sys.executable, "-c", NODE, stdin=asyncio.subprocess.PIPE)
        await lab.apply(Fault.NODE_KILL)
        assert node.returncode == -signal.SIGKILL
        await lab.heal()
        assert lab.processes.process(End.NODE) is node


def namespaces(lab_pid: int) -> list[str]:
    return [path.name for path in Path("/run/netns").glob(f"baru{lab_pid}-*")]


KILLED = """
import asyncio, sys
from support.netlab import NetLab
from support.processes import End

async def main():
    async with NetLab.open() as lab:
        hub = await lab.processes.start(End.HUB, sys.executable, "-c", "import time; time.sleep(600)")
        print(lab.pid, hub.pid, flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""


async def gone(what: Callable[[], bool]) -> bool:
    for _ in range(int(WAIT_S / 0.05)):
        if not what():
            return True
        await asyncio.sleep(0.05)
    return False


async def test_a_lab_of_frames_skips_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(pytest.skip.Exception, match="root"):
        await NetLab.open().__aenter__()


async def test_nothing_is_left_of_a_lab_whose_test_failed() -> None:
    seen: list[NetLab] = []

    async def fail() -> None:
        async with NetLab.open() as lab:
            seen.append(lab)
            assert not namespaces(lab.pid)

    with pytest.raises(AssertionError):
        await fail()
    assert not namespaces(seen[0].pid)


@pytest.mark.skipif(bool(missing()), reason=missing())
async def test_nothing_is_left_of_a_lab_whose_test_was_killed(tmp_path: Path) -> None:
    """Not even the processes in it."""
    test = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", KILLED),
        stdout=asyncio.subprocess.PIPE,
        cwd=Path(__file__).parents[1],
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )
    assert test.stdout
    lab_pid, hub_pid = map(int, (await asyncio.wait_for(test.stdout.readline(), WAIT_S)).split())
    assert len(namespaces(lab_pid)) == 2
    test.kill()
    await test.wait()
    assert await gone(lambda: bool(namespaces(lab_pid)))
    assert await gone(Path("/proc", str(hub_pid)).exists)


async def test_the_next_lab_removes_what_a_killed_wire_left() -> None:
    async with NetLab.open() as lab:
        os.kill(lab.pid, signal.SIGKILL)
        with pytest.raises((RuntimeError, ConnectionError)):
            await lab.report()
    assert namespaces(lab.pid)
    async with NetLab.open():
        assert not namespaces(lab.pid)

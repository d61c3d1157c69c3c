"""Two network namespaces and the wire between them, as a process: `python -m support.emulator`.

It makes the namespaces with a TAP device in each, carries Ethernet frames from one to the other as `Conditions` tell,
and removes everything once its standard input ends, however its parent did. Each line of input is a command in JSON,
each is answered with a line of counters:

    {"shape": [up, down]}   conditions of both directions
    {"reset": true}         RST to both ends of every TCP connection seen
    {}                      counters only

Both ends have addresses of the loopback range, so that programs which talk to loopback only can be tested, too.
Addresses of neighbours are fixed and IPv6 is off: every frame on the wire belongs to what is tested. The devices are
opened without IFF_VNET_HDR, so the kernel offloads nothing: frames are of at most 1,514 bytes, checksums are in them
and are verified on arrival.
"""

from __future__ import annotations

import fcntl
import heapq
import json
import os
import random
import re
import selectors
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from .faults import CLEAR, REORDER_S, Conditions, TokenBucket, Traffic
from .processes import End

IP = {End.NODE: "127.77.0.1", End.HUB: "127.77.0.2"}
MAC = {End.NODE: "02:00:00:00:00:01", End.HUB: "02:00:00:00:00:02"}
PEER = {End.NODE: End.HUB, End.HUB: End.NODE}

MAX_QUEUE_S = 1.0
"""A rate limit drops what would wait longer than this."""
_MAX_FRAMES = 10_000
_FRAME_BYTES = 2048
_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
_NAMESPACES = Path("/run/netns")
_OURS = re.compile(r"baru(\d+)-(?:node|hub)")


def ip(*arguments: str, batch: str = "") -> str:
    """Run `ip`; raises with what it said."""
    return subprocess.run(("ip", *arguments), input=batch, text=True, stdout=subprocess.PIPE, check=True).stdout


def namespace(end: End, pid: int) -> str:
    """The name says whose it is, so that what a killed emulator left can be told from what is in use."""
    return f"baru{pid}-{end.value}"


def open_end(end: End) -> int:
    """Make the namespace of that end with its device in it; return the file frames are read from and written to."""
    name = namespace(end, os.getpid())
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    made = fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", b"baru%d", _IFF_TAP | _IFF_NO_PI))
    device = made[:16].rstrip(b"\0").decode()
    ip("netns", "add", name)
    ip("link", "set", "dev", device, "netns", name)
    peer = PEER[end]
    setup = f"""
        link set dev {device} name link
        link set dev link addrgenmode none address {MAC[end]}
        link set dev lo up
        addr del 127.0.0.1/8 dev lo
        addr add 127.0.0.1/32 dev lo
        addr add {IP[end]}/30 dev link
        link set dev link up
        neigh add {IP[peer]} dev link lladdr {MAC[peer]} nud permanent
    """
    ip("-n", name, "-batch", "-", batch=setup)
    ip("netns", "exec", name, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/conf/link/route_localnet")
    return tap


def remove(name: str) -> None:
    """Remove a namespace and kill what runs in it."""
    for pid in ip("netns", "pids", name).split():
        os.kill(int(pid), signal.SIGKILL)
    ip("netns", "del", name)


def sweep() -> None:
    """Remove what an emulator that was killed left."""
    for path in _NAMESPACES.glob("baru*"):
        ours = _OURS.fullmatch(path.name)
        if ours and not Path("/proc", ours[1]).exists():
            remove(path.name)


@dataclass(frozen=True)
class Segment:
    """What a reset needs to know of a TCP segment in an Ethernet frame (IPv4)."""

    addresses: bytes
    """Source and destination, 8 bytes."""
    ports: bytes
    """Source and destination, 4 bytes."""
    next_seq: int
    ack: int
    flags: int

    SYN, RST, ACK = 0x02, 0x04, 0x10

    @classmethod
    def of(cls, frame: bytes) -> Segment | None:
        if frame[12:14] != b"\x08\x00" or frame[23] != socket.IPPROTO_TCP:
            return None
        start = 14 + 4 * (frame[14] & 15)
        (ip_bytes,) = struct.unpack_from("!H", frame, 16)
        ports, seq, ack, offset, flags = struct.unpack_from("!4sIIBB", frame, start)
        payload_bytes = 14 + ip_bytes - start - 4 * (offset >> 4)
        # SYN and FIN take a place in the sequence each.
        return cls(frame[26:34], ports, seq + payload_bytes + (flags >> 1 & 1) + (flags & 1) & 0xFFFFFFFF, ack, flags)

    def ends_before(self, other: Segment) -> bool:
        return (self.next_seq - other.next_seq) & 0xFFFFFFFF >= 1 << 31

    def reset_frame(self, macs: bytes) -> bytes:
        """The RST that follows this segment, as if from its sender."""
        tcp = struct.pack("!4sIIBBHHH", self.ports, self.next_seq, self.ack, 5 << 4, self.RST | self.ACK, 0, 0, 0)
        pseudo = self.addresses + struct.pack("!HH", socket.IPPROTO_TCP, len(tcp))
        tcp = _with_checksum(tcp, 16, pseudo)
        header = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(tcp), 0, 0, 64, socket.IPPROTO_TCP, 0) + self.addresses
        return macs + b"\x08\x00" + _with_checksum(header, 10) + tcp


def _with_checksum(header: bytes, at: int, pseudo: bytes = b"") -> bytes:
    total = sum(struct.unpack(f"!{(len(pseudo) + len(header)) // 2}H", pseudo + header))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return header[:at] + struct.pack("!H", ~total & 0xFFFF) + header[at + 2 :]


@dataclass
class Way:
    """One direction of the wire: frames wait in a heap until they are due."""

    write: Callable[[bytes], object]
    choose: random.Random
    conditions: Conditions = CLEAR
    traffic: Traffic = field(default_factory=Traffic)
    last: dict[bytes, tuple[bytes, Segment]] = field(default_factory=dict)
    """By connection: addresses of Ethernet and the segment that was delivered and ends last."""
    attempts_s: dict[tuple[bytes, int], float] = field(default_factory=dict)
    """By ports and initial sequence number: when the first SYN came."""
    _waiting: list[tuple[float, int, bytes]] = field(default_factory=list)
    _in_order_s: float = 0.0
    _latest: int = -1
    _bucket: TokenBucket = field(default_factory=TokenBucket)
    _serial: Iterator[int] = field(default_factory=count)

    @property
    def due_s(self) -> float | None:
        return self._waiting[0][0] if self._waiting else None

    def shape(self, conditions: Conditions) -> None:
        """Change the conditions; what waited under those before is due at once, in its order."""
        self.conditions = conditions
        self._waiting = [(0.0, serial, frame) for _, serial, frame in sorted(self._waiting, key=lambda w: w[1])]
        self._in_order_s = 0.0
        self._bucket = TokenBucket()

    def offer(self, frame: bytes, now_s: float) -> None:
        """Take a frame from the sender: lose it, or let it wait its time."""
        is_ = self.conditions
        self.traffic.num_frames += 1
        self._note_attempt(frame, now_s)
        if self.choose.random() < is_.loss or len(self._waiting) >= _MAX_FRAMES:
            self.traffic.num_lost += 1
            return
        queue_s = self._bucket.take(len(frame), is_.rate_bit_s, now_s)
        if queue_s > MAX_QUEUE_S:
            self._bucket.give_back(len(frame))
            self.traffic.num_lost += 1
            return
        due_s = now_s + queue_s + is_.delay_s + self.choose.random() * is_.jitter_s
        if self.choose.random() < is_.reorder:
            due_s += REORDER_S
        else:
            self._in_order_s = due_s = max(due_s, self._in_order_s)
        self._push(due_s, frame)
        if self.choose.random() < is_.duplicate:
            self.traffic.num_duplicated += 1
            self._push(due_s, frame)

    def deliver(self, now_s: float) -> None:
        """Hand what is due to the receiver; a cut link loses what is under way, too."""
        while self._waiting and self._waiting[0][0] <= now_s:
            _, serial, frame = heapq.heappop(self._waiting)
            if self.conditions.cut:
                self.traffic.num_lost += 1
                continue
            self.traffic.num_late += serial < self._latest
            self._latest = max(self._latest, serial)
            self.traffic.num_delivered += 1
            self.traffic.num_bytes += len(frame)
            self._note(frame)
            self.write(frame)

    def reset(self) -> None:
        """RST to the receiver of every connection seen."""
        for macs, segment in self.last.values():
            self.write(segment.reset_frame(macs))
        self.last.clear()

    def _push(self, due_s: float, frame: bytes) -> None:
        heapq.heappush(self._waiting, (due_s, next(self._serial), frame))

    def _note(self, frame: bytes) -> None:
        segment = Segment.of(frame)
        if segment is None:
            return
        connection = segment.addresses + segment.ports
        before = self.last.get(connection)
        if before is None or segment.flags & Segment.SYN or not segment.ends_before(before[1]):
            self.last[connection] = (frame[:12], segment)

    def _note_attempt(self, frame: bytes, now_s: float) -> None:
        segment = Segment.of(frame)
        if segment and segment.flags & (Segment.SYN | Segment.ACK) == Segment.SYN:
            self.attempts_s.setdefault((segment.ports, segment.next_seq), now_s)


class Wire:
    """Both directions, the commands, and the loop that serves them."""

    def __init__(self, taps: dict[End, int], seed: int) -> None:
        choose = random.Random(seed)
        self.up = Way(_writer(taps[End.HUB]), choose)
        self.down = Way(_writer(taps[End.NODE]), choose)
        self._pending = b""
        self._selector = selectors.DefaultSelector()
        for end, way in ((End.NODE, self.up), (End.HUB, self.down)):
            self._selector.register(taps[end], selectors.EVENT_READ, way)
        self._selector.register(sys.stdin, selectors.EVENT_READ, None)

    def run(self) -> None:
        """Until the input ends."""
        while True:
            for key, _ in self._selector.select(self._timeout_s()):
                if key.data is not None:
                    self._take_frames(key.fd, key.data)
                elif not self._obey():
                    return
            now_s = time.monotonic()
            self.up.deliver(now_s)
            self.down.deliver(now_s)

    def _timeout_s(self) -> float | None:
        due_s = [way.due_s for way in (self.up, self.down) if way.due_s is not None]
        return max(0.0, min(due_s) - time.monotonic()) if due_s else None

    def _take_frames(self, tap: int, way: Way) -> None:
        for _ in range(64):
            try:
                frame = os.read(tap, _FRAME_BYTES)
            except BlockingIOError:
                return
            way.offer(frame, time.monotonic())

    def _obey(self) -> bool:
        """Read and answer commands; False once there are none any more."""
        read = os.read(sys.stdin.fileno(), 65536)
        *lines, self._pending = (self._pending + read).split(b"\n")
        for line in lines:
            self._do(json.loads(line))
            answer(
                up=asdict(self.up.traffic), down=asdict(self.down.traffic), attempts_s=[*self.up.attempts_s.values()]
            )
        return bool(read)

    def _do(self, command: dict[str, Any]) -> None:
        if "shape" in command:
            for way, conditions in zip((self.up, self.down), command["shape"], strict=True):
                way.shape(Conditions(**conditions))
        if "reset" in command:
            self.up.reset()
            self.down.reset()


def _writer(tap: int) -> Callable[[bytes], object]:
    return lambda frame: os.write(tap, frame)


def answer(**told: object) -> None:
    print(json.dumps(told), flush=True)  # noqa: T201


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    sweep()
    try:
        taps = {end: open_end(end) for end in End}
        answer(pid=os.getpid())
        Wire(taps, seed=int(sys.argv[1])).run()
    finally:
        for end in End:
            if (_NAMESPACES / namespace(end, os.getpid())).exists():
                remove(namespace(end, os.getpid()))


if __name__ == "__main__":
    main()

"""Group J of the public bug reports, who may do what: every call of every service, with every wrong certificate."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from baru.drafting.v1 import drafting_pb2
from baru_common import wire
from baru_common.certificates import HUB_HOST, Certificate
from baru_common.discovery import Place
from baru_common.errors import BaruError, ConfigError, PermissionDenied, Unauthenticated
from baru_common.frames import HubFrame, Open, Opened, Resume
from baru_common.identity import Role
from baru_common.tls import MEMBERS, TlsFiles
from baru_hub.access import ALLOWED
from baru_hub.config import HubConfig
from baru_hub.observing import Ended, HubObserver
from baru_hub.server import Hub
from baru_micro import client
from baru_micro.transport import HubChannel
from support.hubs import hub_of
from support.kits import Kit, kit
from support.link import PROMPT, asked, scripted_engine, until
from support.lockstep import free_running

SERVICES = (drafting_pb2, health_pb2, reflection_pb2)
METHODS = tuple(
    f"/{service.full_name}/{method.name}"
    for module in SERVICES
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
)
UNKNOWN = "/baru.drafting.v1.DraftingService/Undo"
LONG_AGO = datetime.now(timezone.utc) - timedelta(days=40)
WAIT_S = 20.0
Code = grpc.StatusCode
REFUSALS = (Code.UNAVAILABLE, Code.UNAUTHENTICATED, Code.PERMISSION_DENIED)


@asynccontextmanager
async def trusted_hub(made: Kit, step_s: float = 0.01, **settings: Any) -> AsyncIterator[Hub]:
    engine = scripted_engine(step_s)
    async with hub_of(engine, scheduler=free_running(), tls=made.hub, reflection=True, **settings) as hub:
        yield hub


class Ends(HubObserver):
    """Notes which sessions are over."""

    def __init__(self) -> None:
        self.told: list[Ended] = []

    def ended(self, end: Ended) -> None:
        self.told.append(end)


# -- (b) every call, with every wrong certificate


@dataclass(frozen=True)
class Stranger:
    """What somebody connects with; no certificate in the folder: none is shown."""

    folder: Path | None
    shows: bool = True
    role: Role = Role.NODE

    def connect(self, address: str, authority: Path) -> grpc.aio.Channel:
        if self.folder is None:
            return grpc.aio.insecure_channel(address)
        pair = tuple((self.folder / f"{self.role.value}.{end}").read_bytes() for end in ("key", "pem"))
        own = grpc.ssl_channel_credentials(authority.read_bytes(), *(pair if self.shows else ()))
        return grpc.aio.secure_channel(address, own, options=[("grpc.ssl_target_name_override", HUB_HOST)])


def strangers(made: Kit, elsewhere: Kit) -> dict[str, tuple[Stranger, Callable[[str], grpc.StatusCode]]]:
    """Who they are, and how a method answers them. UNAVAILABLE: no connection comes about at all."""
    made.issue("revoked")
    made.revoke("revoked")
    nowhere, who, may_not = Code.UNAVAILABLE, Code.UNAUTHENTICATED, Code.PERMISSION_DENIED

    def observer(method: str) -> grpc.StatusCode:
        return Code.OK if method in ALLOWED[Role.OBSERVER] else may_not

    return {
        "plain": (Stranger(None), lambda _: nowhere),
        "no certificate": (Stranger(made.issue("shy"), shows=False), lambda _: nowhere),
        "another kit's": (Stranger(elsewhere.issue("alpha")), lambda _: nowhere),
        "expired": (Stranger(made.issue("late", lifetime=timedelta(days=1), now=LONG_AGO)), lambda _: nowhere),
        "a hub's": (Stranger(made.hub, role=Role.HUB), lambda _: nowhere),
        "revoked": (Stranger(made.folder / "revoked"), lambda _: who),
        "not on the list": (Stranger(made.issue("beta")), lambda _: may_not),
        "another role's": (Stranger(made.issue("eye", Role.OBSERVER), role=Role.OBSERVER), observer),
    }


async def answer(channel: grpc.aio.Channel, method: str) -> grpc.StatusCode:
    """Call a method with an empty message, whatever its kind: on the wire all are the same. OK: the method has it."""
    raw: Any = channel.stream_stream(method)
    call = raw(iter([b""]), timeout=WAIT_S)
    try:
        await call.read()
    except grpc.aio.AioRpcError as error:
        return error.code() if error.code() in REFUSALS else Code.OK
    finally:
        call.cancel()
    return Code.OK


async def test_j01b_every_call_with_every_wrong_certificate(tmp_path: Path) -> None:
    """Services are asked for their methods, so a new one is in here by itself. Nobody reaches a session; and those whom
    the hub would not even talk to are told why by their own side."""
    made, elsewhere = kit(tmp_path), kit(tmp_path, "elsewhere")
    cases, reached = strangers(made, elsewhere), []
    async with trusted_hub(made, allow=("alpha", "observer/eye", "revoked")) as hub:
        hub.verifier.open = lambda *_: reached.append(_)  # type: ignore[method-assign,assignment]
        for who, (stranger, expected) in cases.items():
            async with stranger.connect(hub.address, made.hub / "ca.pem") as channel:
                for method in (*METHODS, UNKNOWN):
                    assert (who, method, await answer(channel, method)) == (who, method, expected(method))
        assert not reached
        assert hub.verifier.num_sessions == 0
        alpha = Stranger(made.issue("alpha"))
        async with alpha.connect(hub.address, made.hub / "ca.pem") as channel:
            assert [await answer(channel, method) for method in METHODS if "Health" in method] == [Code.OK] * 3


def test_j01b_each_method_is_on_somebodys_list() -> None:
    """A method that is added must be given to somebody."""
    assert set(METHODS) <= set().union(*ALLOWED.values())
    assert UNKNOWN not in set().union(*ALLOWED.values())
    assert not ALLOWED[Role.HUB]


async def test_j01b_a_node_learns_what_is_wrong(tmp_path: Path) -> None:
    """gRPC says UNAVAILABLE to all of these; the node's error says what it is, and which file."""
    made, elsewhere = kit(tmp_path), kit(tmp_path, "elsewhere")
    alpha = made.issue("alpha")
    expired = made.issue("late", lifetime=timedelta(days=1), now=LONG_AGO)
    made.issue("gone")
    made.revoke("gone")
    trusting = elsewhere.issue("trusting")  # this kit's hub, too: but it is the hub that does not take it
    (trusting / "ca.pem").write_bytes((made.hub / "ca.pem").read_bytes() + (trusting / "ca.pem").read_bytes())
    one = TlsFiles.of(alpha, *MEMBERS)
    cases: dict[str, tuple[TlsFiles | None, str]] = {
        "plain": (None, "wants a certificate"),
        "expired": (TlsFiles.of(expired, *MEMBERS), r"late/node.pem expired on"),
        "another kit": (TlsFiles.of(elsewhere.issue("alpha"), *MEMBERS), r"is not signed by .*elsewhere/alpha/ca.pem"),
        "refused": (TlsFiles.of(trusting, *MEMBERS), r"does not take .*trusting/node.pem"),
        "revoked": (TlsFiles.of(made.folder / "gone", *MEMBERS), "has been revoked"),
        "another hub": (replace(one, hub="two"), "is not the hub two"),
    }
    async with trusted_hub(made) as hub:
        for files, words in cases.values():
            with pytest.raises(Unauthenticated, match=words) as told:
                await described(hub.address, files)
            assert told.value.hint
        await described(hub.address, one)
        await described(hub.address, replace(one, hub="one"))
    async with hub_of(scripted_engine(0.01), scheduler=free_running()) as plain:
        with pytest.raises(Unauthenticated, match="does not speak TLS"):
            await described(plain.address, one)


async def described(address: str, files: TlsFiles | None) -> None:
    channel = HubChannel(address, timeout_s=WAIT_S, tls=files)
    try:
        await channel.describe()
    finally:
        await channel.close()


async def test_j01b_no_node_can_pose_as_a_hub(tmp_path: Path) -> None:
    """Its certificate is of the kit, and a server may even be started with it; nobody talks to that."""
    made = kit(tmp_path)
    thief = made.issue("thief")
    server = grpc.aio.server()
    pair = ((thief / "node.key").read_bytes(), (thief / "node.pem").read_bytes())
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair]))
    await server.start()
    try:
        with pytest.raises(Unauthenticated, match="is not a hub of this kit"):
            await described(f"127.0.0.1:{port}", TlsFiles.of(made.issue("alpha"), *MEMBERS))
    finally:
        await server.stop(None)


async def test_j01b_a_hub_that_is_found_by_name_has_to_prove_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is announced proves nothing: the other hub of the same kit is no help, either."""
    made = kit(tmp_path)
    made.issue("alpha")
    async with trusted_hub(made) as hub:

        async def found(_names: object) -> list[Place]:
            return [Place(hub.address, identity)]

        monkeypatch.setattr(client, "resolved", found)
        for identity in ("spiffe://kit/hub/one", "spiffe://kit/hub/two"):
            with nullcontext() if identity.endswith("one") else pytest.raises(Unauthenticated, match="not the hub two"):
                async with client.MicroNode.connect("mdns:x", drafter=None, tls=made.folder / "alpha"):
                    pass


# -- (c) what is served where


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0", "192.0.2.1:7443", "hub.local:7443"])
def test_j01c_a_hub_for_others_needs_certificates(listen: str, tmp_path: Path) -> None:
    """It does not start without; loopback is the default and may be plain."""
    assert HubConfig().listen.startswith("127.0.0.1:")
    with pytest.raises(ConfigError, match="not a loopback address") as refused:
        HubConfig(listen=listen)
    assert "certs issue" in refused.value.hint
    assert HubConfig(listen=listen, tls=tmp_path).listen == listen


# -- (d) whose session it is


@asynccontextmanager
async def session_of(hub: Hub, folder: Path, resume: Resume | None = None) -> AsyncIterator[AsyncIterator[HubFrame]]:
    """Open a session, or ask to go on with one; the frames that come."""
    channel = HubChannel(hub.address, timeout_s=WAIT_S, tls=TlsFiles.of(folder, *MEMBERS))
    try:
        told = await channel.describe()
        stream = channel.open_stream()
        stream.send(Open(PROMPT, asked(400), told.target_fingerprint, told.tokenizer_digest, resume=resume))
        yield stream.frames()
    finally:
        await channel.close()


async def opened_in(frames: AsyncIterator[HubFrame]) -> Opened:
    frame = await anext(frames)
    assert isinstance(frame, Opened)
    return frame


async def test_j01d_another_nodes_session_is_out_of_reach(tmp_path: Path) -> None:
    """Not even with its key: neither gone on with, nor ended by being tried."""
    made = kit(tmp_path)
    async with trusted_hub(made, orphan_grace_s=60.0) as hub, session_of(hub, made.issue("alpha")) as frames:
        opened = await opened_in(frames)
        known = Resume(opened.session_id, opened.session_key, opened.epoch, (), ())
        async with session_of(hub, made.issue("beta"), known) as theirs:
            with pytest.raises(PermissionDenied, match="not this node's own"):
                await anext(theirs)
        await anext(frames)  # it goes on
        assert hub.verifier.num_sessions == 1
        async with session_of(hub, made.folder / "alpha", known) as again:
            assert (await opened_in(again)).continued


# -- what lasts


async def ended(frames: AsyncIterator[HubFrame]) -> BaruError:
    try:
        async for _ in frames:
            pass
    except BaruError as error:
        return error
    raise AssertionError("the stream ended well")


async def revoke(made: Kit) -> str:
    made.revoke("alpha")
    return "has been revoked"


async def strike_off(made: Kit) -> str:
    (made.folder / "list").write_text("beta\n")
    return "not on this hub's list"


@pytest.mark.parametrize("change", [revoke, strike_off])
async def test_j01_who_is_put_out_is_out_at_once(change: Callable[[Kit], Awaitable[str]], tmp_path: Path) -> None:
    """Streams and orphans end, and give back their memory, and observers are told of both; another node's session
    goes on."""
    made, ends = kit(tmp_path), Ends()
    alpha, beta = made.issue("alpha"), made.issue("beta")
    (made.folder / "list").write_text("alpha # to be put out\nbeta\n")
    async with (
        trusted_hub(made, 0.02, allow_file=made.folder / "list", orphan_grace_s=60.0, observers=[ends]) as hub,
        session_of(hub, alpha) as first,
        session_of(hub, beta) as other,
    ):
        await opened_in(other)
        gone = HubChannel(hub.address, timeout_s=WAIT_S, tls=TlsFiles.of(alpha, *MEMBERS))
        told = await gone.describe()
        request = Open(PROMPT, asked(400), told.target_fingerprint, told.tokenizer_digest)
        lost = gone.stub.Decode(iter([wire.encode_request(request)]))
        await opened_in(first)
        await until(lambda: hub.verifier.num_sessions == 3)
        lost.cancel()
        await until(lambda: hub.verifier.num_orphans == 1)
        start_s = time.monotonic()
        words = await change(made)
        error = await asyncio.wait_for(ended(first), WAIT_S)
        assert isinstance(error, (Unauthenticated, PermissionDenied))
        assert words in error.message
        await until(lambda: hub.verifier.num_sessions == 1)
        assert time.monotonic() - start_s < 3.0
        name = str(Certificate.read((alpha / "node.pem").read_bytes()).identity)
        assert [(end.who.node, end.reason) for end in ends.told] == [(name, error.reason)] * 2
        await anext(other)
        await gone.close()


async def test_j01_a_certificate_that_expires_ends_its_streams(tmp_path: Path) -> None:
    """The connection was made while it was valid; the session goes with it."""
    made = kit(tmp_path)
    short = made.issue("alpha", lifetime=timedelta(seconds=2))
    async with trusted_hub(made, 0.02) as hub, session_of(hub, short) as frames:
        await opened_in(frames)
        error = await asyncio.wait_for(ended(frames), WAIT_S)
        assert "has expired" in error.message
        await until(lambda: hub.verifier.num_sessions == 0)

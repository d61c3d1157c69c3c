"""Everything that nodes may do to one hub, in any order, good and bad: a state machine over the frame protocol.

The verifier and the reader of its streams are the real ones; frames go through the wire's bytes. Only the sockets are
left out, and the target is `HashTarget`: an id that is not the target's own, or not of this session, shows at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baru.drafting.v1 import drafting_pb2 as pb
from baru_common import wire
from baru_common.errors import (
    BaruError,
    CapacityExhausted,
    EngineFailure,
    HubTimeout,
    HubUnavailable,
    PermissionDenied,
    ProtocolViolation,
    Superseded,
)
from baru_common.frames import (
    Cancel,
    Draft,
    DrafterInfo,
    Finished,
    FinishReason,
    Heartbeat,
    HubFrame,
    Limits,
    NodeFrame,
    Open,
    Opened,
    Resume,
    Verdict,
)
from baru_common.sampling import SamplingParams
from baru_hub.orphans import LinkPolicy
from baru_hub.scheduler import Plan
from baru_hub.servicer import DraftingServicer
from baru_hub.session import Session
from baru_hub.verifier import LiveSession, Verifier

from .target import CONTEXT_LIMIT, EOS_ID, ID_BYTES, SIZE, HashTarget, own_id

_T = TypeVar("_T")
_WAIT_S = 20.0
"""What takes longer hangs."""
_AHEAD = 8
_LIMITS = Limits(max_sessions=5, max_prompt_tokens=60, max_draft_ahead=_AHEAD, max_message_bytes=1 << 20)
_LINK = LinkPolicy(orphan_grace_s=20.0, orphan_tokens=12, orphan_bytes=150 * ID_BYTES)
_IDENTITIES = ("ada", "bo", "cy")

_any = st.integers(0, 7)
"""Picks one of several, whatever their number."""
_uint32 = st.integers(0, (1 << 32) - 1)
_near = st.integers(0, CONTEXT_LIMIT + 20)


@dataclass
class Stepped:
    """A scheduler that takes a step when it is allowed: everybody's, to the depth that it is told."""

    num_allowed: int = 0
    depth: int = 4
    idle: asyncio.Event = field(default_factory=asyncio.Event)

    def plan(self, sessions: Sequence[Session], now_s: float) -> Plan:  # noqa: ARG002
        for session in sessions:
            session.pace.window = _AHEAD
            if session.own:
                session.own.depth, session.own.width = self.depth // 2, 2
        blocks = tuple((s, s.next_block(self.depth, 16)) for s in sessions) if self.num_allowed else ()
        if blocks:
            self.num_allowed -= 1
        else:
            self.idle.set()
        return Plan(blocks)

    def learn(self, plan: Plan, step_s: float, draft_s: float = 0.0) -> None:
        """Nothing: it is told."""


@dataclass(eq=False)
class Node:
    """The node's end of one session: what it knows is what it has read."""

    request: Open
    identity: str
    honest: bool
    """It keeps to the contract, so no error but those of the link may reach it."""
    ids: list[int]
    opened: Opened | None = None
    live: LiveSession | None = None
    frames: AsyncIterator[HubFrame] | None = None
    inbox: asyncio.Queue[bytes | None] = field(default_factory=asyncio.Queue)
    reader: asyncio.Task[None] | None = None
    coming: asyncio.Future[HubFrame] | None = None
    """A frame under way to it."""
    end: Finished | BaruError | None = None
    chain_id: int = 0
    chain: list[int] = field(default_factory=list)
    base: int = 0

    @property
    def is_on(self) -> bool:
        return self.live is not None

    @property
    def output(self) -> tuple[int, ...]:
        return tuple(self.ids[len(self.request.prompt_ids) :])

    @property
    def is_over(self) -> bool:
        return isinstance(self.end, Finished)

    def begin(self, request: Open, live: LiveSession) -> None:
        """Go on over a new stream."""
        self.request, self.live, self.frames, self.end, self.opened = request, live, live.frames(), None, None
        self.inbox, self.chain_id, self.chain = asyncio.Queue(), 0, []

    def ticket(self) -> Resume:
        assert self.opened
        return Resume(self.opened.session_id, self.opened.session_key, self.opened.epoch, self.output)

    def take(self, frame: HubFrame) -> None:
        """Read a frame, and hold the hub to its word."""
        assert self.opened or isinstance(frame, Opened)
        if isinstance(frame, Opened):
            self.opened = frame
            assert frame.num_committed == len(self.ids)
        elif isinstance(frame, Verdict):
            assert self.opened
            assert (frame.epoch, frame.base) == (self.opened.epoch, len(self.ids))
            assert frame.num_accepted <= frame.num_verified <= CONTEXT_LIMIT
            for token in frame.token_ids:
                assert token == own_id(self.ids), "not the target's own id"
                self.ids.append(token)
        elif isinstance(frame, Finished):
            self._close(frame)

    def _close(self, finished: Finished) -> None:
        self.end = finished
        usage, params = finished.usage, self.request.params
        assert usage.num_drafted == usage.num_accepted + usage.num_rejected + usage.num_discarded
        assert min(usage.num_accepted, usage.num_rejected, usage.num_discarded) >= 0
        assert (usage.num_prompt, usage.num_emitted) == (len(self.request.prompt_ids), len(self.output))
        stops = {*params.stop_ids, *(() if params.ignore_eos else (EOS_ID,))}
        ends = [n for n, token in enumerate(self.output, 1) if token in stops]
        most = min(params.max_tokens or CONTEXT_LIMIT, CONTEXT_LIMIT - len(self.request.prompt_ids))
        if finished.reason is FinishReason.STOP:
            assert ends == [len(self.output)]
        elif finished.reason is FinishReason.LENGTH:
            assert not ends
            assert len(self.output) == most


class Faults(logging.Handler):
    """What the hub logs as a fault of its own: nothing that a node does may be one."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(self.format(record))


class Protocol(RuleBasedStateMachine):
    """Nodes of three identities, honest ones and others, at one hub."""

    num_rules = 0
    """Carried out so far, by all machines."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.now_s = 0.0
        self.nodes: list[Node] = []
        self.draining = False
        self.num_frames = 0

    # -- the hub

    @initialize(drafts=st.booleans(), max_ids=st.sampled_from((200, 400)))
    def start(self, drafts: bool, max_ids: int) -> None:
        self.faults = Faults()
        logging.getLogger("baru_hub").addHandler(self.faults)
        logging.getLogger("baru_hub").propagate = False
        self.engine = HashTarget(max_ids, drafts=drafts)
        self.stepped = Stepped()
        self.verifier = Verifier(self.engine, self.stepped, _LIMITS, link=_LINK, clock=lambda: self.now_s)
        self._run(self.verifier.__aenter__())

    def teardown(self) -> None:
        if not hasattr(self, "verifier"):
            self.loop.close()
            return
        self.engine.may_end.set()
        try:
            if not self.draining:
                self._alive()
            self._run(self.verifier.__aexit__(None, None, None))
            for node in self.nodes:
                self._hang_up(node)
            self._settle()
            assert (self.verifier.num_sessions, self.engine.held, self.engine.room) == (0, {}, {})
            assert not asyncio.all_tasks(self.loop), "a task stays behind"
            assert not self.faults.found, self.faults.found
        finally:
            logging.getLogger("baru_hub").removeHandler(self.faults)
            logging.getLogger("baru_hub").propagate = True
            self._clear()

    def _clear(self) -> None:
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self._settle()
        self.loop.close()

    def _alive(self) -> None:
        """A node that does nothing wrong is served as ever, once those who are there are gone."""
        for node in self.nodes:
            if node.live:
                node.live.close()
                self._hang_up(node)
        self.now_s += 1000
        self._allow(0)
        request = Open((5, 6, 7), SamplingParams(max_tokens=5, ignore_eos=True), *self._fit())
        last = self._open(request, "dee", True)
        assert last is not None
        self._allow(20)
        self._read(last, 99)
        assert isinstance(last.end, Finished)
        assert len(last.output) == 5

    @invariant()
    def holds(self) -> None:
        """After each rule."""
        Protocol.num_rules += 1
        if not hasattr(self, "verifier"):
            return
        loop_task = self.verifier._loop_task
        assert loop_task
        assert not loop_task.done(), "the hub is dead"
        assert not self.faults.found, self.faults.found
        residents = self.verifier.roster.residents.values()
        assert len(self.engine.held) == len(residents)
        assert sum(not r.closed for r in residents) <= _LIMITS.max_sessions
        for resident in residents:
            state, mailbox = resident.state, resident.state.mailbox
            assert len(state.committed) <= state.max_length
            assert 0 <= state.num_accepted <= state.num_verified <= mailbox.num_drafted
            assert mailbox.num_provisional or mailbox._start + len(mailbox._tail) <= len(state.committed) + _AHEAD

    def _fit(self) -> tuple[bytes, bytes]:
        return self.engine.spec.fingerprint, self.engine.spec.bundle.digest

    def _run(self, work: Coroutine[Any, Any, _T]) -> _T:
        return self.loop.run_until_complete(asyncio.wait_for(work, _WAIT_S))

    def _settle(self) -> None:
        async def turns() -> None:
            for _ in range(6):
                await asyncio.sleep(0)

        self._run(turns())

    def _allow(self, num_steps: int) -> None:
        """Let the hub take so many steps, and wait until it has nothing more to do."""
        self._end_step()
        self.stepped.num_allowed = num_steps
        self._idle()
        self.stepped.num_allowed = 0

    def _idle(self) -> None:
        self.stepped.idle.clear()
        self.verifier._awake.set()
        self._run(self.stepped.idle.wait())

    def _end_step(self) -> None:
        if not self.engine.may_end.is_set():
            self.engine.may_end.set()
            self._idle()

    # -- what a node does

    def _open(self, request: Open, identity: str, honest: bool, node: Node | None = None) -> Node | None:
        """Open or resume; an error must be one that this request has earned."""
        if request.resume or self.verifier.num_orphans:
            self._end_step()  # admission waits for it
        sent = wire.decode_request(pb.DecodeRequest.FromString(wire.encode_request(request).SerializeToString()))
        assert sent == request
        try:
            live = self._run(self.verifier.open(request, identity))
        except BaruError as error:
            self._judge(error, honest=honest, opening=True)
            return None
        node = node or Node(request, identity, honest, list(request.committed))
        node.begin(request, live)
        node.reader = self.loop.create_task(DraftingServicer(self.verifier)._read(_until_none(node.inbox), live))
        if node not in self.nodes:
            self.nodes.append(node)
        self._read(node, 1)
        assert node.opened
        return node

    def _say(self, node: Node, frame: NodeFrame) -> None:
        self.num_frames += 1
        if node.reader and not node.reader.done():
            others = self._others(node)
            node.inbox.put_nowait(wire.encode_request(frame).SerializeToString())
            self._settle()
            assert self._others(node) == others, "another session was touched"

    def _others(self, node: Node) -> dict[str, Any]:
        """What a frame of this node must not change."""
        mine = node.live.state if node.live else None
        return {
            name: (
                r.identity, r.closed, r.stream, r.orphan, r.key, r.heard_epoch, r.state.epoch, r.state.mailbox.chain_id,
                r.state.mailbox.num_drafted, r.state.mailbox.num_stale_frames, tuple(r.state.mailbox._tail),
            )
            for name, r in self.verifier.roster.residents.items()
            if r.state is not mine
        }  # fmt: skip

    def _read(self, node: Node, num_frames: int) -> None:
        for _ in range(num_frames):
            if not node.frames:
                return
            node.coming = node.coming or asyncio.ensure_future(anext(node.frames), loop=self.loop)
            self._settle()
            if not node.coming.done():
                return
            coming, node.coming = node.coming, None
            try:
                node.take(coming.result())
            except BaruError as error:
                node.end = error
                self._judge(error, honest=node.honest)
            except StopAsyncIteration:
                assert isinstance(node.end, Finished)
            if node.end:
                self._hang_up(node)

    def _judge(self, error: BaruError, *, honest: bool, opening: bool = False) -> None:
        assert error.message
        assert not isinstance(error, (EngineFailure, ProtocolViolation)), error
        fair: tuple[type[BaruError], ...] = (HubTimeout, Superseded)
        if opening:
            fair += (CapacityExhausted,)
        if self.draining:
            fair += (HubUnavailable,)
        assert not honest or isinstance(error, fair), error

    def _hang_up(self, node: Node) -> None:
        """What the servicer does when a stream ends, for whatever reason."""
        if node.reader:
            node.reader.cancel()
        if node.coming:
            node.coming.cancel()
        if node.live:
            node.live.lose()
        node.live = node.frames = node.reader = node.coming = None
        self._settle()

    def _one(self, which: int, *, honest: bool | None = None, on: bool = True) -> Node | None:
        found = [n for n in self.nodes if n.is_on is on and (honest is None or n.honest is honest)]
        if found or not on or self.draining:
            return found[which % len(found)] if found else None
        prompt = (5, 6, 2 + len(self.nodes) % (SIZE - 2))  # so that few rules find nobody
        request = Open(prompt, SamplingParams(ignore_eos=True), *self._fit(), DrafterInfo("fuzz"))
        return self._open(request, _IDENTITIES[which % 3], which % 2 == 0 if honest is None else honest)

    # -- rules: who comes and goes

    @rule(
        identity=st.sampled_from(_IDENTITIES),
        honest=st.booleans(),
        prompt=st.lists(st.integers(2, SIZE - 1), min_size=1, max_size=40),
        max_tokens=st.none() | st.integers(1, 60),
        stop_ids=st.lists(st.integers(0, SIZE - 1), max_size=3),
        ignore_eos=st.booleans(),
        drafts=st.booleans(),
    )
    def open(
        self,
        identity: str,
        honest: bool,
        prompt: list[int],
        max_tokens: int | None,
        stop_ids: list[int],
        ignore_eos: bool,
        drafts: bool,
    ) -> None:
        params = SamplingParams(max_tokens=max_tokens, stop_ids=tuple(stop_ids), ignore_eos=ignore_eos)
        drafter = DrafterInfo("fuzz") if drafts else None
        self._open(Open(tuple(prompt), params, *self._fit(), drafter), identity, honest)

    @rule(
        change=st.sampled_from(
            (
                {"prompt_ids": ()},
                {"prompt_ids": (5,) * 61},
                {"prompt_ids": (SIZE,)},
                {"protocol_revision": 7},
                {"target_fingerprint": b"x"},
                {"tokenizer_digest": b""},
                {"drafter": DrafterInfo("x", b"y" * 32)},
                {"params": SamplingParams(temperature=1.0)},
                {"params": SamplingParams(stop_ids=(SIZE,))},
                {"resume": Resume("nobody", b"", 0, (SIZE,))},
                {"resume": Resume("nobody", b"", 0, (5,) * CONTEXT_LIMIT)},
            )
        ),
        identity=st.sampled_from(_IDENTITIES),
    )
    def open_wrong(self, change: dict[str, Any], identity: str) -> None:
        """Refused before anything is allocated."""
        before = self.engine._handles.__reduce__()
        request = replace(Open((5, 6), SamplingParams(), *self._fit()), **change)
        assert self._open(request, identity, False) is None
        assert self.engine._handles.__reduce__() == before

    @rule(which=_any)
    def lose(self, which: int) -> None:
        if node := self._one(which):
            self._hang_up(node)

    @rule(
        which=_any,
        on=st.booleans(),
        keep=st.booleans(),
        forget=st.integers(0, 3),
        provisional=st.lists(st.integers(0, 3), max_size=4),
        epoch=st.sampled_from((0, 0, 0, -1, 5)),
    )
    def resume(self, which: int, on: bool, keep: bool, forget: int, provisional: list[int], epoch: int) -> None:
        """Its own session, with what it knows, or less of it; now and then ids that the target never said."""
        node = self._one(which, on=on)
        if not node or not node.opened:
            return
        self._read(node, 99)
        if node.is_over:
            return
        if node.live and keep:  # the older stream is there still; its node reads no more
            if node.coming:
                node.coming.cancel()
            node.coming = None
            assert node.reader
            node.reader.cancel()
        elif node.live:
            self._hang_up(node)
        resume = node.ticket()
        num_known = len(node.ids) - (0 if node.honest else min(forget, len(resume.output_ids)))
        ids = list(node.ids[:num_known])
        room = min(node.request.params.max_tokens or CONTEXT_LIMIT, CONTEXT_LIMIT - len(node.request.prompt_ids))
        room -= num_known - len(node.request.prompt_ids)
        guessed = _decoded_alone(ids, provisional[: max(room, 0)])
        output = tuple(ids[len(node.request.prompt_ids) :])
        resume = replace(resume, output_ids=output, provisional_ids=tuple(guessed))
        if not node.honest:
            resume = replace(resume, epoch=max(resume.epoch + epoch, 0))
        known, node.ids = node.ids, ids
        if not self._open(replace(node.request, resume=resume), node.identity, node.honest, node):
            node.ids = known
            self._hang_up(node)
        elif guessed:  # they are the start of chain 1
            node.chain_id, node.chain, node.base = 1, guessed, num_known

    @rule(which=_any, identity=st.sampled_from(_IDENTITIES), kind=st.sampled_from(("key", "identity", "both", "other")))
    def steal(self, which: int, identity: str, kind: str) -> None:
        """Somebody else's session, or one's own with a wrong key: refused, and nothing of it changes."""
        self._end_step()  # what it ends is nobody's any more
        victim = self._one(which)
        if not victim or not victim.live or not victim.opened or victim.live.closed:
            return
        resume = victim.ticket()
        if kind in ("key", "both"):
            resume = replace(resume, session_key=bytes(32))
        if kind == "other":
            other = next((n for n in self.nodes if n is not victim and n.opened), None)
            if not other or not other.opened:
                return
            resume = replace(resume, session_key=other.opened.session_key)
        if kind in ("identity", "both") and identity == victim.identity:
            identity = "mallory"
        thief = victim.identity if kind in ("key", "other") else identity
        before, committed = self._others(Node(victim.request, "", False, [])), len(victim.live.state.committed)
        with suppress(HubUnavailable):  # when it drains
            try:
                self._run(self.verifier.open(replace(victim.request, resume=resume), thief))
            except PermissionDenied:
                pass
            else:
                raise AssertionError("a session was given to somebody else")
        assert self._others(Node(victim.request, "", False, [])) == before
        assert len(victim.live.state.committed) == committed

    # -- rules: what they say

    @rule(
        which=_any,
        num_ids=st.integers(0, 6),
        wrong_at=st.none() | st.integers(0, 5),
        kind=st.sampled_from(("new", "on", "again", "old chain", "old epoch", "behind")),
    )
    def draft(self, which: int, num_ids: int, wrong_at: int | None, kind: str) -> None:
        """As the contract allows: right and wrong, anew and on, late, twice, from a length that has been passed."""
        node = self._one(which, honest=True)
        if node and kind == "new":
            self._read(node, 99)
        if not node or not node.opened or not node.is_on:
            return
        if kind in ("new", "behind") or not node.chain_id:
            back = min(3, len(node.output)) if kind == "behind" else 0
            node.chain_id, node.chain, node.base = node.chain_id + 1, [], len(node.ids) - back
        start = len(node.chain) if kind != "again" else max(len(node.chain) - 3, 0)
        known = node.chain[start:]
        room = len(node.ids) + _AHEAD - node.base - len(node.chain)
        for n in range(min(num_ids, max(room, 0))):
            right = own_id([*node.ids[: node.base], *node.chain])
            node.chain.append(right if n != wrong_at else 2 + right % (SIZE - 2))
            known.append(node.chain[-1])
        epoch = node.opened.epoch - (kind == "old epoch")
        chain_id = node.chain_id - (kind == "old chain")
        if kind in ("old epoch", "old chain") and known:
            del node.chain[start:]  # the hub does not take them
        if chain_id < 1:
            return
        self._say(node, Draft(epoch, chain_id, node.base, start, tuple(known)))

    @rule(
        which=_any,
        epoch=st.sampled_from((1, 1, 1, 2, 3, 0, (1 << 32) - 1)),
        chain_id=st.sampled_from((0, 1, 1, 2, 3, (1 << 32) - 1)),
        base=_near | _uint32,
        offset=st.just(0) | st.integers(0, 20) | _uint32,
        ids=st.lists(st.integers(0, SIZE + 3), max_size=12) | st.just([5] * 3000) | st.lists(_uint32, max_size=3),
    )
    def draft_wild(self, which: int, epoch: int, chain_id: int, base: int, offset: int, ids: list[int]) -> None:
        """Whatever the wire can carry."""
        if node := self._one(which, honest=False):
            self._say(node, Draft(epoch, chain_id, base, offset, tuple(ids)))

    @rule(
        which=_any,
        last=st.sampled_from((None, None, 9, SIZE)),
        chain_id=st.none() | st.integers(1, 9),
        back=st.sampled_from((0, 0, 0, 1, 3, 9, -1)),
        ids=st.integers(1, 12),
    )
    def draft_likely(self, which: int, last: int | None, chain_id: int | None, back: int, ids: int) -> None:
        """Nearly right: around the committed length, from chains that may be over."""
        node = self._one(which, honest=False)
        if not node or not node.live or not node.opened:
            return
        if chain_id is None:
            chain_id = node.live.state.mailbox.chain_id + 1
        self._read(node, 99)
        base = max(len(node.ids) - back, 0)
        chain: list[int] = []
        for _ in range(ids):
            chain.append(own_id([*node.ids[:base], *chain]))
        if last is not None:
            chain[-1] = last
        self._say(node, Draft(node.opened.epoch, chain_id, base, 0, tuple(chain)))

    @rule(which=_any, sequence=_uint32)
    def heartbeat(self, which: int, sequence: int) -> None:
        if node := self._one(which):
            self._say(node, Heartbeat(sequence, sequence << 7))

    @rule(which=_any)
    def cancel(self, which: int) -> None:
        if node := self._one(which):
            self._say(node, Cancel())

    @rule(which=_any)
    def open_twice(self, which: int) -> None:
        if node := self._one(which, honest=False):
            self._say(node, node.request)

    @rule(which=_any)
    def half_close(self, which: int) -> None:
        """It says no more, and goes on reading."""
        if node := self._one(which):
            node.inbox.put_nowait(None)
            self._settle()

    @rule(which=_any, num_frames=st.sampled_from((1, 2, 100)))
    def read(self, which: int, num_frames: int) -> None:
        if node := self._one(which):
            self._read(node, num_frames)

    # -- rules: what the hub does

    @rule(num_steps=st.sampled_from((1, 1, 2, 6)), depth=st.sampled_from((0, 2, 6, 9)))
    def step(self, num_steps: int, depth: int) -> None:
        self._end_step()
        self.stepped.depth = depth
        self._allow(num_steps)

    @precondition(lambda self: self.engine.may_end.is_set())
    @rule(depth=st.sampled_from((0, 2, 6, 9)))
    def begin_step(self, depth: int) -> None:
        """A step under way, while nodes go on talking."""
        self.stepped.depth, self.stepped.num_allowed = depth, 1
        self.engine.may_end.clear()
        self.engine.entered.clear()
        self.stepped.idle.clear()
        self.verifier._awake.set()

        async def begun() -> None:
            either = [asyncio.ensure_future(event.wait()) for event in (self.engine.entered, self.stepped.idle)]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            for waiting in either:
                waiting.cancel()

        self._run(begun())
        self.stepped.num_allowed = 0
        if not self.engine.entered.is_set():
            self.engine.may_end.set()

    @rule()
    def end_step(self) -> None:
        self._end_step()

    @rule(seconds=st.sampled_from((0.1, 1.0, 4.0, 11.0, 21.0)))
    def pass_time(self, seconds: float) -> None:
        self._end_step()
        self.now_s += seconds
        self._allow(0)

    @precondition(lambda self: not self.draining and len(self.nodes) > 4)
    @rule(sure=st.integers(0, 9))
    def drain(self, sure: int) -> None:
        if not sure:
            self._end_step()
            self.draining = True
            self._run(self.verifier.drain(0.0))
            self._allow(0)
            for identity in _IDENTITIES:
                assert self._open(Open((5,), SamplingParams(), *self._fit()), identity, True) is None


def _decoded_alone(ids: Sequence[int], right: Sequence[int]) -> list[int]:
    """What a node says after `ids` while no hub answers: the target's own id wherever `right` is not 0."""
    said: list[int] = []
    for is_right in right:
        said.append(own_id([*ids, *said]) if is_right else 7)
    return said


async def _until_none(inbox: asyncio.Queue[bytes | None]) -> AsyncIterator[bytes]:
    while (message := await inbox.get()) is not None:
        yield message

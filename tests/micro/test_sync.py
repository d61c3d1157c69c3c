"""The facade without `async`: the same events, the same errors, and nothing left running."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest

from baru_common.errors import BaruError, ConfigError, EmptyPrompt, HubUnavailable
from baru_common.sampling import SamplingParams
from baru_hub.acceptance import Decision
from baru_hub.engines.transformers import TransformersEngine
from baru_hub.ragged_batch import RaggedBatch
from baru_hub.server import Hub
from baru_micro import Event, Finish, MicroNode, Started, Step, SyncMicroNode
from support.drafters import FunctionDrafter
from support.hubs import hub_of
from support.lockstep import free_running
from support.tiny import plain_greedy, tiny_target

_WAIT_S = 10.0
_TARGET = tiny_target()
_PROMPT = [1, 5, 9]
_SHORT = SamplingParams(max_tokens=12, ignore_eos=True)
_LONG = SamplingParams(ignore_eos=True)


@pytest.fixture
def hub() -> Iterator[Hub]:
    """A hub in a thread of its own, because the facade blocks this one."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="test-hub")
    thread.start()
    context = hub_of(_TARGET, scheduler=free_running())
    try:
        running = asyncio.run_coroutine_threadsafe(context.__aenter__(), loop).result(_WAIT_S)
        yield running
        until(lambda: running.verifier.num_sessions == 0)
        asyncio.run_coroutine_threadsafe(context.__aexit__(None, None, None), loop).result(_WAIT_S)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    """The facade's thread ends with its block."""
    yield
    assert [t.name for t in threading.enumerate() if t.name == "baru-micro"] == []


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _WAIT_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_events_are_those_of_the_other_node(hub: Hub) -> None:
    """Compared one by one, but for names and times; what the hub says of itself is there, too."""

    async def with_async() -> list[Event]:
        async with MicroNode.connect(hub.address, drafter=None) as node:
            return [event async for event in node.generate(_PROMPT, _SHORT)]

    with SyncMicroNode.connect(hub.address, drafter=None) as node:
        assert node.hub.target_name == "tiny-0-0.0"
        ours = list(node.generate(_PROMPT, _SHORT))
    theirs = asyncio.run(with_async())
    assert [type(event) for event in ours] == [type(event) for event in theirs]
    assert isinstance(ours[0], Started)
    pieces = [[step.pieces for step in events if isinstance(step, Step)] for events in (ours, theirs)]
    assert pieces[0] == pieces[1]
    assert isinstance(ours[-1], Finish)
    assert list(ours[-1].ids) == plain_greedy(_TARGET, _PROMPT, 12)


def test_generations_can_follow_and_overlap(hub: Hub) -> None:
    """Two iterators read in turn on one connection do not mix."""
    prompts = ([1, 40], [1, 41])
    with SyncMicroNode.connect(hub.address) as node:
        iterators = [node.generate(prompt, _SHORT) for prompt in prompts]
        ids: list[list[int]] = [[], []]
        for events in zip(*iterators, strict=False):
            for i, event in enumerate(events):
                ids[i] += event.ids if isinstance(event, Step) else []
        for i, iterator in enumerate(iterators):
            ids[i] += [token for event in iterator if isinstance(event, Step) for token in event.ids]
    for prompt, got in zip(prompts, ids, strict=True):
        assert plain_greedy(_TARGET, prompt, 12)[: len(got)] == got
        assert len(got) > 6


def test_a_break_ends_the_session(hub: Hub) -> None:
    """At once, while the connection stays; the next generation is served."""
    with SyncMicroNode.connect(hub.address) as node:
        for event in node.generate(_PROMPT, _LONG):
            if isinstance(event, Step):
                break
        until(lambda: hub.verifier.num_sessions == 0)
        assert isinstance(list(node.generate(_PROMPT, _SHORT))[-1], Finish)


def test_closing_the_iterator_ends_the_session(hub: Hub) -> None:
    """Before its first event as well as after; and twice."""
    with SyncMicroNode.connect(hub.address) as node:
        for num_read in (0, 1, 2):
            events = node.generate(_PROMPT, _LONG)
            for _ in range(num_read):
                next(events)
            close = getattr(events, "close")  # noqa: B009 (an Iterator to the types, a generator in fact)
            close()
            close()
            until(lambda: hub.verifier.num_sessions == 0)


def test_an_iterator_held_past_its_node_can_still_be_closed(hub: Hub) -> None:
    """Its session ended with the connection; closing it later, or dropping it, is no error."""
    with SyncMicroNode.connect(hub.address) as node:
        events = node.generate(_PROMPT, _LONG)
        next(events)
    until(lambda: hub.verifier.num_sessions == 0)
    getattr(events, "close")()  # noqa: B009


def test_errors_come_as_they_are(hub: Hub) -> None:
    """From the node, from the drafter; the node can be used after them."""

    def no_idea(*_: object) -> list[int]:
        raise ZeroDivisionError("no idea")

    with SyncMicroNode.connect(hub.address, drafter=FunctionDrafter(no_idea)) as node:
        with pytest.raises(EmptyPrompt):
            next(node.generate(""))
        with pytest.raises(BaruError, match="no idea"):
            list(node.generate(_PROMPT, _LONG))
        with pytest.raises(EmptyPrompt):
            next(node.generate([]))


def test_a_connection_that_fails_leaves_nothing() -> None:
    """No hub, or no such drafter: the error, and no thread (see the fixture)."""
    with pytest.raises(HubUnavailable), SyncMicroNode.connect("127.0.0.1:1", timeout_s=2.0):
        pass
    with pytest.raises(ConfigError), SyncMicroNode.connect("127.0.0.1:1", drafter="telepathy"):
        pass


def test_an_error_of_the_caller_closes_the_connection(hub: Hub) -> None:
    """It passes through unchanged, from the middle of a generation."""

    def fail_in_the_middle() -> None:
        with SyncMicroNode.connect(hub.address) as node:
            for event in node.generate(_PROMPT, _LONG):
                if isinstance(event, Step):
                    raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_in_the_middle()
    until(lambda: hub.verifier.num_sessions == 0)


_INTERRUPTED = """
import os, signal, sys, threading, time
from baru_micro import SyncMicroNode, Step
from baru_common.sampling import SamplingParams
signal.signal(signal.SIGINT, signal.default_int_handler)  # it may have been started with the signal ignored
with SyncMicroNode.connect(sys.argv[1], drafter=None) as node:
    try:
        for event in node.generate([1, 5, 9], SamplingParams(ignore_eos=True)):
            if isinstance(event, Step):
                threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
                print("step", flush=True)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        time.sleep(30 if sys.stdin.read() else 0)
print("closed")
"""


def test_an_interrupt_while_waiting_is_an_interrupt(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while the hub takes its time: KeyboardInterrupt, the session gone, the connection closed."""
    step, may_go_on, num_steps = TransformersEngine._run, threading.Event(), count()

    def slow_after_the_first(
        self: TransformersEngine, batch: RaggedBatch, work: list[Any]
    ) -> list[Decision | BaruError]:
        if next(num_steps):
            may_go_on.wait(_WAIT_S)
        return step(self, batch, work)

    monkeypatch.setattr(TransformersEngine, "_run", slow_after_the_first)
    process = subprocess.Popen(
        [sys.executable, "-c", _INTERRUPTED, hub.address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout
        assert [process.stdout.readline() for _ in range(2)] == ["step\n", "interrupted\n"]
        may_go_on.set()
        until(lambda: hub.verifier.num_sessions == 0)
    finally:
        may_go_on.set()
        out, err = process.communicate(timeout=_WAIT_S)
    assert (out, err, process.returncode) == ("closed\n", "", 0)

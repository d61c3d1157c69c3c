"""The real hub loop and the real node, with device times and a link simulated on a virtual clock.

Nothing waits: the clock jumps to the next thing that is due, so hours of decoding take seconds and the
result is the same on every machine. Only gRPC is left out; frames cross the simulated link as they are.
"""

from __future__ import annotations

import asyncio
import math
import selectors
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any, TypeVar

from baru_common.drafters import Proposal
from baru_common.drafters.simulated import SimulatedDrafter
from baru_common.errors import BaruError
from baru_common.frames import Draft, DrafterInfo, Finished, Heartbeat, HubFrame, Limits, NodeFrame, Open, Opened
from baru_common.sampling import SamplingContext, SamplingParams
from baru_hub.engines.simulated import DeviceProfile, SimulatedEngine
from baru_hub.scheduler import GoodputScheduler
from baru_hub.verifier import LiveSession, Verifier
from baru_micro.decoding import Generation
from baru_micro.events import Finish, Step
from baru_micro.link import Link
from baru_micro.reach import Attached, Caller

_T = TypeVar("_T")
_LIMITS = Limits(max_sessions=1024, max_prompt_tokens=1 << 16, max_draft_ahead=64, max_message_bytes=1 << 22)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps over waiting."""

    def __init__(self) -> None:
        self._virtual_s = 0.0
        selector = selectors.SelectSelector()
        super().__init__(selector)
        really_select = selector.select

        def select(timeout: float | None = None) -> Any:
            events = really_select(0)
            if not events and timeout:
                self._virtual_s += timeout
            elif not events and timeout is None:
                raise RuntimeError("everything waits for something that will not come")
            return events

        selector.select = select  # type: ignore[method-assign]

    def time(self) -> float:
        return self._virtual_s


def run(work: Coroutine[Any, Any, _T]) -> _T:
    """Run `work` on a virtual clock."""
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(work)
    finally:
        loop.close()


class Stream:
    """A session's stream over a link with a fixed round trip; order is kept, nothing is lost. It is its own channel."""

    silence_s = math.inf
    """Since anything was heard below the frames: there is nothing below them."""

    address = "virtual"

    def __init__(self, verifier: Verifier, round_trip_s: float) -> None:
        self.channel = self
        self.link = Link(clock=asyncio.get_running_loop().time)
        self._verifier = verifier
        self._half_s = round_trip_s / 2
        self._live: LiveSession | None = None
        self._early: list[NodeFrame] = []
        """Frames that came while the hub was still opening the session."""
        self._arrived: asyncio.Queue[HubFrame | BaruError] = asyncio.Queue()
        self._pump: asyncio.Task[None] | None = None
        self._on_the_way: dict[str, deque[object]] = {}

    def send(self, frame: NodeFrame) -> None:
        """A frame leaves the node."""
        self._later(self._at_hub, frame)

    async def frames(self) -> AsyncIterator[HubFrame]:
        """Frames reach the node."""
        while True:
            item = await self._arrived.get()
            if isinstance(item, BaruError):
                raise item
            yield item
            if isinstance(item, Finished):
                return

    async def leave(self) -> None:
        """The node hangs up."""
        if self._live:
            self._live.close()

    async def first(self, caller: Caller) -> Attached:
        """Open the session; see `Reach`."""
        request = caller.request()
        self.send(request)
        frames = self.frames()
        opened = await anext(frames)
        if not isinstance(opened, Opened):
            raise RuntimeError("the hub did not admit the session")
        this: Any = self
        return Attached(this, opened, frames, request)

    def _at_hub(self, frame: NodeFrame) -> None:
        if isinstance(frame, Open):
            self._pump = asyncio.get_running_loop().create_task(self._run(frame))
        elif self._live:
            _hand_over(frame, self._live)
        else:
            self._early.append(frame)

    async def _run(self, request: Open) -> None:
        try:
            self._live = live = await self._verifier.open(request)
            for early in self._early:
                _hand_over(early, live)
            async for frame in live.frames():
                self._later(self._arrived.put_nowait, frame)
        except BaruError as error:
            self._later(self._arrived.put_nowait, error)

    def _later(self, action: Callable[[Any], None], item: object) -> None:
        # Through a queue: the loop does not promise the order of calls that are due at the same time.
        queue = self._on_the_way.setdefault(action.__name__, deque())
        queue.append(item)
        asyncio.get_running_loop().call_later(self._half_s, lambda: action(queue.popleft()))


def _hand_over(frame: NodeFrame, live: LiveSession) -> None:
    if isinstance(frame, Draft):
        live.draft(frame)
    elif isinstance(frame, Heartbeat):
        live.heartbeat(frame)


class SlowExecutor(Executor):
    """Runs a simulated drafter's call, `token_s` for each id asked for, on the loop's clock."""

    def __init__(self, token_s: float, throttled: tuple[float, float] | None = None) -> None:
        self._token_s = token_s
        self._throttled = throttled
        self._start_s = asyncio.get_running_loop().time()

    def submit(self, fn: Callable[..., _T], /, *args: Any, **kwargs: Any) -> Future[_T]:
        future: Future[_T] = Future()
        max_tokens = args[2]

        def finish() -> None:
            if future.set_running_or_notify_cancel():
                future.set_result(fn(*args, **kwargs))

        loop = asyncio.get_running_loop()
        since_s, slow_s = self._throttled or (math.inf, 0.0)
        token_s = slow_s if loop.time() - self._start_s >= since_s else self._token_s
        loop.call_later(token_s * max_tokens, finish)
        return future


@dataclass(frozen=True)
class VirtualDrafter:
    """A `SimulatedDrafter` whose time passes in the executor."""

    real: SimulatedDrafter

    family = "simulated"
    vocabulary = None

    @property
    def tokens_per_call(self) -> int:
        return self.real.tokens_per_call

    @property
    def blocking(self) -> bool:
        return self.real.token_ms > 0

    def start(self, sampling: SamplingContext | None = None) -> VirtualDrafter:  # noqa: ARG002
        return self

    def propose(self, ids: Any, num_committed: int, max_tokens: int) -> Proposal:  # noqa: ARG002
        return Proposal(self.real.draft(len(ids), max_tokens))


@dataclass(frozen=True)
class Cell:
    """One experiment."""

    profile: str
    acceptance: float
    token_ms: float
    """Drafting time of an id, milliseconds."""
    round_trip_ms: float
    num_sessions: int = 1
    num_tokens: int = 400
    """Per session."""
    throttled: tuple[float, float] | None = None
    """From this many seconds on, an id takes this many milliseconds: the board is hot."""


@dataclass(frozen=True)
class Outcome:
    """What came of it."""

    tokens_per_s: float
    """All sessions together, while all of them run: until the first has ended."""
    mean_accepted_length: float
    num_steps: int


def simulate(cell: Cell, *, drafting: bool = True, max_depth: int = 16) -> Outcome:
    """Run a cell and return its outcome; with `drafting` off it is the hub alone."""
    return run(_simulate(cell, drafting, max_depth))


async def _simulate(cell: Cell, drafting: bool, max_depth: int) -> Outcome:
    engine = SimulatedEngine(DeviceProfile.load(cell.profile))
    clock = asyncio.get_running_loop().time
    scheduler = GoodputScheduler(await engine.calibrate())
    async with Verifier(engine, scheduler, _LIMITS, max_depth=max_depth, clock=clock) as verifier:
        start_s = clock()
        runs = await asyncio.gather(*(_generate(verifier, cell, i, drafting) for i in range(cell.num_sessions)))
    first_end_s = min(steps[-1][0] for steps, _ in runs)
    num_tokens = sum(num_ids for steps, _ in runs for at_s, num_ids in steps if at_s <= first_end_s)
    usages = [finish.usage for _, finish in runs]
    mean = sum(usage.mean_accepted_length for usage in usages) / len(usages)
    return Outcome(num_tokens / (first_end_s - start_s), mean, max(usage.num_steps for usage in usages))


async def _generate(
    verifier: Verifier, cell: Cell, index: int, drafting: bool
) -> tuple[list[tuple[float, int]], Finish]:
    """Run one session; return when how many ids came, and its end."""
    hub = verifier.describe()
    prompt = (2,) * 8 + (3,) * index  # other lengths: the script goes by position
    request = Open(
        prompt_ids=prompt,
        params=SamplingParams(max_tokens=cell.num_tokens, ignore_eos=True),
        target_fingerprint=hub.target_fingerprint,
        tokenizer_digest=hub.tokenizer_digest,
        drafter=DrafterInfo("simulated") if drafting else None,
    )
    generation = Generation(
        reach=Stream(verifier, cell.round_trip_ms / 1e3),  # type: ignore[arg-type]
        start=request,
        sampling=SamplingContext(request.params, len(prompt), verifier.spec.vocabulary, hub.eos_ids),
        max_length=len(prompt) + cell.num_tokens,
        drafter=VirtualDrafter(SimulatedDrafter(cell.acceptance, cell.token_ms, seed=index)) if drafting else None,
        local=None,
        executor=SlowExecutor(cell.token_ms / 1e3, cell.throttled and (cell.throttled[0], cell.throttled[1] / 1e3)),
        target="simulated",
        clock=asyncio.get_running_loop().time,
    )
    steps: list[tuple[float, int]] = []
    async for event in generation.events():
        if isinstance(event, Step):
            steps.append((generation.clock(), len(event.ids)))
    if not isinstance(event, Finish):
        raise RuntimeError("no Finish came")
    return steps, event

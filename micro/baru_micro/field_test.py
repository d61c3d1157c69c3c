"""Does this node draft, notice a broken link, go on as it is told to, and come back? Tried on its hub, for real."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from baru_common.errors import BaruError, HubUnavailable
from baru_common.sampling import SamplingParams
from baru_common.waiting import within

from .client import MicroNode
from .config import NodeConfig
from .doctor import Check
from .events import Event, Finish, LinkChanged, PostureChanged, Provenance, Retracted, Step
from .link import LinkState
from .relay import Relay

_NUM_BEFORE_CUT = 12
"""Ids that come before the link is cut."""
_CUT_S = 2.0
"""How long it stays so, once that was noticed."""
_NOTICED_WITHIN_S = 5.0
_WHOLE_S = 600.0
_MESSAGES = [
    {"role": "user", "content": "Write the numbers from one to forty as words, one on each line, and all again."}
]
_PARAMS = SamplingParams(max_tokens=128, ignore_eos=True)


async def field_test(config: NodeConfig) -> list[Check]:
    """Return what was found, in order; after a check that failed the rest is not tried.

    The node reaches its first hub through a relay of its own, and that is cut: the machine's network, and what else
    runs here, are left alone.
    """
    checks = list[Check]()
    try:
        async with Relay.open(config.hub[0]) as relay, replace(config, hub=(relay.address,)).connect() as node:
            whole = await within(_watched(node), _WHOLE_S)
            checks.append(Check("drafts", ok=True, found=whole.drafting))
            cut = await within(_watched(node, relay), _WHOLE_S)
            checks += _judged(whole, cut)
    except BaruError as error:
        checks.append(Check("answers" if not checks else "link", ok=False, found=error.message, advice=error.hint))
    except asyncio.TimeoutError:
        checks.append(Check("answers", ok=False, found=f"no answer within {_WHOLE_S:.0f} s", advice="look at the hub"))
    return checks


@dataclass
class Watched:
    """One answer: what came, and when. Times in seconds of one clock; None: it did not happen."""

    ids: tuple[int, ...] = ()
    num_shown: int = 0
    num_provisional: int = 0
    num_retracted: int = 0
    drafting: str = ""
    cut_s: float | None = None
    noticed_s: float | None = None
    provisional_s: float | None = None
    healed_s: float | None = None
    back_s: float | None = None
    failed: HubUnavailable | None = None
    noticed: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self, event: Event) -> None:
        now = time.monotonic()
        if isinstance(event, LinkChanged) and event.state is LinkState.DOWN and self.cut_s and not self.noticed_s:
            self.noticed_s = now
            self.noticed.set()
        elif isinstance(event, PostureChanged) and not event.posture.drafting:
            self.drafting = f"; the posture lets it not draft: {event.posture.reason}"
        elif isinstance(event, Retracted):
            self.num_retracted += len(event.ids)
        elif isinstance(event, Step):
            self._take_step(event, now)
        elif isinstance(event, Finish):
            usage = event.usage
            self.ids = event.ids
            self.drafting = f"{usage.num_accepted} of {usage.num_verified} draft ids accepted{self.drafting}"

    def _take_step(self, step: Step, now: float) -> None:
        self.num_shown += len(step.ids)
        if step.provenance is Provenance.PROVISIONAL:
            self.num_provisional += len(step.ids)
            self.provisional_s = self.provisional_s or now
        elif self.healed_s and not self.back_s:
            self.back_s = now


async def _watched(node: MicroNode, relay: Relay | None = None) -> Watched:
    """Have one answer; with a relay, cut the link in its middle until that was noticed, and a moment more."""
    seen = Watched()
    healing: asyncio.Task[None] | None = None
    try:
        async for event in node.generate(_MESSAGES, _PARAMS):
            seen.take(event)
            if relay and not healing and seen.num_shown >= _NUM_BEFORE_CUT:
                relay.cut()
                seen.cut_s = time.monotonic()
                healing = asyncio.create_task(_heal(relay, seen))
    except HubUnavailable as error:
        if not relay:
            raise
        seen.failed = error
        seen.noticed_s = seen.noticed_s or time.monotonic()
    finally:
        if healing:
            healing.cancel()
            await asyncio.gather(healing, return_exceptions=True)
        if relay:
            relay.heal()
    return seen


async def _heal(relay: Relay, seen: Watched) -> None:
    try:
        await within(seen.noticed.wait(), _NOTICED_WITHIN_S)
        await asyncio.sleep(_CUT_S)
    finally:
        seen.healed_s = time.monotonic()
        relay.heal()


def _judged(whole: Watched, cut: Watched) -> Iterator[Check]:
    """What the answer with the cut shows, beside the same one without."""
    if cut.cut_s is None:
        yield Check("falls back", ok=False, found="the answer ended before the link could be cut", advice="try again")
        return
    if cut.noticed_s is None:
        yield Check("falls back", ok=False, found=f"{_NOTICED_WITHIN_S:.0f} s without a link went unnoticed")
        return
    after = f"{cut.noticed_s - cut.cut_s:.2f} s after the cut"
    if cut.failed:
        yield Check("falls back", ok=True, found=f"the answer ended {after}, as it is told: {cut.failed.message}")
        return
    if cut.provisional_s:
        own = f"{cut.num_provisional} tokens of its own, from {cut.provisional_s - cut.cut_s:.2f} s on"
        yield Check("falls back", ok=True, found=f"noticed {after}; {own}")
    else:
        yield Check("falls back", ok=True, found=f"noticed {after}; it waits, as it has no model or is told to")
    if cut.back_s is None or cut.healed_s is None:
        yield Check("comes back", ok=False, found="nothing verified came after the link was back", advice="see its log")
    elif cut.ids != whole.ids:
        yield Check("comes back", ok=False, found="the answer differs from the one without a cut", advice="report this")
    else:
        yield Check(
            "comes back",
            ok=True,
            found=f"{cut.back_s - cut.healed_s:.2f} s after the link; the same {len(cut.ids)} tokens as without a cut, "
            f"{cut.num_retracted} withdrawn on the way",
        )

"""The counters are exact: whatever happens to sessions, each drafted id has one fate, and every scrape shows it."""

from __future__ import annotations

import asyncio
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress

from prometheus_client.parser import text_string_to_metric_families

from baru_common.drafters.simulated import SimulatedDrafter
from baru_common.errors import BaruError
from baru_common.sampling import SamplingParams
from baru_hub.instruments import INSTRUMENTS
from baru_hub.observing import Begin, Ended, HubObserver, Stepped, Who
from baru_micro import Confirmed, Fallback, Finish, LinkOptions, LinkState, MicroNode, Retracted, Step
from baru_micro.link import Timers
from baru_micro.telemetry import STATES, NodeTelemetry
from support.fault_proxy import FaultProxy
from support.hubs import hub_of
from support.link import PROMPT, Local, asked, script, scripted_engine, until
from support.lockstep import free_running

NUM_TOKENS = 80
Scrape = dict[str, dict[tuple[str, ...], float]]


class Books(HubObserver):
    """What the hub itself says that its sessions came to."""

    def __init__(self) -> None:
        self.ends: list[Ended] = []
        self.num_steps = self.num_rebuilt = self.num_given = 0

    def stepped(self, step: Stepped) -> None:
        self.num_steps += 1

    def opened(self, who: Who, begin: Begin, num_known: int, num_cached: int) -> None:
        """Where `Finished` was what a link lost, the session is made again, and is given what was decided before."""
        if begin is Begin.REBUILT:
            self.num_rebuilt += 1
            self.num_given += num_known - len(PROMPT)

    def ended(self, end: Ended) -> None:
        self.ends.append(end)

    def total(self, name: str) -> int:
        total: int = sum(getattr(end.usage, name) for end in self.ends)
        return total - self.num_given if name == "num_emitted" else total


class Broken(HubObserver):
    """Fails whatever it is told: nobody else may notice."""

    def stepped(self, step: Stepped) -> None:
        raise ZeroDivisionError

    def ended(self, end: Ended) -> None:
        raise ZeroDivisionError


def scrape(address: str) -> Scrape:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    found: Scrape = {}
    for sample in (sample for family in families for sample in family.samples):
        labels = tuple(value for key, value in sorted(sample.labels.items()) if key != "model")
        found.setdefault(sample.name, {})[labels] = sample.value
    return found


def check(found: Scrape) -> None:
    """The law, for each node and drafter."""
    fates = {name: found.get(f"baru_hub_{name}_tokens_total", {}) for name in ("accepted", "rejected", "discarded")}
    for who, drafted in found.get("baru_hub_drafted_tokens_total", {}).items():
        assert drafted == sum(fate[who] for fate in fates.values()), who
        assert found["baru_hub_verified_tokens_total"][who] == fates["accepted"][who] + fates["rejected"][who]
    for name in ("verified", "accepted"):
        by_position = found.get(f"baru_hub_{name}_tokens_at_total", {})
        assert sum(by_position.values()) == sum(found.get(f"baru_hub_{name}_tokens_total", {}).values())


async def scrapes(address: str) -> int:
    """Check scrape after scrape, until cancelled; return how many."""
    num = 0
    with suppress(asyncio.CancelledError):
        while True:
            check(await asyncio.to_thread(scrape, address))
            num += 1
    return num


@asynccontextmanager
async def ready(number: int, hub: str) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """A session to be: it will run to its end, stop, be cancelled, lose its link for a moment, or for good."""
    kind, drafter = number % 5, SimulatedDrafter(0.7, seed=number)
    params = asked(NUM_TOKENS)
    if kind == 1:
        params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, stop_ids=(script(NUM_TOKENS)[25 + number],))
    fallback = Fallback.FAIL if kind == 4 else Fallback.WAIT
    options = LinkOptions(fallback=fallback, timers=Timers(heartbeat_s=0.1, suspect_s=2.0, down_s=8.0))
    connecting = MicroNode.connect
    async with FaultProxy.open(hub) as proxy, connecting(proxy.address, drafter=drafter, options=options) as node:

        async def run() -> None:
            num_steps = 0
            with suppress(BaruError):
                async for event in node.generate(PROMPT, params):
                    num_steps += isinstance(event, Step)
                    if num_steps == 8 and kind == 2:
                        break
                    if num_steps == 8 and kind == 4:
                        await proxy.refuse()
                    if num_steps == 8 and kind in (3, 4):
                        await proxy.reset()

        yield run


def totals(found: Scrape) -> Iterator[tuple[str, float]]:
    for name in ("emitted", "drafted", "verified", "accepted", "rejected", "discarded", "guessed"):
        yield f"num_{name}", sum(found[f"baru_hub_{name}_tokens_total"].values())


async def test_every_drafted_id_has_one_fate_in_every_scrape() -> None:
    books = Books()
    engine = scripted_engine(0.003)
    async with hub_of(
        engine, scheduler=free_running(), observers=[Broken(), books], metrics="127.0.0.1:0", orphan_grace_s=1.5
    ) as hub:
        scraping = asyncio.create_task(scrapes(hub.metrics))
        async with AsyncExitStack() as stack:
            sessions = [await stack.enter_async_context(ready(number, hub.address)) for number in range(10)]
            await asyncio.gather(*(session() for session in sessions))
        await until(lambda: hub.verifier.num_sessions == 0)
        scraping.cancel()
        assert await scraping > 3
        found = await asyncio.to_thread(scrape, hub.metrics)
    check(found)
    for name, total in totals(found):
        assert total == books.total(name), name
    reasons = Counter(end.reason for end in books.ends)
    assert reasons == {"length": 4 + books.num_rebuilt, "stop": 2, "cancelled": 2, "ABANDONED": 2}
    assert {reason: num for (reason,), num in found["baru_hub_sessions_ended_total"].items() if num} == reasons
    assert found["baru_hub_steps_total"][()] == books.num_steps
    assert sum(found["baru_hub_session_steps_total"].values()) == books.total("num_steps")
    assert found["baru_hub_streams_opened_total"]["resumed",] + books.num_rebuilt >= 2
    assert sum(found["baru_hub_streams_lost_total"].values()) + books.num_rebuilt >= 4
    assert books.total("num_rejected") > 0 < books.total("num_discarded")
    assert {i.exported_name for i in INSTRUMENTS} >= {name for name in found if name.endswith("_total")} - {
        name for name in found if name.startswith(("vllm:", "process_"))
    }


async def test_a_nodes_counters_are_what_its_caller_saw() -> None:
    """Through an outage: who stood behind what was shown, and what became of it; and how the link stood."""
    keeper, shown = NodeTelemetry(), Counter[str]()
    async with (
        hub_of(scripted_engine(0.004), scheduler=free_running(), orphan_tokens=4) as hub,
        FaultProxy.open(hub.address) as proxy,
        MicroNode.connect(proxy.address, drafter=Local(0.6, token_ms=2), observers=[keeper]) as node,
    ):
        states, healed = set(), False
        async for event in node.generate(PROMPT, asked(NUM_TOKENS)):
            states.add(node.link.state)
            if isinstance(event, Step):
                shown[event.provenance.value] += len(event.pieces)
            elif isinstance(event, Confirmed):
                shown["confirmed"] += event.end - event.start
            elif isinstance(event, Retracted):
                shown["retracted"] += len(event.ids)
            if shown["verified"] > 10 and LinkState.DOWN not in states:
                await proxy.refuse()
                await proxy.reset()
            if shown["provisional"] == 5 and not healed:
                healed = True
                assert keeper.link_states == {(proxy.address,): STATES[LinkState.DOWN]}
                await proxy.heal()
        address = proxy.address
    counted = keeper.ledger.snapshot()
    assert {who: num for (who,), num in counted["baru_node_tokens"].items() if num} == shown
    assert min(shown["provisional"], shown["confirmed"], shown["retracted"]) > 0
    assert counted["baru_node_link_outages"] == {(address,): 1}
    assert counted["baru_node_attempts"][address, "ok"] == 2
    assert isinstance(event, Finish)
    assert {reason: num for (reason,), num in counted["baru_node_generations_ended"].items() if num} == {"length": 1}

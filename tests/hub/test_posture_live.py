"""A running hub and its posture: handed out at Open, changed while sessions run, kept to by the hub itself."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from baru_common.drafters import DrafterIdentity
from baru_common.errors import ConfigError, WorkloadRefused
from baru_common.frames import Draft, DrafterInfo, Open, Opened, Verdict
from baru_common.sampling import SamplingParams
from baru_hub.audit import log_files
from baru_hub.canary import FIXED_PROMPTS, Standing
from baru_hub.canary_store import CanaryLedger
from baru_hub.engines import Want
from baru_hub.engines.transformers import TransformersEngine
from baru_hub.following import CanaryMode, Follow
from baru_hub.guesses import Guesses
from baru_hub.posture_keeper import PostureKeeper, PostureSource
from baru_hub.posture_store import PostureStore
from baru_hub.verifier import Verifier
from baru_micro import Event, Finish, LinkChanged, LinkOptions, MicroNode, PostureChanged, Step
from baru_micro.canary import run_canary
from support.documents import FLOORS, document
from support.drafters import FunctionDrafter, oracle, wrong_at
from support.hubs import KV_CACHE_MB, hub_of
from support.lockstep import Lockstep
from support.tiny import plain_greedy, tiny_target, twin

_TARGET = tiny_target()
_PROMPT = [1, 5, 9]
_MICRO = LinkOptions(tier="micro")
_LONG = SamplingParams(max_tokens=200, ignore_eos=True)
_OFF = "{ on = false }"
_SMALL = DrafterIdentity("small", b"w" * 32, "engine 1")


@pytest.fixture(scope="module")
def answer() -> list[int]:
    return plain_greedy(_TARGET, _PROMPT, 200)


@dataclass(frozen=True)
class Weighty(FunctionDrafter):
    """A drafter with weights."""

    identity: DrafterIdentity = _SMALL

    def identify(self) -> DrafterIdentity:
        return self.identity


def engine_of(kind: type[TransformersEngine] = TransformersEngine, drafter: str | None = None) -> TransformersEngine:
    return kind(twin(_TARGET), kv_cache_mb=KV_CACHE_MB, drafter=drafter)


@dataclass
class Kit:
    """A hub that follows a folder, and a node of the micro tier."""

    store: PostureStore
    keeper: PostureKeeper
    node: MicroNode
    verifier: Verifier

    def apply(self, text: str) -> None:
        self.store.apply(text)
        assert self.keeper.refresh()


@asynccontextmanager
async def kit(
    folder: Path,
    text: str,
    drafter: FunctionDrafter,
    *,
    ledger: CanaryLedger | None = None,
    engine: TransformersEngine | None = None,
    depth: int = 2,
) -> AsyncIterator[Kit]:
    store, engine = PostureStore(folder), engine or engine_of()
    store.apply(text)
    keeper = PostureKeeper(engine.spec, source=PostureSource(folder), ledger=ledger)
    async with (
        hub_of(engine, scheduler=Lockstep(depth), posture=keeper) as hub,
        MicroNode.connect(hub.address, drafter=drafter, options=_MICRO) as node,
    ):
        yield Kit(store, keeper, node, hub.verifier)


async def events_of(node: MicroNode, act: Callable[[Event], None] = lambda _: None) -> list[Event]:
    events = []
    async for event in node.generate(_PROMPT, _LONG):
        events.append(event)
        act(event)
    return events


def told(events: list[Event]) -> list[PostureChanged]:
    return [event for event in events if isinstance(event, PostureChanged)]


def verified(events: list[Event]) -> list[int]:
    """Draft ids that each step checked."""
    return [event.stats.num_verified for event in events if isinstance(event, Step)]


def finish_of(events: list[Event]) -> Finish:
    assert isinstance(events[-1], Finish)
    return events[-1]


# -- at Open


async def test_what_the_document_says_of_a_tier_reaches_its_nodes_at_open(tmp_path: Path, answer: list[int]) -> None:
    """Off, with rule, reason, version and digest; the answer is the same, and no draft was sent."""
    async with kit(tmp_path, document(2, micro=_OFF), oracle(_PROMPT, answer)) as running:
        events = await events_of(running.node)
        hub = running.verifier.describe()
        current = running.store.current()
    (changed,) = told(events)
    posture = changed.posture
    assert (posture.drafting, posture.rule, posture.reason) == (False, "nano", "too small")
    assert (posture.document_version, posture.document_digest) == (2, current.digest)
    assert (hub.posture_version, hub.posture_digest) == (2, current.digest)
    assert finish_of(events).usage.num_drafted == 0
    assert list(finish_of(events).ids) == answer


@pytest.mark.parametrize(
    ("micro", "most", "reason"),
    [
        ("{ on = true, max_depth = 1 }", 1, ""),
        ("{ on = true, max_ahead = 1 }", 1, ""),
        ('{ on = true, drafters = ["ngram"] }', 0, "oracle is not among ngram"),
    ],
)
async def test_limits_of_a_tier_bound_its_drafts(
    tmp_path: Path, answer: list[int], micro: str, most: int, reason: str
) -> None:
    """As deep as allowed and no deeper; another family is turned off by name."""
    async with kit(tmp_path, document(2, micro=micro), oracle(_PROMPT, answer), depth=8) as running:
        events = await events_of(running.node)
    assert max(verified(events)) == most
    assert [changed.posture.reason for changed in told(events)] == ([reason] if reason else [])
    assert list(finish_of(events).ids) == answer


async def test_a_node_that_does_not_obey_is_not_obeyed(tmp_path: Path, answer: list[int]) -> None:
    """The hub checks none of its drafts; and takes no harm from them."""
    PostureStore(tmp_path).apply(document(2, micro=_OFF))
    engine = engine_of()
    keeper = PostureKeeper(engine.spec, source=PostureSource(tmp_path))
    start = Open(
        tuple(_PROMPT), SamplingParams(max_tokens=20), engine.spec.fingerprint, engine.spec.bundle.digest, tier="micro"
    )
    async with Verifier(engine, Lockstep(), posture=keeper) as verifier:
        live = await verifier.open(replace(start, drafter=DrafterInfo("oracle")))
        live.draft(Draft(live.state.epoch, 1, 3, 0, tuple(answer[:8])))
        frames = [frame async for frame in live.frames()]
    await engine.close()
    assert isinstance(frames[0], Opened)
    assert frames[0].max_draft_ahead == 0
    verdicts = [frame for frame in frames if isinstance(frame, Verdict)]
    assert {verdict.num_verified for verdict in verdicts} == {0}
    assert [token for verdict in verdicts for token in verdict.token_ids] == answer[:20]


@pytest.mark.parametrize(
    ("workload", "words"),
    [("fft", "deterministic"), ("beamformer", "no next token"), ("poetry", "'poetry' is not known")],
)
async def test_work_that_has_no_next_token_is_refused_at_open(workload: str, words: str) -> None:
    """By the hub, whatever the node thinks; and by the node, before it asks. What can be drafted is listed."""
    engine = engine_of()
    start = Open(tuple(_PROMPT), SamplingParams(), engine.spec.fingerprint, engine.spec.bundle.digest)
    async with Verifier(engine, Lockstep()) as verifier:
        with pytest.raises(WorkloadRefused, match=words) as refused:
            await verifier.open(replace(start, workload=workload))
    await engine.close()
    assert "transcription" in refused.value.hint
    with pytest.raises(WorkloadRefused, match=words):
        LinkOptions(workload=workload)


# -- while sessions run


async def test_a_change_reaches_a_running_session_and_so_does_going_back(tmp_path: Path, answer: list[int]) -> None:
    """On, off, on again, on one stream: between off and on no draft is checked; the answer is the target's own."""
    async with kit(tmp_path, document(2), oracle(_PROMPT, answer, depth=2)) as running:
        num_plain = 0

        def act(event: Event) -> None:
            nonlocal num_plain
            posture = running.node.posture
            if isinstance(event, Step) and event.stats.num_accepted and running.keeper.document.version == 2:
                if len(running.store.history()) == 1:
                    running.apply(document(3, micro=_OFF))
            elif isinstance(event, Step) and posture and not posture.drafting:
                num_plain += 1
                if num_plain == 5:
                    running.store.rollback()
                    assert running.keeper.refresh()

        events = await events_of(running.node, act)
    off, on = told(events)
    assert [(c.posture.drafting, c.posture.document_version) for c in (off, on)] == [(False, 3), (True, 2)]
    at_off, at_on = events.index(off), events.index(on)
    assert max(verified(events[:at_off])) == max(verified(events[at_on:])) == 2
    assert set(verified(events[at_off:at_on])) == {0}
    assert list(finish_of(events).ids) == answer
    assert not [event for event in events if isinstance(event, LinkChanged)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("schema_version = [", "no TOML"),
        (document(3, micro='{ on = "yes" }'), "rules.0.upward.on"),
        (document(2, micro=_OFF), "version 2 is in force"),
        (document(1, micro=_OFF), "version 2 is in force"),
    ],
)
def test_a_bad_document_changes_nothing_and_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str, words: str
) -> None:
    """Whoever puts it there, past `posture apply`; the next good one is taken over."""
    file = tmp_path / "posture.toml"
    file.write_text(document(2))
    keeper = PostureKeeper(engine_of().spec, source=PostureSource(file))
    before, calls = keeper.document, []
    keeper.on_change = lambda: calls.append(1)
    file.write_text(text)
    with caplog.at_level(logging.ERROR):
        assert not keeper.refresh()
    assert keeper.document is before
    assert words in keeper.problem
    assert words in caplog.text
    assert not calls
    file.write_text(document(4, micro=_OFF))
    assert keeper.refresh()
    assert (keeper.problem, keeper.for_node("micro", None, 1).drafting, len(calls)) == ("", False, 1)


async def test_a_change_is_in_the_audit_log_and_one_that_was_not_taken_over_is_not(tmp_path: Path) -> None:
    """Once, with version and digest."""
    store, engine = PostureStore(tmp_path / "posture"), engine_of()
    store.apply(document(2))
    keeper = PostureKeeper(engine.spec, source=PostureSource(tmp_path / "posture"))
    async with hub_of(engine, posture=keeper, audit=tmp_path / "audit"):
        store.apply(document(3, micro=_OFF))
        assert keeper.refresh()
        store.path.write_text(document(1))
        assert not keeper.refresh()
    records = [json.loads(line) for path in log_files(tmp_path / "audit") for line in path.read_bytes().splitlines()]
    changes = [record for record in records if record["event"] == "posture_changed"]
    assert [record["fields"] for record in changes] == [{"version": 3, "digest": keeper.document.digest.hex()}]


async def test_a_hub_looks_for_changes_by_itself(tmp_path: Path) -> None:
    """And hears of them from the folder that `posture apply` writes to."""
    store, changed = PostureStore(tmp_path), asyncio.Event()
    keeper = PostureKeeper(engine_of().spec, source=PostureSource(tmp_path))
    keeper.on_change = changed.set
    async with keeper.watching(poll_s=0.01):
        store.apply(document(2))
        await asyncio.wait_for(changed.wait(), 10)
    assert keeper.document.version == 2


async def test_a_node_of_hubs_with_different_documents_is_warned(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Once, with both; not when they follow the same."""
    first, second = engine_of(), engine_of()
    PostureStore(tmp_path / "a").apply(document(2))
    keepers = [
        PostureKeeper(first.spec, source=PostureSource(tmp_path / "a")),
        PostureKeeper(second.spec, source=PostureSource(tmp_path / "b")),
    ]
    async with (
        hub_of(first, posture=keepers[0]) as a,
        hub_of(second, posture=keepers[1]) as b,
        MicroNode.connect([a.address, b.address], drafter=None) as node,
    ):
        assert "different" not in caplog.text
        hub = await node._hubs.channels[1].describe()
        for _ in range(2):
            node._hubs.note_document(b.address, hub.posture_version, hub.posture_digest)
    assert caplog.text.count("different posture documents") == 1
    assert "version 2" in caplog.text


# -- the canary


def weighty(drafter: FunctionDrafter, **identity: Any) -> Weighty:
    return Weighty(drafter.function, "causal_lm", identity=replace(_SMALL, **identity))


@pytest.mark.parametrize("swapped", [{"engine": "engine 2"}, {"digest": b"v" * 32}])
async def test_a_swapped_engine_or_checkpoint_turns_admission_off(
    tmp_path: Path, answer: list[int], swapped: dict[str, Any]
) -> None:
    """What was admitted for one triple says nothing of another: measured anew, it is refused with both figures, and the
    answer goes on without drafts. The next session is refused from the start, the first triple is still admitted."""
    good = weighty(oracle(_PROMPT, answer, depth=2))
    bad = weighty(wrong_at(_PROMPT, answer, 2, lambda _: True, 300), **swapped)
    ledger = CanaryLedger(tmp_path / "canary")
    text = document(2, micro="{ on = true }", canary=FLOORS)
    async with kit(tmp_path, text, good, ledger=ledger, depth=8) as running:
        events = await events_of(running.node)
        (admitted,) = told(events)
        assert (admitted.posture.drafting, admitted.posture.probation) == (True, False)
        assert max(verified(events[: events.index(admitted)])) == 2
    async with kit(tmp_path, text, bad, ledger=CanaryLedger(tmp_path / "canary"), depth=8) as running:
        events = await events_of(running.node)
        (refused,) = told(events)
        assert not refused.posture.drafting
        assert "acceptance 0% measured" in refused.posture.reason
        assert "63% expected (its card)" in refused.posture.reason
        assert set(verified(events[events.index(refused) :])) == {0}
        assert list(finish_of(events).ids) == answer
        again = await events_of(running.node)
        assert set(verified(again)) == {0}
        assert finish_of(again).usage.num_drafted == 0
    async with kit(tmp_path, text, good, ledger=CanaryLedger(tmp_path / "canary"), depth=8) as running:
        assert not told(await events_of(running.node))
        assert running.node.posture
        assert (running.node.posture.drafting, running.node.posture.probation) == (True, False)


async def test_the_canary_of_a_node_has_its_drafter_judged(tmp_path: Path) -> None:
    """On the fixed prompts, whatever it would draft later."""
    bad = weighty(FunctionDrafter(lambda ids, _, most: [(ids[-1] + 1) % 300] * min(most, 2)))
    text = document(2, micro="{ on = true }", canary=FLOORS)
    async with kit(tmp_path, text, bad, ledger=CanaryLedger()) as running:
        report = await run_canary(running.node)
    assert report.standing == "refused"
    assert report.num_verified >= 16
    assert report.posture
    assert "63% expected" in report.posture.reason


class OtherEngine(TransformersEngine):
    """Runs the same checkpoint, and runs its drafter wrong."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._spec = replace(self._spec, runtime="another version")

    async def draft(self, wants: Any) -> list[Guesses]:
        made = await super().draft(wants)
        return [Guesses([(token + 1) % 300 for token in guesses.path]) for guesses in made]


async def test_the_hubs_own_drafter_is_measured_and_left_out_when_it_fails(tmp_path: Path, answer: list[int]) -> None:
    """Two engines, one checkpoint: 100 % and 0 %. The hub starts, says so, drafts nothing; strict: no start."""
    PostureStore(tmp_path).apply(document(2, canary=FLOORS))
    said: list[dict[str, str]] = []

    def say(event: str, **facts: str) -> None:
        said.append({"event": event, **facts})

    follow = Follow(tmp_path)
    good, bad = engine_of(drafter="early_exit:2"), engine_of(OtherEngine, "early_exit:2")
    keeper = await follow.keeper(good, say)
    assert said[-1]["standing"] == "admitted"
    assert "100% measured" in said[-1]["reason"]
    assert keeper.own_depth(1) is None
    keeper = await follow.keeper(bad, say)
    assert said[-1]["standing"] == "refused"
    assert "0% measured" in said[-1]["reason"]
    assert "63% expected" in said[-1]["reason"]
    assert keeper.own_depth(1) == 0
    with pytest.raises(ConfigError, match=r"0% measured.*63% expected"):
        await replace(follow, canary=CanaryMode.STRICT).keeper(bad, say)
    records = CanaryLedger(tmp_path / "canary").records()
    assert [record.method for record in records] == [FIXED_PROMPTS] * 2
    assert len({record.triple.key for record in records}) == 2
    async with hub_of(bad, posture=keeper) as hub, MicroNode.connect(hub.address, drafter=None) as node:
        finish = finish_of(await events_of(node))
    assert (finish.usage.num_guessed, list(finish.ids)) == (0, answer)
    await good.close()


async def test_a_record_is_used_again_until_something_differs(tmp_path: Path) -> None:
    """The second start measures nothing; a damaged record counts as none, and so does one that is removed while
    the hub runs."""
    PostureStore(tmp_path).apply(document(2, canary=FLOORS))
    num_drafts = 0

    class Counting(TransformersEngine):
        async def draft(self, wants: Any) -> list[Guesses]:
            nonlocal num_drafts
            num_drafts += 1
            assert all(isinstance(want, Want) and want.depth <= 2 for want in wants)
            return await super().draft(wants)

    engine = engine_of(Counting, "early_exit:2")
    await Follow(tmp_path).keeper(engine, lambda *_, **__: None)
    assert num_drafts
    before, num_drafts = num_drafts, 0
    await Follow(tmp_path).keeper(engine, lambda *_, **__: None)
    assert num_drafts == 0
    (file,) = (tmp_path / "canary").glob("*.json")
    file.write_text(file.read_text().replace('"num_accepted": ', '"num_accepted": 9'))
    keeper = await Follow(tmp_path).keeper(engine, lambda *_, **__: None)
    assert num_drafts == before
    assert keeper.own_admission().standing is Standing.ADMITTED
    CanaryLedger(tmp_path / "canary").forget()
    assert keeper.refresh()
    assert keeper.own_admission().standing is Standing.PROBATION
    assert keeper.own_depth(1) == 0
    await engine.close()


def test_the_hubs_own_drafter_is_bounded_by_batch(tmp_path: Path) -> None:
    """Off at the batch at which the document says so, on below it."""
    text = document(2, micro="{ on = true }").replace("local = { on = false }", "min_batch = 3\nlocal = { on = false }")
    PostureStore(tmp_path).apply(text)
    engine = engine_of(drafter="early_exit:1")
    keeper = PostureKeeper(engine.spec, source=PostureSource(tmp_path), tier="micro")
    assert [keeper.own_depth(batch) for batch in (1, 2, 3, 8)] == [None, None, 0, 0]

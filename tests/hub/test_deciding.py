"""From logits to a decision: the same ids in any company, plain log-probabilities, and requests that cannot go on."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from baru_common.errors import InvalidRequest
from baru_common.sampling import NO_ID, Grammar, SamplingContext, SamplingMode, SamplingParams, SparseProbs
from baru_common.sampling.guide import Guide
from baru_common.sampling.sampler import Sampler
from baru_hub.acceptance import Decision, accept
from baru_hub.deciding import decide
from baru_hub.engines.transformers import TransformersEngine
from baru_hub.rejection import check_block, check_singly
from baru_hub.session import Block
from baru_micro import Finish, MicroNode
from support.drafters import FunctionDrafter
from support.hubs import hub_of
from support.lines import Line
from support.sampling import context, letters
from support.tiny import tiny_target, twin

_CPU = torch.device("cpu")
_SIZE = 300
_PROMPT = [40, 50, 60]
_DIGITS = [token for token in range(_SIZE) if (tiny_target().vocabulary.pieces[token] or b"").isdigit()]
_EOS = 2


def rows(num_rows: int, seed: int = 0, size: int = _SIZE, spread: float = 3.0) -> torch.Tensor:
    """Logits as a model may return them: [num_rows, size]."""
    return torch.randn(num_rows, size, generator=torch.Generator().manual_seed(seed)) * spread


def sampler_of(num_prompt: int = len(_PROMPT), grammar: Grammar | None = None, **params: Any) -> Sampler:
    target = tiny_target()
    guide = Guide.compile(grammar, target.bundle, target.eos_ids) if grammar else None
    given = SamplingParams(grammar=grammar, **params)
    return Sampler(SamplingContext(given, num_prompt, target.vocabulary, target.eos_ids, guide), _CPU)


def block_of(draft: Sequence[int], *draft_probs: SparseProbs) -> Block:
    return Block((_PROMPT[-1],), tuple(draft), True, 1, tuple(draft_probs))


def some_params(chance: random.Random) -> dict[str, Any]:
    """Any mix of everything that touches logits or draws."""
    few = chance.sample(range(3, _SIZE), 50)
    kinds: list[dict[str, Any]] = [
        {"temperature": chance.choice((0.3, 0.7, 1.0, 1.5)), "seed": chance.getrandbits(64)},
        {"top_k": chance.choice((1, 5, 100)), "top_p": chance.choice((0.5, 0.9)), "min_p": chance.choice((0, 0.1))},
        {"repetition_penalty": 1.3, "presence_penalty": -0.5, "frequency_penalty": 0.7},
        {"logit_bias": {token: chance.uniform(-5, 5) for token in few[:30]}},
        {"banned_ids": few[:20]},
        {"allowed_ids": few[:25]},
        {"min_tokens": chance.randint(1, 9), "stop_ids": few[25:]},
        {"forced_ids": few[20:23]} if chance.random() < 0.5 else {},
    ]
    chosen: dict[str, Any] = {}
    for kind in kinds:
        chosen |= kind if chance.random() < 0.5 else {}
    if chosen.keys() >= {"banned_ids", "allowed_ids"}:
        del chosen["banned_ids"]
    return chosen


# -- a row decides what it would decide alone


@pytest.mark.parametrize("seed", range(40))
def test_a_block_decides_what_plain_steps_decide(seed: int) -> None:
    """Row by row with the draft taken for committed, by a sampler that never saw a draft: the same ids and bits."""
    chance = random.Random(seed)
    params, draft = some_params(chance), [chance.randrange(3, _SIZE) for _ in range(7)]
    logits = rows(8, seed)
    in_blocks, plainly = sampler_of(**params), sampler_of(**params)
    decision = decide(logits, in_blocks, _PROMPT, block_of(draft))
    assert (len(decision.ids), decision.num_accepted, decision.logprobs) == (8, None, ())
    probs = in_blocks.probs(logits, [*_PROMPT, *draft], len(_PROMPT), len(_PROMPT))
    for i in range(8):
        committed = [*_PROMPT, *draft[:i]]
        assert decide(logits[i : i + 1], plainly, committed, block_of(())).ids == decision.ids[i : i + 1]
        assert torch.equal(plainly.probs(logits[i : i + 1], committed, len(committed), len(committed))[0], probs[i])


@pytest.mark.parametrize("seed", range(12))
def test_a_block_under_a_grammar_decides_what_plain_steps_decide(seed: int) -> None:
    """Up to the first draft id that the grammar forbids; rows past it do not count."""
    chance = random.Random(seed)
    grammar = chance.choice((Grammar.regex("[0-9]{6,9}"), Grammar.choices(["1234567", "12890"])))
    params: dict[str, Any] = {"grammar": grammar, "temperature": chance.choice((0, 1)), "seed": seed}
    draft = [_DIGITS[int(digit)] for digit in "12345"]
    wrong = chance.randrange(6)
    draft[wrong:] = [5] if wrong < 5 else []
    logits = rows(len(draft) + 1, seed)
    decided = decide(logits, sampler_of(**params), _PROMPT, block_of(draft)).ids
    plainly = sampler_of(**params)
    for i in range(min(wrong, len(draft)) + 1):
        (alone,) = decide(logits[i : i + 1], plainly, [*_PROMPT, *draft[:i]], block_of(())).ids
        assert alone == decided[i]
    assert accept(draft, Decision(decided)).num_accepted <= wrong


def test_drafts_leave_no_trace() -> None:
    """Blocks full of wrong ids between the plain steps change nothing of what is counted or followed."""
    params: dict[str, Any] = {
        "temperature": 1.0,
        "seed": 5,
        "repetition_penalty": 1.5,
        "frequency_penalty": 1.0,
        "presence_penalty": 1,
    }
    used, fresh, chance = sampler_of(**params), sampler_of(**params), random.Random(0)
    committed = list(_PROMPT)
    for step in range(30):
        draft = [chance.randrange(3, 40) for _ in range(chance.randrange(5))]
        first = decide(rows(len(draft) + 1, step, spread=1), used, committed, block_of(draft)).ids[0]
        (alone,) = decide(rows(len(draft) + 1, step, spread=1)[:1], fresh, committed, block_of(())).ids
        assert first == alone
        committed.append(first)


def test_a_nucleus_does_not_depend_on_the_other_rows() -> None:
    """Logits may differ where their probabilities, rounded, do not; which of these ids stand is the row's own affair,
    be its company so flat that the search goes on for longer."""
    size, num_alike = 20_000, 40
    tied = torch.full((size,), -40.0)
    places = torch.randperm(size, generator=torch.Generator().manual_seed(3))
    tied[places[0]] = 3.5
    tied[places[1 : num_alike + 1]] = 1e-3 + 1e-9 * torch.arange(num_alike)
    logits = torch.stack([tied, torch.zeros(size)])
    assert len(set(tied.tolist())) > 10 > len(set(tied.softmax(0).tolist()))
    sampler = Sampler(context(1, vocabulary=letters(size), temperature=1.0, seed=1, top_p=0.7), _CPU)
    alone = sampler.probs(logits[:1], [1, 1], 1, 1)[0]
    together = sampler.probs(logits, [1, 1], 1, 1)[0]
    assert torch.equal(alone, together)
    assert 1 < int((alone > 0).sum()) <= num_alike + 1


def test_greedy_takes_the_lowest_of_the_likeliest() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 0.0], [5.0, 5.0, 5.0, 5.0], [0.0, 1.0, 2.0, 3.0]])
    sampler = Sampler(context(1, vocabulary=letters(4)), _CPU)
    assert decide(logits, sampler, [0], block_of([1, 2])).ids == (1, 0, 3)
    biased = Sampler(context(1, vocabulary=letters(4), logit_bias={2: 1.0}), _CPU)
    assert decide(logits, biased, [0], block_of([1, 2])).ids == (2, 2, 2)


def test_greedy_takes_no_notice_of_the_sampling_mode() -> None:
    """There is nothing to draw, so nothing to refuse at random."""
    greedy: dict[str, Any] = {"sampling_mode": SamplingMode.REJECTION, "verify_blocks": True}
    logits = rows(4)
    best = tuple(logits.argmax(dim=1).tolist())
    assert decide(logits, sampler_of(**greedy), _PROMPT, block_of(best[:3])) == Decision(best)


# -- rejection


REJECTION: dict[str, Any] = {"temperature": 1.0, "seed": 11, "sampling_mode": SamplingMode.REJECTION}


@pytest.mark.parametrize("verify_blocks", [False, True])
def test_rejection_emits_what_stands_and_one_id_of_the_targets(verify_blocks: bool) -> None:
    """Over many seeds: from nothing to everything accepted; the accepted ids are the draft's own."""
    logits, lengths = rows(4, spread=1.0), set()
    draft = logits.argmax(dim=1).tolist()[:3]
    logits[torch.arange(3), torch.tensor(draft)] += 3
    for seed in range(60):
        sampler = sampler_of(**{**REJECTION, "seed": seed, "verify_blocks": verify_blocks})
        decision = decide(logits, sampler, _PROMPT, block_of(draft))
        assert decision.num_accepted is not None
        assert decision.ids[:-1] == tuple(draft[: decision.num_accepted])
        assert accept(draft, decision).emitted == decision.ids
        if not verify_blocks and decision.num_accepted < 3:
            assert decision.ids[-1] != draft[decision.num_accepted]
        lengths.add(decision.num_accepted)
    assert lengths == {0, 1, 2, 3}


@pytest.mark.parametrize("verify_blocks", [False, True])
def test_rejection_is_a_function_of_seed_and_place(verify_blocks: bool) -> None:
    """Repeated, it decides alike; for another seed, or another committed length, it draws anew."""
    logits, draft = rows(4, spread=0.3), [5, 6, 7]
    probs = [SparseProbs.of([(token, 0.01), (9, 0.99)]) for token in draft]

    def decided(seed: int, num_more: int = 0) -> Decision:
        sampler = sampler_of(**{**REJECTION, "seed": seed, "verify_blocks": verify_blocks})
        return decide(logits, sampler, _PROMPT + [9] * num_more, block_of(draft, *probs))

    assert [decided(seed) for seed in range(20)] == [decided(seed) for seed in range(20)]
    assert len({decided(seed) for seed in range(20)}) > 10
    assert len({decided(3, num_more) for num_more in range(20)}) > 10


@pytest.mark.parametrize("verify_blocks", [False, True])
def test_rejection_checks_against_what_the_request_leaves_of_the_target(verify_blocks: bool) -> None:
    """Filters, penalties and masks are part of the target's distribution: what they exclude does not come, drafted or
    not; and the check is given each row's own."""
    params = {**REJECTION, "verify_blocks": verify_blocks, "top_k": 4, "frequency_penalty": 2.0, "banned_ids": (8,)}
    logits, draft = rows(4, spread=1.0), [8, 9, 9]
    logits[:, 8] = 30.0
    for seed in range(30):
        assert 8 not in decide(logits, sampler_of(**{**params, "seed": seed}), _PROMPT, block_of(draft)).ids
    sampler = sampler_of(**params)
    probs = sampler.probs(logits, [*_PROMPT, 9, 9, 9], len(_PROMPT), len(_PROMPT))
    checked: list[torch.Tensor] = []
    check = check_block if verify_blocks else check_singly

    def recording(draft: Any, draft_probs: Any, target_probs: torch.Tensor, uniforms: Any) -> Any:
        checked.append(target_probs)
        return check(draft, draft_probs, target_probs, uniforms)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"baru_hub.deciding.{check.__name__}", recording)
        decide(logits, sampler, _PROMPT, block_of([9, 9, 9]))
    assert torch.equal(checked[0], probs)


# -- log-probabilities


@pytest.mark.parametrize("mode", ["greedy", "coupled", "rejection", "as a block"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_are_those_of_the_plain_logits(mode: str, dtype: torch.dtype) -> None:
    """Whatever is asked for besides: the model's own opinion of each id, and of the likeliest ones."""
    kind: dict[str, Any] = {
        "greedy": {},
        "coupled": {"temperature": 1.5, "seed": 3},
        "rejection": {**REJECTION, "temperature": 1.5},
        "as a block": {**REJECTION, "temperature": 1.5, "verify_blocks": True},
    }[mode]
    logits, chance = rows(5).to(dtype), random.Random(mode)
    plain = logits.double().log_softmax(dim=1)
    for _ in range(15):
        others = {k: v for k, v in some_params(chance).items() if k not in ("temperature", "seed", "forced_ids")}
        draft = [chance.randrange(3, _SIZE) for _ in range(4)]
        sampler = sampler_of(**kind, **others, logprobs=4)
        decision = decide(logits, sampler, _PROMPT, block_of(draft))
        silent = decide(logits, sampler_of(**kind, **others), _PROMPT, block_of(draft))
        assert replace(decision, logprobs=()) == silent
        assert len(decision.logprobs) == len(decision.ids)
        for row, token, found in zip(plain, decision.ids, decision.logprobs, strict=False):
            assert found.logprob == pytest.approx(float(row[token]), abs=1e-5)
            assert [logprob for _, logprob in found.top] == pytest.approx(row.topk(4).values.tolist(), abs=1e-5)
            assert [float(row[i]) for i, _ in found.top] == pytest.approx(row.topk(4).values.tolist(), abs=1e-5)
            assert len({i for i, _ in found.top}) == 4


def test_logprobs_of_a_row_are_the_same_in_any_company() -> None:
    logits, draft = rows(6), [5, 6, 7, 8, 9]
    together = decide(logits, sampler_of(temperature=1.0, seed=1, logprobs=20), _PROMPT, block_of(draft))
    for i in range(6):
        alone = decide(
            logits[i : i + 1],
            sampler_of(temperature=1.0, seed=1, logprobs=20),
            [*_PROMPT, *draft[:i]],
            block_of(()),
        )
        assert alone.logprobs[0] == together.logprobs[i]


def test_logprobs_of_the_emitted_id_alone() -> None:
    decision = decide(rows(1), sampler_of(logprobs=0), _PROMPT, block_of(()))
    assert [entry.top for entry in decision.logprobs] == [()]


# -- where the request leaves no id


_IMPOSSIBLE: dict[str, dict[str, Any]] = {
    "grammar and banned ids": {"grammar": Grammar.regex("[0-9]+"), "banned_ids": _DIGITS},
    "grammar and allowed ids": {"grammar": Grammar.regex("[0-9]+"), "allowed_ids": (5, 6)},
    "allowed ids and min_tokens": {"allowed_ids": (_EOS,), "min_tokens": 3},
}
_MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "coupled": {"temperature": 1.0, "seed": 1},
    "filtered": {"temperature": 0.7, "seed": 1, "top_k": 3, "top_p": 0.9, "min_p": 0.1},
    "rejection": REJECTION,
    "as a block": {**REJECTION, "verify_blocks": True},
}


@pytest.mark.parametrize("mode", _MODES)
@pytest.mark.parametrize("impossible", _IMPOSSIBLE)
def test_no_id_stands_where_none_is_left(mode: str, impossible: str) -> None:
    """With a draft or without; nothing of the draft is accepted. Log-probabilities are no obstacle."""
    params = {**_MODES[mode], **_IMPOSSIBLE[impossible], "logprobs": 2}
    assert decide(rows(1), sampler_of(**params), _PROMPT, block_of(())).ids == (NO_ID,)
    draft = _DIGITS[:3]
    outcome = accept(draft, decide(rows(4), sampler_of(**params), _PROMPT, block_of(draft)))
    assert (outcome.num_accepted, outcome.emitted) == (0, (NO_ID,))
    probs = [SparseProbs.of([(token, 0.5), (9, 0.5)]) for token in draft]
    outcome = accept(draft, decide(rows(4), sampler_of(**params), _PROMPT, block_of(draft, *probs)))
    assert (outcome.num_accepted, outcome.emitted) == (0, (NO_ID,))


@pytest.mark.parametrize("mode", _MODES)
def test_no_id_stands_at_its_own_row_only(mode: str) -> None:
    """The grammar asks for three digits and then for a letter that is banned."""
    banned = [i for i, piece in enumerate(tiny_target().vocabulary.pieces) if b"x" in (piece or b"")]
    params = {**_MODES[mode], "grammar": Grammar.regex("123x"), "banned_ids": banned}
    draft = [_DIGITS[1], _DIGITS[2], _DIGITS[3]]
    outcome = accept(draft, decide(rows(4), sampler_of(**params), _PROMPT, block_of(draft)))
    assert outcome.emitted == (*draft, NO_ID)


@pytest.mark.parametrize("impossible", _IMPOSSIBLE)
def test_a_drafter_has_nothing_to_say_where_no_id_is_left(impossible: str) -> None:
    sampler = sampler_of(**REJECTION, **_IMPOSSIBLE[impossible])
    assert sampler.draft(rows(1), _PROMPT, len(_PROMPT), 0) == (NO_ID, None)


# -- a request that cannot go on costs nobody else anything


_OTHERS: list[dict[str, Any]] = [{}, {"temperature": 1.0, "seed": 4, "logprobs": 3, "frequency_penalty": 0.5}]


def line_of(engine: TransformersEngine, **params: Any) -> Line:
    return Line(engine, _PROMPT, 12, sampling=sampler_of(**params).context)


async def alone(engine: TransformersEngine, **params: Any) -> list[Decision]:
    line, found = line_of(engine, **params), []
    while not line.done:
        (decided,) = await engine.verify([line.feed()])
        assert isinstance(decided, Decision)
        found.append(decided)
        line.take(decided)
    line.free()
    return found


@pytest.mark.parametrize("impossible", [*_IMPOSSIBLE, "contradicts what is committed"])
@pytest.mark.parametrize("other", range(len(_OTHERS)))
async def test_a_sequence_that_cannot_go_on_leaves_its_neighbours_alone(impossible: str, other: int) -> None:
    """In one pass with it, before it and after it: the others' decisions are, to the bit, those they make alone."""
    engine = TransformersEngine(twin(tiny_target()), kv_cache_mb=16)
    expected = await alone(engine, **_OTHERS[other])
    before, after = line_of(engine, **_OTHERS[other]), line_of(engine, **_OTHERS[other])
    dead = line_of(engine, **_IMPOSSIBLE.get(impossible, {"grammar": Grammar.regex("[0-9]+")}))
    if impossible not in _IMPOSSIBLE:
        dead.committed += [5]
    for decision in expected:
        one, failed, two = await engine.verify([before.feed(), dead.feed(_DIGITS[:2]), after.feed()])
        assert one == two == decision
        before.take(one)
        after.take(two)
        if impossible in _IMPOSSIBLE:
            assert isinstance(failed, Decision)
            assert failed.ids[0] == NO_ID
        else:
            assert isinstance(failed, InvalidRequest)
            assert "contradicts the grammar" in str(failed)
    await engine.close()


async def generated(node: MicroNode, params: SamplingParams) -> Finish | InvalidRequest:
    try:
        events = [event async for event in node.generate(_PROMPT, params)]
    except InvalidRequest as error:
        return error
    assert isinstance(events[-1], Finish)
    return events[-1]


@pytest.mark.parametrize("drafting", [False, True])
async def test_a_session_that_cannot_go_on_leaves_its_neighbours_alone(drafting: bool) -> None:
    """It is told at which position, and ends; those that share its steps get all their ids."""
    drafter = FunctionDrafter(lambda *asked: _DIGITS[: min(asked[-1], 3)]) if drafting else None
    others = [SamplingParams(max_tokens=16, ignore_eos=True, **params) for params in _OTHERS]
    impossible = [SamplingParams(**mode, **_IMPOSSIBLE["grammar and banned ids"]) for mode in _MODES.values()]
    async with hub_of(tiny_target()) as hub, MicroNode.connect(hub.address, drafter=drafter) as node:
        expected = [await generated(node, params) for params in others]
        together = await asyncio.gather(*(generated(node, params) for params in [*impossible, *others]))
        for failed in together[: len(impossible)]:
            assert isinstance(failed, InvalidRequest)
            assert "no id to choose at output position 0" in str(failed)
        for one, found in zip(expected, together[len(impossible) :], strict=True):
            assert isinstance(one, Finish)
            assert isinstance(found, Finish)
            assert (found.ids, found.text) == (one.ids, one.text)
            assert len(found.ids) == 16


async def test_a_session_that_cannot_go_on_leaves_nothing_behind(caplog: pytest.LogCaptureFixture) -> None:
    """It is the request's fault: the hub logs no error, and neither side keeps a task for it."""
    impossible = SamplingParams(**_IMPOSSIBLE["grammar and banned ids"])
    async with hub_of(tiny_target()) as hub, MicroNode.connect(hub.address) as node:
        await generated(node, SamplingParams(max_tokens=4))
        num_tasks = len(asyncio.all_tasks())
        for _ in range(5):
            assert isinstance(await generated(node, impossible), InvalidRequest)
        await asyncio.sleep(0.1)
        assert len(asyncio.all_tasks()) <= num_tasks
    assert not [record.message for record in caplog.records if record.levelno >= logging.ERROR]

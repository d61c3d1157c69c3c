from __future__ import annotations

import math
import random
import struct
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch

from baru_common.errors import InvalidDraft, InvalidRequest
from baru_common.sampling import NO_ID, Grammar, SamplingContext, SamplingParams, SparseProbs
from baru_common.sampling.filters import filtered_weights
from baru_common.sampling.guide import Guide
from baru_common.sampling.noise import Stream, exponential, noise_key, race, uniforms
from baru_common.sampling.sampler import Sampler, lowest_argmax
from baru_common.sampling.sparse import MAX_SUPPORT
from baru_common.tokens import Tokenizer
from support.sampling import context, letters
from support.tiny import tiny_bundle

INF = float("inf")
CPU = torch.device("cpu")
SIZE = 40
EOS = (2, 7)
AB = Grammar.regex("[ab]{2,6}")
Row = list[float]


def sampler(num_prompt: int = 3, size: int = SIZE, **params: Any) -> Sampler:
    return Sampler(context(num_prompt, vocabulary=letters(size), eos_ids=EOS, **params), CPU)


def rows(num_rows: int, size: int = SIZE, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    """Random logits, one id in ten out of the question."""
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(num_rows, size, generator=generator)
    return logits.masked_fill(torch.rand(num_rows, size, generator=generator) < 0.1, -INF)


# -- what is done to logits: against a slow reference


def adjusted_plainly(row: Row, before: Sequence[int], sampling: SamplingContext) -> Row:
    """One row, id by id, from nothing but the ids before it; the grammar apart."""
    params, result = sampling.params, []
    prompt, output = list(before[: sampling.num_prompt]), list(before[sampling.num_prompt :])
    for token, logit in enumerate(row):
        value = logit + dict(params.biases).get(token, 0.0)
        if token in prompt or token in output:
            value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        value -= params.presence_penalty * (token in output) + params.frequency_penalty * output.count(token)
        banned = token in params.banned_ids or (bool(params.allowed_ids) and token not in params.allowed_ids)
        early = len(output) < params.min_tokens and token in sampling.stop_ids
        result.append(-INF if banned or early else value)
    if len(output) < len(params.forced_ids):
        return [0.0 if token == params.forced_ids[len(output)] else -INF for token in range(len(row))]
    return result


PARAMS: dict[str, dict[str, Any]] = {
    "bias": {"logit_bias": {1: 5.0, 3: -100.0, 39: 0.25}},
    "bias of whole numbers": {"logit_bias": {1: 5, 3: -100}},
    "repetition": {"repetition_penalty": 1.7},
    "presence": {"presence_penalty": -1.5},
    "frequency": {"frequency_penalty": 0.4},
    "banned": {"banned_ids": (0, 3, 39)},
    "allowed": {"allowed_ids": (0, 3, 39, 5)},
    "banned and allowed": {"allowed_ids": (0, 3, 39, 5), "banned_ids": (3, 4)},
    "forced": {"forced_ids": (5, 5, 9, 1, 2)},
    "min tokens": {"min_tokens": 7, "stop_ids": (5,)},
    "min tokens without eos": {"min_tokens": 7, "stop_ids": (5,), "ignore_eos": True},
    "forced beyond min tokens": {"forced_ids": (5, 9, 2), "min_tokens": 2},
    "everything": {
        "logit_bias": {1: 5.0, 4: 2.0},
        "repetition_penalty": 0.6,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
        "banned_ids": (6,),
        "allowed_ids": tuple(range(1, 30)),
        "forced_ids": (4, 9),
        "min_tokens": 6,
        "stop_ids": (5,),
    },
}


@pytest.mark.parametrize("num_prompt", [1, 6])
@pytest.mark.parametrize("name", PARAMS)
def test_adjusted_equals_a_recount_from_the_ids(name: str, num_prompt: int) -> None:
    """Committed ids grow by steps of any length; drafts before and after the first row leave no trace."""
    subject = sampler(num_prompt, temperature=1.0, seed=1, **PARAMS[name])
    rng = random.Random(num_prompt)
    committed = rng.choices(range(10), k=num_prompt)
    for step in range(14):
        drafts = rng.choices(range(SIZE if step % 2 else 8), k=rng.randint(0, 6))
        first = len(committed) + rng.choice([0, 0, len(drafts) // 2])
        ids = [*committed, *drafts]
        logits = rows(len(ids) - first + 1, seed=step)
        before = logits.clone()
        result = subject.adjusted(logits, ids, first, len(committed))
        assert torch.equal(logits, before), "the rows belong to who asks"
        for r, row in enumerate(result):
            expected = adjusted_plainly(logits[r].tolist(), ids[: first + r], subject.context)
            assert row.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-5), (step, r)
        committed += rng.choices(range(10), k=rng.randint(0, 4))


def test_plain_rows_are_handed_through() -> None:
    logits = rows(2)
    filters: dict[str, Any] = {"temperature": 1.0, "seed": 1, "top_k": 2, "top_p": 0.5, "min_p": 0.1}
    for params in ({}, filters):
        assert sampler(**params).adjusted(logits, [1, 2, 3, 4], 3, 3) is logits


@pytest.mark.parametrize("ends", [{"stop_ids": (5,)}, {}])
def test_an_output_that_is_forced_to_end_too_soon_is_refused(ends: dict[str, Any]) -> None:
    """A forced id would overrule min_tokens: one of the two is a slip."""
    forced = (9, 5) if ends else (9, EOS[0])
    with pytest.raises(InvalidRequest, match=f"forced_ids holds {forced[1]}"):
        sampler(forced_ids=forced, min_tokens=2, **ends)
    sampler(forced_ids=forced, min_tokens=1, **ends)


def test_plain_means_the_likeliest_of_the_plain_logits() -> None:
    assert sampler().is_plain
    assert sampler(max_tokens=3, stop_ids=(1,), top_k=3, logprobs=2).is_plain
    assert not sampler(temperature=1.0, seed=0).is_plain
    assert not any(sampler(**params).is_plain for params in PARAMS.values())


# -- grammars


@cache
def tiny() -> Tokenizer:
    return Tokenizer(tiny_bundle())


@cache
def ab_guide() -> Guide:
    return Guide.compile(AB, tiny_bundle(), (1, 2))


def ab_sampler(num_prompt: int = 2, **params: Any) -> Sampler:
    """Follows the grammar [ab]{2,6}, which `ab_allows` is the plain form of; 1 and 2 end the text."""
    sampling = SamplingContext(SamplingParams(grammar=AB, **params), num_prompt, tiny().vocabulary, (1, 2), ab_guide())
    return Sampler(sampling, CPU)


def ab_allows(output: Sequence[int]) -> set[int]:
    text = b"".join(map(tiny().vocabulary.text_bytes, output))
    pieces = ((token, tiny().vocabulary.text_bytes(token)) for token in range(300))
    ends = {1, 2} if len(text) >= 2 else set()
    return ends | {token for token, piece in pieces if piece and not piece.strip(b"ab") and len(text + piece) <= 6}


@pytest.mark.parametrize("seed", range(6))
def test_what_the_grammar_forbids_is_masked(seed: int) -> None:
    """In every row up to the first draft id that it forbids; together with penalties and bans."""
    prompt, (a, b, aa) = [5, 5], (tiny().encode_text(text)[0] for text in ("a", "b", "aa"))
    assert len({a, b, aa}) == 3
    subject = ab_sampler(frequency_penalty=0.5, banned_ids=(b,) if seed % 2 else ())
    rng, committed = random.Random(seed), list(prompt)
    while len(ab_allows(committed[2:])) > 2:
        drafts = [rng.choice([a, b, aa, a, 9, 1]) for _ in range(rng.randint(0, 4))]
        first = len(committed) + rng.choice([0, 0, len(drafts) // 2])
        ids = [*committed, *drafts]
        logits = rows(len(ids) - first + 1, 300, seed=len(committed), scale=1.0)
        result = subject.adjusted(logits, ids, first, len(committed))
        counts = True
        for position in range(len(committed), len(ids) + 1):
            if counts and 1 in ids[2:position]:
                break  # the text has ended, so these rows are nobody's
            allowed = ab_allows(ids[2:position])
            if position >= first:
                plain = adjusted_plainly(logits[position - first].tolist(), ids[:position], subject.context)
                expected = [v if not counts or t in allowed else -INF for t, v in enumerate(plain)]
                assert result[position - first].tolist() == pytest.approx(expected, rel=1e-5), position
            counts = counts and position < len(ids) and ids[position] in allowed
        committed.append(rng.choice(sorted(ab_allows(committed[2:]) - {1, 2})))


def test_committed_ids_that_contradict_the_grammar_are_an_error() -> None:
    """Drafted ones are not: what follows them does not count."""
    subject = ab_sampler()
    logits = rows(1, 300)
    assert torch.equal(subject.adjusted(logits, [5, 5, 9], 3, 2), logits)
    with pytest.raises(InvalidRequest, match="grammar") as caught:
        subject.adjusted(logits, [5, 5, 9], 3, 3)
    assert caught.value.details == {"param": "grammar"}
    (a,) = tiny().encode_text("a")
    assert set(subject.adjusted(logits, [5, 5, a], 3, 3)[0].gt(-INF).nonzero().flatten().tolist()) <= ab_allows([a])


# -- choosing


def test_a_greedy_choice_is_the_lowest_of_the_likeliest() -> None:
    logits = torch.tensor([[1.0, 5, 5, -INF, 5], [-INF, -INF, 0, -3, 0], [2, 2, 2, 2, 2], [-INF, -9, -INF, -9, -9]])
    assert lowest_argmax(logits) == [1, 2, 0, 1]
    assert sampler(size=5).choose(logits, [1, 1, 1, 0, 0, 0], 3, 3) == [1, 2, 0, 1]
    assert sampler(size=5).probs(logits, [1, 1, 1, 0, 0, 0], 3, 3).tolist() == torch.eye(5)[[1, 2, 0, 1]].tolist()
    for width in (1, 2, 31, 1024, 49153):
        tied = torch.zeros(3, width)
        tied[0, : width // 2] = -1
        assert lowest_argmax(tied) == [width // 2, 0, 0]


DRAWING: dict[str, Any] = {"temperature": 0.8, "seed": 11}


@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.2}])
def test_a_draw_is_the_race_of_its_position(filters: dict[str, Any]) -> None:
    """Row r decides position `first + r`, with the noise of the seed and that position."""
    subject = sampler(**DRAWING, **filters, logit_bias={3: 2.0})
    logits = rows(6)
    chosen = subject.choose(logits, list(range(11)), 5, 4)
    weights = filtered_weights(subject.adjusted(logits, list(range(11)), 5, 4), subject.context.params)
    assert chosen == [race(weights[r : r + 1], [noise_key(11, Stream.CHOICE, 5 + r)])[0] for r in range(6)]
    probs = subject.probs(logits, list(range(11)), 5, 4)
    assert torch.allclose(probs, weights.double() / weights.double().sum(dim=1, keepdim=True), rtol=1e-12, atol=0)
    assert probs.dtype == torch.double


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_choice_does_not_depend_on_how_it_was_reached(temperature: float) -> None:
    """One id at a time, in blocks with right and wrong drafts, or all anew: the same ids."""
    params = {"temperature": temperature, "seed": 4, "top_p": 0.9} | PARAMS["everything"]
    table = rows(64, seed=9)

    def logits(ids: Sequence[int], first: int) -> torch.Tensor:
        """A model's: each row depends on the two ids before it."""
        return torch.stack([table[(ids[i - 1] * 7 + ids[i - 2]) % 64] for i in range(first, len(ids) + 1)])

    singly, anew, ids = sampler(**params), [1, 2, 3], [1, 2, 3]
    for _ in range(24):
        ids += singly.choose(logits(ids, len(ids)), ids, len(ids), len(ids))
        anew += sampler(**params).choose(logits(anew, len(anew)), anew, len(anew), len(anew))
    assert anew == ids
    blocks, rng, done = sampler(**params), random.Random(0), 3
    while done < 20:
        draft = [t if rng.random() < 0.8 else rng.randrange(SIZE) for t in ids[done : done + 5]]
        decided = blocks.choose(logits([*ids[:done], *draft], done), [*ids[:done], *draft], done, done)
        num_right = next((i for i, token in enumerate(draft) if token != ids[done + i]), len(draft))
        assert decided[: num_right + 1] == ids[done : done + num_right + 1]
        done += num_right + 1


NOTHING: dict[str, tuple[dict[str, Any], torch.Tensor]] = {
    "a row of nothing": ({}, torch.full((1, SIZE), -INF)),
    "bans": ({"allowed_ids": (3, 4)}, torch.zeros(1, SIZE).index_fill(1, torch.tensor([3, 4]), -INF)),
    "min tokens": ({"allowed_ids": (2, 7), "min_tokens": 9}, torch.zeros(1, SIZE)),
}


@pytest.mark.parametrize("name", NOTHING)
@pytest.mark.parametrize("filters", [{"temperature": 0.0}, {}, {"top_k": 3, "top_p": 0.5, "min_p": 0.1}])
def test_where_nothing_is_left_there_is_no_id(name: str, filters: dict[str, Any]) -> None:
    """Alone or beside a row that has one, and the other row is none the worse."""
    params, none = NOTHING[name]
    subject = sampler(**(DRAWING | filters | params))
    ids = [1, 2, 3, 4, 5]
    assert subject.choose(none, ids, 3, 3) == [NO_ID]
    assert subject.probs(none, ids, 3, 3).sum() == 0
    assert subject.draft(none, ids, 3, 3) == (NO_ID, None)
    if name != "min tokens":
        both = torch.cat((none, torch.zeros(1, SIZE), none))
        chosen = subject.choose(both, ids, 3, 3)
        assert [token == NO_ID for token in chosen] == [True, False, True]
        assert subject.probs(both, ids, 3, 3).sum(dim=1).tolist() == pytest.approx([0, 1, 0])
        assert chosen[1] == sampler(**(DRAWING | filters | params)).choose(both[1:2], ids, 4, 3)[0]


@pytest.mark.parametrize("penalty", [1e-300, 1e-38, 1e-4])
def test_a_penalty_that_overflows_leaves_a_choice(penalty: float) -> None:
    """What `choose` may draw and what `probs` says it may be are the same ids."""
    logits = torch.full((1, SIZE), -1.0)
    logits[0, :9] = torch.arange(9.0)
    for filters in ({}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.5}):
        subject = sampler(**DRAWING, **filters, repetition_penalty=penalty)
        probs = subject.probs(logits, [4, 5, 6], 3, 3)[0]
        assert probs.sum() == pytest.approx(1)
        assert probs[subject.choose(logits, [4, 5, 6], 3, 3)[0]] > 0
        assert probs[[4, 5, 6]].sum() == pytest.approx(1)


@pytest.mark.parametrize("values", [{"temperature": 0.0}, {}, {"top_k": 5}, {"top_p": 0.6, "frequency_penalty": 0.9}])
def test_ranked_ids_come_in_the_order_in_which_they_would_be_chosen(values: dict[str, Any]) -> None:
    """The choice itself, then what comes next in its race; as many as are asked for and possible."""
    params = DRAWING | values
    for n in range(4, 24):
        logits, committed, drafted = rows(1, seed=n), [n % 5, *range(n - 3)], [7, 7]
        ids, subject = [*committed, *drafted], sampler(**params)
        scores = subject.adjusted(logits, ids, n, len(committed))[0].double()
        if params["temperature"]:
            weights = filtered_weights(scores[None].float(), subject.context.params)[0].double()
            scores = (weights / exponential(uniforms([noise_key(11, Stream.CHOICE, n)], torch.arange(SIZE)))[0]).log()
        order = [token for token in scores.sort(descending=True).indices.tolist() if scores[token] > -INF]
        for num in (1, 2, 4, SIZE + 1):
            assert sampler(**params).rank(logits, committed, drafted, num) == order[:num]
        assert subject.choose(logits, ids, n, len(committed)) == order[:1]
    assert sampler(**params).rank(torch.full((1, SIZE), -INF), [1, 2, 3], [], 4) == []
    if not params["temperature"]:
        tied = sampler(**params).rank(torch.zeros(1, SIZE), [1, 2, 3], [], 4)
        assert tied[0] == 0
        assert len(set(tied)) == len(tied) == 4


# -- drafts for rejection sampling


def dense(sparse: SparseProbs | None, size: int) -> torch.Tensor:
    assert sparse is not None
    probs = torch.zeros(1, size, dtype=torch.double)
    probs[0, list(sparse.ids)] = torch.tensor(sparse.probs, dtype=torch.double)
    return probs


def test_a_draft_is_drawn_from_what_it_says() -> None:
    """Exactly that distribution, by the noise of its position and of where the chain forked."""
    subject = sampler(size=200, **DRAWING, frequency_penalty=0.5, top_p=0.99)
    for n in range(3, 60):
        logits = rows(1, 200, seed=n)
        ids = [n % 7] * n
        token, sparse = subject.draft(logits, ids, 3, n // 2)
        assert race(dense(sparse, 200), [noise_key(11, Stream.DRAFT, n, n // 2)]) == [token]
        probs = subject.probs(logits, ids, n, 3)[0]
        assert sparse is not None
        assert len(sparse.ids) <= MAX_SUPPORT
        likeliest = probs.sort(descending=True).values[: len(sparse.ids)]
        assert sorted(sparse.probs, reverse=True) == pytest.approx((likeliest / likeliest.sum()).tolist(), rel=2e-3)


def test_a_close_draft_is_decided_by_what_is_reported() -> None:
    """The hub reckons with rounded weights, so the node must have drawn from those: here rounding decides."""
    num_swayed = 0
    for n in range(3, 60):
        key = noise_key(11, Stream.DRAFT, n, 3)
        one, two = exponential(uniforms([key], torch.arange(2)))[0].log().tolist()
        logits = 0.8 * torch.tensor([[one, two + 1e-4]])
        token, sparse = sampler(size=2, **DRAWING).draft(logits, range(n), 3, 3)
        assert race(dense(sparse, 2), [key]) == [token]
        num_swayed += token == 0
    assert num_swayed > 5


def test_drafts_follow_the_reported_distribution() -> None:
    """Total variation at most 0.01 over many positions, and origins at each."""
    num_draws = 6_000
    subject = sampler(size=6, **DRAWING, top_k=3)
    logits = torch.tensor([[0.0, 1.0, -1.0, 0.5, 0.8, -3.0]])
    drafts = [subject.draft(logits, range(3 + n % 100), 3, n // 100) for n in range(num_draws)]
    counts = torch.tensor([token for token, _ in drafts]).bincount(minlength=6)
    (report,) = {sparse for _, sparse in drafts}
    assert (counts / num_draws - dense(report, 6)[0]).abs().sum() / 2 <= 0.01


def test_a_wide_distribution_is_cut_to_its_likeliest() -> None:
    subject = sampler(size=300, **DRAWING)
    logits = torch.linspace(3, 0, 300)[None]
    drawn = {subject.draft(logits, range(n), 3, 3)[0] for n in range(3, 500)}
    _, sparse = subject.draft(logits, [1, 2, 3], 3, 3)
    assert sparse is not None
    assert sorted(sparse.ids) == list(range(MAX_SUPPORT))
    assert drawn <= set(sparse.ids)
    assert len(drawn) > 55
    flat = sampler(size=300, **DRAWING).draft(torch.zeros(1, 300), [1, 2, 3], 3, 3)[1]
    assert flat is not None
    assert flat.probs == (1 / MAX_SUPPORT,) * MAX_SUPPORT


def test_a_draft_is_repeatable_and_differs_by_origin_position_and_seed() -> None:
    logits = torch.zeros(1, SIZE)

    def drawn(seed: int, position: int, origin: int) -> list[int]:
        subject = sampler(temperature=1.0, seed=seed)
        return [subject.draft(logits, range(position + i), 3, origin)[0] for i in range(20)]

    assert drawn(1, 5, 4) == drawn(1, 5, 4)
    assert drawn(1, 5, 4)[2:] == drawn(1, 7, 4)[:-2]
    assert len({tuple(drawn(*words)) for words in ((1, 5, 4), (1, 5, 5), (1, 105, 4), (2, 5, 4))}) == 4
    assert drawn(1, 5, 4) != sampler(temperature=1.0, seed=1).choose(torch.zeros(20, SIZE), range(30), 5, 4)


# -- as drafts cross the wire


def test_sparse_probabilities_are_rounded_weights_over_their_sum() -> None:
    """Halves, in the order given; what rounds to nothing is left out, and other ids have none."""
    sparse = SparseProbs.of([(9, 0.5), (3, 0.25), (4, 1e-9), (1 << 31, 2.0**-24)])
    assert sparse.ids == (9, 3, 1 << 31)
    assert sparse.weights == struct.pack("<3e", 0.5, 0.25, 2.0**-24)
    total = 0.75 + 2.0**-24
    assert sparse.probs == (0.5 / total, 0.25 / total, 2.0**-24 / total)
    assert [sparse.prob(token) for token in (9, 3, 4, 0)] == [0.5 / total, 0.25 / total, 0.0, 0.0]
    assert sum(SparseProbs.of([(i, 1 / 64) for i in range(64)]).probs) == 1


@pytest.mark.parametrize(
    ("ids", "weights"),
    [
        ((), b""),
        (tuple(range(65)), b"\0\x3c" * 65),
        ((1, 1), b"\0\x3c" * 2),
        ((1, 2), b"\0\x3c" * 3),
        ((1,), b"\0"),
        *[((1, 2), b"\0\x3c" + struct.pack("<e", weight)) for weight in (0.0, -0.0, -1.0, INF, math.nan)],
    ],
)
def test_impossible_sparse_probabilities_are_refused(ids: tuple[int, ...], weights: bytes) -> None:
    with pytest.raises(InvalidDraft, match="draft_probs"):
        SparseProbs(ids, weights)

from __future__ import annotations

import math
import random
from collections.abc import Callable
from decimal import Context, Decimal
from fractions import Fraction
from itertools import islice, product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from baru_common.sampling.noise import Stream, exponential, noise_key, race, race_scores, uniform, uniforms
from baru_common.splitmix64 import mix

MASK = (1 << 64) - 1
NUM_DRAWS = 200_000
DIGITS = Context(prec=40)
uint64 = st.integers(0, MASK)


# -- references, in whole numbers


class SplitMix64:
    """The generator as its authors give it: a state that moves, and a finaliser."""

    def __init__(self, state: int) -> None:
        self.state = state

    def __iter__(self) -> SplitMix64:
        return self

    def __next__(self) -> int:
        self.state = (self.state + 0x9E3779B97F4A7C15) % 2**64
        z = self.state
        z = (z ^ (z // 2**30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z // 2**27)) * 0x94D049BB133111EB % 2**64
        return z ^ (z // 2**31)


def first(state: int) -> int:
    return next(SplitMix64(state))


def plain_key(seed: int, stream: int, position: int, origin: int) -> int:
    key = first(seed)
    for word in (stream, position, origin):
        key = first(key ^ first(word))
    return key


def plain_v(key: int, token: int) -> Fraction:
    bits = next(islice(SplitMix64(key), token, None)) // 2**12
    return Fraction(2 * bits + 1, 2**53)


def error_of_log(e: float, v: float) -> float:
    """Relative error of -ln v."""
    log = -Decimal(v).ln(DIGITS)
    return float(DIGITS.divide(DIGITS.subtract(Decimal(e), log), log))


def test_mix_gives_the_published_sequences() -> None:
    """The first outputs for the seeds 0 and 1234567, as other implementations list them."""
    assert first(0) == mix(0) == 0xE220A8397B1DCDAF
    known = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    assert list(islice(SplitMix64(1234567), 5)) == known
    assert [mix(1234567 + i * 0x9E3779B97F4A7C15) for i in range(5)] == known


@pytest.mark.parametrize(
    ("words", "token", "bits", "e"),
    [
        ((0, Stream.CHOICE, 0, 0), 0, 0xA706DD2F4D197, "0x1.b5458a89b6fafp-2"),
        ((0, Stream.CHOICE, 0, 0), 1, 0xB382A305F4414, "0x1.6b76aa1805517p-2"),
        ((42, Stream.CHOICE, 17, 0), 49151, 0xFB921841D865, "0x1.65201a166f273p+1"),
        ((42, Stream.DRAFT, 17, 12), 3, 0xA4EBB037D124C, "0x1.c2441c80552b8p-2"),
        ((MASK, Stream.ACCEPT, 131071, 131000), 0, 0x1157693375AB3, "0x1.58960251b02a1p+1"),
        ((1 << 63, Stream.RESIDUAL, 1, 1), 299, 0xE23473ABFF4D2, "0x1.fad2e02a664a6p-4"),
    ],
)
def test_the_noise_is_pinned(words: tuple[int, Stream, int, int], token: int, bits: int, e: str) -> None:
    """Hubs and nodes of different releases must draw alike, so these numbers never change."""
    v = uniforms([noise_key(*words)], torch.tensor([token]))
    assert v.item() == (bits + 0.5) / 2**52
    assert Fraction(v.item()) == plain_v(plain_key(*words), token)
    assert exponential(v).item() == float.fromhex(e)
    assert abs(error_of_log(float.fromhex(e), v.item())) < 1e-13


# -- uniform numbers


@given(uint64, st.sampled_from(Stream), st.integers(0, 1 << 40), st.integers(0, 1 << 40))
def test_a_key_is_made_of_every_word(seed: int, stream: Stream, position: int, origin: int) -> None:
    key = noise_key(seed, stream, position, origin)
    assert key == plain_key(seed, stream, position, origin)
    if not origin:
        assert noise_key(seed, stream, position) == key


@given(st.lists(uint64, min_size=1, max_size=4), st.lists(st.integers(0, 400), min_size=1, max_size=8))
def test_uniforms_equal_plain_splitmix64(keys: list[int], ids: list[int]) -> None:
    """To the last bit, for every key and id, in any order and repeated."""
    v = uniforms(keys, torch.tensor(ids))
    assert v.dtype == torch.double
    assert v.shape == (len(keys), len(ids))
    assert [[Fraction(x) for x in row] for row in v.tolist()] == [[plain_v(key, i) for i in ids] for key in keys]


@given(uint64)
def test_a_single_number_is_that_of_id_0(key: int) -> None:
    assert uniform(key) == uniforms([key], torch.tensor([0])).item() == float(plain_v(key, 0))
    assert 0 < uniform(key) < 1


@pytest.mark.parametrize("token", [151_935, (1 << 31) + 5, (1 << 62) + 1])
def test_ids_may_be_large(token: int) -> None:
    """The product with the step wraps as unsigned numbers do."""
    key = noise_key(5, Stream.CHOICE, 9)
    state = (key + token * 0x9E3779B97F4A7C15) % 2**64
    assert uniforms([key], torch.tensor([token])).item() == float(plain_v(state, 0))


def test_bits_do_not_depend_on_what_else_is_asked_for() -> None:
    """Any rows, any ids, in any layout."""
    keys = [noise_key(3, Stream.CHOICE, position) for position in range(37)]
    whole = uniforms(keys, torch.arange(1003))
    rng = random.Random(1)
    for _ in range(30):
        rows = rng.sample(range(37), rng.randint(1, 37))
        ids = rng.sample(range(1003), rng.randint(1, 1003))
        part = uniforms([keys[row] for row in rows], torch.tensor(ids))
        assert torch.equal(part, whole[rows][:, ids])
    assert torch.equal(uniforms(keys, torch.arange(2006)[::2]), uniforms(keys, torch.arange(2006))[:, ::2])


def test_no_rows_have_no_numbers() -> None:
    assert uniforms([], torch.arange(5)).shape == (0, 5)
    assert race(torch.zeros(0, 5), []) == []


# -- exponential numbers


def test_exponential_is_a_logarithm_to_13_digits() -> None:
    """From the least v to the greatest, and densely where the series starts anew."""
    least, greatest = 0.5 * 2.0**-52, 1 - 2.0**-53
    rng = random.Random(0)
    values = [least, greatest, math.nextafter(greatest, 0), 1.5 * 2.0**-52, 1 - 2.0**-30]
    values += [2.0**-k for k in range(1, 53)] + [math.nextafter(2.0**-k, 0) for k in range(1, 53)]
    values += [math.sqrt(0.5) * 2.0**-k * (1 + d * 2.0**-52) for k in range(52) for d in range(-3, 4)]
    values += [rng.random() for _ in range(20_000)] + [2.0 ** -rng.uniform(0, 53) for _ in range(20_000)]
    values += [1 - 2.0 ** -rng.uniform(1, 53) for _ in range(20_000)]
    values = [v for v in values if least <= v <= greatest]
    for v, e in zip(values, exponential(torch.tensor(values, dtype=torch.double)).tolist(), strict=True):
        assert abs(e / -math.log(v) - 1) < 1e-13, v
        assert e >= 1 - v, "race() leaves out ids by this bound"
    for v in (least, greatest):
        assert abs(error_of_log(exponential(torch.tensor([v], dtype=torch.double)).item(), v)) < 1e-13


# -- races


def dense_race(weights: torch.Tensor, keys: list[int]) -> list[int]:
    """Every id's w / E; the lowest of the largest."""
    scores = weights.double() / exponential(uniforms(keys, torch.arange(weights.shape[1])))
    return [row.index(max(row)) for row in scores.tolist()]


def one_hot(size: int, generator: torch.Generator) -> torch.Tensor:
    weights = torch.zeros(size)
    weights[torch.randint(size, (1,), generator=generator)] = 1e-30
    return weights


def few(size: int, generator: torch.Generator) -> torch.Tensor:
    return torch.rand(size, generator=generator) * (torch.rand(size, generator=generator) < 5 / size).float()


ROWS: dict[str, Callable[[int, torch.Generator], torch.Tensor]] = {
    "flat": lambda size, _: torch.ones(size),
    "single": one_hot,
    "peaked": lambda size, generator: (20 * torch.randn(size, generator=generator)).softmax(0),
    "soft": lambda size, generator: (2 * torch.randn(size, generator=generator)).exp(),
    "tied": lambda size, generator: torch.randint(0, 3, (size,), generator=generator).float(),
    "few": few,
    "wide": lambda size, generator: 10 ** (200 * torch.rand(size, generator=generator, dtype=torch.double) - 250),
    "large": lambda size, generator: 1e300 * torch.rand(size, generator=generator, dtype=torch.double),
}


@pytest.mark.parametrize("kind", ROWS)
def test_a_race_is_won_by_the_largest_ratio(kind: str) -> None:
    """Leaving out those that cannot win changes nothing, whatever the weights look like."""
    generator = torch.Generator().manual_seed(7)
    for size, num_rows in ((1, 5), (2, 50), (17, 200), (1000, 100), (49152, 2)):
        rows = torch.stack([ROWS[kind](size, generator) for _ in range(num_rows)])
        rows = rows[rows.amax(dim=1) > 0]
        keys = [noise_key(size, Stream.CHOICE, position) for position in range(len(rows))]
        drawn = race(rows, keys)
        assert drawn == dense_race(rows, keys)
        assert all(row[token] > 0 for row, token in zip(rows, drawn, strict=True))
        assert race(rows[1:2], keys[1:2]) == drawn[1:2], "a row alone"


def test_scores_are_those_that_a_race_compares() -> None:
    """The largest wins; -inf where there is no weight."""
    weights = few(200, torch.Generator().manual_seed(1))[None].expand(50, -1)
    keys = [noise_key(6, Stream.CHOICE, position) for position in range(50)]
    scores = race_scores(weights, keys)
    assert scores.argmax(dim=1).tolist() == race(weights, keys)
    assert torch.equal(scores > -math.inf, weights > 0)
    for token in weights[0].nonzero().flatten().tolist()[:3]:
        expected = math.log(float(weights[0, token]) / -math.log(plain_v(keys[4], token)))
        assert scores[4, token].item() == pytest.approx(expected, rel=1e-12)


def test_a_race_is_one_of_true_logarithms() -> None:
    """Against `math.log`, id by id."""
    weights = torch.rand(400, 30, generator=torch.Generator().manual_seed(3), dtype=torch.double)
    keys = [noise_key(1, Stream.DRAFT, position, 4) for position in range(400)]
    expected = [
        max(range(30), key=lambda i: w[i] / -math.log(plain_v(key, i)))
        for w, key in zip(weights.tolist(), keys, strict=True)
    ]
    assert race(weights, keys) == expected


@pytest.mark.parametrize("num_zero", [0, 1, 5, 98])
def test_the_lowest_id_wins_an_exact_tie(num_zero: int) -> None:
    """Weights that equal their E make every ratio 1."""
    keys = [noise_key(8, Stream.CHOICE, position) for position in range(20)]
    weights = exponential(uniforms(keys, torch.arange(100)))
    weights[:, :num_zero] = 0
    assert race(weights, keys) == [num_zero] * 20


def key_for(bits: int, token: int) -> int:
    """The key whose 64 bits for `token` are `bits`: SplitMix64 run backwards."""

    def unshifted(z: int, by: int) -> int:
        x = z
        for _ in range(64 // by):
            x = z ^ (x >> by)
        return x

    z = unshifted(bits, 31) * pow(0x94D049BB133111EB, -1, 2**64) % 2**64
    z = unshifted(z, 27) * pow(0xBF58476D1CE4E5B9, -1, 2**64) % 2**64
    return (unshifted(z, 30) - (token + 1) * 0x9E3779B97F4A7C15) % 2**64


@pytest.mark.parametrize("token", [0, 700, 999])
def test_an_id_with_next_to_no_weight_may_win(token: int) -> None:
    """The least E there is, 2^-53, against a large one."""
    key = key_for(MASK, token)
    e = exponential(uniforms([key], torch.arange(1000)))
    assert e[0, token] == 2.0**-53
    rival = int(e.argmax())
    for share, winner in ((1.01, token), (0.99, rival)):
        weights = torch.zeros(1, 1000, dtype=torch.double)
        weights[0, rival] = 1.0
        weights[0, token] = share * e[0, token] / e[0, rival]
        assert race(weights, [key]) == [winner]


# -- what the draws are like; fixed seeds, so that the tests are, too


def chi_square_limit(degrees: int) -> float:
    """What chance exceeds once in 30 000 times (Wilson & Hilferty 1931)."""
    return float(degrees * (1 - 2 / (9 * degrees) + 4 * math.sqrt(2 / (9 * degrees))) ** 3)


def draws(probs: torch.Tensor, keys: list[int]) -> torch.Tensor:
    return torch.tensor(race(probs.expand(len(keys), -1), keys))


def chi_square(counts: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


def test_draws_follow_the_softmax() -> None:
    """Total variation at most 0.01, and no more deviation than chance has."""
    logits = 1.5 * torch.randn(20, generator=torch.Generator().manual_seed(0), dtype=torch.double)
    probs = logits.softmax(0)
    drawn = draws(logits.sub(3).exp(), [noise_key(0, Stream.CHOICE, position) for position in range(NUM_DRAWS)])
    counts = drawn.bincount(minlength=20).double()
    assert (counts / NUM_DRAWS - probs).abs().sum() / 2 <= 0.01
    assert chi_square(counts, NUM_DRAWS * probs) < chi_square_limit(19)


KEYS: dict[str, Callable[[int], tuple[int, int]]] = {
    "neighbouring positions": lambda n: (noise_key(1, Stream.CHOICE, n), noise_key(1, Stream.CHOICE, n + 1)),
    "neighbouring seeds": lambda n: (noise_key(n, Stream.CHOICE, 3), noise_key(n + 1, Stream.CHOICE, 3)),
    "origins": lambda n: (noise_key(1, Stream.DRAFT, n, 5), noise_key(1, Stream.DRAFT, n, 6)),
    "position and origin": lambda n: (noise_key(1, Stream.DRAFT, n, n + 1), noise_key(1, Stream.DRAFT, n + 1, n)),
    "a key and its mirror": lambda n: (noise_key(1, Stream.CHOICE, n, 2), noise_key(1, Stream.DRAFT, n, 0)),
} | {
    f"{a.name} and {b.name}": lambda n, a=a, b=b: (noise_key(1, a, n, 9), noise_key(1, b, n, 9))
    for a, b in product(Stream, Stream)
    if a < b
}


@pytest.mark.parametrize("pair", KEYS)
def test_draws_of_different_keys_are_independent(pair: str) -> None:
    """The joint counts are the products; so are the uniform numbers uncorrelated."""
    num_pairs = 12_000
    probs = torch.tensor([0.35, 0.3, 0.2, 0.1, 0.05], dtype=torch.double)
    one, two = (list(keys) for keys in zip(*map(KEYS[pair], range(num_pairs)), strict=True))
    joint = (draws(probs, one) * 5 + draws(probs, two)).bincount(minlength=25).double()
    assert chi_square(joint, num_pairs * torch.outer(probs, probs).flatten()) < chi_square_limit(24)
    pairs = torch.tensor([list(map(uniform, one)), list(map(uniform, two))])
    assert abs(torch.corrcoef(pairs)[0, 1]) < 4 / math.sqrt(num_pairs)


def test_ids_of_one_key_are_independent() -> None:
    """Neighbouring ids' numbers, and every 8 bits of them."""
    keys = [noise_key(2, Stream.CHOICE, position) for position in range(400)]
    v = uniforms(keys, torch.arange(256))
    assert abs(torch.corrcoef(torch.stack((v[:, :-1].flatten(), v[:, 1:].flatten())))[0, 1]) < 4 / math.sqrt(v.numel())
    bits = (v * 2**52).long().flatten()
    for shift in range(0, 45, 4):
        counts = (bits >> shift & 255).bincount(minlength=256).double()
        assert chi_square(counts, torch.full((256,), v.numel() / 256, dtype=torch.double)) < chi_square_limit(255)

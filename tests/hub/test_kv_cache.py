"""Attention over pages equals plain attention, row by row, and no row sees its company."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch

from baru_common.errors import EngineFailure
from baru_hub.kv_cache import AttentionPlan, KvShape, PagedCache, ragged_attention
from baru_hub.ragged_batch import SequenceFeed, lay_out
from baru_hub.session import Block
from support.tiny import tiny_target

_PAGE, _DIM, _SCALE = 16, 8, 0.3
_MODULE = torch.nn.Identity()


class Sequence:
    """All keys, values and queries of a sequence, [num_ids, heads, head_dim], made up at random."""

    def __init__(self, seed: int, num_ids: int, kv_heads: int, group: int) -> None:
        made = torch.Generator().manual_seed(seed)
        self.keys = torch.randn(num_ids, kv_heads, _DIM, generator=made)
        self.values = torch.randn(num_ids, kv_heads, _DIM, generator=made)
        self.queries = 3 * torch.randn(num_ids, kv_heads * group, _DIM, generator=made)

    def plain(self, position: int) -> torch.Tensor:
        """Softmax attention of one row in float64: [num_heads, head_dim]."""
        group = self.queries.shape[1] // self.keys.shape[1]
        keys, values = (x[: position + 1].double().repeat_interleave(group, dim=1) for x in (self.keys, self.values))
        scores = torch.einsum("hd,khd->hk", self.queries[position].double(), keys) * _SCALE
        return torch.einsum("hk,khd->hd", scores.softmax(dim=1), values)


class Pages:
    """A cache of one layer and whoever attends in it."""

    def __init__(self, kv_heads: int, group: int, num_pages: int = 160) -> None:
        self.group = group
        self.num_pages = num_pages
        shape = KvShape(1, kv_heads, _DIM)
        self.cache = PagedCache(shape, num_pages, _PAGE, dtype=torch.float32, device=torch.device("cpu"))

    def write(self, sequence: Sequence, pages: list[int], num_ids: int) -> None:
        """Put a sequence's first ids into its pages."""
        slots = torch.tensor([pages[p // _PAGE] * _PAGE + p % _PAGE for p in range(num_ids)], dtype=torch.long)
        self.update(slots, sequence.keys[:num_ids], sequence.values[:num_ids])

    def update(self, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> Any:
        self.cache.begin(slots)
        return self.cache.update(keys.transpose(0, 1)[None], values.transpose(0, 1)[None], 0)

    def attend(self, parts: list[tuple[Sequence, list[int], int, int]], row_floor: int = 8) -> list[torch.Tensor]:
        """Feed rows [start, end) of each (sequence, pages, start, end) in one pass; [rows, num_heads, d] of each."""
        feeds = [SequenceFeed(pages, start, Block((5,) * (end - start))) for _, pages, start, end in parts]
        batch = lay_out(feeds, _PAGE, row_floor, self.cache.spare_page)
        padding = batch.num_rows - sum(end - start for _, _, start, end in parts)
        rows = []
        for name in ("queries", "keys", "values"):
            real = [getattr(sequence, name)[start:end] for sequence, _, start, end in parts]
            rows.append(torch.cat([*real, torch.ones(padding, *real[0].shape[1:])]))
        key, value = self.update(torch.tensor(batch.slots), rows[1], rows[2])
        plan = AttentionPlan.of(batch, _PAGE, self.group, torch.device("cpu"))
        query = rows[0].transpose(0, 1)[None]
        output, _ = ragged_attention(_MODULE, query, key, value, None, attention_plan=plan, scaling=_SCALE)
        assert output.shape == (1, batch.num_rows, query.shape[1], _DIM)
        lengths = [end - start for _, _, start, end in parts]
        return list(torch.split(output[0], [*lengths, padding]))[: len(parts)]


def scattered(random: Random, num_pages: int) -> list[int]:
    """Pages in a random order, no one's neighbours."""
    return random.sample(range(num_pages), num_pages)


def ready(seed: int, kv_heads: int, group: int) -> tuple[Pages, list[tuple[Sequence, list[int], int, int]]]:
    """Four sequences in scattered or neighbouring pages, the last one sharing the first one's first pages."""
    random, pages = Random(seed), Pages(kv_heads, group)
    free, parts = scattered(random, pages.num_pages), []
    for i, num_cached in enumerate((0, random.randint(1, 40), random.randint(240, 256), random.randint(250, 500))):
        num_rows = random.choice([1, 2, 9, 17, 40])
        sequence = Sequence(100 * seed + i, num_cached + num_rows, kv_heads, group)
        own = [free.pop() for _ in range(-(-(num_cached + num_rows) // _PAGE))]
        own = sorted(own) if random.random() < 0.5 else own
        pages.write(sequence, own, num_cached)
        parts.append((sequence, own, num_cached, num_cached + num_rows))
    donor, lender, start, _ = parts[-1]
    heir = Sequence(100 * seed + 9, start + 5, kv_heads, group)
    num_shared = start // _PAGE
    for name in ("keys", "values"):
        getattr(heir, name)[: num_shared * _PAGE] = getattr(donor, name)[: num_shared * _PAGE]
    own = [*lender[:num_shared], *(free.pop() for _ in range(2))]
    pages.write(heir, own, start)
    parts.append((heir, own, start, start + 5))
    return pages, parts


@pytest.mark.parametrize(("kv_heads", "group"), [(2, 1), (2, 2), (1, 3), (3, 4)])
@pytest.mark.parametrize("seed", range(4))
def test_attention_over_pages_is_plain_attention(seed: int, kv_heads: int, group: int) -> None:
    """Any mix of lengths, with grouped heads, scattered pages and shared ones: within 1e-5 of float64."""
    pages, parts = ready(seed, kv_heads, group)
    for (sequence, _, start, end), output in zip(parts, pages.attend(parts), strict=True):
        expected = torch.stack([sequence.plain(position) for position in range(start, end)])
        torch.testing.assert_close(output.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("seed", range(4))
def test_a_row_is_computed_alike_in_any_company(seed: int) -> None:
    """Bit for bit in fp32: row by row and alone, or in blocks and among others."""
    pages, parts = ready(seed, 2, 2)
    together = pages.attend(parts)
    for part, expected in zip(parts, together, strict=True):
        sequence, own, start, end = part
        assert torch.equal(pages.attend([part])[0], expected)
        single = [pages.attend([(sequence, own, p, p + 1)])[0] for p in range(start, end)]
        assert torch.equal(torch.cat(single), expected)


def test_which_pages_hold_the_keys_makes_no_difference() -> None:
    """Neighbouring pages are read in place, others are gathered: the same bits come out."""
    sequence, outputs = Sequence(1, 100, 2, 2), []
    for own in ([3, 4, 5, 6, 7, 8, 9], [9, 30, 2, 77, 5, 1, 0]):
        pages = Pages(2, 2)
        pages.write(sequence, own, 90)
        outputs.append(pages.attend([(sequence, own, 90, 100)])[0])
    assert torch.equal(*outputs)


@pytest.mark.parametrize("name", ["softcap", "sliding_window", "s_aux", "attention_mask"])
def test_what_is_not_built_is_refused(name: str) -> None:
    """By name, and never left out in silence; an option that is None asks for nothing."""
    pages = Pages(1, 1)
    batch = lay_out([SequenceFeed([0], 0, Block((1,)))], _PAGE, 1, pages.cache.spare_page)
    plan = AttentionPlan.of(batch, _PAGE, 1, torch.device("cpu"))
    row = torch.zeros(1, 1, 1, _DIM)
    key, value = pages.update(torch.tensor(batch.slots), row[0], row[0])
    options: dict[str, Any] = {"attention_mask": None, "softcap": None, "sliding_window": None, "s_aux": None}
    ragged_attention(_MODULE, row, key, value, attention_plan=plan, **options)
    with pytest.raises(EngineFailure, match="mask" if name == "attention_mask" else name):
        ragged_attention(_MODULE, row, key, value, attention_plan=plan, **(options | {name: torch.ones(1)}))


def test_wiping_zeroes_the_pages_named_and_no_others() -> None:
    """In every layer, keys and values."""
    shape = KvShape(3, 2, _DIM)
    cache = PagedCache(shape, 4, _PAGE, dtype=torch.float32, device=torch.device("cpu"))
    for layer in cache._pages:
        layer.keys.fill_(float("nan"))
        layer.values.fill_(7.0)
    cache.wipe([0, 2])
    for layer in cache._pages:
        for tensor, kept in ((layer.keys, float("nan")), (layer.values, 7.0)):
            pages = tensor[: 5 * _PAGE].reshape(5, -1)
            assert pages[[0, 2]].eq(0).all()
            assert torch.equal(pages[[1, 3, 4]].nan_to_num(-1), torch.full_like(pages[[1, 3, 4]], kept).nan_to_num(-1))


def test_a_fresh_cache_holds_nothing_that_spreads() -> None:
    """Zeros everywhere: a masked key meets its weight of zero, and 0 * NaN would be NaN."""
    cache = Pages(2, 1).cache
    assert all(layer.keys.eq(0).all() and layer.values.eq(0).all() for layer in cache._pages)


def test_a_pass_outside_a_batch_fails() -> None:
    """Nobody said where its rows go."""
    row = torch.zeros(1, 2, 1, _DIM)
    with pytest.raises(EngineFailure):
        Pages(2, 1).cache.update(row, row, 0)


def test_the_shape_is_the_model_s() -> None:
    """Layers, key-value heads and head size of the configuration; both keys and values are paid for."""
    shape = KvShape.of(tiny_target().model.config)
    assert shape == KvShape(num_layers=2, num_kv_heads=2, head_dim=16)
    assert shape.bytes_per_id(torch.float32) == 2 * 2 * 2 * 16 * 4
    assert shape.bytes_per_id(torch.bfloat16) == 2 * 2 * 2 * 16 * 2

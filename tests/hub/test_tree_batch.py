"""Trees in a real pass: each row as it would be in a chain, bit for bit, and what stands moved to where it belongs."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import pytest
import torch

from baru_common.errors import BaruError
from baru_common.model_files import LoadedModel
from baru_hub.acceptance import accept
from baru_hub.engines import Feed
from baru_hub.engines.transformers import PAGE_SIZE, TransformersEngine
from baru_hub.ragged_batch import SCRATCH_SLOTS, SequenceFeed, lay_out
from baru_hub.session import Block
from baru_hub.tree import ROOT, TokenTree
from support.tiny import tiny_target, twin

_SIZE = 300


@cache
def target_in(dtype: str) -> LoadedModel:
    if dtype == "float32":
        return tiny_target()
    whole = tiny_target()
    return LoadedModel(whole.files, copy.deepcopy(whole.model).bfloat16(), whole.bundle, dtype)


@pytest.fixture
def opened() -> Iterator[Any]:
    engines: list[TransformersEngine] = []

    def make(dtype: str = "float32") -> TransformersEngine:
        engines.append(TransformersEngine(twin(target_in(dtype)), kv_cache_mb=8))
        return engines[-1]

    yield make
    for engine in engines:
        engine._worker.shutdown()
        engine.pool.check_integrity()


class Told:
    """A sequence of committed ids, all but the last of them cached."""

    def __init__(self, engine: TransformersEngine, ids: Sequence[int], identity: str | None = None) -> None:
        self.engine, self.ids = engine, list(ids)
        allocation = engine.allocate(ids, engine.spec.context_limit, identity)
        self.num_cached, self.sequence = allocation.num_cached, allocation.sequence

    async def cache(self) -> Told:
        while len(self.ids) - 1 > self.num_cached:
            piece = tuple(self.ids[self.num_cached : -1][:100])
            await self.engine.verify([Feed(self.sequence, self.num_cached, Block(piece, decides=False))])
            self.num_cached += len(piece)
        return self

    @property
    def pages(self) -> list[int]:
        return self.engine._sequences[self.sequence].pages

    def block(self, tree: TokenTree) -> Block:
        return Block(tuple(self.ids[self.num_cached :]), tree.ids, parents=tree.parents)

    def feed(self, tree: TokenTree) -> SequenceFeed:
        return SequenceFeed(self.pages, self.num_cached, self.block(tree))

    async def step(self, tree: TokenTree) -> list[int]:
        """Verify a tree and commit; return what was emitted."""
        block = self.block(tree)
        (decision,) = await self.engine.verify([Feed(self.sequence, self.num_cached, block)])
        assert not isinstance(decision, BaruError)
        emitted = list(accept(tree, decision).emitted)
        self.ids += emitted
        self.num_cached = len(self.ids) - 1
        return emitted

    def rows(self) -> list[torch.Tensor]:
        """Keys and values of all that is cached, layer by layer."""
        slots = [self.pages[p // PAGE_SIZE] * PAGE_SIZE + p % PAGE_SIZE for p in range(self.num_cached)]
        return [part[slots] for layer in self.engine._cache._pages for part in (layer.keys, layer.values)]


def logits_of(engine: TransformersEngine, feeds: Sequence[SequenceFeed]) -> list[torch.Tensor]:
    """What one pass says, for each feed: [num_draft + 1, vocabulary]."""
    logits, _ = engine._forward(lay_out(feeds, PAGE_SIZE, engine._row_floor, engine._cache.spare_page))
    return list(torch.split(logits.clone(), [len(feed.block.draft) + 1 for feed in feeds]))


def random_tree(chance: random.Random, num_paths: int, depth: int) -> TokenTree:
    """Paths that leave those before them anywhere, also below the first."""
    paths: list[list[int]] = [[chance.randrange(_SIZE) for _ in range(depth)]]
    while len(paths) < num_paths:
        trunk = chance.choice(paths)
        start = chance.randrange(depth)
        paths.append([*trunk[:start], *(chance.randrange(_SIZE) for _ in range(chance.randint(1, depth - start)))])
    return TokenTree.merged(paths)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(1000 * length + seed).choices(range(3, _SIZE), k=length)


_LENGTHS = (1, 20, 60, 64, 250, 256, 257)
"""Drafts of twelve then stay on a page, cross to the next, or from one bucket of 256 keys to the next."""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("length", _LENGTHS)
async def test_every_row_is_as_in_a_chain(length: int, dtype: str, opened: Any) -> None:
    """Alone, and beside seven others with trees, chains and nothing of their own."""
    engine, chance = opened(dtype), random.Random(length)
    prompt = prompt_of(length)
    tree = random_tree(chance, 6, 12)
    leaves = [node for node in range(len(tree)) if node not in tree.parents]
    assert len(leaves) > 3
    in_tree, in_chain = await Told(engine, prompt).cache(), await Told(engine, prompt).cache()
    (alone,) = logits_of(engine, [in_tree.feed(tree)])
    others = [await Told(engine, prompt_of(chance.randint(1, 300), i)).cache() for i in range(7)]
    trees = [random_tree(chance, num, depth) for num, depth in ((1, 3), (4, 2), (3, 9), (9, 4), (1, 1), (2, 12))]
    feeds = [other.feed(other_tree) for other, other_tree in zip(others, [*trees, TokenTree()], strict=True)]
    together = logits_of(engine, [*feeds[:4], in_tree.feed(tree), *feeds[4:]])[4]
    assert torch.equal(alone, together)
    seen = {ROOT}
    for leaf in leaves:
        nodes = tree.ancestors(leaf)
        (chain,) = logits_of(engine, [in_chain.feed(TokenTree.chain(tree.path(leaf)))])
        for row, node in enumerate([ROOT, *nodes]):
            assert torch.equal(alone[node + 1], chain[row]), (leaf, node)
        seen.update(nodes)
    assert seen == set(range(-1, len(tree)))
    for told in (in_tree, in_chain, *others):
        engine.free(told.sequence)


async def test_a_tree_beside_pending_ids_of_a_prompt(opened: Any) -> None:
    """The first block of a short prompt may hold a tree, too."""
    engine, tree = opened(), random_tree(random.Random(3), 5, 6)
    whole, cached = Told(engine, prompt_of(9)), await Told(engine, prompt_of(9)).cache()
    assert torch.equal(logits_of(engine, [whole.feed(tree)])[0], logits_of(engine, [cached.feed(tree)])[0])
    for told in (whole, cached):
        engine.free(told.sequence)


async def decoded(engine: TransformersEngine, prompt: Sequence[int], num_ids: int) -> list[int]:
    """What the engine says id by id."""
    plain = Told(engine, prompt)
    while len(plain.ids) < len(prompt) + num_ids:
        await plain.step(TokenTree())
    engine.free(plain.sequence)
    return plain.ids[len(prompt) :]


def other_than(token: int, by: int = 1) -> int:
    return 3 + (token + by) % (_SIZE - 3)


def tree_around(answer: Sequence[int], leaves_at: int, num_right: int) -> TokenTree:
    """A first path that is right for `leaves_at` ids and then wrong; a branch beside it that is right for `num_right`
    ids in all and then wrong; and a wrong guess at each place."""
    right, wrong = list(answer[:num_right]), [other_than(token) for token in answer]
    return TokenTree.merged(
        [
            [*right[:leaves_at], *wrong[leaves_at : leaves_at + 3]],
            [*right[:leaves_at], other_than(answer[leaves_at], 2), 9, 10],
            [*right, *wrong[num_right : num_right + 2]],
            *([*right[:depth], other_than(answer[depth], 3)] for depth in range(num_right + 1)),
        ]
    )


@pytest.mark.parametrize("length", [1, 57, 60, 63, 64, 250, 255])
async def test_after_a_branch_that_stood_all_is_as_after_plain_steps(length: int, opened: Any) -> None:
    """The same ids, and the same keys and values in the same places, bit for bit; again and again."""
    engine, prompt = opened(), prompt_of(length)
    answer = await decoded(engine, prompt, 45)
    told, plain = await Told(engine, prompt).cache(), await Told(engine, prompt).cache()
    for leaves_at, num_right in ((0, 1), (0, 5), (2, 6), (1, 2), (3, 4)):
        rest = answer[len(told.ids) - length :]
        assert await told.step(tree_around(rest, leaves_at, num_right)) == rest[: num_right + 1]
        while len(plain.ids) < len(told.ids):
            await plain.step(TokenTree())
        for moved, written in zip(told.rows(), plain.rows(), strict=True):
            assert torch.equal(moved, written)
    for _ in range(4):
        await told.step(TokenTree())
    await told.step(TokenTree.chain(answer[len(told.ids) - length :][:4]))
    assert told.ids[length:] == answer[: len(told.ids) - length]
    for each in (told, plain):
        engine.free(each.sequence)


async def test_pages_published_after_a_branch_hold_committed_ids_only(opened: Any) -> None:
    """Who asks for what stood finds it, as if it had been decoded plainly; who asks for what did not, finds less."""
    engine, prompt = opened(), prompt_of(60)
    answer = await decoded(engine, prompt, 30)
    told = await Told(engine, prompt, "alice").cache()
    tree = tree_around(answer, 2, 7)  # positions 62 and on part: the page ends within the branch
    first_path = tree.path(tree.runs()[0][-1])
    await told.step(tree)
    await told.step(TokenTree())
    assert Told(engine, [*prompt, *first_path, 9, 9, 9], "alice").num_cached == 0
    found = Told(engine, [*prompt, *answer[:12]], "alice")
    assert found.num_cached == PAGE_SIZE
    cold = await Told(engine, found.ids).cache()
    await found.cache()
    for shared, own in zip(found.rows(), cold.rows(), strict=True):
        assert torch.equal(shared, own)
    assert (await found.step(TokenTree()))[0] == answer[12]


@pytest.mark.parametrize("poison", [float("nan"), 1e4])
async def test_scratch_slots_are_nobodys(poison: float, opened: Any) -> None:
    """What is left in them from other passes reaches no row: neither of a tree nor of a plain step."""
    engine = opened()
    prompts = [prompt_of(length) for length in (5, 62, 254)]
    answers = [await decoded(engine, prompt, 40) for prompt in prompts]
    lines = [await Told(engine, prompt).cache() for prompt in prompts]

    def spoil() -> None:
        for layer in engine._cache._pages:
            layer.keys[-SCRATCH_SLOTS:] = poison
            layer.values[-SCRATCH_SLOTS:] = poison

    for leaves_at, num_right in ((0, 3), (1, 4), (2, 2)):
        for line, prompt, answer in zip(lines, prompts, answers, strict=True):
            rest = answer[len(line.ids) - len(prompt) :]
            spoil()
            await line.step(tree_around(rest, leaves_at, num_right))
            spoil()
            await line.step(TokenTree())
            assert line.ids == [*prompt, *answer][: len(line.ids)]
    for line in lines:
        assert all(part.isfinite().all() for part in line.rows())
        engine.free(line.sequence)


async def test_trees_of_one_pass_do_not_share_scratch_slots(opened: Any) -> None:
    """Each row of a pass goes to a slot of its own, but for padding."""
    engine, chance = opened(), random.Random(1)
    lines = [Told(engine, prompt_of(length)) for length in (1, 3, 70)]
    batch = lay_out([line.feed(random_tree(chance, 5, 6)) for line in lines], PAGE_SIZE, 1, engine._cache.spare_page)
    assert len(set(batch.slots)) == batch.num_rows
    assert max(batch.slots) < len(engine._cache._pages[0].keys)
    for line in lines:
        engine.free(line.sequence)

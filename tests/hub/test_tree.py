"""Draft ids as a tree, against what a few lines by brute force say."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baru_hub.acceptance import Decision, accept, standing
from baru_hub.session import Block
from baru_hub.tree import ROOT, TokenTree

_IDS = st.integers(0, 3)
_PATHS = st.lists(st.lists(_IDS, max_size=5).map(tuple), max_size=6)


def prefixes(paths: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Every start of a path, once, in the order of first mention."""
    return list(dict.fromkeys(path[:end] for path in paths for end in range(1, len(path) + 1)))


@given(_PATHS)
def test_what_is_merged_holds_every_start_of_every_path_once(paths: list[tuple[int, ...]]) -> None:
    """In the order of first mention; ids, parents, depths, paths and ancestors agree with the starts themselves."""
    tree, starts = TokenTree.merged(paths), prefixes(paths)
    assert len(tree) == len(starts)
    for node, start in enumerate(starts):
        assert tuple(tree.path(node)) == start
        assert tree.ids[node] == start[-1]
        assert tree.depths[node] == len(start) - 1
        assert tree.parents[node] == (starts.index(start[:-1]) if len(start) > 1 else ROOT)
        assert tree.ancestors(node) == [starts.index(start[:end]) for end in range(1, len(start) + 1)]
    assert (tree.path(ROOT), tree.ancestors(ROOT)) == ([], [])


@given(_PATHS)
def test_the_first_path_comes_first(paths: list[tuple[int, ...]]) -> None:
    tree = TokenTree.merged(paths)
    if paths:
        assert tree.ids[: len(paths[0])] == paths[0]
        assert tree.parents[: len(paths[0])] == tuple(range(-1, len(paths[0]) - 1))


@given(_PATHS)
def test_runs_are_chains_that_hold_every_node_once(paths: list[tuple[int, ...]]) -> None:
    """As few as there can be in this order."""
    tree = TokenTree.merged(paths)
    runs = tree.runs()
    assert [node for run in runs for node in run] == list(range(len(tree)))
    for run in runs:
        assert len(run) > 0
        assert all(tree.parents[node] == node - 1 for node in run[1:])
    for run in runs[1:]:
        assert tree.parents[run.start] != run.start - 1
    assert (len(runs) <= 1) == tree.is_chain
    assert tree.is_chain == (tree == TokenTree.chain(tree.ids))


@given(_PATHS, st.data())
def test_accepted_is_the_longest_path_that_the_target_walks(paths: list[tuple[int, ...]], data: st.DataObject) -> None:
    """The target's id after each node decides; of all paths that follow it the longest stands."""
    tree = TokenTree.merged(paths)
    decided = data.draw(st.lists(_IDS, min_size=len(tree) + 1, max_size=len(tree) + 1))

    def agrees(node: int) -> bool:
        path = tree.ancestors(node)
        return all(decided[before + 1] == tree.ids[at] for before, at in zip([ROOT, *path], path, strict=False))

    agreeing = [node for node in range(len(tree)) if agrees(node)]
    longest = max(agreeing, key=lambda node: tree.depths[node], default=ROOT)
    assert tree.accepted(decided) == tree.ancestors(longest)
    assert standing(tree, Decision(tuple(decided))) == tree.ancestors(longest)


@given(_PATHS, st.data())
def test_what_is_emitted_and_whose_it_is(paths: list[tuple[int, ...]], data: st.DataObject) -> None:
    """The ids that stand and the target's own next; those of the node's draft count as accepted, others as guessed."""
    tree = TokenTree.merged(paths)
    decided = tuple(data.draw(st.lists(_IDS, min_size=len(tree) + 1, max_size=len(tree) + 1)))
    num_chain = data.draw(st.integers(0, len(paths[0]) if paths else 0))
    outcome = accept(tree, Decision(decided), num_chain)
    nodes = tree.accepted(decided)
    last = nodes[-1] if nodes else ROOT
    assert outcome.emitted == (*tree.path(last), decided[last + 1])
    assert outcome.num_accepted == len([node for node in nodes if node < num_chain])
    assert (outcome.num_verified, outcome.num_guessed) == (num_chain, len(nodes) - outcome.num_accepted)
    assert outcome.places == (0, *(node + 1 for node in nodes))
    assert [decided[place] for place in outcome.places] == list(outcome.emitted)


@given(st.lists(_IDS, max_size=6))
def test_a_chain_is_the_tree_of_one_path(ids: list[int]) -> None:
    tree = TokenTree.chain(ids)
    assert tree == TokenTree.merged([ids])
    assert tree.is_chain
    assert tree.depths == tuple(range(len(ids)))
    assert tree.runs() == ([range(len(ids))] if ids else [])
    assert Block((7,), tuple(ids)).tree == tree


@given(st.lists(_IDS, max_size=4), st.lists(_IDS, max_size=4), _PATHS)
def test_a_block_extended_keeps_the_nodes_draft_first(
    chain: list[int], more: list[int], others: list[tuple[int, ...]]
) -> None:
    """The path goes on from it; leaves come after the path, and the block knows where there are some."""
    path = [*chain, *more]
    leaves = [[*path[: len(other)], 9] for other in others if len(other) <= len(path)]
    block = Block((7,), tuple(chain)).extended(path, leaves)
    assert (block.num_chain, block.num_path) == (len(chain), len(path))
    assert block.draft[: len(path)] == tuple(path)
    assert block.tree == TokenTree.merged([path, *leaves])
    for depth in range(len(path) + 1):
        assert block.has_leaf(depth) == any(len(leaf) == depth + 1 for leaf in leaves)
    assert not Block((7,), tuple(chain)).has_leaf(0)


@pytest.mark.parametrize(
    ("ids", "parents", "message"),
    [
        ((1, 2), (-1,), "1 parents for 2 draft ids"),
        ((1,), (0,), "before its child"),
        ((1, 2), (-1, 2), "before its child"),
        ((1,), (-2,), "before its child"),
        ((1, 2, 2), (-1, 0, 0), "siblings"),
        ((1, 1), (-1, -1), "siblings"),
    ],
)
def test_what_is_no_tree_is_refused(ids: tuple[int, ...], parents: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TokenTree(ids, parents)


def test_the_same_id_may_come_again_further_down() -> None:
    tree = TokenTree((1, 1, 1), (-1, 0, 1))
    assert tree.accepted([1, 1, 2, 0]) == [0, 1]

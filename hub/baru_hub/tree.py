"""Draft ids as a tree: several guesses at what comes, checked in one step. Plain bookkeeping: no tensors.

    ids      [num_nodes]    what each node guesses; parents come before their children
    parents  [num_nodes]    index of the node before it, ROOT for a guess at the first position
    path     of a node      its ancestors' ids from the root on, and its own: the draft that it ends

A chain is the tree where each node is the parent of the next. Siblings have different ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

ROOT = -1
"""The last committed id, as a parent."""


@dataclass(frozen=True)
class TokenTree:
    """A tree of draft ids."""

    ids: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if len(self.ids) != len(self.parents):
            raise ValueError(f"{len(self.parents)} parents for {len(self.ids)} draft ids")
        if any(not ROOT <= parent < node for node, parent in enumerate(self.parents)):
            raise ValueError("a parent must come before its child")
        if len(set(zip(self.parents, self.ids, strict=True))) != len(self.ids):
            raise ValueError("siblings must differ")

    @classmethod
    def chain(cls, ids: Sequence[int]) -> TokenTree:
        """Return the tree of one path."""
        return cls(tuple(ids), tuple(range(-1, len(ids) - 1)))

    @classmethod
    def merged(cls, paths: Iterable[Sequence[int]]) -> TokenTree:
        """Return the tree of several paths, what they share at its start taken once; the first path comes first."""
        ids: list[int] = []
        parents: list[int] = []
        places: dict[tuple[int, int], int] = {}
        for path in paths:
            node = ROOT
            for token in path:
                if (node, token) not in places:
                    places[node, token] = len(ids)
                    ids.append(token)
                    parents.append(node)
                node = places[node, token]
        return cls(tuple(ids), tuple(parents))

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def is_chain(self) -> bool:
        return all(parent == node - 1 for node, parent in enumerate(self.parents))

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Position of each node after the committed ids, from 0."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent == ROOT else depths[parent] + 1)
        return tuple(depths)

    def ancestors(self, node: int) -> list[int]:
        """Return the nodes of the path that `node` ends, itself last; none for ROOT."""
        path: list[int] = []
        while node != ROOT:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def path(self, node: int) -> list[int]:
        """Return the ids of the path that `node` ends; none for ROOT."""
        return [self.ids[i] for i in self.ancestors(node)]

    def accepted(self, decided: Sequence[int]) -> list[int]:
        """Return the nodes that stand: from the root on, each the child that equals what the target decided there.

        `decided` has the target's id after the root, then after each node.
        """
        children = {
            (parent, token): node for node, (parent, token) in enumerate(zip(self.parents, self.ids, strict=True))
        }
        node, path = ROOT, []
        while (child := children.get((node, decided[node + 1]))) is not None:
            path.append(child)
            node = child
        return path

    def runs(self) -> list[range]:
        """Return the nodes as runs, each a chain of neighbours: a new one begins where a node's parent is not the
        node before it. The first begins at the root."""
        starts = [node for node, parent in enumerate(self.parents) if node == 0 or parent != node - 1]
        return [range(start, end) for start, end in pairwise([*starts, len(self)])]

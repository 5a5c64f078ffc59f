"""The order in which what is gone is made again: complete, each op after what it needs, and on trees none depth first needs less room."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from memmgr.policies.rules.remat_order import Making, needed, remake_order


@dataclass
class Graph:
    """Op k makes cell k from `inputs[k]`; what is in `stored` waits in a tier, what is in `resident` in memory."""

    inputs: list[tuple[int, ...]]
    sizes: list[int]
    resident: set[int] = field(default_factory=set)
    stored: set[int] = field(default_factory=set)

    def making(self) -> Making[int, int]:
        return Making(
            gone=lambda c: c not in self.resident and c not in self.stored,
            maker=lambda c: c,
            inputs=lambda k: self.inputs[k],
            outputs=lambda k: (k,),
            size_bytes=lambda c: self.sizes[c],
            present=lambda c: c in self.resident,
        )

    def peak(self, order: list[int]) -> int:
        """Most bytes that the making in this order adds; what no later op reads goes at once, what is stored comes with its op."""
        uses = Counter(i for k in order for i in self.inputs[k])
        held: dict[int, int] = {}
        most = 0
        for k in order:
            for i in self.inputs[k]:
                if i not in self.resident:
                    held[i] = self.sizes[i]
            most = max(most, sum(held.values()) + self.sizes[k])
            held[k] = self.sizes[k]
            for i in self.inputs[k]:
                uses[i] -= 1
                if not uses[i]:
                    held.pop(i, None)
        return most


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    n = draw(st.integers(1, 12))
    inputs = [tuple(sorted(draw(st.sets(st.integers(0, k - 1), max_size=3)))) if k else () for k in range(n)]
    sizes = [draw(st.integers(1, 9)) for _ in range(n)]
    away = draw(st.lists(st.sampled_from("grs"), min_size=n, max_size=n))
    return Graph(
        inputs, sizes, {k for k, how in enumerate(away) if how == "r"}, {k for k, how in enumerate(away) if how == "s"}
    )


@st.composite
def trees(draw: st.DrawFn) -> Graph:
    """Each cell is read by one op."""
    n = draw(st.integers(1, 8))
    parent = [draw(st.integers(k + 1, n - 1)) if k < n - 1 else -1 for k in range(n)]
    inputs = [tuple(i for i in range(k) if parent[i] == k) for k in range(n)]
    sizes = [draw(st.integers(1, 9)) for _ in range(n)]
    stored = {k for k in range(n - 1) if draw(st.integers(0, 4)) == 0}
    return Graph(inputs, sizes, stored=stored)


def depth_first(graph: Graph, k: int) -> list[list[int]]:
    """All orders of the ops under cell k that finish one input before the next is begun."""
    if k in graph.stored:
        return [[]]
    found = []
    for inputs in itertools.permutations(graph.inputs[k]):
        for parts in itertools.product(*(depth_first(graph, i) for i in inputs)):
            found.append([*itertools.chain.from_iterable(parts), k])
    return found


@given(graphs(), st.data())
@settings(max_examples=300, deadline=None)
def test_all_that_is_needed_once_and_in_time(graph: Graph, data: st.DataObject) -> None:
    gone = graph.making().gone
    wanted = data.draw(st.lists(st.sampled_from(range(len(graph.inputs))), min_size=1, max_size=3, unique=True))
    order, uses = remake_order(graph.making(), wanted)
    want, todo = set(), list(wanted)
    while todo:
        c = todo.pop()
        if gone(c) and c not in want:
            want.add(c)
            todo += graph.inputs[c]
    assert sorted(order) == sorted(want)
    at = {k: i for i, k in enumerate(order)}
    assert all(at[i] < at[k] for k in order for i in graph.inputs[k] if gone(i))
    assert uses == Counter(i for k in order for i in graph.inputs[k])
    assert sorted(needed(graph.making(), wanted)[0]) == sorted(order)


@given(trees())
@settings(max_examples=300, deadline=None)
def test_on_a_tree_no_depth_first_order_needs_less_room(graph: Graph) -> None:
    root = len(graph.inputs) - 1
    order, _ = remake_order(graph.making(), [root])
    assert graph.peak(order) == min(graph.peak(other) for other in depth_first(graph, root))


def test_what_lies_about_longer_is_made_later() -> None:
    """One input is small but needs much on the way, the other is large and needs nothing: the small one first."""
    graph = Graph([(), (0,), (), (1, 2)], [9, 1, 5, 1])
    assert remake_order(graph.making(), [3])[0] == [0, 1, 2, 3]
    assert graph.peak([0, 1, 2, 3]) == 10 and graph.peak([2, 0, 1, 3]) == 15


def test_what_is_there_costs_nothing_although_its_op_runs_again() -> None:
    """An op makes x and y; only y is gone. P, made of x, is ready at no cost, so the branch of y comes first."""
    names = ["L", "x", "y", "P", "Q", "T"]
    sizes = dict(zip(names, (100, 1, 1, 10, 40, 1), strict=True))
    maker = {"L": "l", "x": "a", "y": "a", "P": "p", "Q": "q", "T": "t"}
    inputs = {"l": (), "a": ("L",), "p": ("x",), "q": ("y",), "t": ("P", "Q")}
    making: Making[str, str] = Making(
        gone=lambda c: c != "x",
        maker=lambda c: maker[c],
        inputs=lambda k: inputs[k],
        outputs=lambda k: [c for c in names if maker[c] == k],
        size_bytes=lambda c: sizes[c],
        present=lambda c: c == "x",
    )
    assert remake_order(making, ["T"])[0] == ["l", "a", "q", "p", "t"]

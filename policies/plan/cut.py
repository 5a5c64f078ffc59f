"""The least cut of a network (Dinic 1970), and what a moment's relaxation is by it.

The relaxation at one moment (bound.py) has one constraint that is not about pairs: the room. With a price on bytes in its place
what is left is a cut: an op on the source's side runs again and costs its seconds, a storage that somebody on that side reads
and whose maker is on the other is kept and costs its bytes. So the best price, between two cuts, gives the linear program's
own optimum, without a solver.
"""

from __future__ import annotations

from collections.abc import Sequence

_ALL = float("inf")

_TIE = 1e-6
"""Of a storage's bytes. Models repeat their layers: what costs the same would all be kept by half, which says nothing."""


class Network:
    """Arcs with capacities; node 0 is the source, node 1 the sink."""

    def __init__(self, nodes: int) -> None:
        self.head: list[int] = []
        self.room: list[float] = []
        self.out: list[list[int]] = [[] for _ in range(nodes)]

    def arc(self, tail: int, head: int, capacity: float) -> None:
        """Arc 2 i is the i-th, the one after it its reverse."""
        self.out[tail].append(len(self.head))
        self.out[head].append(len(self.head) + 1)
        self.head += (head, tail)
        self.room += (capacity, 0.0)

    def cut(self, capacities: Sequence[float]) -> list[bool]:
        """Per node, whether it is on the source's side of a least cut under these capacities."""
        self.room = [c for capacity in capacities for c in (capacity, 0.0)]
        least = 1e-12 * max((c for c in capacities if c < _ALL), default=0.0)
        while True:
            level = self._levels(least)
            if level[1] < 0:
                return [depth >= 0 for depth in level]
            self._fill(level, least)

    def _levels(self, least: float) -> list[int]:
        head, room, out = self.head, self.room, self.out
        level = [-1] * len(out)
        level[0] = 0
        todo = [0]
        for node in todo:  # grows
            depth = level[node] + 1
            for arc in out[node]:
                if room[arc] > least and level[head[arc]] < 0:
                    level[head[arc]] = depth
                    todo.append(head[arc])
        return level

    def _fill(self, level: list[int], least: float) -> None:
        """Sends all that shortest ways can take."""
        head, room, out = self.head, self.room, self.out
        left = [len(arcs) for arcs in out]
        path: list[int] = []
        node = 0
        while True:
            if node == 1:
                flow = min([room[arc] for arc in path])
                full = -1
                for i in range(len(path) - 1, -1, -1):
                    arc = path[i]
                    room[arc] -= flow
                    room[arc ^ 1] += flow
                    if room[arc] <= least:
                        full = i
                node = head[path[full] ^ 1]
                del path[full:]
            arcs, depth = out[node], level[node] + 1
            while left[node]:
                arc = arcs[left[node] - 1]
                if room[arc] > least and level[head[arc]] == depth:
                    path.append(arc)
                    node = head[arc]
                    break
                left[node] -= 1
            else:
                if not path:
                    return
                node = head[path.pop() ^ 1]
                left[node] -= 1


def relaxed(
    seconds: dict[int, float], inputs: dict[int, Sequence[int]], size: dict[int, int], maker: dict[int, int],
    wanted: Sequence[int], gone: frozenset[int], room: int, light: dict[int, float],
) -> tuple[float, dict[int, float]]:  # fmt: skip
    """(least seconds that run again, the share of each storage that is kept) where what is kept has `room` bytes.

    Args:
        seconds: per op that may run again.
        inputs: per such op, what it reads of `size`.
        size: per storage that may be kept or made again.
        maker: the op of each.
        wanted: what has to be there in the end.
        gone: what cannot be kept.
        room: bytes.
        light: per storage, from 0 to 1, how much rather than its like it is kept.

    Returns:
        Infinity and nothing, where there is no such choice.
    """
    ops = {k: 2 + i for i, k in enumerate(seconds)}
    storages = {s: 2 + len(ops) + i for i, s in enumerate(size)}
    network = Network(2 + len(ops) + len(storages))
    fixed, priced = [], []
    weight = {s: each * (1.0 - _TIE * light.get(s, 0.0)) for s, each in size.items()}
    for s in wanted:
        network.arc(0, storages[s], _ALL)
        fixed.append(_ALL)
    for k, reads in inputs.items():
        for s in reads:
            network.arc(ops[k], storages[s], _ALL)
            fixed.append(_ALL)
    for k, cost in seconds.items():
        network.arc(ops[k], 1, cost)
        fixed.append(cost)
    for s in size:
        network.arc(storages[s], ops.get(maker[s], 1), 0.0)
        priced.append(_ALL if s in gone else weight[s])

    def chosen(price: float) -> tuple[float, float, set[int]]:
        """(seconds, bytes, kept) of the least seconds + price * bytes."""
        there = network.cut([*fixed, *(price * each for each in priced)])
        kept = {s for s, node in storages.items() if there[node] and not there[ops.get(maker[s], 1)]}
        return sum(c for k, c in seconds.items() if there[ops[k]]), sum(weight[s] for s in kept), kept

    unit = sum(seconds.values()) or 1.0
    more = 0.0, sum(weight[s] for s in wanted), set(wanted)  # nothing runs again
    if gone.isdisjoint(wanted) and more[1] <= room:
        return 0.0, {s: float(s in more[2]) for s in size}
    less = chosen(unit)  # a byte is worth all
    if less[1] > room or not gone.isdisjoint(less[2]):
        return _ALL, {}
    if not gone.isdisjoint(wanted):
        more = chosen(0.0)
    while True:
        if more[1] <= room:
            less = more
        if less[1] >= more[1]:
            return less[0], {s: float(s in less[2]) for s in size}
        price = (less[0] - more[0]) / (more[1] - less[1])
        found = chosen(price)
        if found[0] + price * found[1] >= (more[0] + price * more[1]) * (1 - 1e-9) or found[1] in (less[1], more[1]):
            share = (room - less[1]) / (more[1] - less[1])
            kept = {s: share * (s in more[2]) + (1 - share) * (s in less[2]) for s in size}
            return less[0] + share * (more[0] - less[0]), kept
        less, more = (found, more) if found[1] <= room else (less, found)

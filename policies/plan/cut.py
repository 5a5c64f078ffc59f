"""The least cut of a network (Dinic 1970), and the relaxation of one moment by it.

The relaxation at one moment (bound.py) has one constraint that is not about pairs: the room. With a price on bytes in
its place, the program is a cut. An op on the source's side runs again and costs its seconds. A storage that an op on
that side reads and whose maker is on the other side is kept and costs its bytes. The best price lies between two cuts,
and their mixture is the linear program's own optimum. No solver is needed, and a thousand ops take some 20 ms.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

_ALL = float("inf")

_TIE = 1e-7
"""A tie-break, as a share of a storage's bytes. Models repeat their layers: storages of equal cost would all be kept by
half, which decides nothing.
"""


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

    def cut(self, least: float) -> list[bool]:
        """Returns for each node if it is on the source's side of a least cut; capacities under `least` count for
        nothing. `room` then holds the residual capacities, from which a cut of larger capacities can continue.
        """
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


class _Choice(NamedTuple):
    """Which ops run again and which storages are kept: seconds, bytes, the sets, the price at which they are best, and
    the residual capacities of the flow.
    """

    seconds: float
    bytes: float
    kept: set[int]
    price: float
    left: list[float]


def relaxed(
    seconds: dict[int, float], inputs: dict[int, Sequence[int]], size: dict[int, int], maker: dict[int, int],
    wanted: Sequence[int], gone: frozenset[int], room: int, light: dict[int, float],
) -> tuple[float, dict[int, float]]:  # fmt: skip
    """(least seconds that run again, the share of each storage that is kept) where the kept storages have `room` bytes.

    Args:
        seconds: per op that may run again.
        inputs: per such op, the storages of `size` that it reads.
        size: per storage that may be kept or made again.
        maker: the op of each.
        wanted: storages that must be resident in the end.
        gone: storages that cannot be kept.
        room: bytes.
        light: per storage, 0 to 1: how strongly it is preferred among equals.

    Returns:
        Infinity and an empty dict if there is no such choice.
    """
    ops = {k: 2 + i for i, k in enumerate(seconds)}
    storages = {s: 2 + len(ops) + i for i, s in enumerate(size)}
    network = Network(2 + len(ops) + len(storages))
    weight = {s: each * (1.0 - _TIE * light.get(s, 0.0)) for s, each in size.items()}
    for s in wanted:
        network.arc(0, storages[s], _ALL)
    for k, reads in inputs.items():
        for s in reads:
            network.arc(ops[k], storages[s], _ALL)
    for k, cost in seconds.items():
        network.arc(ops[k], 1, cost)
    priced = [(len(network.head) + 2 * i, weight[s]) for i, s in enumerate(size) if s not in gone]
    for s in size:
        network.arc(storages[s], ops.get(maker[s], 1), _ALL if s in gone else 0.0)
    unit = sum(seconds.values()) or 1.0

    def choice(price: float, left: list[float], before: float) -> _Choice:
        """The choice with the least seconds + price * bytes. Continues from the residual flow of a price `before`,
        which is no higher.
        """
        network.room = list(left)
        for arc, each in priced:
            network.room[arc] += (price - before) * each
        there = network.cut(1e-12 * unit)
        kept = {s for s, node in storages.items() if there[node] and not there[ops.get(maker[s], 1)]}
        again = sum(cost for k, cost in seconds.items() if there[ops[k]])
        return _Choice(again, sum(weight[s] for s in kept), kept, price, network.room)

    none, dry = set(wanted), list(network.room)
    more = _Choice(0.0, sum(weight[s] for s in none), none, 0.0, dry)  # nothing runs again
    if not gone.isdisjoint(none):
        more = choice(0.0, dry, 0.0)
    if more.bytes <= room:
        return more.seconds, {s: float(s in more.kept) for s in size}
    bare = {s for s in none.union(*inputs.values()) if maker[s] not in ops}
    less = _Choice(unit, sum(weight[s] for s in bare), bare, 0.0, dry)  # all that can does
    if less.bytes > room or not gone.isdisjoint(bare):
        less = choice(unit, dry, 0.0)
    if less.bytes > room or not gone.isdisjoint(less.kept):
        return _ALL, {}
    while True:
        price = (less.seconds - more.seconds) / (more.bytes - less.bytes)
        found = choice(price, more.left, more.price)
        if found.seconds + price * found.bytes >= (more.seconds + price * more.bytes) * (1 - 1e-9):
            break
        less, more = (found, more) if found.bytes <= room else (less, found)
    share = (room - less.bytes) / (more.bytes - less.bytes)
    kept = {s: share * (s in more.kept) + (1 - share) * (s in less.kept) for s in size}
    return less.seconds + share * (more.seconds - less.seconds), kept
